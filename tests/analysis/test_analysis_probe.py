"""SkipProbe against quantities computed by hand.

Gradient norms (Figure 3) are compared with autograd, example by example.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from skip_variants import CASES, WITHOUT_RATIO, draw
from torch import nn
from transformer_helpers import TINY, batch, build, dictionary, pad, randomise, sentences

from fairseq_rskip.analysis.gradients import gradient_norms
from fairseq_rskip.analysis.paths import PathProbe
from fairseq_rskip.analysis.probe import SkipProbe
from fairseq_rskip.residual import Place, SkipConnection, create_skip
from fairseq_rskip.tools.resnets import Batch
from fairseq_rskip.tools.resnets import losses as image_losses
from fairseq_rskip.tools.transformers import losses as sentence_losses
from fairseq_rskip.vision.model import PreActResNet


class Residual(nn.Module):
    """x -> skip(x, F(x)) with F(x) = tanh(x) * 2."""

    def __init__(self, skip):
        super().__init__()
        self.skip = skip

    def forward(self, x, mask=None):
        return self.skip(x, 2 * torch.tanh(x), padding_mask=mask)


def test_the_inputs_of_a_call_are_known_by_name():
    class ByName(Residual):
        def forward(self, x):
            return self.skip(x=x, f_x=2 * torch.tanh(x), carried=None, padding_mask=None)

    model, x = ByName(create_skip("xskip", 8)), draw((5, 2, 8), 1, torch.float32)
    values = []
    for each in (model, Residual(model.skip)):
        with SkipProbe(each) as probe:
            each(x)
        values.append(probe.values("skip"))
    assert values[0].keys() == values[1].keys() and values[0]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


def resnet(depth=8, **skip):
    torch.manual_seed(0)
    return PreActResNet(depth, 5, {"kind": "rskip", "skip_lambda": 2, "norm": "layer", **skip})


def images(count=3):
    return draw((count, 3, 32, 32), 5, torch.float32)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.variant.name not in WITHOUT_RATIO], ids=lambda c: c.name
)
def test_an_examples_norms_and_ratio_leave_padding_out(case):
    model = Residual(case.build().double().eval())
    x, mask, upstream = draw(case.shape, 1).requires_grad_(), case.mask(), draw(case.shape, 2)
    with SkipProbe(model) as probe:
        model(x, mask).backward(upstream)
    (name,) = probe.skips
    measured = probe.values(name)
    f_x = 2 * torch.tanh(x.detach())
    ratio = model.skip.ratio(x.detach(), f_x, mask)
    parts = model.skip.parts(x.detach(), f_x, mask)
    examples = case.shape[0] if case.channel_dim == 1 else case.shape[1]
    for i in range(examples):
        one = (lambda t, i=i: t[i]) if case.channel_dim == 1 else (lambda t, i=i: t[:, i])
        kept = (
            slice(None)
            if mask is None
            else one((~mask).unsqueeze(case.channel_dim).expand(case.shape))
        )
        x_norm, f_norm, gradient_norm, skip_norm, branch_norm = (
            one(tensor.detach())[kept].square().sum().sqrt()
            for tensor in (x, f_x, upstream, *parts)
        )
        expected = {
            "f_over_x": f_norm / x_norm,
            "ratio": one(ratio)[kept].mean(),
            "bf_over_ax": branch_norm / skip_norm,
            "y_grad_norm": gradient_norm,
        }
        assert list(measured) == list(expected)
        for quantity, value in expected.items():  # NaN where all of an example is padding
            torch.testing.assert_close(measured[quantity][i], value, equal_nan=True)


def test_padding_is_no_part_of_a_batchs_statistics_in_training():
    """G(x + G(x + F)) with gains 1: the last sum is (1 + 1 / s) x + F / s and more, x:F is 1 + s,
    s the deviation of x + F over the positions that are not padded."""
    model = Residual(create_skip("rskip", 5, norm="batch", eps=1e-20).double())
    x = draw((4, 3, 5), 1)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2:, 1] = True
    x[mask] *= 9
    with SkipProbe(model) as probe:
        model(x, mask)
    f_x = 2 * torch.tanh(x)
    s = (x + f_x)[~mask].std(0, correction=0)
    actual = probe.values("skip")
    for i in range(3):
        kept = ~mask[:, i]
        of_x, of_branch = ((1 + 1 / s) * x)[kept, i], (f_x / s)[kept, i]
        torch.testing.assert_close(actual["bf_over_ax"][i], of_branch.norm() / of_x.norm())
        torch.testing.assert_close(actual["ratio"][i], (1 + s).mean())


def test_two_batches_of_one_backward_pass_keep_their_order():
    model = Residual(create_skip("xskip", 5))
    inputs = [draw((4, 3, 5), seed, torch.float32).requires_grad_() for seed in (1, 2)]
    upstreams = [draw((4, 3, 5), seed, torch.float32) for seed in (3, 4)]
    with SkipProbe(model) as probe:
        ys = [model(x) for x in inputs]
        torch.autograd.backward(ys, upstreams)
    expected = torch.cat([upstream.norm(dim=(0, 2)) for upstream in upstreams])
    torch.testing.assert_close(probe.values("skip")["y_grad_norm"], expected)


def test_x_is_the_tensor_that_the_branch_stands_on():
    """At their start these are pre-norm: one stream, however many tensors travel in it."""
    actual = {}
    for arch in ("preln", "x0", "denseformer", "hyper"):
        model = build(f"transformer_{arch}_tiny", **TINY).eval()
        with torch.no_grad(), SkipProbe(model.encoder) as probe:
            model.encoder(*batch(sentences())[:2])
        actual[arch] = torch.stack([probe.values(name)["f_over_x"] for name in probe.skips])
    for arch, values in actual.items():
        torch.testing.assert_close(values, actual["preln"], msg=arch)


def test_it_sees_the_equation_in_the_resnet_with_its_in_place_relu():
    model = resnet(depth=14).eval()
    with SkipProbe(model) as probe:
        model(images()).sum().backward()
    h = model.conv(images())
    assert list(probe.skips) == [f"blocks.{i}.skip" for i in range(6)]
    for unit, name in zip(model.blocks, probe.skips):
        activated = torch.relu(unit.bn1(h))
        f_x = unit.conv2(torch.relu(unit.bn2(unit.conv1(activated))))
        x = unit.shortcut(activated if unit.common else h)
        expected = f_x.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        torch.testing.assert_close(probe.values(name)["f_over_x"], expected)
        h = unit.skip(x, f_x)


def test_activation_checkpointing_measures_the_same_once():
    actual = []
    for checkpointed in (False, True):
        model = build(
            "transformer_rskip_ln_tiny", checkpoint_activations=checkpointed, dropout=0.1, **TINY
        ).train()
        torch.manual_seed(0)
        with SkipProbe(model) as probe:
            for seed in (3, 4):
                model(*batch(sentences(seed=seed)))[0].square().sum().backward()
        actual.append([probe.values(name) for name in probe.skips])
    assert len(actual[0]) == 2 * 2 + 2 * 3
    for plain, repeated in zip(*actual):
        assert [len(values) for values in plain.values()] == [6, 6, 6, 6]
        torch.testing.assert_close(repeated, plain)


def test_an_example_is_a_sentence_whichever_dimension_comes_first():
    x, f_x = draw((5, 3, 4), 1, torch.float32), draw((5, 3, 4), 2, torch.float32)
    skip = create_skip("rskip", 4)
    batch_first = create_skip("rskip", 4, batch_dim=0)
    with SkipProbe(skip) as probe, SkipProbe(batch_first) as other:
        skip(x, f_x)
        batch_first(x.transpose(0, 1), f_x.transpose(0, 1))
    assert {quantity: len(values) for quantity, values in other.values("").items()} == {
        "f_over_x": 3,
        "ratio": 3,
        "bf_over_ax": 3,
    }
    torch.testing.assert_close(other.values(""), probe.values(""))


def test_nothing_stays_behind():
    skip = create_skip("rskip", 4)
    with SkipProbe(skip) as probe:
        f_x = torch.ones(2, 1, 4, requires_grad=True).exp()
        y = skip(torch.ones(2, 1, 4), f_x)
        held = [weakref.ref(tensor) for tensor in (f_x, y)]
    assert not skip._forward_hooks
    y.sum().backward()  # after the block: nothing measures
    del y, f_x
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    measured = probe.values("")
    assert (
        list(measured) == ["f_over_x", "ratio", "bf_over_ax"]
        and not measured["f_over_x"].requires_grad
    )


def norms_one_by_one(model, examples, loss):
    """Return name -> list of ||dL_i / dy||.

    Each example has a pass of its own, with torch.autograd.grad.
    """
    outputs, actual = {}, {}
    skips = [(name, m) for name, m in model.named_modules() if isinstance(m, SkipConnection)]
    handles = [
        m.register_forward_hook(lambda _m, _i, y, name=name: outputs.update({name: y}))
        for name, m in skips
    ]
    for example in examples:
        value = loss(model, example)
        for name, gradient in zip(outputs, torch.autograd.grad(value, list(outputs.values()))):
            actual.setdefault(name, []).append(gradient.double().norm())
    for handle in handles:
        handle.remove()
    return {name: torch.stack(values) for name, values in actual.items()}


def check(actual, expected, rel=1e-9):
    assert list(actual) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(actual[name], values, rtol=rel, atol=0)


@pytest.mark.parametrize("norm", ("layer", "batch"))
def test_resnet_equals_autograd_image_by_image(norm):
    torch.manual_seed(1)
    model = PreActResNet(8, 4, {"kind": "rskip", "skip_lambda": 2, "norm": norm}).double()
    randomise(model)
    x, y = draw((5, 3, 32, 32), 1), torch.tensor([0, 3, 1, 2, 2])
    actual = gradient_norms(model.eval(), [Batch(x[:2], y[:2]), Batch(x[2:], y[2:])], image_losses)
    assert all(p.grad is None for p in model.parameters())
    check(
        actual,
        norms_one_by_one(
            model, range(5), lambda net, i: F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        ),
    )


@pytest.mark.parametrize(
    "arch", ("transformer_rskip_ln_tiny", "transformer_wskip_tiny", "transformer_rskip_bn_tiny")
)
def test_transformer_equals_autograd_sentence_by_sentence(arch, exact_attention):
    model = build(arch, dropout=0.3, **TINY).double()
    randomise(model)
    pairs = sentences(lengths=(7, 3, 5))

    def sample(pairs):
        tokens, lengths, previous = batch(pairs)
        inputs = {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": previous}
        return {
            "net_input": inputs,
            "target": pad([t for _, t in pairs]),
            "pad": dictionary().pad(),
        }

    def mean_token_loss(net, pair):
        logits = net(*batch([pair]))[0]
        return F.cross_entropy(logits[0], torch.tensor(pair[1]))

    actual = gradient_norms(model.eval(), [sample(pairs)], sentence_losses)
    check(
        actual, norms_one_by_one(model, pairs, mean_token_loss), rel=1e-6
    )  # fp32 in its loss: 4e-8


def test_the_two_paths_are_measured_of_a_call_by_keywords():
    skip, x = create_skip("xskip", 5, skip_lambda=2), draw((4, 3, 5), 1, torch.float32)
    x.requires_grad_()
    actual = []
    for call in (lambda x: skip(x, x.tanh()), lambda x: skip(x=x, f_x=x.tanh())):
        with PathProbe(skip) as probe:
            call(x * 1.0)[0, 0, 0].backward()
        actual.append(probe.means())
    assert actual[0] == actual[1] and len(actual[0][""]) == 4


def test_where_the_skip_reads_x_before_its_branch_the_paths_are_not_told_apart():
    place = Place("encoder", "ffn", index=0, depth=1, sublayers=1)
    skip = create_skip("fractional", 8, place=place)
    x = draw((4, 3, 8), 1, torch.float32).requires_grad_()
    with PathProbe(skip) as probe:
        h, carried = skip.prepare(moved := x * 1.0)
        skip(moved, h.tanh(), carried).sum().backward()
    assert {*probe.means()[""]} == {"skip_cos_y_x", "skip_cos_x_F"} and x.grad.abs().sum() > 0


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_cosines_are_means_over_positions_however_the_batch_is_cut(is_padded):
    skip = create_skip("xskip", 5, skip_lambda=2).double()
    x, f_x = draw((4, 9, 5), 1), draw((4, 9, 5), 2)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    if is_padded:
        mask[2:, 1:7] = True
    means = []
    for sizes in ([9], [8, 1]):
        with PathProbe(skip) as probe:
            for part in zip(*(t.split(sizes, dim=1) for t in (x, f_x, mask))):
                skip(part[0], part[1], padding_mask=part[2] if is_padded else None)
        means.append(probe.means()[""])
    kept = F.cosine_similarity(x, f_x, dim=-1)[~mask]
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    assert means[1]["skip_cos_x_F"] == pytest.approx(float(kept.mean()), rel=1e-12)


def test_the_two_paths_of_a_gradient_are_those_of_autograd():
    """y = LN(2x + F(x)), F(x) = 2 tanh(x): the paths' gradients by autograd, with x given twice."""
    skip = create_skip("xskip", 5, skip_lambda=2).double()
    x, upstream = draw((4, 3, 5), 1), draw((4, 3, 5), 2)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[3, 1] = True

    leaf = x.clone().requires_grad_()
    with PathProbe(model := Residual(skip)) as probe:
        y = model(leaf * 1.0, mask)
        y.backward(upstream)
    plain = x.clone().requires_grad_()
    model(plain * 1.0, mask).backward(upstream)
    assert torch.equal(leaf.grad, plain.grad)

    by_skip, by_branch = x.clone().requires_grad_(), x.clone().requires_grad_()
    f_x = 2 * torch.tanh(by_branch)
    torch.layer_norm(2 * by_skip + f_x, [5]).backward(upstream)
    skip_grad, branch_grad = by_skip.grad.flatten(), by_branch.grad.flatten()
    expected = {
        "skip_cos_y_x": F.cosine_similarity(y, x, dim=-1)[~mask].mean(),
        "skip_cos_x_F": F.cosine_similarity(x, f_x, dim=-1)[~mask].mean(),
        "skip_cos_gradients": F.cosine_similarity(skip_grad, branch_grad, dim=0),
        "skip_branch_over_skip_gradient": branch_grad.norm() / skip_grad.norm(),
    }
    assert probe.means() == {"skip": pytest.approx({k: float(v) for k, v in expected.items()})}


OF_GRADIENTS = ("skip_cos_gradients", "skip_branch_over_skip_gradient")


def measured(skip, batches):
    """The means of a probe that sees ``batches``, pairs of an input and a gradient at y."""
    with PathProbe(skip) as probe:
        for x, upstream in batches:
            x = x.clone().requires_grad_()
            moved = x * 1.0
            skip(moved, torch.tanh(2 * moved)).backward(upstream)
    return probe.means()[""]


def test_the_gradients_of_the_two_paths_are_means_over_the_passes():
    skip = create_skip("xskip", 5, skip_lambda=2).double()
    first = (draw((4, 3, 5), 1), draw((4, 3, 5), 2))
    second = (draw((4, 3, 5), 3), draw((4, 3, 5), 4))
    together = measured(skip, [first, second])
    alone = [measured(skip, [batch]) for batch in (first, second)]
    for quantity in OF_GRADIENTS:
        values = [means[quantity] for means in alone]
        assert values[0] != pytest.approx(values[1], rel=1e-3)
        assert together[quantity] == pytest.approx(sum(values) / 2)
