"""`reproduce.py run --launcher slurm`: what is submitted, by stand-ins for SLURM's commands; and what a job does."""

import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from reproduce_helpers import wait_until

from fairseq_rskip.tools.reproduce import execution, runs, slurm
from fairseq_rskip.tools.reproduce import main as program
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.tools.reproduce.runs import BROKEN, DONE, State

SMALL = ["table1", "--corpus", "digits", "--seeds", "1", "--rows", "1xSkip", "2rSkip+LN"]
SHORT = [*SMALL, "--scale", "0.002", "--set", "depth=8", "batch-size=16", "save-interval=10"]  # 128 iterations
SLURM = ["--launcher", "slurm"]
# each works in the folder of the commands: scripts/<number>, and which jobs are alive
COMMANDS = {
    "sbatch": """
if grep -q nowhere "$1"; then
  echo "sbatch: error: invalid partition specified: nowhere" >&2
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
number=$((1000 + $(ls scripts | wc -l)))
cp "$1" scripts/$number
printf '%s_0\\n%s_1\\n%s\\n' $number $number $number >>alive
echo "Submitted batch job $number" """,
    "squeue": "cat alive",
    "srun": "exit 1",  # is only looked for
    "scontrol": 'echo "$@" >>scontrol.log',
}


class Slurm:
    """The commands in ``folder``/bin, in PATH."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "scripts").mkdir()
        for name, body in COMMANDS.items():
            self.command(name, body)
        monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)

    def command(self, name, body):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\ncd {shlex.quote(str(self.folder))} || exit\n{body}\n")
        path.chmod(0o755)

    def scripts(self):
        """Of every submission, what its script asks for: name -> value, True for one without."""
        found = []
        for path in sorted((self.folder / "scripts").iterdir()):
            lines = [
                shlex.split(line)[1][2:] for line in path.read_text().splitlines() if line.startswith("#SBATCH --")
            ]
            found.append({name: value if equals else True for name, equals, value in (x.partition("=") for x in lines)})
        return found


@pytest.fixture
def commands(tmp_path, monkeypatch):
    return Slurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def reproduce(capsys, monkeypatch):
    """``reproduce.py`` in this process: (status, lines of its output); an error is the last of them."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own handlers stay

    def call(*argv):
        runs.queued_jobs.cache_clear()  # as in a new process
        capsys.readouterr()
        status = program.main([str(word) for word in argv])
        out, error = capsys.readouterr()
        assert bool(error) == bool(status) and error.count("\n") <= 1
        return status, [*out.splitlines(), *error.splitlines()]

    return call


def records(out):
    return {path.parent: runs.read(path.parent) for path in out.glob("runs/*/seed1/run.json")}


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_requeued_and_resumes(tmp_path, commands, reproduce):
    """As srun starts it; USR2 is what the script asks SLURM for before the time limit."""
    out = tmp_path / "kết quả 2"
    more = ["--partition", "long", "--gpus", "2", "--time", "0:20:00", "--array-size", "2", "--mem", "4G"]
    argv = ["run", *SHORT, *SLURM, *more, "--slurm", "constraint=a b", "exclusive", "--output", out]
    status, lines = reproduce(*argv)
    assert status == 0 and [line.rsplit(" ", 1)[1] for line in lines[:2]] == ["1000_0", "1000_1"]
    (asked,) = commands.scripts()
    expected = {"partition": "long", "gpus-per-node": "2", "cpus-per-task": "8", "time": "20", "array": "0-1%2"}
    expected.update({"mem": "4G", "constraint": "a b", "exclusive": True, "requeue": True, "signal": "USR2@120"})
    assert {key: asked.get(key) for key in expected} == expected
    assert asked["output"] == str(out / "slurm" / "%A_%a_0_log.out") and "wckey" not in asked
    (folder,) = (folder for folder, record in records(out).items() if record["queued"] == {"job": "1000_0"})

    job = start_job(out)
    wait_until((folder / "checkpoint.pt").exists, job)
    assert any("seed 1: running" in line for line in reproduce("status", "--output", out)[1])
    assert reproduce(*argv)[1][-1] == "nothing to submit" and len(commands.scripts()) == 1
    job.send_signal(signal.SIGUSR2)
    job.communicate(timeout=120)
    assert (commands.folder / "scontrol.log").read_text() == "requeue 1000_0\n"
    assert any("seed 1: queued: SLURM job 1000_0" in line for line in reproduce("status", "--output", out)[1])
    job = start_job(out)
    said, error = job.communicate(timeout=300)
    assert job.returncode == 0, said + error
    record = runs.read(folder)
    assert (folder / "log.txt").read_text("utf-8").count("resuming from iteration") == 1
    assert len(record["attempts"]) == 2 and "metrics" in record and not {"queued", "failed"} & set(record)
    assert json.loads((folder / "log.jsonl").read_text("utf-8").splitlines()[-1])["iteration"] == 128


def start_job(out):
    """The first task of array 1000."""
    variables = {"SLURM_JOB_ID": "1000", "SLURM_ARRAY_JOB_ID": "1000", "SLURM_ARRAY_TASK_ID": "0", "SLURM_NTASKS": "1"}
    variables.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_NUM_NODES="1", SLURM_NODEID="0")
    variables.update(SLURM_JOB_NODELIST="here", SUBMITIT_EXECUTOR="slurm", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-u", "-m", "submitit.core._submit", str(out / "slurm")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **variables}, **pipes)


def test_a_queued_run_is_submitted_again_only_when_its_job_is_gone(tmp_path, commands, reproduce):
    argv = ["run", *SHORT, "--output", tmp_path / "out", *SLURM]
    assert reproduce(*argv)[0] == 0
    status, lines = reproduce(*argv)
    assert status == 0 and lines[-1] == "nothing to submit"
    assert lines[0].startswith("queued already ") and lines[0].endswith(": SLURM job 1000_0")
    _, lines = reproduce("status", "--output", tmp_path / "out")
    assert any("1xSkip, seed 1: queued: SLURM job 1000_0" in line for line in lines)
    (commands.folder / "alive").write_text("1000_0\n")
    _, lines = reproduce("status", "--output", tmp_path / "out")
    assert any("2rSkip+LN, seed 1: not run" in line for line in lines)
    status, lines = reproduce(*argv)
    assert status == 0 and lines[1].startswith("queued ") and lines[1].endswith("SLURM job 1001")
    first, second = commands.scripts()
    assert "array" not in second and second["time"] == "1440"


@pytest.mark.parametrize("gone", [False, True], ids=["an error", "no squeue"])
def test_where_squeue_does_not_answer_queued_runs_are_left(tmp_path, commands, reproduce, gone):
    argv = ["run", *SHORT, "--output", tmp_path / "out", *SLURM]
    assert reproduce(*argv)[0] == 0
    if gone:
        (commands.folder / "bin" / "squeue").unlink()
        reason = "there is no squeue in PATH"
    else:
        commands.command("squeue", "echo 'slurm_load_jobs error: no answer' >&2; exit 1")
        reason = "slurm_load_jobs error: no answer"
    status, lines = reproduce(*argv)
    assert status == 0 and len(commands.scripts()) == 1
    message = f"cannot ask SLURM which jobs are alive ({reason}): what is queued is left as it is"
    assert lines[-2:] == [message, "nothing to submit"]


def test_what_sbatch_says_is_the_error(tmp_path, commands, reproduce):
    out = tmp_path / "out"
    status, lines = reproduce("run", *SHORT, "--output", out, *SLURM, "--partition", "nowhere")
    said = "invalid partition specified: nowhere; Batch job submission failed: Invalid partition name specified"
    assert status == 1 and lines == [f"error: SLURM refused: {said}"]
    assert len(records(out)) == 2 and not any("queued" in record for record in records(out).values())
    _, lines = reproduce("status", "--output", out)
    assert sum("seed 1: not run" in line for line in lines) == 2


def test_without_slurm_nothing_is_written(tmp_path, commands, reproduce):
    (commands.folder / "bin" / "sbatch").unlink()
    status, lines = reproduce("run", *SHORT, "--output", tmp_path / "out", *SLURM)
    assert status == 1
    assert lines == ["error: --launcher slurm: there is no sbatch in PATH; --launcher local runs on this machine"]
    commands.command("sbatch", "exit 1")
    status, lines = reproduce("run", *SHORT, "--output", tmp_path / "50%", *SLURM)
    assert status == 1 and "SLURM takes % in a path for a placeholder" in lines[0]
    assert not (tmp_path / "out").exists() and not (tmp_path / "50%").exists()


@pytest.mark.parametrize(
    "options, said",
    [
        (["--partition", "p"], "--partition is an option of --launcher slurm"),
        (["--gpus", "0"], "--gpus is an option of --launcher slurm"),
        (["--array-size", "3"], "--array-size is an option of --launcher slurm"),
        (["--slurm", "constraint=a"], "--slurm is an option of --launcher slurm"),
        ([*SLURM, "--jobs", "2"], "--jobs is an option of --launcher local"),
        ([*SLURM, "--time", "tomorrow"], "argument --time: 'tomorrow': expected minutes, HH:MM:SS or D-HH:MM:SS"),
        ([*SLURM, "--gpus", "-1"], "argument --gpus: '-1' is not a whole number of at least 0"),
        ([*SLURM, "--slurm", "nodes=2"], "argument --slurm: 'nodes=2': nodes is set already, by an option of its own"),
        ([*SLURM, "--slurm", "qos=high"], "argument --slurm: 'qos=high': qos is set already"),
        ([*SLURM, "--slurm", "a=b\n#"], "argument --slurm: 'a=b\\n#': expected KEY=VALUE"),
    ],
)
def test_options_that_make_no_sense_are_one_line(capsys, options, said):
    with pytest.raises(SystemExit) as ended:
        parse(["run", "table1", *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"error: {said}") and error.count("\n") == 1


@pytest.mark.parametrize(
    "text, minutes",
    [("90", 90), ("90:30", 91), ("1:30:00", 90), ("2-0", 2880), ("1-02:03", 1563), ("1-00:00:01", 1441)],
)
def test_times_are_those_of_sbatch(text, minutes):
    """Examples after sbatch's manual page: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
    assert parse(["run", "table1", *SLURM, "--time", text]).time == minutes


# a job as submitit runs it, with a run that says what it hears
AS_SUBMITIT_DOES = """
import signal, sys
from fairseq_rskip.tools.reproduce import execution, runs, slurm

def execute(folder, job):
    (folder / "ready").write_text(job)
    execution.stopping.wait(60)
    with open(folder / "said", "a") as file:
        file.write("saved\\n")
    return runs.State(runs.STOPPED)

execution.execute = execute
attempt = slurm.Attempt(".")
def usr2(*_):
    if sys.argv[1] == "too often":
        raise RuntimeError("timed-out too many times")
    print("asked", type(attempt.checkpoint().function).__name__, attempt.state.name, flush=True)
    sys.exit(255)
signal.signal(signal.SIGUSR2, usr2)
attempt()
"""
CASES = {"time is up": (False, "requeued"), "pre-empted": (True, "requeued"), "too often": (False, "too often")}


@pytest.mark.parametrize("case", CASES)
def test_signals_let_the_run_save_once(tmp_path, case):
    """TERM: saved, and the job stays for SLURM to kill. USR2: saved, then what submitit does."""
    preempted, ends = CASES[case]
    variables = {"PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12", "SUBMITIT_EXECUTOR": "slurm"}
    command = [sys.executable, "-c", AS_SUBMITIT_DOES, ends]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables}, **pipes)
    wait_until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text() == "12", job)
    if preempted:
        job.send_signal(signal.SIGTERM)
        wait_until((tmp_path / "said").exists, job)
        time.sleep(0.3)
        assert job.poll() is None
    job.send_signal(signal.SIGUSR2)
    out, error = job.communicate(timeout=60)
    assert (tmp_path / "said").read_text() == "saved\n"
    if ends == "too often":
        assert (job.returncode, out) == (1, "") and "timed-out too many times" in error
    else:
        assert (job.returncode, out) == (255, "asked Attempt stopped\n")


def test_a_run_that_ended_is_not_queued_again(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(execution, "stop", lambda: None)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    for state in (State(DONE), State(BROKEN, detail="too hot")):
        monkeypatch.setattr(execution, "execute", lambda folder, job, state=state: state)
        attempt = pickle.loads(pickle.dumps(slurm.Attempt(str(tmp_path))))
        if state.name == BROKEN:
            with pytest.raises(RuntimeError, match="failed: too hot; .*/log.txt says more"):
                attempt()
            assert attempt.checkpoint() is None
        else:
            attempt()
            with pytest.raises(SystemExit) as ended:
                attempt.checkpoint()
            assert not ended.value.code
