"""Read the folders of runs: their states, the runs that can start, and the results of a cell."""

import fcntl
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.process import is_divergence

from .records import (
    DIVERGED,
    DONE,
    FAILED,
    NEW,
    NO_VALUE,
    RUNNING,
    STOPPED,
    UNSCORED,
    Cell,
    Experiment,
    Result,
    Run,
    State,
    Trial,
)
from .run_folder import LOCK, LOG, checksum_of, measured, read_record, trained
from .tasks import TASKS


def with_folder(run: Run, out: Path, seed: int) -> Run:
    """``run`` with a seed and its folder."""
    return replace(run, seed=seed, folder=run.folder_in(out, seed))


def ready(experiment: Experiment, out: Path) -> list[Run]:
    """The runs that can start now, each once, first seeds first.

    A sweep has a run for each of its values, with the first seed, and once it is decided one for
    each seed.
    """
    decided = []
    for cell in experiment.cells:
        result = collect(experiment, cell, out)
        if result.runs:
            decided.append(result.runs)

    runs = []
    for cell in experiment.cells:
        if cell.sweep:
            runs += [_sweep_run(trial, experiment, out) for trial in cell.trials]
    for seed in experiment.seeds:
        for by_seed in decided:
            if seed in by_seed:
                runs.append(by_seed[seed])

    return distinct(runs)


def rows_that_wait(experiment: Experiment, out: Path) -> set[str]:
    """The labels of the rows with a sweep that has not ended: more runs follow its choice."""
    labels = set()
    for cell in experiment.cells:
        result = collect(experiment, cell, out)
        is_over = all(trial.state.kind == DIVERGED for trial in result.trials)
        if cell.sweep and not result.runs and not is_over:
            labels.add(cell.row.label)
    return labels


def distinct(runs: list[Run]) -> list[Run]:
    """``runs``, each training once for each evaluation of it.

    A training without an evaluation is left out beside one with an evaluation, of which it is a
    part. Several runs have one folder where rows differ in their evaluation alone.
    """
    by_folder: dict[Path, dict[str, Run]] = {}
    for run in runs:
        by_evaluation = by_folder.setdefault(run.folder, {})
        if run.scored:
            by_evaluation.pop("", None)
            by_evaluation[run.evaluation] = run
        elif not by_evaluation:
            by_evaluation[""] = run
    return [run for by_evaluation in by_folder.values() for run in by_evaluation.values()]


def _sweep_run(trial: Trial, experiment: Experiment, out: Path) -> Run:
    """The run that tries a combination of a sweep's values: decided by a loss, it is not scored."""
    return with_folder(replace(trial.deciding_run, scored=False), out, experiment.sweep_seed)


def state(run: Run) -> State:
    """The state of a run, with its progress or its error.

    Raises ``UserError`` for a run on other data.
    """
    record = read_record(run.folder)
    _check_data(run, record)
    _check_parent(run, record)
    if measured(run, record):
        return State(DONE)

    ended = None
    if record.get("failed"):
        error = str(record["failed"].get("error"))
        ended = State(DIVERGED if is_divergence(error) else FAILED, detail=error)
    elif trained(record):
        ended = State(UNSCORED)

    is_from_an_archive = not (run.folder / LOCK).exists()
    if is_from_an_archive:
        return ended or State(NEW)

    part, losses = TASKS[run.task].progress(run)
    if _is_locked(run.folder):
        return State(RUNNING, f"{RUNNING} {part:.0%}", losses)
    if ended:
        return ended
    if (run.folder / LOG).exists():
        return State(UNSCORED) if part >= 1 else State(STOPPED, f"{STOPPED} at {part:.0%}")
    return State(NEW)


def _is_locked(folder: Path) -> bool:
    """Whether a process executes the run in ``folder``."""
    with open(folder / LOCK, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _check_data(run: Run, record: dict[str, Any]) -> None:
    """Raise ``UserError`` for a run on other data; data that no longer exists was moved."""
    folder_of = TASKS[run.task].data_folder
    recorded = folder_of(str(record.get("settings", {}).get("data", run.data)))
    if recorded != folder_of(run.data) and recorded.is_absolute() and recorded.exists():
        raise UserError(
            f"{run.folder} was trained on {recorded}, not on {run.data}; "
            "rename a folder, or give --output"
        )


def _check_parent(run: Run, record: dict[str, Any]) -> None:
    """Raise ``UserError`` for a run that began with what its checkpoint was before."""
    parent = TASKS[run.task].parent_of(run)
    before = record.get("parent")
    if before and parent is not None and parent.is_file() and checksum_of(parent) != before:
        raise UserError(
            f"{run.folder} began with another {parent} than there is now; "
            "remove that folder to train it again, or give --output"
        )


def collect(experiment: Experiment, cell: Cell, out: Path) -> Result:
    """The states and values of the runs of ``cell``, without comparisons."""
    trials = []
    best = cell.trials[0] if cell.trials else None
    if len(cell.trials) > 1:
        trials = [_read(trial, experiment, out) for trial in cell.trials]
        best = _best(trials)
    if best is None:
        return Result(cell, trials=trials)

    result = Result(cell, trials=trials if cell.decides else [], chosen=best.values_of_run)
    for seed in experiment.seeds_of(cell.row):
        run = with_folder(best.run, out, seed)
        result.runs[seed] = run
        result.states[seed] = state(run)
        if result.states[seed].kind == DONE:
            result.records[seed] = measured(run, read_record(run.folder))

    for seed, record in result.records.items():
        value = record["values"].get(experiment.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            result.values[seed] = float(value)
        else:
            problem = "missing" if value is None else "not finite"
            result.states[seed] = State(NO_VALUE, f"done, with {experiment.metric} {problem}")
    return result


def _best(trials: list[Trial]) -> Trial | None:
    """The best trial, the first of equals.

    None until all trials have ended, and where none of them has a value. A trial that failed has
    ended: it may fail for a reason that lasts, and would keep the row from being trained.
    """
    best = None
    lowest = math.inf
    for trial in trials:
        if trial.held_out is None:
            if trial.state.kind not in (FAILED, DIVERGED):
                return None
        elif trial.held_out < lowest:
            best, lowest = trial, trial.held_out
    return best


def _read(trial: Trial, experiment: Experiment, out: Path) -> Trial:
    """``trial`` with its held-out metric and the state of the run that tries it."""
    run = _sweep_run(trial, experiment, out)
    ended = state(run)
    if ended.kind != DONE:
        return replace(trial, state=ended)

    metric = TASKS[run.task].held_out
    value = float(trained(read_record(run.folder))["values"].get(metric, math.nan))
    if not math.isfinite(value):
        return replace(trial, state=State(DIVERGED, detail=f"{metric} is not finite"))
    return replace(trial, held_out=value, state=ended)
