"""Batch normalisation that leaves padding out, and the other norms.

The former is compared with nn.BatchNorm on the packed positions. The rest is the identities of the
norms of a row, layouts, the affine map of each, and the factory.
"""

import copy

import pytest
import torch
from skip_variants import draw, to_rows
from torch import nn
from torch.optim import swa_utils

from fairseq_rskip.norms import NORMS, BatchNorm, LayerNorm, create_norm

SHAPES = {"sequence": ((6, 5, 33), -1), "image": ((4, 7, 5, 3), 1), "one-feature": ((9, 4, 1), -1)}


def random_norm(name, dim, dtype=torch.float64, **options):
    norm = create_norm(name, dim, **options)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm.to(dtype)


def packed_twin(norm):
    """nn.BatchNorm1d with the same parameters and statistics."""
    twin = nn.BatchNorm1d(norm.dim).to(norm.weight.dtype)
    twin.load_state_dict(norm.state_dict())
    return twin


def random_mask(shape, channel_dim, seed, share=0.4):
    shape = list(shape)
    shape.pop(channel_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float64, 1e-11), (torch.float32, 3e-5)], ids=["fp64", "fp32"]
)
def test_batch_norm_equals_torchs_on_the_packed_positions(layout, masked, dtype, tolerance):
    """Outputs, all gradients with random upstream ones, and the running statistics agree.

    That is over three batches, then in eval.
    """
    shape, channel_dim = SHAPES[layout]
    norm = random_norm("batch", shape[channel_dim], dtype, channel_dim=channel_dim)
    twin = packed_twin(norm)
    for step in range(4):
        if step == 3:
            norm.eval(), twin.eval()
        x = (draw(shape, step, dtype) * (step + 1) + step).requires_grad_()
        mask = random_mask(shape, channel_dim, step) if masked else None
        keep = (
            ~to_rows(mask.unsqueeze(channel_dim), channel_dim).squeeze(1) if masked else slice(None)
        )
        upstream = draw(shape, 50 + step, dtype)
        packed = to_rows(x.detach(), channel_dim)[keep].requires_grad_()
        y, expected = norm(x, mask), twin(packed)
        close = dict(rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(to_rows(y, channel_dim)[keep], expected, **close)
        ours = torch.autograd.grad(y, [x, norm.weight, norm.bias], upstream)
        theirs = torch.autograd.grad(
            expected, [packed, twin.weight, twin.bias], to_rows(upstream, channel_dim)[keep]
        )
        torch.testing.assert_close(to_rows(ours[0], channel_dim)[keep], theirs[0], **close)
        for a, b in zip(ours[1:], theirs[1:]):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 30)
        if masked:
            assert (
                not to_rows(y, channel_dim)[~keep].any()
                and not to_rows(ours[0], channel_dim)[~keep].any()
            )
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(norm.state_dict()[name], value, **close)


@pytest.mark.parametrize("masked", [(False, True), (True, False), (True, True)], ids=str)
def test_two_batches_before_one_backward(masked):
    """As a shared layer or two forward passes per update have it."""
    norm, twin = random_norm("batch", 5), nn.BatchNorm1d(5).double()
    twin.load_state_dict(norm.state_dict())
    ours, theirs = 0, 0
    for step, with_mask in enumerate(masked):
        x, upstream = draw((6, 4, 5), step), draw((6, 4, 5), 9 + step)
        mask = random_mask(x.shape, -1, step) if with_mask else torch.zeros(6, 4, dtype=torch.bool)
        ours = ours + (norm(x, mask if with_mask else None) * upstream)[~mask].sum()
        theirs = theirs + (twin(x[~mask]) * upstream[~mask]).sum()
    for a, b in zip(
        torch.autograd.grad(ours, norm.parameters()), torch.autograd.grad(theirs, twin.parameters())
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("unpadded", [0, 1])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_too_few_positions_leave_the_running_statistics_alone(unpadded, masked):
    norm = random_norm("batch", 5)
    before = copy.deepcopy(norm.state_dict())
    x = draw((3 if masked else unpadded, 1, 5), 1).requires_grad_()
    mask = torch.arange(3).view(3, 1) >= unpadded if masked else None
    y = norm(x, mask)
    gradients = torch.autograd.grad(y, [x, norm.weight, norm.bias], draw(x.shape, 2))
    assert all(torch.isfinite(t).all() for t in (y, *gradients))
    torch.testing.assert_close(y[:unpadded], norm.bias.expand(unpadded, 1, 5))
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_activation_checkpointing_counts_a_batch_once(masked, reentrant):
    norm, plain = create_norm("batch", 5), create_norm("batch", 5)
    x, mask = draw((6, 4, 5), 1, torch.float32), random_mask((6, 4, 5), -1, 1) if masked else None
    given = x.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(norm, given, mask, use_reentrant=reentrant)
    y.square().sum().backward()
    assert torch.equal(y, plain(x, mask)) and given.grad is not None
    assert norm.num_batches_tracked == 1
    assert all(torch.equal(mine, other) for mine, other in zip(norm.buffers(), plain.buffers()))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_update_bn_takes_the_mean_over_batches(masked):
    """torch.optim.swa_utils sets the momentum to None, as torch's own layers take it."""
    norm, plain = create_norm("batch", 5), torch.nn.BatchNorm1d(5)
    batches = [draw((6, 5), seed, torch.float32) for seed in (1, 2, 3)]
    swa_utils.update_bn(batches, torch.nn.Sequential(plain))
    if masked:
        norm.momentum = None
        for x in batches:
            padded = torch.cat([x, torch.full((1, 5), torch.nan)])
            norm(padded, torch.tensor([False] * 6 + [True]))
    else:
        swa_utils.update_bn(batches, torch.nn.Sequential(norm))
    for mine, other in zip(norm.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def test_running_statistics_stay_fp32_in_a_half_model():
    """A variance above fp16's largest number, 65504, must survive."""
    norm = random_norm("batch", 5, torch.float32).half()
    assert norm.weight.dtype == torch.float16
    x = (draw((50, 4, 5), 1) * 600).half()
    mask = random_mask(x.shape, -1, 1)
    for _ in range(100):
        y = norm(x, mask)
    assert y.dtype == torch.float16
    assert norm.running_mean.dtype == norm.running_var.dtype == torch.float32
    torch.testing.assert_close(norm.running_var, x[~mask].float().var(0), rtol=1e-3, atol=0)
    assert norm.running_var.min() > 2e5
    assert norm.double().running_var.dtype == torch.float64


ROW_NORMS = ["layer", "rms", "scale", "ada", "dyt", "derf"]


@pytest.mark.parametrize("name,classes", [("layer", LayerNorm), ("batch", BatchNorm)])
def test_defaults_are_torchs(name, classes):
    """Who looks for torch's classes, to leave norms out of weight decay, finds ours."""
    norm = create_norm(name, 5)
    assert type(norm) is classes is NORMS[name]
    assert isinstance(norm, {"layer": nn.LayerNorm, "batch": nn.modules.batchnorm._BatchNorm}[name])
    torchs = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[name](5)
    assert norm.eps == torchs.eps and list(norm.state_dict()) == list(torchs.state_dict())
    for key, value in torchs.state_dict().items():
        assert torch.equal(norm.state_dict()[key], value)


def test_rms_norm_is_torchs():
    ours, x = random_norm("rms", 33, eps=1e-3), draw((6, 5, 33), 1)
    torchs = nn.RMSNorm(33, eps=1e-3).double()
    torchs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-14, atol=1e-14)


def test_scale_norm_gives_every_row_one_length():
    norm, x = create_norm("scale", 33).double(), draw((6, 5, 33), 1)
    torch.testing.assert_close(
        norm(x).norm(dim=-1), torch.full((6, 5), 33**0.5, dtype=torch.float64)
    )
    nn.init.constant_(norm.weight, 7.0)
    torch.testing.assert_close(
        norm(1e3 * x).norm(dim=-1), torch.full((6, 5), 7.0, dtype=torch.float64)
    )
    torch.testing.assert_close(norm(1e3 * x), norm(x))


def test_ada_norm_has_the_mean_of_its_definition_and_no_parameters():
    """The mean over features of (1 - z / 10) z is -0.1 (d - 1) / d.

    The reason is that the squares of z sum up to d - 1.
    """
    norm, x = create_norm("ada", 33, eps=1e-12).double(), draw((6, 5, 33), 1)
    torch.testing.assert_close(
        norm(x).mean(-1), torch.full((6, 5), -0.1 * 32 / 33, dtype=torch.float64)
    )
    assert not norm.state_dict()


def test_dyt_starts_with_slope_one_half_at_zero_and_saturates():
    norm = create_norm("dyt", 5).double()
    x = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(torch.autograd.grad(norm(x).sum(), x)[0], torch.full_like(x, 0.5))
    nn.init.constant_(norm.weight, 3.0), nn.init.constant_(norm.bias, 0.25)
    torch.testing.assert_close(norm(x + 1e3), torch.full_like(x, 3.25))


def test_derf_starts_odd_with_slope_one_over_root_pi_at_zero():
    norm = create_norm("derf", 5).double()
    x = draw((3, 5), 1).requires_grad_()
    assert torch.equal(norm(-x), -norm(x))
    zero = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        torch.autograd.grad(norm(zero).sum(), zero)[0], torch.full_like(zero, torch.pi**-0.5)
    )


def test_dyt_is_no_affine_map():
    with pytest.raises(ValueError, match="DyT is not an affine map of its input"):
        create_norm("dyt", 5).affine_map(draw((3, 5), 1))


@pytest.mark.parametrize("name", ROW_NORMS)
def test_a_row_of_zeros_sends_a_finite_gradient(name):
    """As fairseq's encoder makes of padding."""
    norm, x = random_norm(name, 5), torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(norm(x), [x, *norm.parameters()], draw((3, 5), 2))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_none_is_the_identity():
    norm, x = create_norm("none", 5), draw((3, 5), 1)
    assert norm(x) is x and not norm.state_dict()


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(name="instance"), r"norm='instance': expected one of none, layer, batch"),
        (dict(name=None), r"norm=None: expected one of"),
        (
            dict(name="batch", norm_axes="chw", channel_dim=1),
            r"norm_axes='chw': expected 'c' for BatchNorm",
        ),
    ],
    ids=["name", "none", "axes"],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        create_norm(**{"name": "layer", "dim": 5, **options})


def test_scale_norm_has_a_gain_of_one_number():
    norm = create_norm("scale", 16)
    assert norm.has_gain and norm.weight.tolist() == [4.0] and not norm.has_bias
