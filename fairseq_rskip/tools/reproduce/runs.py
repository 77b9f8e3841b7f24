"""The folder of a run, and what has become of it, and of a table's cells: states, metrics, what a sweep has chosen.

run.json is its one record: what is run, with which commands and versions, every attempt, and in the end its metrics, or
why it failed. log.txt is everything that the commands said. run.lock is held, by the process or what it started, while
it runs; only who holds it writes the record.
"""

import contextlib
import fcntl
import functools
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import dacite
import torch

from fairseq_rskip import __version__
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools.process import git_commit

from .plans import TASKS, Plan, Run, make_run
from .tables import HELD_OUT, Cell, Options, Variant

RECORD, LOG, LOCK = "run.json", "log.txt", "run.lock"
LOOKS = 5  # tries for the lock, which `status` takes for a moment
DONE, RUNNING, WAITING, BROKEN, STOPPED, NEW = "done", "running", "queued", "failed", "stopped", "not run"


@dataclass(frozen=True)
class State:
    """``name`` is one of the above; ``progress`` from 0 to 1; ``detail`` the last error, losses, or the SLURM job."""

    name: str
    progress: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        percent = f" {100 * self.progress:.0f} %" if self.name in (RUNNING, STOPPED) else ""
        return f"{self.name}{percent}" + (f": {self.detail}" if self.detail else "")


def read(folder: Path) -> dict[str, Any]:
    """The run's record, or {} if it is not there or not whole."""
    try:
        return dict(json.loads((folder / RECORD).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def note(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change the record of a run whose lock the caller holds, None removes; returns it."""
    record = {name: value for name, value in {**read(folder), **changes}.items() if value is not None}
    write_json(folder / RECORD, record)
    return record


def prepare(run: Run, **more: Any) -> None:
    """Write what ``execute`` needs, and ``more``, into the run's record, unless it is running. Raises ``UserError``."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {run.folder}: {error.strerror}") from None
    with holding(run.folder) as lock:
        if lock is not None:
            note(run.folder, task=run.task, seed=run.seed, settings=asdict(run.settings), **more)


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[IO[str] | None]:
    """Hold the run's lock during the block; gives its file, or None if the run is running elsewhere."""
    for look in range(LOOKS, 0, -1):
        with locked(folder, LOCK) as lock:
            if lock is not None or look == 1:
                yield lock
                return
        time.sleep(0.1)


def about(run: Run) -> dict[str, Any]:
    """What is recorded of a run when it starts."""
    versions = {"fairseq_rskip": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {"commands": run.commands(), "versions": versions, "git": git_commit()}


def load(folder: Path) -> Run:
    """The run that ``prepare`` wrote. Raises ``UserError``."""
    with contextlib.suppress(dacite.DaciteError):
        run = dacite.from_dict(Run, {**read(folder), "folder": folder})
        if run.task in TASKS:
            return run
    raise UserError(f"{folder} is not the folder of a run: it has no whole {RECORD}")


def state(run: Run) -> State:
    """What has become of the run."""
    record = read(run.folder)
    if metrics(record):
        return State(DONE, 1.0)
    progress, losses = TASKS[run.task].progress(run.settings, run.folder)
    if _held(run.folder / LOCK):
        return State(RUNNING, progress, losses)
    queued, failed = record.get("queued"), record.get("failed")
    jobs, problem = queued_jobs() if queued else ([], "")
    if queued and (problem or queued.get("job") in jobs):  # after a failure, if there was one
        return State(WAITING, progress, f"SLURM job {queued.get('job')}")
    if failed:
        return State(BROKEN, progress, str(failed.get("error")))
    return State(STOPPED, progress) if (run.folder / LOG).exists() else State(NEW)


def still_to_do(found: list[Run], *left: str) -> list[Run]:
    """Those of the runs that are not done, not running, and in none of the states ``left``; says of the others why."""
    chosen = []
    for run in found:
        if (now := state(run)).name in (DONE, RUNNING, *left):
            print_line(f"{now.name} already {run}" + (f": {now.detail}" if now.detail else ""))
        else:
            chosen.append(run)
    return chosen


@functools.lru_cache(maxsize=1)
def queued_jobs() -> tuple[list[str], str]:
    """The user's SLURM jobs that wait or run, elements of arrays as 12_0; where squeue does not answer, also why."""
    command = ["squeue", f"--user={os.getuid()}", "--array", "--noheader", "--format=%i"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        missing = isinstance(error, FileNotFoundError)
        return [], "there is no squeue in PATH" if missing else f"squeue does not answer: {error}"
    if done.returncode:
        return [], " ".join(done.stderr.split()) or f"squeue ended with status {done.returncode}"
    return done.stdout.split(), ""


def _held(lock: Path) -> bool:
    """Whether a run holds ``lock``: looked at for a moment, shared with others who look, and without writing."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # none yet, or one that this user may not read
        return False


def metrics(record: dict[str, Any]) -> dict[str, Any]:
    """What a finished run gave; {} if it is not finished."""
    found = record.get("metrics")
    return found if isinstance(found, dict) and isinstance(found.get("values"), dict) else {}


def stamp() -> dict[str, Any]:
    """When and where."""
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname()}


class Trial(NamedTuple):
    """A combination of a sweep's values, with the mean of the held-out metric, or None and why."""

    swept: Options
    value: float | None
    state: str


@dataclass(frozen=True)
class Outcome:
    """A planned cell with, by seed, its runs, their states, and the metrics of those that are done.

    trials: of its sweep, if it has one; chosen: the values of the best, None while that is open, and there are no runs
    """

    cell: Cell
    runs: dict[int, Run] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    chosen: Options | None = None

    @property
    def begun(self) -> bool:
        """Whether any of its runs has been started, or queued."""
        started = any(state.name != NEW for state in self.states.values())
        return started or any(trial.state != NEW for trial in self.trials)

    @property
    def waits_for_sweep(self) -> str:
        """How far the sweep is, "" when it is over or there is none."""
        done = sum(trial.value is not None for trial in self.trials)
        return "" if self.chosen is not None else f"sweep: {done} of {len(self.trials)} values done"


def collect(plan: Plan, cell: Cell, out: Path) -> Outcome:
    """Read what has become of the runs of ``cell`` in ``out``."""
    trials = [_trial(plan, variant, out) for variant in cell.variants] if len(cell.variants) > 1 else []
    variant = _chosen(cell, trials)
    if variant is None:
        return Outcome(cell, trials=trials)
    found = {seed: make_run(plan, variant, seed, out) for seed in plan.seeds}
    states = {seed: state(run) for seed, run in found.items()}
    done = {seed: metrics(read(run.folder)) for seed, run in found.items() if states[seed].name == DONE}
    return Outcome(cell, found, states, done, trials, variant.swept)


def ready_runs(plan: Plan, out: Path) -> list[Run]:
    """The runs that the plan can have now, each once: the first seed of every row comes before the second of any.

    Of a cell with a sweep these are all values with its first seeds, and when they are done the chosen one with all.
    """
    swept = [cell for cell in plan.cells if len(cell.variants) > 1]
    found = [make_run(plan, v, seed, out) for seed in sweep_seeds(plan) for cell in swept for v in cell.variants]
    outcomes = [collect(plan, cell, out) for cell in plan.cells]
    found += [outcome.runs[seed] for seed in plan.seeds for outcome in outcomes if outcome.runs]
    return list({run.folder: run for run in found}.values())


def sweep_seeds(plan: Plan) -> list[int]:
    """The seeds with which each value of a sweep is tried: the table's first, whatever --seeds says."""
    return plan.table.seeds[: plan.table.sweep_seeds]


def _trial(plan: Plan, variant: Variant, out: Path) -> Trial:
    """What the runs of one combination of values say."""
    found = [make_run(plan, variant, seed, out) for seed in sweep_seeds(plan)]
    states = [state(run) for run in found]
    for name in (BROKEN, NEW, STOPPED, WAITING, RUNNING):  # the worst of them
        for found_state in states:
            if found_state.name == name:
                return Trial(variant.swept, None, str(found_state))
    metric = HELD_OUT[plan.table.task]
    mean = statistics.fmean(metrics(read(run.folder))["values"].get(metric, math.nan) for run in found)
    if not math.isfinite(mean):
        return Trial(variant.swept, None, f"{BROKEN}: {metric} is not there or not finite")
    return Trial(variant.swept, mean, DONE)


def _chosen(cell: Cell, trials: list[Trial]) -> Variant | None:
    """The variant that did best on the held-out set, the first of equals; None while a trial is still to come."""
    if not trials:
        return cell.variants[0]
    done = [index for index, trial in enumerate(trials) if trial.value is not None]
    if not done or any(trial.value is None and not trial.state.startswith(BROKEN) for trial in trials):
        return None
    return cell.variants[min(done, key=lambda index: trials[index].value)]


def at_border(outcome: Outcome) -> list[str]:
    """The options whose chosen value is the smallest or largest of the sweep: the best may lie beyond."""
    found = []
    for option, value in (outcome.chosen or {}).items():
        values = [trial.swept[option] for trial in outcome.trials]
        numbers = all(isinstance(each, (int, float)) for each in values)
        if numbers and value in (min(values), max(values)):
            found.append(option)
    return found
