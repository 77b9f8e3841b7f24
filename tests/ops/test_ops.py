"""The operator of the recursive skip, its norms and its mixtures of steps.

They are compared with Eq. 4 in float64.
"""

import eq4
import pytest
import torch

from fairseq_rskip import ops
from fairseq_rskip.errors import UserError
from fairseq_rskip.norms import RecursiveNorm
from fairseq_rskip.ops import in_use, skip_mix, skip_norm
from fairseq_rskip.ops.operator import operator

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MODES = ("norm", "constant", "halting")  # the last step, or a sum over steps with these weights
# (rows, features), steps, options
CASES = {
    "post_norm": ((7, 256), 1, {}),
    "one_feature": ((5, 1), 2, {}),
    "odd": ((3, 5, 33), 2, {}),
    "short_16": ((37, 16), 3, {}),
    "short_20": ((18, 20), 3, {}),
    "short_32": ((16, 32), 2, {"branch_scale": 2.0}),
    "short_64": ((33, 64), 4, {}),
    "three_vectors": ((17, 48), 2, {}),
    "long": ((2, 8192), 3, {}),
    "prime": ((3, 1023), 4, {}),
    "expanded": ((9, 48), 1, {"skip_scale": 2.0, "branch_scale": 0.5}),
    "equal_scales": ((20, 16), 1, {"skip_scale": 2.0, "branch_scale": 2.0}),
    "pieces": ((700, 128), 2, {"branch_scale": 2.0}),
    "rms": ((6, 112), 3, {"rms": True}),
    "rms_short": ((19, 16), 4, {"rms": True, "skip_scale": 2.0}),
    "no_bias": ((6, 32), 2, {"biases": False}),
    "one_row": ((64,), 2, {}),
    "empty": ((0, 4, 32), 2, {}),
    "large_eps": ((5, 1040), 5, {"eps": 0.1}),
}
WHOLE = [
    name for name, (shape, *_) in CASES.items() if shape[-1] % 16 == 0
]  # what the CPU operator takes
MIXED = {
    "half": (torch.float16, torch.float16, torch.float16),
    "bfloat": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "branch_half": (torch.float32, torch.float16, torch.float32),
    "stream_bfloat": (torch.bfloat16, torch.float32, torch.float32),
    "gains_wide": (torch.float16, torch.float16, torch.float32),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def random(size, seed, like):
    """Values that every dtype holds exactly."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(like)


def inputs(shape, steps, dtypes=(torch.float32,) * 3, biases=True, mode="norm"):
    """Leaves x, F, gains and biases; of a mixture weights; of one that halts also the direction."""
    sizes = [shape, shape, *[shape[-1:]] * steps * (2 if biases else 1)]
    sizes += {"norm": [], "constant": [(steps,)], "halting": [(steps - 1,), shape[-1:]]}[mode]
    kinds = [dtypes[0], dtypes[1]] + [dtypes[2]] * (len(sizes) - 2)
    values = [random(size, seed, kind) for seed, (size, kind) in enumerate(zip(sizes, kinds))]
    values[-1] = values[-1] / shape[-1] ** 0.5 if mode == "halting" else values[-1]
    return [value.requires_grad_() for value in values]


def call(module, leaves, steps, mode="norm", **options):
    """[y], or [y, p] of a mixture, by the functions of ``module``."""
    end = len(leaves) - MODES.index(mode)
    arguments = (leaves[0], leaves[1], leaves[2 : 2 + steps], leaves[2 + steps : end])
    if mode == "norm":
        return [module.skip_norm(*arguments, **options)]
    weights, direction = [*leaves[end:], None][:2]
    return list(module.skip_mix(*arguments, weights, direction, **options))


def evaluate(module, leaves, steps, mode="norm", **options):
    """The result and the gradients of all leaves for random upstream gradients."""
    outputs = call(module, leaves, steps, mode, **options)
    count = 2 if mode == "halting" else 1
    upstream = [random(y.shape, 100 + k, y) for k, y in enumerate(outputs[:count])]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs[:count], leaves, upstream)]


def agree(actual, expected, dtype):
    """Check that each pair has one shape and agrees.

    The tolerance is that of the narrowest dtype, relative to the largest value.
    """
    for ours, truth in zip(actual, expected, strict=True):
        assert ours.shape == truth.shape
        largest = max(1.0, truth.abs().max().item() if truth.numel() else 0)
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=TOLERANCE[dtype] * largest)


def check(module, shape, steps, options, dtypes=(torch.float32,) * 3, mode="norm"):
    options = dict(options)
    leaves = inputs(shape, steps, dtypes, options.pop("biases", not options.get("rms")), mode)
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual = evaluate(module, leaves, steps, mode, **options)
    agree(actual, evaluate(eq4, truth, steps, mode, **options), max(dtypes, key=TOLERANCE.get))
    assert [actual[0].dtype, *(t.dtype for t in actual[-len(leaves) :])] == [
        leaf.dtype for leaf in (leaves[0], *leaves)
    ]


@every_mode
@pytest.mark.parametrize("case", WHOLE)
def test_every_shape_equals_eq4_in_float64(case, mode, cpu_operator):
    check(ops, *CASES[case], mode=mode)


@every_mode
@pytest.mark.parametrize("kinds", MIXED)
def test_every_mixture_of_types_equals_eq4_in_float64(kinds, mode, cpu_operator):
    check(ops, (9, 16), 3, {}, MIXED[kinds], mode)


@pytest.mark.parametrize("width", [1, 20, 1023], ids=["1", "20", "1023"])
def test_torch_computes_rows_that_are_no_whole_vectors(width, cpu_operator, operators):
    norm, (x, f_x) = RecursiveNorm("layer", width, steps=2), inputs((5, width), 2)[:2]
    y = norm(x, f_x)
    operators("torch")
    assert torch.equal(y, norm(x, f_x))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "image_contiguous": lambda t: t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "sliced_rows": lambda t: torch.cat([t, t], -1)[..., : t.size(-1)],
    "strided_features": lambda t: torch.stack([t, t], -1)[..., 0],
    "every_other_row": lambda t: torch.cat([t, t], 2)[:, :, : t.size(2)],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@every_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout, mode, cpu_operator):
    leaves = inputs((2, 3, 5, 16), 2, mode=mode)
    moved = [LAYOUTS[layout](leaf.detach()).requires_grad_() for leaf in leaves[:2]] + leaves[2:]
    dense = [
        leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for leaf in moved
    ]
    for ours, truth in zip(evaluate(ops, moved, 2, mode), evaluate(ops, dense, 2, mode)):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize(
    "chosen", [[0], [1], [2, 3], [4, 5], [0, 2]], ids=["x", "f_x", "gains", "biases", "x_and_gain"]
)
def test_gradients_come_one_by_one(chosen, cpu_operator):
    leaves = inputs((11, 32), 2)
    everything = evaluate(ops, leaves, 2)[1:]
    some = [leaf.detach().requires_grad_(i in chosen) for i, leaf in enumerate(leaves)]
    (y,) = call(ops, some, 2)
    y.backward(random(y.shape, 100, y))
    for i, leaf in enumerate(some):
        if i in chosen:
            torch.testing.assert_close(leaf.grad, everything[i])
        else:
            assert leaf.grad is None


@every_mode
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1e30], ids=["nan", "inf", "overflow"]
)
@pytest.mark.parametrize("width", [16, 80], ids=["short", "long"])
def test_a_bad_row_comes_out_as_in_torch_and_spoils_no_other(value, width, mode, cpu_operator):
    leaves = [leaf.detach() for leaf in inputs((33, width), 2, mode=mode)]
    leaves[0][5, 3] = value
    actual, truth = (call(module, leaves, 2, mode)[0] for module in (ops, eq4))
    torch.testing.assert_close(actual, truth, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", [16, 64, 256], ids=["16", "64", "256"])
def test_rows_far_from_zero_keep_their_digits(width, cpu_operator):
    """For multiples of 1/8 around 4096 fp32 holds x + F exactly.

    So only the norm can lose digits.
    """
    leaves = inputs((9, width), 1)
    x, f_x = ((leaf.detach() * 4).round() / 8 for leaf in leaves[:2])
    moved = [(x + 4096).requires_grad_(), f_x.requires_grad_(), *leaves[2:]]
    truth = [leaf.detach().double().requires_grad_() for leaf in moved]
    agree(evaluate(ops, moved, 1), evaluate(eq4, truth, 1), torch.float32)


@every_mode
@pytest.mark.parametrize("width", [16, 64, 80, 528], ids=["16", "64", "80", "528"])
def test_a_row_gives_the_same_bits_wherever_it_stands(width, mode, cpu_operator):
    x, f_x, *rest = (leaf.detach() for leaf in inputs((70, width), 3, mode=mode))
    whole = call(ops, [x, f_x, *rest], 3, mode)
    for start, stop in ((0, 1), (3, 20), (69, 70)):
        part = call(ops, [x[start:stop], f_x[start:stop], *rest], 3, mode)
        assert torch.equal(part[0], whole[0][start:stop])
        assert mode != "halting" or torch.equal(part[1], whole[1][:, start:stop])


@every_mode
def test_threads_change_no_bit(mode, cpu_operator):
    leaves, threads, results = inputs((5000, 48), 3, mode=mode), torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(evaluate(ops, leaves, 3, mode))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@every_mode
def test_outputs_are_written_whole(mode, cpu_operator):
    """Memory that held NaN before shows through nowhere."""
    leaves = inputs((130, 48), 2, mode=mode)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        actual = evaluate(ops, leaves, 2, mode)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(t).all() for t in actual)


@every_mode
@pytest.mark.parametrize("name", ["layer", "rms"])
@pytest.mark.parametrize("channel_dim", [-1, 1], ids=["sequence", "image"])
def test_norms_give_the_operator_their_eps_kind_and_scales(channel_dim, name, mode, cpu_operator):
    leaves = [leaf.detach() for leaf in inputs((2, 3, 4, 16), 2, biases=name == "layer", mode=mode)]
    norm = RecursiveNorm(name, 16, steps=2, channel_dim=channel_dim, eps=0.1)
    with torch.no_grad():
        for k, each in enumerate(norm):
            each.weight.copy_(leaves[2 + k])
            if each.has_bias:
                each.bias.copy_(leaves[4 + k])
    x, f_x = (rows.movedim(-1, channel_dim) for rows in leaves[:2])
    scales = {"branch_scale": 0.5}
    if mode == "norm":
        scales["skip_scale"] = 2.0
        actual = norm(x, f_x, **scales)
    else:
        actual, _ = norm.mixture(x, f_x, *leaves[-MODES.index(mode) :], **scales)
    assert ops.should_fuse(x, f_x, 16, 2, mixed=mode != "norm")

    truth = [leaf.double() for leaf in leaves]
    expected = call(eq4, truth, 2, mode, eps=0.1, rms=name == "rms", **scales)[0]
    agree([actual], [expected.movedim(-1, channel_dim)], torch.float32)


@pytest.mark.parametrize("mixed", [False, True], ids=["last", "mixture"])
def test_a_norm_of_whole_images_is_not_that_of_the_operators_rows(mixed, cpu_operator):
    norm = RecursiveNorm("layer", 16, steps=2, channel_dim=1, norm_axes="chw")
    x, f_x = (random((2, 16, 3, 4), seed, torch.float32) for seed in (1, 2))
    share = torch.tensor([0.25, 0.75])
    actual = norm.mixture(x, f_x, share)[0] if mixed else norm(x, f_x)

    first = torch.group_norm(x.double() + f_x.double(), 1)
    second = torch.group_norm(x.double() + first, 1)
    expected = 0.25 * first + 0.75 * second if mixed else second
    agree([actual], [expected], torch.float32)


@pytest.mark.parametrize("mode, name", [*((mode, "layer") for mode in MODES), ("norm", "rms")])
def test_torchs_operators_pass_gradcheck_once_and_twice(mode, name, stock_operators):
    leaves = [leaf.detach().double().requires_grad_() for leaf in inputs((2, 16), 2, mode=mode)]
    del leaves[2:6]  # the norm has its own gains and biases
    norm = RecursiveNorm(name, 16, steps=2).double()

    def outputs(x, f_x, *weights):
        if mode == "norm":
            return norm(x, f_x, branch_scale=0.7)
        y, p = norm.mixture(x, f_x, *weights, branch_scale=0.7)
        return (y, p) if mode == "halting" else y

    assert torch.autograd.gradcheck(outputs, leaves)
    assert torch.autograd.gradgradcheck(outputs, leaves)


@every_mode
def test_a_second_derivative_is_refused(mode, cpu_operator):
    y = call(ops, (leaves := inputs((4, 32), 2, mode=mode)), 2, mode)[0]
    with pytest.raises(UserError, match="has no second derivative; RSKIP_OPS=torch, set before"):
        torch.autograd.grad(y.sum(), leaves, create_graph=True)


@every_mode
@pytest.mark.parametrize("steps", [1, 4])
def test_backward_keeps_its_inputs_and_some_numbers_of_each_row(steps, mode, cpu_operator):
    """Other than torch, which keeps the sum x + F of each step."""
    leaves, kept = inputs((64, 128), steps, mode=mode), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        call(ops, leaves, steps, mode)
    numbers = {"norm": 2 * steps * 64, "constant": 0, "halting": steps * 64}[mode]
    assert sum(kept) == sum(leaf.numel() for leaf in leaves) + numbers


@every_mode
def test_opcheck(mode, cpu_operator):
    leaves, mixture = inputs((4, 16), 2, mode=mode), MODES.index(mode)
    weights, direction = [*leaves[len(leaves) - mixture :], None, None][:2]
    for options in ((1.0, 1.0, 1e-5, False), (1.0, 2.0, 1e-5, True)):
        torch.library.opcheck(
            operator, (*leaves[:2], leaves[2:4], leaves[4:6], weights, direction, *options)
        )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_whole(dynamic, cpu_operator):
    in_use()
    leaves = inputs((12, 48), 2)
    torch._dynamo.reset()
    compiled = torch.compile(skip_norm, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    y = compiled(*leaves[:2], leaves[2:4], leaves[4:])
    actual = [y.detach(), *torch.autograd.grad(y, leaves, random(y.shape, 100, y))]
    agree(actual, [t.double() for t in evaluate(ops, leaves, 2)], torch.float32)


def test_autocast_leaves_the_types_as_they_are(cpu_operator):
    leaves = inputs((5, 32), 2, (torch.float32, torch.bfloat16, torch.float32))
    plain = evaluate(ops, leaves, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = evaluate(ops, leaves, 2)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, under))


def test_torch_computes_transforms_of_torch_func(cpu_operator):
    norm, (x, f_x) = RecursiveNorm("layer", 16), (t.detach() for t in inputs((3, 6, 16), 1)[:2])
    norm[0].weight, norm[0].bias = map(torch.nn.Parameter, (random(16, 2, x), random(16, 3, x)))

    def total(x):
        return norm(x, f_x[0], 2.0).square().sum()

    expected = torch.stack([torch.autograd.functional.jacobian(total, row) for row in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), expected)
    tangent = torch.func.jvp(total, (x[0],), (f_x[1],))[1]
    torch.testing.assert_close(tangent, (expected[0] * f_x[1]).sum())


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("width", [16, 64, 256], ids=["16", "64", "256"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_at_one_hot_weights_a_mixture_is_that_step_bit_for_bit(step, width, mode, cpu_operator):
    leaves = [leaf.detach() for leaf in inputs((21, width), 4, mode=mode)]
    k = torch.arange(4 - (mode == "halting")) + 1
    leaves[10] = torch.where(k < step, -1e9, 1e9) if mode == "halting" else (k == step).float()
    y, p = call(ops, leaves, 4, mode)
    assert torch.equal(y, skip_norm(*leaves[:2], leaves[2 : 2 + step], leaves[6 : 6 + step]))
    assert torch.equal(p.view(4, -1).mean(1), (torch.arange(4) + 1 == step).float())


@pytest.mark.parametrize("used", ["y", "p"])
def test_either_output_alone_has_its_gradients(used, cpu_operator):
    actual = []
    for module in (ops, eq4):
        leaves = inputs((11, 32), 3, mode="halting")
        y, p = call(module, leaves, 3, "halting")
        wanted = y if used == "y" else p.square()
        actual.append(
            torch.autograd.grad(wanted.sum(), leaves, allow_unused=True, materialize_grads=True)
        )
    for ours, truth in zip(*actual):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused(cpu_operator):
    x, f_x, gain, bias = inputs((4, 16), 1)
    for wrong in (
        (x, f_x[:2], [gain], [bias]),
        (x, f_x, [], []),
        (x, f_x, [gain[:3]], [bias]),
        (x, f_x, [gain], [bias] * 2),
    ):
        with pytest.raises(RuntimeError, match="skip_norm: "):
            skip_norm(*wrong)
    for weights, direction in ((3, None), (2, gain), (1, gain[:8])):
        with pytest.raises(RuntimeError, match="skip_(mix|norm): "):
            skip_mix(x, f_x, [gain, gain], [bias, bias], torch.ones(weights), direction)


@pytest.mark.parametrize("exponent", [17, 18, 19, 20, 25, 30, 37, 38])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_values_whose_variance_overflows_are_those_of_torch(exponent, steps, rms, cpu_operator):
    """Where torch is NaN the operator is, and where torch is the bias alone."""
    x = torch.linspace(1, 2, 3 * 32).view(3, 32) * 10.0**exponent
    x[0] = torch.linspace(-1, 1, 32)  # one ordinary row
    x = x.clone().requires_grad_()
    f_x = torch.ones(3, 32, requires_grad=True)
    gains = [torch.full((32,), 1.5, requires_grad=True) for _ in range(steps)]
    biases = [] if rms else [torch.full((32,), 0.25, requires_grad=True) for _ in range(steps)]
    leaves = [x, f_x, *gains, *biases]
    upstream = torch.linspace(-1, 1, 3 * 32).view(3, 32)
    results = []
    for function in (ops.skip_norm, eq4.skip_norm):
        y = function(x, f_x, gains, biases, rms=rms)
        # the sum over a row of the gradient of RMS norm overflows in torch alone
        has_gradients = not (rms and exponent >= 37)
        gradients = torch.autograd.grad(y, leaves, upstream) if has_gradients else []
        results.append([y.detach(), *gradients])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("exponent", [17, 18, 19, 20, 25, 30, 37, 38])
@pytest.mark.parametrize("halts", [False, True], ids=["fixed", "halting"])
def test_mixtures_whose_variance_overflows_are_those_of_torch(exponent, halts, cpu_operator):
    x = torch.linspace(1, 2, 3 * 32).view(3, 32) * 10.0**exponent
    x[0] = torch.linspace(-1, 1, 32)  # one ordinary row
    x = x.clone().requires_grad_()
    f_x = torch.ones(3, 32, requires_grad=True)
    gains = [torch.full((32,), 1.5, requires_grad=True) for _ in range(3)]
    biases = [torch.full((32,), 0.25, requires_grad=True) for _ in range(3)]
    weights, direction = torch.tensor([0.2, 0.3, 0.5], requires_grad=True), None
    leaves = [x, f_x, *gains, *biases, weights]
    if halts:
        weights = torch.tensor([0.2, -0.3], requires_grad=True)
        direction = torch.linspace(-0.1, 0.1, 32).requires_grad_()
        leaves = [x, f_x, *gains, *biases, weights, direction]

    upstream = torch.linspace(-1, 1, 3 * 32).view(3, 32)
    results = []
    for function in (ops.skip_mix, eq4.skip_mix):
        y, p = function(x, f_x, gains, biases, weights, direction)
        gradients = torch.autograd.grad(y, leaves, upstream)
        results.append([y.detach(), p.detach(), *gradients])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
