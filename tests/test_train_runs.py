"""scripts/train.sh at work, on a CPU: killed, stopped, resumed, finished, refused."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_command
from fairseq.logging.progress_bar import SummaryWriter
from training_corpus import lengthen, prepare

SCRIPT = ROOT / "scripts" / "train.sh"
TINY = "transformer_rskip_ln_tiny"
LITTLE = "--max-tokens 600 --lr 0.005 --warmup-updates 10 --encoder-embed-dim 32".split()


@pytest.fixture
def data(tiny_corpus, tmp_path):
    return prepare(tiny_corpus, tmp_path)


def processes_of(session):
    """The processes of a session that are still at work."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, (state, _, _, owner) = int(path.parent.name), path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            found.append(pid)
    return found


def start(*argv, until):
    """A training in a session of its own, once ``until`` is there."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    quiet["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where pytest itself ignores it
    running = subprocess.Popen([SCRIPT, *map(str, argv)], env=environment, start_new_session=True, **quiet)
    deadline = time.time() + 120
    while not until.exists() and running.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    assert running.poll() is None, "it ended before it could be stopped"
    if not until.exists():
        running.kill()
        pytest.fail(f"no {until} after two minutes")
    return running


@pytest.mark.slow
def test_training_is_killed_goes_on_and_ends(data, tmp_path):
    save = tmp_path / "gespeichert in ö"
    argv = [data, TINY, *LITTLE, "--save-dir", save]
    running = start(*argv, "--max-epoch", 500, until=save / "checkpoint2.pt")
    for pid in processes_of(running.pid):
        os.kill(pid, signal.SIGKILL)
    running.communicate()
    done = run_command([SCRIPT, *argv, "--max-update", 100])
    assert done.returncode == 0, done.stderr
    assert "Loaded checkpoint" in done.stdout
    assert "--arch transformer_rskip_ln_tiny" in done.stdout and f"the whole log: {save}/train.log" in done.stdout
    assert "slow" in done.stderr
    log = (save / "train.log").read_text("utf-8")
    assert log.count("tokens a step: ") == 2
    assert "| INFO |" in log and "| INFO |" not in done.stdout + done.stderr
    for name in ("dict.src.txt", "dict.tgt.txt", "preparation.json"):
        assert (save / name).read_bytes() == (data / "data-bin" / name).read_bytes()
    assert 5 <= len([path for path in save.iterdir() if path.stem[10:].isdigit()]) <= 10
    assert (save / "tensorboard").is_dir() == bool(SummaryWriter)
    done = run_command([SCRIPT, *argv, "--max-update", 100])
    assert (done.returncode, done.stdout) == (0, "")
    assert "all 100 updates" in done.stderr
    with open(save / "train.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run_command([SCRIPT, *argv, "--max-update", 101])
    assert (done.returncode, done.stderr.splitlines()[-1][:24]) == (1, "error: another training ")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process(data, tmp_path, number, status):
    save = tmp_path / "save"
    running = start(data, TINY, *LITTLE, "--max-epoch", 5000, "--save-dir", save, until=save / "checkpoint_last.pt")
    running.send_signal(number)
    _, said = running.communicate(timeout=30)
    assert running.returncode == status
    assert processes_of(running.pid) == []
    assert said.splitlines()[-1] == f"stopped; the same command resumes from {save}/checkpoint_last.pt"


@pytest.mark.slow
def test_the_exit_status_and_the_reason_are_fairseqs(data, tmp_path):
    """The training sentences are cut off, which only fairseq-train finds out."""
    (data / "data-bin" / "train.src-tgt.src.bin").write_bytes(b"")
    save = tmp_path / "save"
    save.mkdir()
    (save / "train.log").write_text("KeyError: of the run before\n")
    done = run_command([SCRIPT, data, TINY, *LITTLE, "--save-dir", save])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: fairseq-train ended with status 1: ValueError: ")
    assert last.endswith(f"; its output is in {save}/train.log")


@pytest.mark.slow
def test_a_held_out_sentence_that_is_too_long_ends_nothing(data, tmp_path):
    """Nor is there a checkpoint to average where --max-update ends the first epoch midway, and it says so."""
    lengthen(data / "data-bin" / "valid.src-tgt.src", 10, 3001)
    save = tmp_path / "save"
    done = run_command([SCRIPT, data, TINY, *LITTLE, "--save-dir", save, "--max-update", 2])
    assert done.returncode == 0, done.stderr
    assert "1 of 60" in done.stderr and "epoch 1, 2 updates, valid loss" in done.stdout
    assert {path.name for path in save.glob("*.pt")} == {"checkpoint_best.pt", "checkpoint_last.pt"}
    assert done.stderr.splitlines()[-1].startswith(f"train.sh: 0 numbered checkpoint(s) in {save}: nothing to average")
