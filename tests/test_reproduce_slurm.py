"""`reproduce.py run --launcher slurm`, by a stand-in sbatch that runs its scripts; and what a job does on signals."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from conftest import ROOT
from fake_slurm import FakeSlurm, parameters, until

from fairseq_rskip.tools.reproduce import execution, runs, slurm
from fairseq_rskip.tools.reproduce import main as program
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.tools.reproduce.runs import BROKEN, DONE, State

SMALL = ["table1", "--corpus", "digits", "--seeds", "1", "--rows", "1xSkip", "2rSkip+LN"]
SHORT = [*SMALL, "--scale", "0.002", "--set", "depth=8", "batch-size=16", "save-interval=10"]  # 128 iterations
SLURM = ["--launcher", "slurm"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the local launcher sets it for two runs at a time


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


@pytest.fixture
def fake(tmp_path, monkeypatch, request):
    found = FakeSlurm(tmp_path / "slurm", monkeypatch, **getattr(request, "param", {}))
    yield found
    found.close()


idle = pytest.mark.parametrize("fake", [{"idle": True}], indirect=True)


def folders(out):
    """By kind of skip, the folder of its run."""
    paths = out.glob("runs/*/seed1/run.json")
    return {json.loads(path.read_text())["settings"]["options"]["skip-kind"]: path.parent for path in paths}


def says(path, text):
    return text in path.read_text("utf-8")


@pytest.mark.slow
def test_an_array_is_interrupted_requeued_and_done(tmp_path, fake, reproduce):
    """The first run is at its time limit, the second is pre-empted; both go on from where they were."""
    out = tmp_path / "kết quả 2"
    more = ["--partition", "long", "--gpus", "2", "--time", "0:20:00", "--array-size", "2", "--mem", "4G"]
    argv = ["run", *SHORT, *SLURM, *more, "--slurm", "constraint=a b", "exclusive", "--output", out]
    status, lines = reproduce(*argv)
    assert status == 0 and [line.rsplit(" ", 1)[1] for line in lines[:2]] == ["1000_0", "1000_1"]
    asked = parameters(out / "slurm" / "1000_submission.sh")
    expected = {"partition": "long", "gpus-per-node": "2", "cpus-per-task": "8", "time": "20", "array": "0-1%2"}
    expected.update({"mem": "4G", "constraint": "a b", "exclusive": True, "requeue": True, "signal": "USR2@120"})
    assert {key: asked.get(key) for key in expected} == expected
    assert asked["output"] == str(out / "slurm" / "%A_%a_0_log.out") and "wckey" not in asked

    first, second = (folders(out)[kind] for kind in ("xskip", "rskip"))

    def interrupt(folder, signals):
        until((folder / "checkpoint.pt").exists)
        signals()

    saved = partial(says, second / "log.txt", "error: stopped at iteration")
    with ThreadPoolExecutor() as pool:
        both = (lambda: fake.end_of_time("1000_0"), lambda: fake.preempt("1000_1", saved))
        done = pool.map(interrupt, (first, second), both)
        until(lambda: (first / "log.txt").exists() and (second / "log.txt").exists())
        _, lines = reproduce("status", "--output", out)
        assert sum("seed 1: running" in line for line in lines) == 2
        status, lines = reproduce(*argv)
        assert status == 0 and lines[-1] == "nothing to submit" and len(fake.calls("sbatch")) == 1
        list(done)
    fake.wait()

    assert fake.calls("scontrol") == [["requeue", "1000_0"]]
    for folder in (first, second):
        assert (folder / "log.txt").read_text().count("resuming from iteration") == 1
        assert len(json.loads((folder / "run.json").read_text())["attempts"]) == 2
        assert not {"queued", "failed"} & set(runs.read(folder))
        assert json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["iteration"] == 128
    status, lines = reproduce(*argv)
    assert status == 0 and len(fake.calls("sbatch")) == 1
    assert [line.split(" already")[0] for line in lines] == ["done", "done", "nothing to submit"]


@idle
def test_a_queued_run_is_submitted_again_only_when_its_job_is_gone(tmp_path, fake, reproduce):
    argv = ["run", *SHORT, "--output", tmp_path / "out", *SLURM]
    assert reproduce(*argv)[0] == 0
    status, lines = reproduce(*argv)
    assert status == 0 and lines[-1] == "nothing to submit" and lines[0].startswith("queued: SLURM job 1000_0 already")
    _, lines = reproduce("status", "--output", tmp_path / "out")
    assert any("1xSkip, seed 1: queued: SLURM job 1000_0" in line for line in lines)
    fake.cancel("1000_1")
    _, lines = reproduce("status", "--output", tmp_path / "out")
    assert any("2rSkip+LN, seed 1: not run" in line for line in lines)
    status, lines = reproduce(*argv)
    assert status == 0 and lines[1].startswith("queued ") and lines[1].endswith("SLURM job 1001")
    assert len(fake.calls("sbatch")) == 2
    assert "array" not in parameters(tmp_path / "out" / "slurm" / "1001_submission.sh")
    assert parameters(tmp_path / "out" / "slurm" / "1001_submission.sh")["time"] == "1440"


@idle
@pytest.mark.parametrize("body", ["echo 'slurm_load_jobs error: no answer' >&2; exit 1", None])
def test_where_squeue_does_not_answer_queued_runs_are_left(tmp_path, fake, reproduce, monkeypatch, body):
    argv = ["run", *SHORT, "--output", tmp_path / "out", *SLURM]
    assert reproduce(*argv)[0] == 0
    if body:
        fake.command("squeue", body)
        reason = "slurm_load_jobs error: no answer"
    else:
        (fake.folder / "bin" / "squeue").unlink()
        reason = "there is no squeue in PATH"
    status, lines = reproduce(*argv)
    assert status == 0 and len(fake.calls("sbatch")) == 1
    message = f"cannot ask SLURM which jobs are alive ({reason}): what is queued is left as it is"
    assert lines[-2:] == [message, "nothing to submit"]


@idle
def test_what_sbatch_says_is_the_error(tmp_path, fake, reproduce):
    out = tmp_path / "out"
    status, lines = reproduce("run", *SHORT, "--output", out, *SLURM, "--partition", "nowhere")
    said = "invalid partition specified: nowhere; Batch job submission failed: Invalid partition name specified"
    assert status == 1 and lines == [f"error: SLURM refused: {said}"]
    assert not any("queued" in runs.read(path) for path in folders(out).values()) and len(folders(out)) == 2
    _, lines = reproduce("status", "--output", out)
    assert sum("seed 1: not run" in line for line in lines) == 2


@idle
def test_without_slurm_nothing_is_written(tmp_path, fake, reproduce):
    out = tmp_path / "out"
    (fake.folder / "bin" / "sbatch").unlink()
    status, lines = reproduce("run", *SHORT, "--output", out, *SLURM)
    assert status == 1
    assert lines == ["error: --launcher slurm: there is no sbatch in PATH; --launcher local runs on this machine"]
    fake.command("sbatch", "exit 1")
    status, lines = reproduce("run", *SHORT, "--output", tmp_path / "50%", *SLURM)
    assert status == 1 and "SLURM takes % in a path for a placeholder" in lines[0]
    assert not out.exists() and not (tmp_path / "50%").exists()


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
    until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text() == "12", 60)
    if preempted:
        job.send_signal(signal.SIGTERM)
        until((tmp_path / "said").exists, 60)
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
