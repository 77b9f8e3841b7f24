"""The rivals: each one's identity, constants and start, against what its source says."""

import math

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw

from fairseq_rskip.residual import Place, create_skip, initialise_from_batch

ENCODER, DECODER = (
    Place("encoder", "ffn", 5, 6, 6, 1, 2, 3),
    Place("decoder", "ffn", 5, 6, 6, 2, 3, 2),
)


def test_keel_keeps_a_stream_whose_branches_are_zero():
    skip, x = create_skip("keel", 5, place=DECODER).double(), 3 * draw(SEQUENCE, 1)
    assert skip.constants() == {"lambda": 18}
    assert torch.equal(skip.prepare(x)[0], torch.layer_norm(x, [5], skip.pre.weight, skip.pre.bias))
    torch.testing.assert_close(
        skip(x, torch.zeros_like(x)), torch.layer_norm(x, [5]), rtol=1e-5, atol=1e-5
    )


def test_a_fixed_angle_is_the_angle_between_y_and_an_orthogonal_x():
    """Whatever the size of F; c / N^e with the 18 residuals of a decoder of six layers."""
    x = torch.tensor([[[1.0, -1.0, 1.0, -1.0]]], dtype=torch.float64)
    f = 30 * torch.tensor([[[1.0, 1.0, -1.0, -1.0]]], dtype=torch.float64)
    for exponent, angle in ((0.5, 1.2 / 18**0.5), (1.0, 1.2 / 18), (0.0, 1.2)):
        options = {"angle": 1.2, "angle_exponent": exponent}
        skip = create_skip("angle", 4, place=DECODER, eps=1e-12, **options).double()
        cosine = torch.cosine_similarity(skip(x, f), x, dim=-1)
        torch.testing.assert_close(cosine.acos(), torch.full_like(cosine, angle))


def test_angle_zero_is_the_norm_of_x_and_a_quarter_turn_post_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("angle", 5, angle=0.0, angle_exponent=0).double()
    assert torch.equal(skip(x, f), torch.layer_norm(x, [5]))
    options = {"angle": math.pi / 4, "angle_exponent": 0.0, "eps": 1e-12}
    skip = create_skip("angle", 5, **options).double()
    x, f_normalised = (torch.layer_norm(z, [5], eps=1e-12) for z in (x, f))
    post_norm = torch.layer_norm(x + f_normalised, [5], eps=1e-12)
    torch.testing.assert_close(skip(x, f), post_norm)


@pytest.mark.parametrize("angle", [1.0, 7.0])  # 7 / sqrt(18) is more than a right angle
def test_a_learned_angle_starts_as_the_fixed_one(angle):
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    fixed, learned = (
        create_skip(kind, 5, angle=angle, place=DECODER).double()
        for kind in ("angle", "learned_angle")
    )
    torch.testing.assert_close(learned(x, f), fixed(x, f), rtol=1e-6, atol=1e-6)  # θ in fp32


def test_norm_agnostic_shows_the_stream_itself():
    """What is logged is the length of x; only the branch reads the direction."""
    x = 3 * draw(SEQUENCE, 1)
    skip = create_skip("nag", 5, place=DECODER).double()
    assert torch.equal(skip.current(x)[0], x)
    expected = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(skip.prepare(x)[0], expected, rtol=1e-6, atol=1e-6)


def test_fractional_connections_report_the_parts_that_they_use():
    place = DECODER
    for parts, used in ((5, 4), (8, 8)):  # the largest divisor of 64 up to it
        assert create_skip("fractional", 64, parts=parts, place=place).constants()["m"] == used


def test_a_fixed_angle_is_at_most_a_right_angle():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("angle", 5, angle=7, place=DECODER).double()  # 7 / sqrt(18) = 1.65
    twice = torch.layer_norm(torch.layer_norm(f, [5]), [5])
    torch.testing.assert_close(skip(x, f), twice)


@pytest.mark.parametrize(
    ("kind", "warm_up", "plain"), [("prores", 6000, "preln"), ("branchnorm", 4000, "xskip")]
)
def test_a_schedule_ends_as_the_plain_rule_and_is_in_checkpoints(kind, warm_up, plain):
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip(kind, 5, place=ENCODER).double()
    plain = create_skip(
        plain, 5, norm="layer", **({} if plain == "preln" else {"skip_lambda": 1})
    ).double()
    start = x if skip.pre is not None else torch.layer_norm(x, [5])
    assert torch.equal(skip(x, f), start)
    skip.set_num_updates(warm_up - 1)
    assert not torch.equal(skip(x, f), plain(x, f))
    skip.set_num_updates(warm_up)
    loaded = create_skip(kind, 5, place=ENCODER).double()
    loaded.load_state_dict(skip.state_dict())
    assert torch.equal(loaded(x, f), plain(x, f))


def test_gpas_scales_the_output_and_not_the_gradient():
    x, f, g = draw(SEQUENCE, 1).requires_grad_(), draw(SEQUENCE, 2), draw(SEQUENCE, 3)
    skip = create_skip("gpas", 5).double()
    assert torch.equal(skip(x, f), x + f)
    torch.nn.init.constant_(skip.gate, 0.5)
    y = skip(x, f)
    torch.testing.assert_close(y, (1 - 0.5 / (1 + math.exp(-0.5))) * (x + f))
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g)


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_an_orthogonal_update_is_orthogonal_and_drops_a_parallel_branch(shape):
    axis = 1 if shape == IMAGE else -1
    x, f = draw(shape, 1), draw(shape, 2)
    skip = create_skip("orthogonal", 5, channel_dim=axis, eps=1e-12).double()
    inner = ((skip(x, f) - x) * x).sum(axis)
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-10)
    torch.testing.assert_close(skip(x, 3 * x), x)


def test_the_delta_rule_writes_its_value_and_reflects():
    x, f, skip = draw(SEQUENCE, 1), draw(SEQUENCE, 2), create_skip("ddl", 5).double()
    k = torch.nn.functional.normalize(f, dim=-1)
    torch.testing.assert_close(
        (k * skip(x, f)).sum(-1), torch.full((4, 3), 2.0).double()
    )  # b = 1: <k, y> = v
    torch.nn.init.constant_(skip.gate_bias, 50.0), torch.nn.init.constant_(skip.value_bias, -50.0)
    torch.testing.assert_close(skip(x, f).norm(dim=-1), x.norm(dim=-1))  # b = 2, v = 0


def test_layerscale_of_one_is_pre_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("layerscale", 5, init=1.0).double()
    assert torch.equal(skip(x, f), x + f)
    assert torch.equal(skip.prepare(x)[0], torch.layer_norm(x, [5], skip.pre.weight, skip.pre.bias))
    starts = {
        depth: create_skip("layerscale", 5, place=Place(depth=depth)).weight[0]
        for depth in (18, 24, 36)
    }
    assert [float(start) for start in starts.values()] == pytest.approx([0.1, 1e-5, 1e-6])


def test_the_variance_of_a_scaled_stream_stays_bounded():
    blocks = 200
    x = start = draw((1000, 64), 0)
    for number in range(blocks):
        skip = create_skip("scaled", 64, place=Place(index=number, depth=blocks))
        x = skip(x, draw((1000, 64), number + 1))
    assert float(x.var() / start.var()) == pytest.approx(2, rel=0.05)


def test_constants_at_six_and_six_layers():
    def of(kind, place, **options):
        return create_skip(kind, 4, place=place, **options).constants()

    near = {"abs": 5e-5}
    assert of("deepnorm", ENCODER) == pytest.approx({"lambda": 1.4179, "beta": 0.4970}, **near)
    assert of("deepnorm", DECODER) == pytest.approx({"lambda": 2.0598, "beta": 0.3433}, **near)
    alone = Place("decoder", "ffn", 0, 6, 0, 1, 2)
    assert of("deepnorm", alone) == pytest.approx({"lambda": 12**0.25, "beta": 48**-0.25})
    assert of("tfixup", ENCODER) == pytest.approx(
        {"beta": 0.4281, "embedding_scale": 0.3689}, **near
    )
    assert of("tfixup", DECODER) == pytest.approx(
        {"beta": 0.3689, "embedding_scale": 0.3689}, **near
    )
    assert of("admin", ENCODER, omega="formula") == pytest.approx({"weight": 2.0170}, **near)
    assert of("admin", DECODER, omega="formula") == pytest.approx({"weight": 2.3351}, **near)


@pytest.mark.parametrize(
    ("kind", "expected"), [("highway", "x"), ("exclusive_gate", "x"), ("shortcut_gate", "sum")]
)
@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_a_closed_gate(kind, expected, shape):
    x, f = draw(shape, 1), draw(shape, 2)
    skip = create_skip(kind, 5, gate_bias=-1e4, channel_dim=1 if shape == IMAGE else -1).double()
    assert torch.equal(skip(x, f), x if expected == "x" else x + f)


def test_laurel_starts_plain():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    torch.testing.assert_close(
        create_skip("laurel", 5).double()(x, f), x + f, rtol=1e-14, atol=1e-14
    )


def test_dropout_is_on_the_shortcut_alone():
    x, f = draw((50, 20, 5), 1), draw((50, 20, 5), 2)
    skip = create_skip("dropout_shortcut", 5)
    torch.manual_seed(0)
    kept = (skip(x, f) - f) / x
    assert set(kept.round(decimals=9).unique().tolist()) == {0.0, 2.0} and 0.9 < kept.mean() < 1.1
    torch.testing.assert_close(skip.eval()(x, f), x + f)


def test_admin_takes_its_start_from_one_batch():
    """The recursion, from the outputs of every block, padding left out."""
    torch.manual_seed(0)
    blocks = 6
    chain = [create_skip("admin", 8, place=Place(index=i, depth=blocks)) for i in range(blocks)]
    layers = [torch.nn.Linear(8, 8) for _ in chain]
    model = torch.nn.ModuleList([*chain, *layers])
    x, mask = 3 * torch.randn(5, 4, 8), torch.zeros(5, 4, dtype=torch.bool)
    mask[3:, 1] = True

    def forward():
        y = x.masked_fill(mask.unsqueeze(-1), 1e3)
        for skip, layer in zip(chain, layers):
            y = skip(y, layer(y), padding_mask=mask)

    initialise_from_batch(model, forward)
    omega, y = 1.0, x
    for skip, layer in zip(chain, layers):
        assert skip.weight.detach().unique().item() == pytest.approx(omega, rel=1e-5)
        f_x = layer(y)
        parts = [part[~mask].detach().double().var(unbiased=False) for part in (omega * y, f_x)]
        omega = math.sqrt(sum(parts))
        y = skip(y, f_x)
    mask[:] = True
    initialise_from_batch(model, forward)
    assert all(skip.weight.eq(1).all() for skip in chain)  # nothing but padding says nothing
