"""What needs CUDA: half-precision training through fairseq-train, and skips that agree with their CPU result."""

import json

import pytest
import torch
from conftest import ROOT, run_checked
from skip_variants import CASE_NAMES, CASES, draw, gradients
from transformer_helpers import ALL_TINY

from fairseq_rskip import compat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("precision", ["--fp16", "--memory-efficient-fp16", "--amp"])
@pytest.mark.parametrize("arch", ALL_TINY)
def test_half_precision_training_lowers_the_loss(tiny_corpus, tmp_path, arch, precision):
    """Without a norm λ is 1: larger ones grow out of fp16, which the build warns of."""
    options = (
        "-s src -t tgt --optimizer adam --lr 0.003 --clip-norm 1.0 --max-tokens 600 --max-update 40 --seed 3 "
        "--fp16-init-scale 4 --log-format json --log-interval 5 --no-progress-bar --disable-validation"
    ).split()
    command = ["fairseq-train", tiny_corpus, "--user-dir", ROOT / "fairseq_rskip", "--arch", arch, precision, *options]
    plain = ["--skip-lambda", "1"] if arch == "transformer_xskip_tiny" else []
    log = run_checked([*command, *plain, "--save-dir", tmp_path])
    losses = [json.loads(row[row.index("{") :])["loss"] for row in log.splitlines() if '"num_updates"' in row]
    assert float(losses[-1]) < float(losses[0]) - 0.2
    state = compat.load_checkpoint(tmp_path / "checkpoint_last.pt")["model"]
    assert all(torch.isfinite(v).all() for n, v in state.items() if not n.endswith("_float_tensor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_skip_on_the_gpu_agrees_with_float64_on_the_cpu(case, dtype):
    shape = (13, *case.shape[1:])
    case = case._replace(shape=shape)
    outcomes = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        skip = case.build().to(device, kind if device == "cpu" else torch.float32)
        mask = None if case.mask() is None else case.mask().to(device)
        x, f, upstream = (draw(shape, seed, dtype).to(device, kind) for seed in (1, 2, 3))
        x.requires_grad_(), f.requires_grad_()
        y = skip(x, f, mask)
        assert y.dtype == kind
        outcomes.append([t.detach().double().cpu() for t in (y, *gradients(y, upstream, (x, f)))])
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for expected, found in zip(*outcomes):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
