"""The Triton kernels on a GPU against the reference in float64, as tests/ops does on a CPU."""

import pytest
import test_ops
import test_ops_mix
import torch
from device import DEVICE, NEEDS_DEVICE

from fairseq_rskip.ops import in_use, reference, skip_mix, skip_norm

pytestmark = NEEDS_DEVICE


def check(kinds, ours, truth, evaluate, leaves, *arguments, **options):
    """``ours`` twice the same bits, and equal to ``truth`` of the same values in float64."""
    assert in_use(DEVICE).name == DEVICE
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    moved = [leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves]
    first, second = (evaluate(ours, moved, *arguments, **options) for _ in range(2))
    assert all(torch.equal(a, b) and a.device.type == DEVICE for a, b in zip(first, second))
    expected = evaluate(truth, wide, *arguments, **options)
    test_ops.agree([t.cpu() for t in first], expected, max(kinds, key=test_ops.TOLERANCE.get))


def check_norm(shape, steps, options, kinds=(torch.float32,) * 3):
    options = dict(options)
    leaves = test_ops.inputs(shape, steps, kinds, options.pop("biases", not options.get("rms")))
    check(kinds, skip_norm, reference.skip_norm, test_ops.evaluate, leaves, steps, **options)


@pytest.mark.parametrize("case", test_ops.CASES)
def test_every_shape_equals_the_reference_in_float64(case):
    check_norm(*test_ops.CASES[case])


@pytest.mark.parametrize("kinds", test_ops.MIXED)
def test_every_mixture_of_types_equals_the_reference_in_float64(kinds):
    check_norm((9, 100), 2, {"branch_scale": 0.1}, test_ops.MIXED[kinds])


@pytest.mark.parametrize("mode", test_ops_mix.MODES)
@pytest.mark.parametrize("case", test_ops_mix.CASES)
def test_a_weighted_sum_equals_the_reference_in_float64(case, mode):
    shape, steps, options = test_ops_mix.CASES[case]
    leaves = test_ops_mix.inputs(mode, shape, steps, biases=not options.get("rms"))
    check((torch.float32,), skip_mix, reference.skip_mix, test_ops_mix.evaluate, leaves, mode, steps, **options)


def test_compiled_whole():
    in_use(DEVICE)
    leaves = [leaf.detach().to(DEVICE).requires_grad_() for leaf in test_ops.inputs((12, 48), 2)]
    compiled = test_ops.evaluate(torch.compile(skip_norm, fullgraph=True), leaves, 2)
    eager = test_ops.evaluate(skip_norm, leaves, 2)
    test_ops.agree([t.cpu() for t in compiled], [t.double().cpu() for t in eager], torch.float32)
