"""What stands between SLURM's signals and a run: saved once, queued again or not."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from fake_slurm import until

from fairseq_rskip.tools.reproduce import execution, runs, slurm_job
from fairseq_rskip.tools.reproduce.runs import BROKEN, DONE, STOPPED, State

# a job as submitit runs it, with a run that says what it hears
AS_SUBMITIT_DOES = """
import pathlib, signal, sys, time
from fairseq_rskip.tools.reproduce import execution, runs, slurm_job

def execute(folder):
    (folder / "ready").touch()
    execution.stopping.wait(60)
    with open(folder / "said", "a") as file:
        file.write("saved\\n")
    return runs.State(runs.STOPPED)

execution.execute = execute
attempt = slurm_job.Attempt(".")
def usr2(*_):
    delayed = attempt.checkpoint()
    print("asked", type(delayed.function).__name__, attempt.state.name, flush=True)
    if sys.argv[1] == "too often":
        raise RuntimeError("timed-out too many times")
    sys.exit(255)
signal.signal(signal.SIGUSR2, usr2)
attempt()
"""
CASES = [(False, "requeued"), (True, "requeued"), (False, "too often")]


@pytest.mark.parametrize("preempted, ends", CASES, ids=["time is up", "pre-empted", "too often"])
def test_signals_let_the_run_save_once(tmp_path, preempted, ends):
    """TERM: saved, and the job stays for SLURM to kill. USR2: saved, then what submitit does."""
    variables = {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12", "SUBMITIT_EXECUTOR": "slurm"}
    command = [sys.executable, "-c", AS_SUBMITIT_DOES, ends]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables}, **pipes)
    until((tmp_path / "ready").exists, 60)
    if preempted:
        job.send_signal(signal.SIGTERM)
        until(lambda: "queued" in runs.read(tmp_path), 60)
        time.sleep(0.3)
        assert job.poll() is None
    job.send_signal(signal.SIGUSR2)
    out, error = job.communicate(timeout=60)
    assert (tmp_path / "said").read_text() == "saved\n" and out == "asked Attempt stopped\n"
    if ends == "too often":
        assert job.returncode == 1 and "timed-out too many times" in error and "queued" not in runs.read(tmp_path)
    else:
        assert job.returncode == 255 and runs.read(tmp_path)["queued"] == {"job": "12"}


def test_a_run_that_ended_is_not_queued_again(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(execution, "stop", lambda: None)
    for state in (State(DONE), State(BROKEN, detail="too hot")):
        monkeypatch.setattr(execution, "execute", lambda folder, state=state: state)
        attempt = slurm_job.Attempt(str(tmp_path))
        if state.name == BROKEN:
            with pytest.raises(RuntimeError, match="failed: too hot; .*/log.txt says more"):
                attempt()
            assert attempt.checkpoint() is None
        else:
            attempt()
            with pytest.raises(SystemExit) as ended:
                attempt.checkpoint()
            assert not ended.value.code
    assert runs.read(tmp_path) == {}


def test_an_attempt_is_pickled_by_its_name(tmp_path):
    text = pickle.dumps(slurm_job.Attempt("/a/folder"))
    assert b"fairseq_rskip.tools.reproduce.slurm_job" in text and len(text) < 200
    assert pickle.loads(text).folder == "/a/folder" and STOPPED
