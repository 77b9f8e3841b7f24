"""--wandb-project of both halves, offline: what Weights & Biases would be sent; and without the package."""

import json

import pytest
from conftest import ROOT, run_checked
from vision_helpers import train_process

SKIPS = (b"skip_x_to_F", b"skip_F_over_x", b"skip_grad_norm")


@pytest.fixture
def offline(monkeypatch):
    """Without wandb's service in this process, which commands would join, and not wait for what it writes."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def sent(folder):
    """The records of the one run in ``folder``; names and values stand in them as text."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return path.read_bytes()


@pytest.mark.slow
def test_train_cifar_sends_its_log_and_the_skip_connections(offline, tmp_path, images):
    done = train_process(tmp_path / "run", images, wandb_project="Ähnlich", skip_log_interval=2)
    assert done.returncode == 0, done.stderr
    records = sent(tmp_path / "run" / "seed1")
    result = json.loads((tmp_path / "run" / "seed1" / "result.json").read_text("utf-8"))
    texts = ["Ähnlich", "run/seed1", "train_loss", json.dumps(result["error"])]
    assert all(part in records for part in (*SKIPS, *(text.encode() for text in texts)))


@pytest.mark.slow
def test_fairseq_train_sends_its_log_and_the_skip_connections(offline, tiny_corpus, tmp_path):
    """Without --tensorboard-logdir, which --skip-log-interval then does not need; in a process that nothing forked."""
    command = ["env", "fairseq-train", tiny_corpus, "--user-dir", ROOT / "fairseq_rskip", "--cpu"]
    command += "--arch transformer_rskip_ln_tiny --encoder-embed-dim 32 --encoder-ffn-embed-dim 32".split()
    command += "--optimizer adam --lr 0.003 --max-tokens 400 --max-update 2 --num-workers 0 --no-save".split()
    command += "--source-lang src --target-lang tgt --log-interval 1 --disable-validation --skip-log-interval 1".split()
    log = run_checked([*command, "--wandb-project", "Ähnlich"], cwd=tmp_path)
    records = sent(tmp_path)
    texts = ["Ähnlich", "train_inner/loss", "train/loss"]
    assert all(part in records for part in (*(b"skip/" + name for name in SKIPS), *(t.encode() for t in texts)))
    assert "are not logged" not in log
