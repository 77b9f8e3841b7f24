"""The Triton kernels on a GPU against the reference in float64, as tests/ops/test_ops.py does on a CPU."""

import pytest
import torch
from test_ops import CASES, MIXED, TOLERANCE, agree, evaluate, inputs

from fairseq_rskip.ops import in_use, reference, skip_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def check(shape, steps, options, dtypes=(torch.float32,) * 3):
    options = dict(options)
    leaves = inputs(shape, steps, dtypes, options.pop("biases", not options.get("rms")))
    truth = [leaf.detach().double().requires_grad_() for leaf in leaves]
    moved = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    found = [evaluate(skip_norm, moved, steps, **options) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found)), "the same bits in every run"
    expected = evaluate(reference.skip_norm, truth, steps, **options)
    agree([t.cpu() for t in found[0]], expected, max(dtypes, key=TOLERANCE.get))


@pytest.mark.parametrize("case", CASES)
def test_every_shape_equals_the_reference_in_float64(case):
    assert in_use("cuda").name == "cuda"
    check(*CASES[case])


@pytest.mark.parametrize("kinds", MIXED)
def test_every_mixture_of_types_equals_the_reference_in_float64(kinds):
    check((9, 100), 2, {}, MIXED[kinds])


def test_compiled_whole():
    in_use("cuda")
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in inputs((12, 48), 2)]
    compiled = evaluate(torch.compile(skip_norm, fullgraph=True), leaves, 2)
    agree([t.cpu() for t in compiled], [t.double().cpu() for t in evaluate(skip_norm, leaves, 2)], torch.float32)
