"""--bf16 on a CPU: it learns as fp32 does, resumes exactly, and its checkpoint translates."""

import json

import pytest
import torch
from conftest import ROOT, run_checked

from fairseq_rskip import compat

OPTIONS = (
    "--arch transformer_rskip_ln_tiny -s src -t tgt --optimizer adam --lr 0.003 --clip-norm 1.0 --max-tokens 600 "
    "--seed 3 --log-format json --log-interval 5 --no-progress-bar --disable-validation --cpu"
).split()


def train(data, folder, updates, *options):
    """The losses of ``fairseq-train``, one for five updates, and the checkpoint it leaves."""
    command = ["fairseq-train", data, "--user-dir", ROOT / "fairseq_rskip", *OPTIONS, "--max-update", updates]
    log = run_checked([*command, "--save-dir", folder, *options])
    losses = [float(json.loads(row[row.index("{") :])["loss"]) for row in log.splitlines() if '"num_updates"' in row]
    return losses, compat.load_checkpoint(folder / "checkpoint_last.pt")


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory):
    """The folder, losses and checkpoint of 40 updates."""
    folder = tmp_path_factory.mktemp("bf16")
    return folder, *train(tiny_corpus, folder, 40, "--bf16")


def test_the_loss_falls_as_in_fp32(trained, tiny_corpus, tmp_path):
    _, losses, state = trained
    expected, _ = train(tiny_corpus, tmp_path, 40)
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(expected, abs=0.05)
    assert any(loss != other for loss, other in zip(losses, expected)), "computed in fp32"
    weights = state["model"]["decoder.layers.0.fc1.weight"]
    assert torch.equal(weights, weights.bfloat16().to(weights))


def test_a_resumed_run_computes_what_an_uninterrupted_one_does(trained, tiny_corpus, tmp_path):
    train(tiny_corpus, tmp_path, 20, "--bf16")
    _, state = train(tiny_corpus, tmp_path, 40, "--bf16")
    for resumed, whole in zip(*(s["last_optimizer_state"]["fp32_params"] for s in (state, trained[2]))):
        assert resumed.dtype == torch.float32 and torch.equal(resumed, whole)


def test_its_checkpoint_translates(trained, tiny_corpus):
    path = trained[0] / "checkpoint_last.pt"
    command = ["fairseq-generate", tiny_corpus, "--path", path, "--user-dir", ROOT / "fairseq_rskip", "--cpu"]
    out = run_checked([*command, "--max-tokens", "600", "--beam", "2", "--gen-subset", "test"])
    assert sum(line.startswith("H-") for line in out.splitlines()) == 40
