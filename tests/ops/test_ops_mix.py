"""The weighted sum over the steps as one operator: every backend against the reference in float64 and skip_norm."""

import pytest
import torch
from test_ops import LAYOUTS, MIXED, agree
from test_ops import TOLERANCE as TOLERANCES

from fairseq_rskip.ops import reference, skip_mix, skip_norm

# (rows, features), steps, options
CASES = {
    "short_16": ((37, 16), 4, {}),
    "short_20": ((18, 20), 3, {}),
    "short_64": ((33, 64), 4, {}),
    "long": ((7, 256), 4, {}),
    "prime": ((3, 5, 1023), 3, {}),
    "one_step": ((9, 48), 1, {}),
    "one_feature": ((5, 1), 2, {}),
    "one_row": ((64,), 2, {}),
    "pieces": ((700, 128), 4, {"branch_scale": 2.0}),
    "rms": ((6, 112), 3, {"rms": True}),
    "rms_short": ((19, 16), 4, {"rms": True, "skip_scale": 2.0}),
    "large_eps": ((5, 1040), 2, {"eps": 0.1}),
    "empty": ((0, 4, 32), 3, {}),
}
MODES = ("constant", "halting")


def inputs(mode, shape, steps, dtypes=(torch.float32,) * 3, biases=True):
    """Leaves x, F, weights, direction, gains and biases, with values that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(0)
    given, along = (steps, []) if mode == "constant" else (steps - 1, [shape[-1:]])
    sizes = [shape, shape, (given,), *along] + [shape[-1:]] * (steps * (2 if biases else 1))
    kinds = [dtypes[0], dtypes[1]] + [dtypes[2]] * (len(sizes) - 2)
    values = [torch.randn(size, generator=generator).bfloat16().to(kind) for size, kind in zip(sizes, kinds)]
    if mode == "halting":
        values[3] = values[3] / 4
    return [value.requires_grad_() for value in values]


def call(function, leaves, mode, steps, **options):
    x, f_x, weights, *rest = leaves
    direction = rest.pop(0) if mode == "halting" else None
    return function(x, f_x, rest[:steps], rest[steps:], weights, direction, **options)


def evaluate(function, leaves, mode, steps, **options):
    """y, p and the gradients of all leaves, from random gradients of y and, of rows that halt by themselves, of p."""
    outputs = call(function, leaves, mode, steps, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in outputs]
    count = 2 if mode == "halting" else 1
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs[:count], leaves, upstream[:count]))


def check(function, mode, shape, steps, options, dtypes=(torch.float32,) * 3):
    leaves = inputs(mode, shape, steps, dtypes, not options.get("rms"))
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = evaluate(function, leaves, mode, steps, **options)
    agree(found, evaluate(reference.skip_mix, truth, mode, steps, **options), max(dtypes, key=TOLERANCES.get))
    assert [found[0].dtype, *(t.dtype for t in found[2:])] == [leaves[0].dtype, *(leaf.dtype for leaf in leaves)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [name for name, (shape, *_) in CASES.items() if shape[-1] % 16 == 0])
def test_every_shape_equals_the_reference_in_float64(case, mode, cpu_operator):
    check(skip_mix, mode, *CASES[case])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", MIXED)
def test_every_mixture_of_types_equals_the_reference_in_float64(kinds, mode, cpu_operator):
    check(skip_mix, mode, (9, 16), 3, {}, MIXED[kinds])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [16, 64, 256], ids=["16", "64", "256"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_at_one_hot_weights_it_is_that_step_bit_for_bit(step, width, mode, cpu_operator):
    x, f_x, weights, *rest = (leaf.detach() for leaf in inputs(mode, (21, width), 4))
    direction = rest.pop(0) if mode == "halting" else None
    k = torch.arange(len(weights)) + 1
    weights = torch.where(k < step, -1e9, 1e9) if mode == "halting" else (k == step).float()
    y, p = skip_mix(x, f_x, rest[:4], rest[4:], weights, direction)
    assert torch.equal(y, skip_norm(x, f_x, rest[:step], rest[4 : 4 + step]))
    assert torch.equal(p.view(4, -1).mean(1), (torch.arange(4) + 1 == step).float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout, mode, cpu_operator):
    leaves = inputs(mode, (2, 3, 5, 16), 3)
    moved = [LAYOUTS[layout](leaf.detach()).requires_grad_() for leaf in leaves[:2]] + leaves[2:]
    dense = [leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for leaf in moved]
    for ours, truth in zip(evaluate(skip_mix, moved, mode, 3), evaluate(skip_mix, dense, mode, 3)):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [16, 64, 80, 528], ids=["16", "64", "80", "528"])
def test_a_row_gives_the_same_bits_wherever_it_stands(width, mode, cpu_operator):
    x, f_x, *rest = (leaf.detach() for leaf in inputs(mode, (70, width), 3))
    whole, p = call(skip_mix, [x, f_x, *rest], mode, 3)
    for start, stop in ((0, 1), (3, 20), (69, 70)):
        part, its_p = call(skip_mix, [x[start:stop], f_x[start:stop], *rest], mode, 3)
        assert torch.equal(part, whole[start:stop])
        assert torch.equal(its_p, p[:, start:stop] if mode == "halting" else p)


@pytest.mark.parametrize("mode", MODES)
def test_threads_change_no_bit(mode, cpu_operator):
    leaves, threads, results = inputs(mode, (5000, 48), 3), torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(evaluate(skip_mix, leaves, mode, 3))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_once_and_twice(mode, cpu_operator):
    leaves = [leaf.detach().double().requires_grad_() for leaf in inputs(mode, (2, 16), 3)]

    def outputs(*leaves):
        y, p = call(skip_mix, leaves, mode, 3, branch_scale=0.7)
        return (y, p) if mode == "halting" else y

    assert torch.autograd.gradcheck(outputs, leaves)
    assert torch.autograd.gradgradcheck(outputs, leaves)


@pytest.mark.parametrize("used", ["y", "p"])
def test_either_output_alone_has_its_gradients(used, cpu_operator):
    found = []
    for function in (skip_mix, reference.skip_mix):
        leaves = inputs("halting", (11, 32), 3)
        y, p = call(function, leaves, "halting", 3)
        wanted = y if used == "y" else p.square()
        found.append(torch.autograd.grad(wanted.sum(), leaves, allow_unused=True, materialize_grads=True))
    for ours, truth in zip(*found):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_no_step_is_kept_for_backward(mode, cpu_operator):
    leaves, kept = inputs(mode, (64, 128), 4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        call(skip_mix, leaves, mode, 4)
    p = 4 * 64 if mode == "halting" else 0
    assert sum(kept) == sum(leaf.numel() for leaf in leaves) + p


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_row_spoils_no_other(mode, cpu_operator):
    leaves = [leaf.detach() for leaf in inputs(mode, (33, 16), 3)]
    truth, _ = call(skip_mix, leaves, mode, 3)
    leaves[0] = leaves[0].clone()
    leaves[0][5, 3] = float("nan")
    found, _ = call(skip_mix, leaves, mode, 3)
    others = torch.arange(33) != 5
    assert found[5].isnan().all() and torch.equal(found[others], truth[others])


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode, cpu_operator):
    x, f_x, weights, *rest = inputs(mode, (4, 16), 2)
    direction = rest.pop(0) if mode == "halting" else None
    arguments = (x, f_x, rest[:2], rest[2:], weights, direction, 1.0, 2.0, 1e-5, False)
    torch.library.opcheck(torch.ops.fairseq_rskip.skip_mix.default, arguments)


@pytest.mark.parametrize(
    ("weights", "direction", "message"),
    [
        (3, None, r"weights of shape \[3\] for 2 steps: expected 2"),
        (2, 16, "expected 1"),
        (1, 8, "rows of 16 expected"),
    ],
    ids=["constant", "halting", "direction"],
)
def test_weights_that_do_not_fit(weights, direction, message, cpu_operator):
    x, f_x, _, *rest = (leaf.detach() for leaf in inputs("constant", (4, 16), 2))
    with pytest.raises(RuntimeError, match=message):
        skip_mix(x, f_x, rest[:2], rest[2:], torch.ones(weights), None if direction is None else torch.ones(direction))
