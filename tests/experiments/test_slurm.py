"""Runs as jobs of Slurm: what sbatch is given, and what it refuses."""

import subprocess

import pytest
from experiment_runs import IMAGES, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.experiments import results, slurm

submitit = pytest.importorskip("submitit")


@pytest.fixture
def run(tmp_path):
    return results.ready(tables(write(tmp_path, IMAGES))[0], tmp_path)[0]


def test_slurm_gets_one_array_with_the_options_of_sbatch(run, tmp_path, monkeypatch, capfd):
    calls = {}

    class Executor(submitit.SlurmExecutor):
        def __init__(self, folder):
            calls["folder"] = folder

        def update_parameters(self, **options):
            calls["options"] = options

        def map_array(self, job, folders):
            calls["folders"] = folders
            return [type("Job", (), {"job_id": "7_0"}) for _ in folders]

    monkeypatch.setattr(submitit, "SlurmExecutor", Executor)
    slurm.submit([run], ["partition=gpu", "time=60", "reservation=x"], tmp_path)
    assert calls["folders"] == [str(run.folder)]
    assert calls["options"]["additional_parameters"] == {"reservation": "x"}
    assert (calls["options"]["partition"], calls["options"]["time"]) == ("gpu", 60)
    assert "7_0" in capfd.readouterr().out

    shell = "\n".join([*calls["options"]["setup"], "echo $SRUN_CPUS_PER_TASK $OMP_NUM_THREADS"])
    for given, threads in (("", "3"), ("1", "1")):
        environment = {"SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": given}
        found = subprocess.run(["bash", "-c", shell], env=environment, stdout=-1, text=True)
        assert found.stdout.split() == ["3", threads]


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
