"""PreAct-ResNet against a straight-line float64 implementation with the same weights.

Its parameter counts are tested, too.
"""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from skip_variants import VARIANTS, draw, from_rows, to_rows

from fairseq_rskip.errors import UserError
from fairseq_rskip.option_error import OptionError
from fairseq_rskip.parameters import learned
from fairseq_rskip.residual import initialise_from_batch, skips
from fairseq_rskip.vision.config import parse
from fairseq_rskip.vision.data import ImageSet
from fairseq_rskip.vision.model import PreActResNet
from fairseq_rskip.vision.trainer import Group, Trainer

CPU = torch.device("cpu")


def batch_norm(x, weights, name):
    """Over batch and positions, with the batch's statistics."""
    mean = x.mean((0, 2, 3), keepdim=True)
    var = ((x - mean) ** 2).mean((0, 2, 3), keepdim=True)
    shape = (1, -1, 1, 1)
    gain, bias = weights[f"{name}.weight"].view(shape), weights[f"{name}.bias"].view(shape)
    return (x - mean) / (var + 1e-5) ** 0.5 * gain + bias


def skip_norms(variant, axes, weights, block, image_shape):
    """The G_k of a block as functions of rows (positions, channels)."""
    over = {"batch": (0, 1), "layer": (1, 2) if axes == "chw" else (2,), "none": ()}[variant.norm]

    def apply(rows, k):
        cells = rows.view(image_shape[0], -1, image_shape[1])  # (N, H * W, C)
        mean = cells.mean(over, keepdim=True)
        var = ((cells - mean) ** 2).mean(over, keepdim=True)
        gain, bias = (
            weights[f"{block}.skip.post.{k}.weight"],
            weights[f"{block}.skip.post.{k}.bias"],
        )
        return ((cells - mean) / (var + 1e-5) ** 0.5 * gain + bias).reshape(rows.shape)

    return [functools.partial(apply, k=k) for k in range(10)]


def reference(x, weights, depth, variant, shortcut, axes="c"):
    """Compute He et al. 2016b with the variant's equation in place of the addition.

    The equation is plain arithmetic; the network is in training mode.
    """
    x = F.conv2d(x, weights["conv.weight"], padding=1)
    units = (depth - 2) // 6
    for unit in range(3 * units):
        block, first, stride = (
            f"blocks.{unit}",
            unit % units == 0,
            2 if unit in (units, 2 * units) else 1,
        )
        activated = batch_norm(x, weights, f"{block}.bn1").clamp(min=0)
        skip = activated if first else x
        branch = F.conv2d(activated, weights[f"{block}.conv1.weight"], padding=1, stride=stride)
        branch = batch_norm(branch, weights, f"{block}.bn2").clamp(min=0)
        branch = F.conv2d(branch, weights[f"{block}.conv2.weight"], padding=1)
        if stride == 2 and shortcut == "A":
            small = skip[:, :, ::2, ::2]
            skip = torch.cat([small, torch.zeros_like(small)], 1)
        elif stride == 2:
            skip = F.conv2d(skip, weights[f"{block}.shortcut.weight"], stride=2)
        norms = skip_norms(variant, axes, weights, block, branch.shape)
        learned = {"weight": weights.get(f"{block}.skip.weight")}
        y = variant.equation(to_rows(skip, 1), to_rows(branch, 1), norms, learned)
        x = from_rows(y, branch, 1)
    x = batch_norm(x, weights, "bn").clamp(min=0).sum((2, 3)) / (x.size(2) * x.size(3))
    return x @ weights["fc.weight"].t() + weights["fc.bias"]


def build(depth, variant, shortcut="A", **more):
    """A network whose every parameter is random, so that no gain is 1 and no bias is 0."""
    torch.manual_seed(3)
    model = PreActResNet(depth, 7, {**variant.options, **more}, shortcut)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def outputs_and_gradients(compute, x, weights):
    y = compute(x)
    upstream = draw(y.shape, seed=11, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [x, *weights], upstream)]


def test_a_norm_before_the_branch_is_refused_since_the_branch_begins_with_one():
    with pytest.raises(OptionError, match="pre_norm=True: expected no pre-norm"):
        PreActResNet(8, 10, {"kind": "xskip", "norm": "none", "pre_norm": True})


@pytest.mark.parametrize("skip", ["rskip", {"skip_lambda": 2}, {}])
def test_a_skip_without_its_kind_is_told_what_is_expected(skip):
    with pytest.raises(ValueError, match="expected a mapping with the kind and its options"):
        PreActResNet(8, 10, skip)


PAPER = [
    v
    for v in VARIANTS
    if v.kind in ("xskip", "rskip", "wskip") and v.norm in ("none", "layer", "batch")
]
CASES = [(v, "A", "c") for v in PAPER] + [
    (v, "B", "chw" if v.norm == "layer" else "c") for v in PAPER
]


@pytest.mark.parametrize(
    "variant, shortcut, axes", CASES, ids=[f"{v.name}-{s}-{a}" for v, s, a in CASES]
)
def test_equals_a_straight_line_float64_implementation(variant, shortcut, axes, depth=14):
    model = build(depth, variant, shortcut, norm_axes=axes).double()
    x = draw((4, 3, 12, 12), seed=1).requires_grad_()
    weights = dict(model.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
    expected = outputs_and_gradients(
        lambda x: reference(x, copies, depth, variant, shortcut, axes), x, copies.values()
    )
    got = outputs_and_gradients(model, x, weights.values())
    largest = max(
        truth.abs().max().item() for truth in expected
    )  # a bias that a BN follows has gradient 0
    for name, ours, truth in zip(["y", "x", *weights], got, expected):
        torch.testing.assert_close(
            ours, truth, atol=1e-11 * largest, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[7]], ids=lambda v: v.name)
def test_fp32_in_either_memory_format_stays_close_to_float64(variant):
    model = build(20, variant)
    x = draw((4, 3, 32, 32), seed=2)
    truth = reference(
        x, {n: p.detach().double() for n, p in model.named_parameters()}, 20, variant, "A"
    )
    kept = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda _m, _i, y: kept.append(y.is_contiguous(memory_format=torch.channels_last))
        )
    for memory_format in (torch.contiguous_format, torch.channels_last):
        y = model.to(memory_format=memory_format)(x.float().contiguous(memory_format=memory_format))
        torch.testing.assert_close(y.double(), truth, atol=1e-3, rtol=1e-3)
    assert kept == [False] * 9 + [True] * 9


SIZES = {
    20: 269_722,
    32: 464_154,
    44: 658_586,
    56: 853_018,
    110: 1_727_962,
}  # He et al. 2016a, Table 6: 0.27M to 1.7M
UNITS = 18 * (
    16 + 32 + 64
)  # ResNet-110 has 54 units of three widths; a vector of each unit has its width
MORE = {
    "rSkip+LN, two gains and biases": (
        {"kind": "rskip", "skip_lambda": 2, "norm": "layer"},
        "A",
        10,
        4 * UNITS,
    ),
    "wSkip+LN, one and w": ({"kind": "wskip", "norm": "layer"}, "A", 10, 3 * UNITS),
    "shortcut B, two kernels": (None, "B", 10, 16 * 32 + 32 * 64),
    "100 classes": (None, "A", 100, 90 * (64 + 1)),
}


def test_parameter_counts_are_the_published_ones_and_what_skips_add():
    def count(depth, classes=10, skip=None, shortcut="A", **more):
        with torch.device("meta"):
            model = PreActResNet(depth, classes, skip, shortcut, **more)
        return sum(parameter.numel() for parameter in model.parameters())

    assert {depth: count(depth) for depth in SIZES} == SIZES
    for name, (skip, shortcut, classes, more) in MORE.items():
        assert count(110, classes, skip, shortcut) == SIZES[110] + more, name


def test_he_initialisation():
    torch.manual_seed(0)
    model = PreActResNet(56, 10)
    weight = model.blocks[-1].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)
    assert abs(weight.mean().item()) < 1e-3 and model.fc.bias.eq(0).all()
    assert all(
        module.bias is None for module in model.modules() if isinstance(module, torch.nn.Conv2d)
    )


def test_lambda_from_the_gradient_sees_the_input_where_the_width_changes():
    torch.manual_seed(3)
    model = PreActResNet(8, 10, {"kind": "askip", "adapt": "gradient"})
    images = torch.randn(8, 3, 32, 32)
    ratios = {}
    for k in (1, 2, 3, 4):
        for skip in skips(model).values():
            skip.shares.freeze(k)
        inputs, x = [], model.conv(images)
        for block in model.blocks:  # a block's input after its common activation
            x = F.relu(block.bn1(x))
            inputs.append(x)
            f_x = block.conv2(F.relu(block.bn2(block.conv1(x))))
            x = block.skip(block.shortcut(x), f_x)
            inputs.append(x)
        loss = F.cross_entropy(model.fc(F.relu(model.bn(x)).mean((2, 3))), torch.arange(8))
        norms = [gradient.norm() for gradient in torch.autograd.grad(loss, inputs)]
        for block in range(3):
            ratios.setdefault(block, {})[k] = abs(math.log(norms[2 * block] / norms[2 * block + 1]))
    actual = initialise_from_batch(
        model, lambda: F.cross_entropy(model(images), torch.arange(8)), model.shortcuts()
    )
    assert list(actual.values()) == [min(each, key=each.get) for each in ratios.values()]


def trainer_of(*options, seed=1):
    """Of eight random images in as many classes."""
    generator, labels = torch.Generator().manual_seed(0), torch.arange(8)
    images = torch.randint(256, (8, 32, 32, 3), dtype=torch.uint8, generator=generator)
    config = parse(["--data", "digits", "--depth", "8", *options])
    return Trainer(
        config, seed, ImageSet(tuple("12345678"), images, labels, images, labels), Group(0, 1, CPU)
    )


@pytest.mark.parametrize("kind", ["askip", "wskip", "layerscale"])
def test_one_update_moves_coefficients_by_the_factor_of_their_rate(kind):
    """And nothing else: under SGD, whose first step is proportional to the rate."""
    moved = {}
    for factor in ("1", "8"):
        trainer = trainer_of("--skip-kind", kind, "--skip-lr-scale", factor)
        before = {k: v.detach().clone() for k, v in trainer.module.named_parameters()}
        trainer.backward(draw((8, 3, 32, 32), seed=1, dtype=torch.float32), torch.arange(8))
        trainer.step()
        after = dict(trainer.module.named_parameters())
        moved[factor] = {name: after[name].detach() - value for name, value in before.items()}
    own = learned(trainer.module)
    assert own and all(moved["1"][name].any() for name in own)
    for name, step in moved["1"].items():
        factor = 8.0 if name in own else 1.0
        torch.testing.assert_close(moved["8"][name], factor * step, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "decays"), [("layerscale", False), ("wskip", True)])
def test_weight_decay_shrinks_all_but_a_rules_coefficients(kind, decays):
    """wskip's decay, as in its paper. SGD's first step with decay is longer by 0.01 * 0.5 w."""
    starts, ends = {}, {}
    for decay in ("0", "0.5"):
        trainer = trainer_of("--skip-kind", kind, "--weight-decay", decay)
        starts = {k: v.detach().clone() for k, v in trainer.module.named_parameters()}
        trainer.backward(draw((8, 3, 32, 32), seed=1, dtype=torch.float32), torch.arange(8))
        trainer.step()
        ends[decay] = dict(trainer.module.named_parameters())
    own = learned(trainer.module)
    for name, start in starts.items():
        expected = -0.005 * start if decays or name not in own else torch.zeros_like(start)
        got = ends["0.5"][name].detach() - ends["0"][name].detach()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6, msg=name)


def test_halting_costs_the_same_in_a_batch_of_twice_the_images():
    """Each image twice: the mean loss, its gradients and the batch's statistics stay."""
    options = "--skip-kind askip --skip-adapt halting --skip-halt-cost 0.5"
    trainer = trainer_of(*options.split())
    trainer.module.double()
    x, y, actual = draw((4, 3, 32, 32), seed=1), torch.arange(4), []
    for times in (1, 2):
        trainer.backward(x.repeat(times, 1, 1, 1), y.repeat(times))
        actual.append({name: p.grad for name, p in trainer.module.named_parameters()})
    assert all(actual[0][name].any() for name in learned(trainer.module))
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-6, atol=1e-9)


def test_every_seed_and_update_has_random_numbers_of_its_own():
    seeds = []
    for seed in (1, 2):
        trainer = trainer_of("--batch-size", "8", seed=seed)
        for _ in range(2):
            trainer.train_step()
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 4


def test_digits_are_not_flipped():
    flips = {data: trainer_of("--data", data).stream.next().flip for data in ("digits", "cifar10")}
    assert not flips["digits"].any() and flips["cifar10"].any()


def test_a_test_uses_the_running_statistics_and_training_goes_on():
    trainer = trainer_of("--batch-size", "8")
    trainer.train_step()
    still = copy.deepcopy(trainer.module).eval()
    labels = trainer.images.test_labels
    with torch.no_grad():
        logits = still(trainer.augmenter.test(trainer.images.test_images))
    losses = logits.logsumexp(1) - logits[torch.arange(8), labels]
    actual = trainer.test()
    assert actual["test_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert actual["test_error"] == 12.5 * int((logits.argmax(1) != labels).sum())
    assert all(module.training for module in trainer.module.modules())
    assert all(map(torch.equal, trainer.module.buffers(), still.buffers()))


def test_a_factor_is_refused_where_nothing_is_learned():
    with pytest.raises(UserError, match="--skip-lr-scale 8: expected 1 .kind rskip learns no"):
        parse(["--skip-lr-scale", "8"])


def test_admin_is_profiled_on_the_first_batch_and_that_is_no_movement():
    trainer = trainer_of("--skip-kind", "admin", "--skip-norm", "layer")
    omegas = [float(block.skip.weight[0].detach()) for block in trainer.module.blocks]
    assert omegas[0] == 1 and min(omegas[1:]) > 1.01
    assert len(trainer.unmoved.names()) == len(omegas)


def test_admin_is_profiled_before_the_network_is_shared_between_processes(monkeypatch):
    """DistributedDataParallel sends the first process's values to all when it is made."""
    omegas = []

    def wrapped(trainer):
        omegas.append(float(trainer.module.blocks[-1].skip.weight[0].detach()))
        return trainer.module

    monkeypatch.setattr(Trainer, "_wrapped", wrapped)
    trainer_of("--skip-kind", "admin", "--skip-norm", "layer")
    assert len(omegas) == 1 and omegas[0] > 1.01


def test_every_block_of_a_resnet_is_at_its_place():
    model = PreActResNet(20, 10, {"kind": "xskip", "skip_lambda": 1, "norm": "none"})
    places = [block.skip.place for block in model.blocks]
    assert [(place.side, place.index, place.depth) for place in places] == [
        ("resnet", index, 9) for index in range(9)
    ]
