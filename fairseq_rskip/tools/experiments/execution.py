"""Execute runs, each in a process of its own. run.json in a run's folder is its one record, log.txt all the output.

``python -m fairseq_rskip.tools.experiments.execution FOLDER`` executes one prepared run.
"""

import ctypes
import io
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rskip import __version__
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools import process
from fairseq_rskip.tools.process import Stopped, explanation, follow, git_commit, killed_by, stop_on_signals, tail

from .records import DONE, FAILED, RUNNING, Run
from .results import LOCK, LOG, RECORD, measured, read, state
from .tasks import TASKS

GRACE = 60.0  # seconds that a training has to save
LOOK_EVERY, SPEAK_EVERY = 1.0, 60.0  # seconds
KEPT = 200  # lines of output in which the reason of a failure is searched
BAR = "{percentage:3.0f} % [{elapsed}<{remaining}{postfix}] {desc}"  # elapsed < left


def note(folder: Path, **changes: Any) -> None:
    """Change the record of a run whose lock the caller holds; None removes."""
    record = {name: value for name, value in {**read(folder), **changes}.items() if value is not None}
    write_json(folder / RECORD, record)


def prepare(run: Run) -> None:
    """Write what ``execute`` needs into the run's record, unless it is running."""
    with locked(run.folder, LOCK) as lock:
        if lock is not None:
            settings = {name: value for name, value in asdict(run).items() if name not in ("task", "seed", "folder")}
            note(run.folder, task=run.task, seed=run.seed, settings=settings)


def execute(folder: Path) -> None:
    """Run the commands of a prepared run that have not ended yet; its record says what came of it."""
    record = read(folder)
    with locked(folder, LOCK) as lock:
        if lock is None or measured(record):
            return
        run = Run(record["task"], seed=record["seed"], folder=folder, **record["settings"])
        commands = TASKS[run.task].commands(run)
        versions = {"fairseq_rskip": __version__, "python": platform.python_version()}
        # what has ended is not run again: fairseq would train on where --patience has ended it
        complete = record.get("complete", 0) if record.get("commands") == commands else 0
        attempts = [*record.get("attempts", []), stamp()]
        note(folder, commands=commands, versions=versions, git=git_commit(), attempts=attempts, failed=None)
        start = time.monotonic()
        for number, command in enumerate(commands[complete:], complete + 1):
            error = _follow(command, folder / LOG, lock.fileno())
            if error:
                note(folder, failed={"error": error, "command": shlex.join(command), **stamp()}, complete=None)
                return
            note(folder, complete=number)
        metrics = TASKS[run.task].measure(run)
        if metrics is None:
            error = {"error": "the commands succeeded but left no complete result", **stamp()}
            return note(folder, failed=error, complete=None)
        note(folder, metrics={**metrics, "seconds": round(time.monotonic() - start, 1), **stamp()}, complete=None)


def _follow(command: list[str], path: Path, lock: int) -> str:
    """Run ``command`` with its output at the end of ``path``; returns why it failed, "" if it did not."""
    lines: deque[bytes] = deque(maxlen=KEPT)
    with open(path, "ab", buffering=0) as output:

        def take(line: bytes) -> None:
            output.write(line)
            lines.append(line)

        output.write(f"== {stamp()['time']} {shlex.join(command)}\n".encode())
        status = follow(command, take, inherit=[lock])
    if status < 0:
        return killed_by(-status)
    return explanation(tail(list(lines))).removeprefix("error: ") if status else ""


def stamp() -> dict[str, str]:
    """When and where."""
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname()}


def environments(jobs: int | None) -> list[dict[str, str]]:
    """What each of the parallel runs gets: a GPU, or its share of the cores; a single one gets all. ``UserError``."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    gpus = named[:count] or [str(number) for number in range(count)]
    jobs = jobs or max(1, len(gpus))
    if gpus and jobs > len(gpus):
        raise UserError(f"--jobs {jobs}: expected at most {len(gpus)}, one for each GPU that torch sees")
    if jobs == 1:
        return [{}]
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": name} for name in gpus[:jobs]]
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    # threads that spin while they wait would take the cores from the other runs
    return [{"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}] * jobs


def run_all(runs: list[Run], places: list[dict[str, str]]) -> list[str]:
    """Execute ``runs``, as many at a time as there are ``places``; returns the state of each.

    One that fails does not stop the others. An exception, such as Ctrl-C, ends all of them and lets them save.
    """
    waiting, running = deque(runs), {}  # by the folder: the run, its process, and its place
    shown = Progress()
    try:
        while waiting or running:
            for run, child, place in list(running.values()):
                if child.poll() is not None:
                    del running[run.folder]
                    places.append(place)
                    shown.say(f"{run}: {state(run)}")
            while waiting and len(places):
                run, place = waiting.popleft(), places.pop(0)
                prepare(run)
                shown.say(f"{run}: starts")
                running[run.folder] = (run, _start(run, place), place)
            shown.show([run for run, *_ in running.values()])
            time.sleep(LOOK_EVERY if running else 0)
    finally:
        shown.show([])
        for _, child, _ in running.values():
            child.terminate()
        for _, child, _ in running.values():
            child.wait()
    return [state(run) for run in runs]


def _start(run: Run, place: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, "-m", __name__, str(run.folder)]
    return subprocess.Popen(command, env={**os.environ, **place}, stdin=subprocess.DEVNULL, start_new_session=True)


class Progress:
    """How far the running ones are, with losses and time left: live on a terminal, elsewhere a line each minute."""

    def __init__(self) -> None:
        self.bars: dict[str, tqdm] = {}
        self.live, self.spoken = sys.stdout.isatty(), time.monotonic()

    def say(self, line: str) -> None:
        print_line(line, bar=tqdm)

    def show(self, running: list[Run]) -> None:
        for name in set(self.bars) - set(map(str, running)):
            self.bars.pop(name).close()
        output = sys.stdout if self.live else io.StringIO()
        for run in running:
            if str(run) not in self.bars:
                options = {"bar_format": BAR, "file": output, "dynamic_ncols": True, "leave": False}
                self.bars[str(run)] = tqdm(total=1.0, desc=str(run), **options)
            bar, (part, losses) = self.bars[str(run)], TASKS[run.task].progress(run)
            if not bar.n:  # the time left is estimated from here: a resumed run begins in the middle
                bar.reset()
                bar.initial = part
            bar.n = part
            bar.set_postfix_str(losses, refresh=self.live)
        if not self.live and time.monotonic() - self.spoken > SPEAK_EVERY:
            self.spoken = time.monotonic()
            for bar in self.bars.values():
                print_line(f"{RUNNING} {bar}")


def main(argv: list[str]) -> int:
    """Execute the run of one folder; it ends, saved, with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    process.GRACE = GRACE
    stop_on_signals()
    try:
        return exit_status(lambda: execute(Path(argv[0])))
    except Stopped as stopped:
        return stopped.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
