"""What stands between SLURM's signals and a run: saved once, queued again or not."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from fake_slurm import until

from fairseq_rskip.tools.reproduce import slurm_job

STUBBORN = """
import os, signal, sys, time
def save(*_):
    with open("said", "a") as file:
        file.write("saved\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
with open("ready.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("ready.part", "ready")
time.sleep(60)
"""
AS_SUBMITIT_DOES = """
import signal, sys
from fairseq_rskip.tools.reproduce.slurm_job import Attempt
attempt = Attempt([sys.executable, "-c", sys.argv[2]], ".", ".")
def usr2(*_):
    delayed = attempt.checkpoint()
    print("asked", type(delayed.function).__name__, attempt.status, flush=True)
    if sys.argv[1] == "too often":
        raise RuntimeError("timed-out too many times")
    sys.exit(255)
signal.signal(signal.SIGUSR2, usr2)
attempt()
"""


@pytest.mark.parametrize("preempted, ends", [(False, "requeued"), (True, "requeued"), (False, "too often")])
def test_signals_let_the_run_save_once(tmp_path, preempted, ends):
    """TERM: saved, and the job stays for SLURM to kill. USR2: saved, then what submitit does."""
    variables = {"PYTHONPATH": str(ROOT / "scripts"), "SLURM_JOB_ID": "12", "SUBMITIT_EXECUTOR": "slurm"}
    job = subprocess.Popen(
        [sys.executable, "-c", AS_SUBMITIT_DOES, ends, STUBBORN],
        cwd=tmp_path,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until((tmp_path / "ready").exists, 20)
    os.kill(int((tmp_path / "ready").read_text()), signal.SIGUSR2)  # some clusters signal every process of a job
    if preempted:
        job.send_signal(signal.SIGTERM)
        until((tmp_path / "queued.json").exists, 20)
        time.sleep(0.3)
        assert job.poll() is None
    job.send_signal(signal.SIGUSR2)
    out, error = job.communicate(timeout=20)
    assert (tmp_path / "said").read_text() == "saved\n"
    assert out == "asked Attempt 143\n"
    if ends == "too often":
        assert job.returncode == 1 and "timed-out too many times" in error and not (tmp_path / "queued.json").exists()
    else:
        assert job.returncode == 255 and json.loads((tmp_path / "queued.json").read_text()) == {"job": "12"}


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_ended_is_not_queued_again(tmp_path, status):
    attempt = slurm_job.Attempt([sys.executable, "-c", f"raise SystemExit({status})"], str(tmp_path), str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    try:
        if status:
            with pytest.raises(RuntimeError, match="status 1: .*/log.txt says why"):
                attempt()
            assert attempt.checkpoint() is None
        else:
            attempt()
            with pytest.raises(SystemExit) as ended:
                attempt.checkpoint()
            assert not ended.value.code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "queued.json").exists()
