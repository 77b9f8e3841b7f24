"""--bf16 on a CPU: it learns as fp32 does, resumes exactly, and its checkpoint translates."""

import json

import pytest
import torch
from conftest import ROOT, run_checked

from fairseq_rskip import compat

PLUGIN = ["--user-dir", ROOT / "fairseq_rskip", "--cpu"]
OPTIONS = (
    "--arch transformer_rskip_ln_tiny -s src -t tgt --optimizer adam --lr 0.003 --clip-norm 1.0 "
    "--max-tokens 600 "
    "--seed 3 --log-format json --log-interval 5 --no-progress-bar --disable-validation"
).split()


def train(data, folder, updates, *options):
    """The losses of ``fairseq-train``, one for five updates, and the checkpoint it leaves."""
    command = [
        "fairseq-train",
        data,
        *PLUGIN,
        *OPTIONS,
        "--max-update",
        updates,
        "--save-dir",
        folder,
        *options,
    ]
    log = run_checked(command)
    losses = [
        float(json.loads(row[row.index("{") :])["loss"])
        for row in log.splitlines()
        if '"num_updates"' in row
    ]
    return losses, compat.load_checkpoint(folder / "checkpoint_last.pt")


def test_bf16_learns_as_fp32_does_resumes_exactly_and_translates(tiny_corpus, tmp_path):
    losses, state = train(tiny_corpus, tmp_path / "bf16", 40, "--bf16")
    expected, _ = train(tiny_corpus, tmp_path / "fp32", 40)
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(expected, abs=0.05)
    assert any(loss != other for loss, other in zip(losses, expected)), "computed in fp32"
    weights = state["model"]["decoder.layers.0.fc1.weight"]
    assert torch.equal(weights, weights.bfloat16().to(weights))

    train(tiny_corpus, tmp_path / "resumed", 20, "--bf16")
    _, again = train(tiny_corpus, tmp_path / "resumed", 40, "--bf16")
    for resumed, whole in zip(*(s["last_optimizer_state"]["fp32_params"] for s in (again, state))):
        assert resumed.dtype == torch.float32 and torch.equal(resumed, whole)

    search = ["--max-tokens", "600", "--beam", "2", "--gen-subset", "test"]
    path = tmp_path / "bf16" / "checkpoint_last.pt"
    out = run_checked(["fairseq-generate", tiny_corpus, *PLUGIN, "--path", path, *search])
    assert sum(line.startswith("H-") for line in out.splitlines()) == 40
