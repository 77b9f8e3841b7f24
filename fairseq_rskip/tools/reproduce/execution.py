"""One run from its folder: its commands one after another, their output in log.txt, what came out in run.json."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path

from tqdm import tqdm

from fairseq_rskip.console import print_line
from fairseq_rskip.tools.process import environment as process_environment
from fairseq_rskip.tools.process import explanation, killed_by

from . import runs
from .plans import TASKS, Run
from .runs import BROKEN, DONE, RUNNING, STOPPED, State

GRACE = 60.0  # seconds that a command has to save and stop
# some clusters send USR1 and USR2 to every process of a job, and a training has no use for them
IGNORE_USR = ["sh", "-c", "trap '' USR1 USR2; exec \"$@\"", "sh"]

stopping = threading.Event()
_children: set[subprocess.Popen] = set()


def execute(folder: Path, environment: dict[str, str] | None = None, job: str | None = None) -> State:
    """Do the run of ``folder``, from where it was left; ``environment`` is added to this process's.

    It stays noted as queued by the SLURM ``job``, which starts again by itself.

    Returns what became of it: done, failed with the last error, stopped by ``stop``, or running elsewhere. Raises
    ``UserError`` if ``folder`` is no run's.
    """
    run = runs.load(folder)
    with runs.holding(folder) as lock:
        if lock is None:
            return State(RUNNING, detail="by another process")
        return _attempt(run, environment or {}, lock.fileno(), {"job": job} if job else None)


def _attempt(run: Run, environment: dict[str, str], lock: int, queued: dict[str, str] | None) -> State:
    folder, before = run.folder, runs.read(run.folder)
    if runs.metrics(before):
        return State(DONE, 1.0)
    attempts = [*before.get("attempts", []), {**runs.stamp(), "environment": environment}]
    about = runs.about(run)
    # what has ended is not run twice: fairseq would train on where --patience has ended it
    complete = before.get("complete", 0) if before.get("commands") == about["commands"] else 0
    runs.note(folder, **about, attempts=attempts, failed=None, queued=queued)
    start, log = time.time(), folder / runs.LOG
    for number, command in enumerate(about["commands"][complete:], complete + 1):
        print_line(shlex.join(command), bar=tqdm)  # above what shows the progress
        begins = log.stat().st_size if log.exists() else 0
        status = _run(command, log, environment, lock)
        if stopping.is_set():
            return State(STOPPED)
        if status:
            return _failed(folder, f"status {status}", last_error(log, begins, status), command)
        runs.note(folder, complete=number)
    result = TASKS[run.task].metrics(run.settings, folder)
    if result is None:
        error = "the commands ended well, and left no whole result"
        return _failed(folder, "no result", error, about["commands"][-1])
    runs.note(
        folder, metrics={**result, "seconds": round(time.time() - start, 1), **runs.stamp()}, complete=None, queued=None
    )
    return State(DONE, 1.0)


def _failed(folder: Path, status: str, error: str, command: list[str]) -> State:
    failed = {"error": error, "status": status, "command": shlex.join(command), **runs.stamp()}
    runs.note(folder, failed=failed, complete=None, queued=None)
    return State(BROKEN, detail=error)


def _run(command: list[str], log: Path, environment: dict[str, str], lock: int) -> int:
    """Run ``command`` with its output at the end of ``log``; returns its status.

    It has a process group of its own, and keeps the run's lock as long as anything of it lives.
    """
    with open(log, "ab") as output:
        output.write(f"== {runs.stamp()['time']} {shlex.join(command)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            [*IGNORE_USR, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**process_environment(), **environment},
            start_new_session=True,
            pass_fds=[lock],
        )
    _children.add(child)
    try:
        if stopping.is_set():
            _signal(child, signal.SIGTERM)
        return child.wait()
    except BaseException:  # where this is the main thread
        stop()
        raise
    finally:
        _children.discard(child)


def stop() -> None:
    """End what runs, in every thread: each command may save; what has not ended after a minute is killed.

    SIGTERM is sent once: a second one keeps some commands from saving. A second KeyboardInterrupt kills at once.
    """
    children = list(_children)
    if not stopping.is_set():
        stopping.set()
        for child in children:
            _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    try:
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for child in children:
            _signal(child, signal.SIGKILL)


def _signal(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def last_error(log: Path, begins: int = 0, status: int = 1) -> str:
    """Why the command whose output begins at byte ``begins`` of ``log`` has ended with ``status``, as one line."""
    with open(log, "rb") as file:
        file.seek(begins)
        text = file.read().decode("utf-8", "replace")
    if status < 0:  # by a signal: what it said last is no error
        return killed_by(-status)
    return re.sub(r"^error: ", "", explanation(text.partition("\n")[2]))  # the first line is the command
