"""The operator of the recursive skip and its norms: every backend against the reference in float64."""

import pytest
import torch

from fairseq_rskip.ops import in_use, reference, skip_norm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# (rows, features), steps, options
CASES = {
    "post_norm": ((7, 256), 1, {}),
    "one_feature": ((5, 1), 2, {}),
    "odd": ((3, 5, 33), 2, {}),
    "short_16": ((37, 16), 3, {}),
    "short_20": ((18, 20), 2, {}),
    "short_32": ((16, 32), 2, {"branch_scale": 2.0}),
    "short_64": ((33, 64), 5, {}),
    "three_vectors": ((17, 48), 2, {}),
    "long": ((2, 8192), 3, {}),
    "prime": ((3, 1023), 4, {}),
    "expanded": ((9, 48), 1, {"skip_scale": 2.0, "branch_scale": 0.5}),
    "equal_scales": ((20, 16), 1, {"skip_scale": 2.0, "branch_scale": 2.0}),
    "pieces": ((700, 128), 2, {}),
    "rms": ((6, 112), 3, {"rms": True}),
    "rms_short": ((19, 16), 2, {"rms": True}),
    "no_bias": ((6, 32), 2, {"biases": False}),
    "one_row": ((64,), 2, {}),
    "empty": ((0, 4, 32), 2, {}),
    "large_eps": ((5, 1040), 2, {"eps": 0.1}),
}
WHOLE = [name for name, (shape, *_) in CASES.items() if shape[-1] % 16 == 0]  # what the CPU operator takes
MIXED = {
    "half": (torch.float16, torch.float16, torch.float16),
    "bfloat": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "double": (torch.float64, torch.float64, torch.float64),
    "branch_half": (torch.float32, torch.float16, torch.float32),
    "stream_bfloat": (torch.bfloat16, torch.float32, torch.float32),
    "gains_wide": (torch.float16, torch.float16, torch.float32),
    "branch_double": (torch.float32, torch.float64, torch.float32),
}


def inputs(shape, steps, dtypes=(torch.float32,) * 3, biases=True, seed=0):
    """Leaves x, F, gains and biases with values that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 + steps * (2 if biases else 1)
    sizes = [shape, shape] + [shape[-1:]] * (count - 2)
    kinds = [dtypes[0], dtypes[1]] + [dtypes[2]] * (count - 2)
    values = [torch.randn(size, generator=generator).bfloat16().to(kind) for size, kind in zip(sizes, kinds)]
    return [value.requires_grad_() for value in values]


def evaluate(function, leaves, steps, **options):
    """The result and the gradients of all leaves for one random upstream gradient."""
    y = function(leaves[0], leaves[1], leaves[2 : 2 + steps], leaves[2 + steps :], **options)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def agree(found, expected, dtype):
    """Each of one dtype and shape, within the tolerance of the narrowest dtype, relative to the largest value."""
    for ours, truth in zip(found, expected):
        assert ours.shape == truth.shape
        torch.testing.assert_close(
            ours.double(),
            truth,
            rtol=0,
            atol=TOLERANCE[dtype] * max(1.0, truth.abs().max().item() if truth.numel() else 0),
        )


def check(function, shape, steps, options, dtypes=(torch.float32,) * 3):
    options = dict(options)
    biases = options.pop("biases", not options.get("rms"))
    leaves = inputs(shape, steps, dtypes, biases)
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = evaluate(function, leaves, steps, **options)
    agree(found, evaluate(reference.skip_norm, truth, steps, **options), max(dtypes, key=TOLERANCE.get))
    assert [t.dtype for t in found] == [leaves[0].dtype, *(leaf.dtype for leaf in leaves)]


@pytest.mark.parametrize("case", WHOLE)
def test_every_shape_equals_the_reference_in_float64(case, cpu_operator):
    check(skip_norm, *CASES[case])


@pytest.mark.parametrize("width", [1, 20, 1023], ids=["1", "20", "1023"])
def test_torch_computes_rows_that_are_no_whole_vectors(width, cpu_operator):
    leaves = inputs((5, width), 2)
    for ours, truth in zip(evaluate(skip_norm, leaves, 2), evaluate(reference.skip_norm, leaves, 2)):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize("shape", [(9, 16), (3, 112)], ids=["short", "long"])
def test_every_mixture_of_types_equals_the_reference_in_float64(kinds, shape, cpu_operator):
    check(skip_norm, shape, 2, {}, MIXED[kinds])


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels_last": lambda t: t,
    "image_contiguous": lambda t: t.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "sliced_rows": lambda t: torch.cat([t, t], -1)[..., : t.size(-1)],
    "strided_features": lambda t: torch.stack([t, t], -1)[..., 0],
    "every_other_row": lambda t: torch.cat([t, t], 2)[:, :, : t.size(2)],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [16, 80], ids=["short", "long"])
def test_strides_change_nothing(layout, width, cpu_operator):
    leaves = inputs((2, 3, 5, width), 2)
    moved = [LAYOUTS[layout](leaf.detach()).requires_grad_() for leaf in leaves[:2]] + leaves[2:]
    dense = [leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for leaf in moved]
    for ours, truth in zip(evaluate(skip_norm, moved, 2), evaluate(skip_norm, dense, 2)):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("wanted", ["x", "f_x", "gains", "biases", "x_and_gains"])
def test_gradients_come_one_by_one(wanted, cpu_operator):
    leaves = inputs((11, 32), 2)
    everything = evaluate(skip_norm, leaves, 2)[1:]
    chosen = {"x": [0], "f_x": [1], "gains": [2, 3], "biases": [4, 5], "x_and_gains": [0, 2]}[wanted]
    some = [leaf.detach().requires_grad_(i in chosen) for i, leaf in enumerate(leaves)]
    y = skip_norm(some[0], some[1], some[2:4], some[4:])
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    y.backward(upstream)
    for i, leaf in enumerate(some):
        if i in chosen:
            torch.testing.assert_close(leaf.grad, everything[i])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize("width", [16, 80], ids=["short", "long"])
def test_a_bad_row_comes_out_as_in_torch_and_spoils_no_other(value, width, cpu_operator):
    leaves = inputs((33, width), 2)
    with torch.no_grad():
        leaves[0][5, 3] = value
        found = skip_norm(leaves[0], leaves[1], leaves[2:4], leaves[4:])
        truth = reference.skip_norm(leaves[0], leaves[1], leaves[2:4], leaves[4:])
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", [16, 64, 256], ids=["16", "64", "256"])
def test_rows_far_from_zero_keep_their_digits(width, cpu_operator):
    """Multiples of 1/8 around 4096: fp32 holds x + F exactly, so that only the norm can lose digits."""
    leaves = inputs((9, width), 1)
    x, f_x = ((leaf.detach() * 4).round() / 8 for leaf in leaves[:2])
    moved = [(x + 4096).requires_grad_(), f_x.requires_grad_(), *leaves[2:]]
    truth = [leaf.detach().double().requires_grad_() for leaf in moved]
    agree(evaluate(skip_norm, moved, 1), evaluate(reference.skip_norm, truth, 1), torch.float32)


@pytest.mark.parametrize("width", [16, 64, 80, 528], ids=["16", "64", "80", "528"])
def test_a_row_gives_the_same_bits_wherever_it_stands(width, cpu_operator):
    leaves = [leaf.detach() for leaf in inputs((70, width), 3)]
    whole = skip_norm(leaves[0], leaves[1], leaves[2:5], leaves[5:])
    for start, stop in ((0, 1), (3, 20), (69, 70)):
        part = skip_norm(leaves[0][start:stop], leaves[1][start:stop], leaves[2:5], leaves[5:])
        assert torch.equal(part, whole[start:stop])


def test_threads_change_no_bit(cpu_operator):
    leaves = inputs((5000, 48), 3)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(evaluate(skip_norm, leaves, 3))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_outputs_are_written_whole(cpu_operator):
    """Memory that held NaN before shows through nowhere."""
    leaves = inputs((130, 48), 2)
    with torch.random.fork_rng():
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            found = evaluate(skip_norm, leaves, 2)
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(t).all() for t in found)


@pytest.mark.parametrize("options", [{}, {"rms": True}], ids=["layer", "rms"])
def test_gradcheck_once_and_twice(options, cpu_operator):
    leaves = [leaf.detach().double().requires_grad_() for leaf in inputs((3, 16), 2)]

    def call(x, f_x, *rest):
        return skip_norm(x, f_x, list(rest[:2]), list(rest[2:]), 1.0, 0.7, **options)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_one_tensor_in_two_places_and_twice_differentiated(cpu_operator):
    def penalty(function, x, gain):
        y = function(x, x, [gain, gain], [gain, gain])
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (x, gain))

    x, _, gain = inputs((4, 32), 1, (torch.float64,) * 3, biases=False)
    for ours, truth in zip(penalty(skip_norm, x, gain), penalty(reference.skip_norm, x, gain)):
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("steps", [1, 4])
def test_backward_keeps_x_and_f_and_two_numbers_a_row(steps, cpu_operator):
    """Other than torch, which keeps the sum x + F of each step."""
    leaves = inputs((64, 128), steps)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        skip_norm(leaves[0], leaves[1], leaves[2 : 2 + steps], leaves[2 + steps :])
    own = {leaf.data_ptr() for leaf in leaves}
    (moments,) = [t for t in kept if t.data_ptr() not in own]
    assert len(kept) == len(leaves) + 1 and moments.shape == (2 * steps, 64)


def test_opcheck(cpu_operator):
    for options in ((1.0, 1.0, 1e-5, False), (1.0, 2.0, 1e-5, True)):
        leaves = inputs((4, 16), 2)
        torch.library.opcheck(
            torch.ops.fairseq_rskip.skip_norm.default, (leaves[0], leaves[1], leaves[2:4], leaves[4:], *options)
        )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_whole(dynamic, cpu_operator):
    in_use()
    leaves = inputs((12, 48), 2)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a, **k: skip_norm(*a, **k) * 2.0, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    found = evaluate(compiled, leaves, 2)
    agree(found, [t.double() for t in evaluate(lambda *a, **k: skip_norm(*a, **k) * 2.0, leaves, 2)], torch.float32)


def test_autocast_leaves_the_types_as_they_are(cpu_operator):
    leaves = inputs((5, 32), 2, (torch.float32, torch.bfloat16, torch.float32))
    plain = evaluate(skip_norm, leaves, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = evaluate(skip_norm, leaves, 2)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, under))


def test_transforms_of_torch_func_take_the_reference(cpu_operator):
    x, f_x, gain, bias = (leaf.detach() for leaf in inputs((3, 6, 16), 1))

    def total(x):
        return skip_norm(x, f_x[0], [gain], [bias], 2.0).square().sum()

    expected = torch.stack([torch.autograd.functional.jacobian(total, row) for row in x])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(x), expected)
    tangent = torch.func.jvp(total, (x[0],), (f_x[1],))[1]
    torch.testing.assert_close(tangent, (expected[0] * f_x[1]).sum())
