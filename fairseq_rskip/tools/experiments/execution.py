"""Execute runs, each in a process of its own.

In a run's folder, run.json is its record and log.txt has all its output.
"""

import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO

from fairseq_rskip import __version__
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import exit_status
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.machine import all_cores
from fairseq_rskip.tools import process

from .records import STOPPED, Run, State
from .results import state
from .run_folder import (
    LOCK,
    LOG,
    RECORD,
    checksum_of,
    has_checkpoints,
    measured,
    read_record,
    trained,
)
from .tasks import TASKS

POLL_INTERVAL = 1.0  # seconds between looks at the processes
PROGRESS_INTERVAL = 60.0  # seconds between lines of progress
GRACE = 60.0  # seconds that a training has to save its state
TIME = "%Y-%m-%dT%H:%M:%S%z"


def note(folder: Path, **changes: object) -> None:
    """Change the record of a run whose lock the caller holds; None removes a key."""
    record = {**read_record(folder), **changes}
    present = {name: value for name, value in record.items() if value is not None}
    write_json(folder / RECORD, present)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[IO[str] | None]:
    """The run's lock, or None if a process executes the run.

    Another command that looks at the state holds it for a moment: this waits for up to a second.
    """
    for _ in range(5):
        with locked(folder, LOCK) as lock:
            if lock is not None:
                yield lock
                return
        time.sleep(0.2)
    yield None


def prepare(run: Run) -> None:
    """Write what ``execute`` needs into the run's record, unless it is running."""
    settings = asdict(run)
    for name in ("task", "seed", "folder"):
        del settings[name]
    with held(run.folder) as lock:
        if lock is not None:
            note(run.folder, task=run.task, seed=run.seed, settings=settings)


def prepared(folder: Path, record: dict[str, Any]) -> Run:
    """The run that ``prepare`` wrote into the record of ``folder``."""
    return Run(record["task"], seed=record["seed"], folder=folder, **record["settings"])


def execute(folder: Path) -> bool:
    """Run those commands of a prepared run that have not ended well.

    Returns False if another process holds the run's lock.
    """
    with held(folder) as lock:
        if lock is None:
            return False
        record = read_record(folder)
        run = prepared(folder, record)
        if measured(run, record):
            return True

        commands = TASKS[run.task].commands(run)
        complete = count_complete(run, record, commands)
        versions = {"fairseq_rskip": __version__, "python": platform.python_version()}
        note(
            folder,
            commands=commands,
            complete=complete or None,  # no entry for 0
            versions=versions,
            git=process.git_commit(),
            failed=None,
        )

        error = _run_commands(run, commands, complete, lock.fileno())
        note_result(run, complete, error)
    return True


def _run_commands(run: Run, commands: list[list[str]], complete: int, lock: int) -> str:
    """Run the ``commands`` but for the first ``complete`` ones; return why one failed, or ""."""
    error = _data_have_changed(run)
    if error:
        return error
    _note_parent(run)
    for number, command in enumerate(commands[complete:], complete + 1):
        start = time.monotonic()
        error = _rule_has_changed(run)
        if error:
            return error
        error = _follow(command, run.folder, lock)
        if error:
            return error
        ended: dict[str, Any] = {"complete": number}
        if number == 1:  # the training
            ended["seconds"] = round(time.monotonic() - start, 1)
        note(run.folder, **ended)
    return ""


def _note_parent(run: Run) -> None:
    """Note the checkpoint that a training starts from, which its options know by its name only."""
    task = TASKS[run.task]
    parent = task.parent_of(run)
    if parent is not None and parent.is_file() and not task.has_begun(run):
        note(run.folder, parent=checksum_of(parent))


def _data_have_changed(run: Run) -> str:
    """Why a run must not go on: it or another seed was trained on other data. Else "".

    Notes what the data are, which the run's identity knows by their name only.
    """
    checksum = TASKS[run.task].data_checksum(run.data)
    if not checksum:
        return ""
    for folder in sorted(run.folder.parent.glob("seed*")):
        record = read_record(folder)
        has_trained = has_checkpoints(folder) or trained(record)
        if has_trained and record.get("data_checksum", checksum) != checksum:
            return (
                f"{run.data} was prepared again, and {folder} was trained on what it was before: "
                "give the corpus another name, or another --output"
            )
    note(run.folder, data_checksum=checksum)
    return ""


def _rule_has_changed(run: Run) -> str:
    """Why a run must not go on: the file of its rule is not as it was planned. Else ""."""
    checksum = run.identity.get("rule")
    if checksum is None:
        return ""
    from fairseq_rskip.residual import own_rules  # imports torch

    if own_rules.is_unchanged(checksum):
        return ""
    return f"the file of its rule ({own_rules.VARIABLE}) has changed: the same command plans again"


def _follow(command: list[str], folder: Path, lock: int) -> str:
    """Run ``command`` with its output in the run's log; return why it failed, or ""."""
    log: BinaryIO
    with open(folder / LOG, "ab", buffering=0) as log:
        log.write(f"== {time.strftime(TIME)} {shlex.join(command)}\n".encode())
        return process.follow(command, log=log, inherit=[lock])


def count_complete(run: Run, record: dict[str, Any], commands: list[list[str]]) -> int:
    """The number of ``commands`` that have ended well, and are not repeated.

    A training that --patience has ended must not be: fairseq would train further. One whose
    checkpoints were removed is repeated where they are to be evaluated.
    """
    if len(commands) > 1 and not has_checkpoints(run.folder):
        return 0
    if trained(record) and has_checkpoints(run.folder):
        return 1  # only its evaluation is missing
    number = record.get("complete", 0)
    same_commands = record.get("commands", [])[:number] == commands[:number]
    return number if same_commands else 0


def note_result(run: Run, complete: int, error: str) -> None:
    """Write the results of the commands into the record, or why they failed.

    ``complete`` commands had ended well before.
    """
    changes: dict[str, Any] = {}
    if not error:
        changes = _results(run, complete)
        missing = not changes["metrics"] or (run.scored and "scores" not in changes)
        if missing:
            error = "the commands succeeded but left no complete result"

    if error:
        note(run.folder, **changes, failed={"error": error, "time": time.strftime(TIME)})
    else:
        note(run.folder, **changes, failed=None, complete=None, seconds=None)


def _results(run: Run, complete: int) -> dict[str, Any]:
    """The ``metrics`` of the training, or None, and the ``scores`` of the evaluation, if any."""
    task = TASKS[run.task]
    record = read_record(run.folder)

    metrics = None
    if complete:  # an earlier process has trained, and perhaps measured
        metrics = trained(record)
    if not metrics:
        metrics = task.measure(run)
    if metrics and "time" not in metrics:
        metrics |= {"seconds": record.get("seconds"), "time": time.strftime(TIME)}

    changes: dict[str, Any] = {"metrics": metrics}
    scores = task.scores(run) if run.scored else None
    if scores:
        changes["scores"] = {**record.get("scores", {}), run.evaluation: scores}
    return changes


def environments(jobs: int | None) -> list[dict[str, str]]:
    """The environment variables of each parallel run: its GPU, or its share of the cores.

    A single run gets all of them. More jobs than GPUs share the GPUs.
    """
    import torch

    count = torch.cuda.device_count()
    jobs = jobs or max(1, count)
    if jobs == 1:
        return [{}]

    threads = max(1, all_cores() // jobs)
    made = [{"OMP_NUM_THREADS": str(threads)} for _ in range(jobs)]
    if count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(number) for number in range(count)]
        for number, variables in enumerate(made):
            variables["CUDA_VISIBLE_DEVICES"] = gpus[number % count]
    return made


class Job:
    """A run in a process of its own, with further environment ``variables``."""

    def __init__(self, run: Run, variables: dict[str, str]) -> None:
        prepare(run)
        self.run = run
        self.variables = variables
        self.started = time.monotonic()
        self.done_before, _ = TASKS[run.task].progress(run)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(run.folder)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def progress(self) -> str:
        """One line: the part that is done, the time that is left, and the losses."""
        part, losses = TASKS[self.run.task].progress(self.run)
        minutes = (time.monotonic() - self.started) / 60
        line = f"{self.run.titled}: {part:.0%}, {minutes:.0f} min"
        done_here = part - self.done_before
        if done_here > 0:
            left = minutes * (1 - part) / done_here
            line += f", {left:.0f} min left"
        return f"{line}; {losses}" if losses else line


def run_all(runs: list[Run], environments: list[dict[str, str]]) -> list[State]:
    """Execute ``runs``, one at a time in each of ``environments``, and return their states.

    Ctrl-C ends them all. A pool of concurrent.futures would not be shorter: it would have to be
    polled as well, for the progress, and its processes ended one by one.
    """
    waiting = deque(runs)
    free = list(environments)
    jobs: list[Job] = []
    printed = time.monotonic()
    try:
        while waiting or jobs:
            free += _remove_ended(jobs)
            while waiting and free:
                run = waiting.popleft()
                was_stopped = state(run).kind == STOPPED
                job = Job(run, free.pop(0))
                jobs.append(job)
                verb = "resumes" if was_stopped else "starts"
                if job.done_before == 1.0:
                    verb = "is trained, evaluation starts"
                print_line(f"{run.titled}: {verb}; {len(waiting)} more to start")

            if jobs:
                time.sleep(POLL_INTERVAL)
            if time.monotonic() - printed > PROGRESS_INTERVAL:
                printed = time.monotonic()
                for job in jobs:
                    print_line(job.progress())
    finally:
        for job in jobs:
            job.process.terminate()
        for job in jobs:
            job.process.wait()
    return [state(run) for run in runs]


def _remove_ended(jobs: list[Job]) -> list[dict[str, str]]:
    """Remove the jobs that have ended from ``jobs``; returns their environment variables."""
    freed = []
    for job in list(jobs):
        if job.process.poll() is not None:
            jobs.remove(job)
            freed.append(job.variables)
            print_line(f"{job.run.titled}: {state(job.run)}")
    return freed


def main(argv: list[str]) -> int:
    """Execute the run of one folder. When the parent process ends, the run saves and ends."""
    process.end_with_parent(signal.SIGTERM)
    process.GRACE = GRACE
    process.stop_on_signals()

    def status() -> bool:
        """The exit status: 1 where another process has the run."""
        return not execute(Path(argv[0]))

    return exit_status(status, interrupted="")  # rskip run, which started it, says so itself


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
