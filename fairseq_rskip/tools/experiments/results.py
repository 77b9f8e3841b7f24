"""Read what has become of runs from their folders: states, measured values, what a sweep has chosen."""

import fcntl
import json
import math
import statistics
from pathlib import Path
from typing import Any

from .plan import at
from .records import DONE, FAILED, NEW, RUNNING, STOPPED, Cell, Result, Run, Table
from .tasks import TASKS

RECORD, LOG, LOCK = "run.json", "log.txt", "run.lock"


def read(folder: Path) -> dict[str, Any]:
    """The run's record; {} if it is missing or damaged."""
    try:
        return dict(json.loads((folder / RECORD).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """What a finished run gave; {} if it is not finished."""
    found = record.get("metrics")
    return found if isinstance(found, dict) and isinstance(found.get("values"), dict) else {}


def state(run: Run) -> str:
    """One of the states of a run, with its progress or its error."""
    record = read(run.folder)
    if measured(record):
        return DONE
    if not run.folder.exists():
        return NEW
    part, losses = TASKS[run.task].progress(run)
    if is_held(run.folder / LOCK):
        return f"{RUNNING} {100 * part:.0f} %" + (f": {losses}" if losses else "")
    if record.get("failed"):
        return f"{FAILED}: {record['failed'].get('error')}"
    return f"{STOPPED} {100 * part:.0f} %" if (run.folder / LOG).exists() else NEW


def is_held(lock: Path) -> bool:
    """Whether a process holds ``lock``."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def collect(table: Table, out: Path) -> list[Result]:
    """A result for each cell, without comparisons."""
    return [_result(table, cell, out) for cell in table.cells]


def _result(table: Table, cell: Cell, out: Path) -> Result:
    trials = [_trial(table, swept, run, out) for swept, run in cell.variants] if len(cell.variants) > 1 else []
    chosen = _chosen(cell, trials)
    if chosen is None:
        return Result(cell, trials=trials)
    swept, run = chosen
    runs = {seed: at(run, out, seed) for seed in table.seeds}
    states = {seed: state(run) for seed, run in runs.items()}
    records = {seed: measured(read(run.folder)) for seed, run in runs.items() if states[seed] == DONE}
    values = {}
    for seed, record in records.items():
        value = record["values"].get(table.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            values[seed] = float(value)
        else:
            states[seed] = f"done, with {table.metric} {'missing' if value is None else 'not finite'}"
    return Result(cell, runs, states, records, values, trials, swept)


def _trial(table: Table, swept: dict[str, Any], run: Run, out: Path) -> tuple[dict[str, Any], float | None, str]:
    """A combination of a sweep's values, the mean of the held-out metric or None, and the worst state of its runs."""
    runs, metric = [at(run, out, seed) for seed in table.tried], TASKS[run.task].held_out
    states = [state(run) for run in runs]
    for kind in (FAILED, NEW, STOPPED, RUNNING):
        for each in states:
            if each.startswith(kind):
                return swept, None, each
    mean = statistics.fmean(measured(read(run.folder))["values"].get(metric, math.nan) for run in runs)
    if not math.isfinite(mean):
        return swept, None, f"{FAILED}: {metric} is missing or not finite"
    return swept, mean, DONE


def _chosen(cell: Cell, trials: list) -> tuple[dict[str, Any], Run] | None:
    """The variant that is best on the held-out set, the first of equals; None while a trial is not finished."""
    if not trials:
        return cell.variants[0] if cell.variants else None
    done = [number for number, (_, value, _) in enumerate(trials) if value is not None]
    if not done or any(value is None and not how.startswith(FAILED) for _, value, how in trials):
        return None
    return cell.variants[min(done, key=lambda number: trials[number][1])]


def at_border(result: Result) -> list[str]:
    """The options whose chosen value is the smallest or largest of the sweep: the best may lie beyond."""
    found = []
    for option, value in (result.chosen or {}).items():
        values = [swept[option] for swept, *_ in result.trials]
        if all(isinstance(each, int | float) for each in values) and value in (min(values), max(values)):
            found.append(option)
    return found
