"""From a table and the command line to cells and runs, and from the folders of runs to results."""

import fcntl
import itertools
import json
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fairseq_rskip.errors import UserError, did_you_mean

from .records import DONE, FAILED, NEW, RUNNING, STOPPED, Cell, Result, Row, Run, Table, clean, dashed
from .tasks import TASKS
from .yaml_file import find, load

LENGTHS = {"max-update": "warmup-updates", "max-epoch": "warmup-updates", "iterations": "warmup-iterations"}
RECORD, LOG, LOCK = "run.json", "log.txt", "run.lock"  # in a run's folder


def make_tables(options: Namespace) -> list[Table]:
    """The tables of the command line, with cells and runs. Raises ``UserError`` with a line for each mistake."""
    mistakes, tables = [], []
    for name in dict.fromkeys(options.tables):
        try:
            if (table := load(find(name), mistakes)) is not None:
                tables.append(with_cells(select(table, options), mistakes))
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\nerror: ".join(dict.fromkeys(mistakes)))
    known: dict[Path, Run] = {}
    for run in (run for table in tables for cell in table.cells for _, run in cell.variants):
        other, place = known.setdefault(run.place(Path(), 1), run), TASKS[run.task].place
        if place(other.data) != place(run.data):
            raise UserError(f"{other.data} and {run.data} would share their runs; rename one of the folders")
    return tables


def select(table: Table, options: Namespace) -> Table:
    """``table`` with the rows, columns, seeds, data and options of the command line. Raises ``UserError``."""
    labels = [row.label for row in table.rows]
    for name in [*options.rows, *options.columns]:
        if name not in (known := labels if name in options.rows else [*table.columns]):
            raise UserError(f"no row or column {name!r}; {did_you_mean(name, known)} expected {', '.join(known)}")
    columns = {name: each for name, each in table.columns.items() if name in (options.columns or table.columns)}
    own = {each.data or table.data for each in columns.values()}
    if options.corpus and len(own) > 1:
        raise UserError(f"{table.name} has columns of {', '.join(sorted(own))}: --corpus needs --columns, for one")
    given = {"columns": columns, "rows": [row for row in table.rows if row.label in (options.rows or labels)]}
    given |= {"seeds": list(dict.fromkeys(options.seeds or table.seeds)), "changed": parse_changes(options.set)}
    corpus = TASKS[table.task].find_data(options.corpus) if options.corpus else ""
    return table.model_copy(update={**given, "corpus": corpus})


def parse_changes(words: list[str]) -> dict[str, Any]:
    """``--set`` NAME=VALUE, the values as YAML has them. Raises ``UserError``."""
    changed: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            value = text
        if not name or not equals or not isinstance(value, bool | int | float | str | list) or name in changed:
            raise UserError(f"--set {word}: expected NAME=VALUE, once for each option, such as depth=20")
        changed[name.lstrip("-")] = value
    return dashed(changed)


def with_cells(table: Table, mistakes: list[str]) -> Table:
    """``table`` with its cells and their runs; what a training command would refuse is added to ``mistakes``."""
    cells, warnings, refused = [], [], {}
    for row, name in itertools.product(table.rows, table.columns):
        cell = _cell(table, row, name)
        try:
            cells.append(_with_runs(cell, table, warnings) if cell.run else cell)
        except UserError as error:
            refused.setdefault(str(error).replace(cell.arch or " ", ""), []).append((cell, error))
    for (cell, error), *others in refused.values():
        where = f"row {cell.row.label!r}" + f", column {cell.column!r}" * bool(cell.column)
        more = f" and {len(others)} more" * bool(others) + ", with --set" * bool(table.changed)
        mistakes.append(f"{table.path}, {where}{more}: {error}")
    return table.model_copy(update={"cells": cells, "warnings": list(dict.fromkeys(warnings))})


def _cell(table: Table, row: Row, column: str) -> Cell:
    """The cell without its runs: a row's options win over its column's, these over the table's, --set over all."""
    arch = row.arch.get(column, "") if isinstance(row.arch, dict) else row.arch
    reported = row.reported.get(column) if isinstance(row.reported, dict) else row.reported
    parts = [dashed(part.options) for part in (table, table.columns[column], row)]
    options = {name: value for part in [*parts, table.changed] for name, value in part.items()}
    sweep = dashed(table.sweep if row.sweep is None else row.sweep)
    sweep = {name: values for name, values in sweep.items() if name not in table.changed}
    runs = row.run and bool(arch) == TASKS[table.task].has_architectures
    return Cell(row, column, arch, table.columns[column].data or table.data, options, sweep, reported, runs)


def _with_runs(cell: Cell, table: Table, warnings: list[str]) -> Cell:
    """``cell`` with the run of each combination of its sweep's values. Raises ``UserError``."""
    task, variants = TASKS[table.task], []
    if taken := set(task.reserved) & {*cell.options, *cell.sweep}:
        raise UserError(f"option {taken.pop()!r} cannot be given here: every run gets its own")
    if cell.sweep and not task.has_architectures and not cell.options.get("valid-images"):
        raise UserError("a sweep is decided on held-out images, never on the test set; set valid-images")
    data = table.corpus or (cell.data if cell.data in table.texts else task.find_data(cell.data))
    for values in itertools.product(*cell.sweep.values()):
        swept = dict(zip(cell.sweep, values))
        run, warned = task.make_run(data, cell.arch, {**cell.options, **swept}, table)
        variants.append((swept, replace(run, label=cell.row.label)))
        warnings += warned
    return replace(cell, variants=variants)


def described(table: Table) -> tuple[str, float, str, dict[str, Any]]:
    """How ``table`` differs from its file: a name, the length relative to the file's, other data, other options."""
    task, scale = TASKS[table.task], 1.0
    changed = {name: value for name, value in table.changed.items() if name not in task.free}
    cell = next((cell for cell in table.cells if cell.variants), None)
    if cell and LENGTHS.keys() & changed.keys():
        swept, run = cell.variants[0]
        whole = _cell(table.model_copy(update={"changed": {}}), cell.row, cell.column)
        whole, _ = task.make_run(run.data, run.arch, {**whole.options, **swept}, table)
        if whole.unit == run.unit and whole.length:
            scale = run.length / whole.length
            changed = {k: v for k, v in changed.items() if k not in {*LENGTHS, *LENGTHS.values()}}
    own = {column.data or table.data for column in table.columns.values()}
    data = task.data_name(table.corpus) if table.corpus else ""
    data = "" if data in own | {task.data_name(each) for each in own} else data
    words = [table.name, data, f"scale{scale:g}" * (scale != 1), *(f"{k}-{v}" for k, v in sorted(changed.items()))]
    return clean("-".join(filter(None, words))), scale, data, changed


def at(run: Run, out: Path, seed: int) -> Run:
    """``run`` with a seed, in its folder."""
    return replace(run, seed=seed, folder=run.place(out, seed))


def ready(table: Table, out: Path) -> list[Run]:
    """The runs that can start now, each once, first seeds first; of a sweep that is not decided, all its values."""
    decided = [result.runs for cell in table.cells if (result := collect(table, cell, out)).runs]
    runs = [at(run, out, table.tried) for cell in table.cells if cell.sweep for _, run in cell.variants]
    runs += [by_seed[seed] for seed in table.seeds for by_seed in decided]
    return list({run.folder: run for run in runs}.values())


def read_record(folder: Path) -> dict[str, Any]:
    """The run's record; {} if it is missing or damaged."""
    try:
        return dict(json.loads((folder / RECORD).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """What a finished run gave; {} if it is not finished."""
    metrics = record.get("metrics")
    return metrics if isinstance(metrics, dict) and isinstance(metrics.get("values"), dict) else {}


def state(run: Run) -> str:
    """One of the states of a run, with its progress or its error. Raises ``UserError`` for a run on other data."""
    record, place = read_record(run.folder), TASKS[run.task].place
    was = place(str(record.get("settings", {}).get("data", run.data)))
    if was != place(run.data) and was.is_absolute() and was.exists():  # otherwise the folder was moved
        raise UserError(f"{run.folder} was trained on {was}, not on {run.data}; rename a folder, or give --output")
    failed = f"{FAILED}: {record['failed'].get('error')}" if record.get("failed") else ""
    if measured(record) or not (run.folder / LOCK).exists():  # without a lock: a record out of an archive
        return DONE if measured(record) else failed or NEW
    part, losses = TASKS[run.task].progress(run)
    with open(run.folder / LOCK, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"{RUNNING} {part:.0%}: {losses}"
    return failed or (f"{STOPPED} at {part:.0%}" if (run.folder / LOG).exists() else NEW)


def collect(table: Table, cell: Cell, out: Path) -> Result:
    """What has become of the runs of ``cell``, without comparisons."""
    trials = [_trial(table, swept, run, out) for swept, run in cell.variants] if len(cell.variants) > 1 else []
    done = [number for number, (_, value, _) in enumerate(trials) if value is not None]
    waits = any(value is None and not how.startswith(FAILED) for _, value, how in trials) or (trials and not done)
    if waits or not cell.variants:
        return Result(cell, trials=trials)
    swept, run = cell.variants[min(done, key=lambda number: trials[number][1], default=0)]  # the first of equals
    runs = {seed: at(run, out, seed) for seed in table.seeds}
    states = {seed: state(run) for seed, run in runs.items()}
    records = {seed: measured(read_record(run.folder)) for seed, run in runs.items() if states[seed] == DONE}
    values = {}
    for seed, record in records.items():
        value = record["values"].get(table.metric)
        if isinstance(value, int | float) and math.isfinite(value):
            values[seed] = float(value)
        else:
            states[seed] = f"done, with {table.metric} {'missing' if value is None else 'not finite'}"
    return Result(cell, runs, states, records, values, trials, swept)


def _trial(table: Table, swept: dict[str, Any], run: Run, out: Path) -> tuple[dict[str, Any], float | None, str]:
    """A combination of a sweep's values, its held-out metric or None, and the state of its run."""
    run, metric = at(run, out, table.tried), TASKS[run.task].held_out
    if (now := state(run)) != DONE:
        return swept, None, now
    value = float(measured(read_record(run.folder))["values"].get(metric, math.nan))
    return (swept, value, DONE) if math.isfinite(value) else (swept, None, f"{FAILED}: {metric} is not finite")
