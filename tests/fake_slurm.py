"""A stand-in for SLURM's commands: sbatch really runs the script it is given, in the background, every array task with
the variables that SLURM sets, and no more of them at a time than the script asks for.

As a program it is sbatch, srun, scontrol and squeue, by its first argument; a test makes a ``FakeSlurm``. The folder
that FAKE_SLURM names holds what it knows: calls.log, and for every job or array task <id>.state, and <id>.pid of the
process that srun started.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scontrol", "squeue")
PENDING, RUNNING, ENDED = "PENDING", "RUNNING", "ENDED"
REFUSED = """sbatch: error: invalid partition specified: nowhere
sbatch: error: Batch job submission failed: Invalid partition name specified
"""


class FakeSlurm:
    """The commands in ``folder``/bin, to be put into PATH; with ``idle`` jobs wait for ever."""

    def __init__(self, folder, monkeypatch, idle=False):
        self.folder, bin_dir = folder, folder / "bin"
        bin_dir.mkdir(parents=True)
        for name in COMMANDS:
            self.command(name, f'exec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"')
        monkeypatch.setenv("PATH", str(bin_dir), prepend=os.pathsep)
        monkeypatch.setenv("FAKE_SLURM", str(folder))
        monkeypatch.setenv("FAKE_SLURM_IDLE", "1" if idle else "")

    def command(self, name, body):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
        path.chmod(0o755)

    def calls(self, name):
        """The arguments of every call of ``name`` so far."""
        lines = [shlex.split(line) for line in _lines(self.folder / "calls.log")]
        return [words[1:] for words in lines if words[0] == name]

    def state(self, job):
        return _text(self.folder / f"{job}.state")

    def cancel(self, job):
        """A job that has not started is no more."""
        (self.folder / f"{job}.state").unlink()

    def end_of_time(self, job):
        """Send ``job`` the signal that its script asks for before the time limit."""
        name = parameters(self.folder / f"{job.partition('_')[0]}.sbatch")["signal"].partition("@")[0]
        os.kill(int(_text(self.folder / f"{job}.pid")), getattr(signal, f"SIG{name}"))

    def preempt(self, job, saved):
        """Tell ``job`` to end, kill it when ``saved`` says that it has saved, and let it wait for another start."""
        process = int(_text(self.folder / f"{job}.pid"))
        _write(self.folder / f"{job}.requeue", "")
        os.kill(process, signal.SIGTERM)
        until(saved)
        os.kill(process, signal.SIGKILL)

    def wait(self):
        """Until every job has ended, and left no process."""
        until(lambda: all(_text(path) == ENDED for path in self.folder.glob("*.state")))
        until(lambda: not self.processes())

    def processes(self):
        """Every other process that has this SLURM in its environment."""
        mark, found = f"FAKE_SLURM={self.folder}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() and path.parent.name != str(os.getpid()):
                    found.append(int(path.parent.name))
        return found

    def close(self):
        """Kill what a test that failed has left."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def until(happened, timeout=300):
    """Wait until ``happened()`` is true."""
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def _text(path):
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""


def _lines(path):
    return _text(path).splitlines()


def _write(path, text):
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, "utf-8")
    part.replace(path)


def parameters(script):
    """The #SBATCH lines of ``script``: name -> value, True for one without."""
    found = {}
    for line in _lines(Path(script)):
        if line.startswith("#SBATCH --"):
            name, equals, value = shlex.split(line)[1][2:].partition("=")
            found[name] = value if equals else True
    return found


def sbatch(folder, script):
    asked = parameters(script)
    if asked.get("partition") == "nowhere":
        sys.exit(REFUSED.rstrip("\n"))
    number = 1000 + len(list(folder.glob("*.sbatch")))
    _write(folder / f"{number}.sbatch", Path(script).read_text("utf-8"))
    for job in tasks(number, asked):
        _write(folder / f"{job}.state", PENDING)
    if not os.environ["FAKE_SLURM_IDLE"]:
        with open(folder / f"{number}.log", "ab") as log:
            command = [sys.executable, __file__, "control", str(number)]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {number}")


def tasks(number, asked):
    """The ids of the job, or of its array's tasks."""
    if "array" not in asked:
        return [str(number)]
    first, last = re.match(r"(\d+)-(\d+)%\d+$", asked["array"]).groups()
    return [f"{number}_{task}" for task in range(int(first), int(last) + 1)]


def control(folder, number):
    """What the controller and the nodes do: run the tasks of job ``number``, and again where they were requeued."""
    asked = parameters(folder / f"{number}.sbatch")
    at_a_time = int(asked["array"].partition("%")[2]) if "array" in asked else 1
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(lambda job: run(folder, job, asked), tasks(number, asked)))


def run(folder, job, asked):
    number, _, task = job.partition("_")
    raw = str(int(number) + 100 * int(task or 0))  # an array's task has a number of its own, too
    variables = {"SLURM_JOB_ID": raw, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    variables.update(SLURM_JOB_NUM_NODES="1", SLURM_NODEID="0", SLURM_JOB_NODELIST="here")
    if task:
        variables.update(SLURM_ARRAY_JOB_ID=number, SLURM_ARRAY_TASK_ID=task)
    for start in range(5):
        _write(folder / f"{job}.state", RUNNING)
        again = {"SLURM_RESTART_COUNT": str(start)} if start else {}
        command = ["bash", str(folder / f"{number}.sbatch")]
        with opened(asked["output"], variables) as out, opened(asked["error"], variables) as error:
            subprocess.run(command, env={**os.environ, **variables, **again}, stdout=out, stderr=error)
        (folder / f"{job}.pid").unlink()
        if not (folder / f"{job}.requeue").exists():
            break
        (folder / f"{job}.requeue").unlink()
        _write(folder / f"{job}.state", PENDING)
    _write(folder / f"{job}.state", ENDED)


def opened(path, variables):
    """A log, with SLURM's placeholders in its path replaced."""
    own = {"%j": "SLURM_JOB_ID", "%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID", "%t": "SLURM_PROCID"}
    return open(re.sub("%[jAat]", lambda found: variables[own[found[0]]], path), "ab")


def srun(folder, *words):
    """One task on one node: the command, its output in files."""
    options = {}
    words = list(words)
    while words[0].startswith("--"):
        name = words.pop(0)
        options[name] = True if name == "--unbuffered" else words.pop(0)
    with opened(options["--output"], os.environ) as out, opened(options["--error"], os.environ) as error:
        child = subprocess.Popen(words, stdout=out, stderr=error)
    job, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID")
    _write(folder / (f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}.pid" if task else f"{job}.pid"), str(child.pid))
    sys.exit(child.wait() % 256)


def scontrol(folder, action, job):
    assert action == "requeue" and _text(folder / f"{job}.state") == RUNNING, (action, job)
    _write(folder / f"{job}.requeue", "")


def squeue(folder, *options):
    assert {"--array", "--noheader", "--format=%i"} <= set(options), options
    for path in sorted(folder.glob("*.state")):
        if _text(path) in (PENDING, RUNNING):
            print(path.stem)


if __name__ == "__main__":
    state = Path(os.environ["FAKE_SLURM"])
    with open(state / "calls.log", "a", encoding="utf-8") as calls:
        calls.write(shlex.join(sys.argv[1:]) + "\n")
    globals()[sys.argv[1]](state, *sys.argv[2:])
