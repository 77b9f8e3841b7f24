"""Runs as jobs of Slurm: what sbatch is given, and what it refuses."""

import re
import stat
import subprocess

import pytest
from experiment_runs import IMAGES, finish, reproduce, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import reproduce as reproduce_module
from fairseq_rskip.tools.experiments import results, slurm

submitit = pytest.importorskip("submitit")

SBATCH = """\
#!/bin/sh
cp "$1" "{copy}"
echo "Submitted batch job 7"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A machine with a program sbatch that keeps the file it is given; call it to read the file."""
    program, copy = tmp_path / "bin" / "sbatch", tmp_path / "submitted"
    program.parent.mkdir()
    program.write_text(SBATCH.format(copy=copy))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", lambda *_: 2)
    return lambda: dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", copy.read_text(), re.M))


@pytest.fixture
def run(tmp_path):
    return results.ready(tables(write(tmp_path, IMAGES))[0], tmp_path)[0]


def test_a_job_has_the_defaults_of_the_page(run, tmp_path, cluster, capfd):
    slurm.submit([run, run], [], tmp_path)
    submitted = cluster()
    assert submitted["time"] == "1440" and submitted["cpus-per-task"] == "8"
    assert submitted["gpus-per-node"] == "1" and submitted["array"].startswith("0-1")
    assert "7_0" in capfd.readouterr().out


def test_a_job_has_a_signal_90_seconds_before_its_time_is_over(run, tmp_path, cluster):
    slurm.submit([run, run], ["time=60", "partition=gpu", "reservation=x"], tmp_path)
    submitted = cluster()
    assert submitted["signal"] == "USR2@90"
    assert submitted["time"] == "60" and submitted["partition"] == "gpu"
    assert submitted["reservation"] == "x"


def test_a_job_whose_time_is_over_is_queued_again_with_its_run(tmp_path):
    again = slurm.SlurmJob().checkpoint(str(tmp_path))
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert isinstance(again.function, slurm.SlurmJob) and again.args == (str(tmp_path),)


@pytest.mark.parametrize(("from_outside", "threads"), [("", "3"), ("1", "1")])
def test_a_job_has_the_threads_of_its_cores_unless_a_number_is_set(from_outside, threads):
    shell = "\n".join([*slurm.SETUP, "echo $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS"])
    environment = {"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": from_outside}
    shown = subprocess.run(["bash", "-c", shell], env=environment, stdout=-1, text=True).stdout
    assert shown.split() == ["3", threads]


def test_what_slurm_refuses_is_one_line(run, tmp_path, monkeypatch):
    binaries = tmp_path / "bin"
    binaries.mkdir()
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", lambda *_: -1)
    with pytest.raises(UserError, match="did not take the jobs.*on a slurm cluster"):
        slurm.submit([run], [], tmp_path)

    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", lambda *_: 2)
    sbatch = "sbatch: error: Invalid generic resource (gres) specification"
    (binaries / "sbatch").write_text(f"#!/bin/sh\necho '{sbatch}' >&2\nexit 1\n")
    (binaries / "sbatch").chmod(0o755)
    with pytest.raises(UserError, match="gpus-per-node=0 asks for no GPU") as error:
        slurm.submit([run], [], tmp_path)
    assert sbatch in str(error.value)


def test_slurm_is_given_the_runs_that_are_not_done(tmp_path, monkeypatch, capfd):
    path, out = write(tmp_path, IMAGES), tmp_path / "out"
    finish(tables(path)[0], out, {"plain": {1: 10.0}})
    submitted = []
    monkeypatch.setattr(
        reproduce_module.slurm, "submit", lambda runs, words, out: submitted.extend(runs)
    )
    status, _, error = reproduce(capfd, "run", path, "--output", out, "--slurm", "time=60")
    assert status == 0, error
    assert [(run.label, run.seed) for run in submitted] == [
        ("recursive", 1), ("plain", 2), ("recursive", 2)
    ]  # fmt: skip
