"""From a table and what the command line changes to its cells, each with its runs."""

import itertools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fairseq_rskip.errors import UserError, did_you_mean

from .records import Cell, Result, Run, Table, clean, dashed
from .tasks import TASKS
from .yaml_file import find, load

LENGTHS = {"max-update": "warmup-updates", "max-epoch": "warmup-updates", "iterations": "warmup-iterations"}


def make_tables(options: Namespace) -> list[Table]:
    """The tables of the command line with their cells. Raises ``UserError`` with a line for each mistake."""
    mistakes: list[str] = []
    tables = []
    for name in dict.fromkeys(options.tables):
        if (table := load(find(name), mistakes)) is not None:
            try:
                tables.append(with_cells(select(table, options), mistakes))
            except UserError as error:
                mistakes.append(str(error))
    if mistakes:
        raise UserError("\nerror: ".join(dict.fromkeys(mistakes)))
    return tables


def select(table: Table, options: Namespace) -> Table:
    """``table`` with the rows, columns, seeds, data and options of the command line. Raises ``UserError``."""
    rows = [row for row in table.rows if not options.rows or row.label in options.rows]
    columns = {name: each for name, each in table.columns.items() if not options.columns or name in options.columns}
    known = {"row": [row.label for row in table.rows], "column": list(table.columns)}
    for kind, names in (("row", options.rows), ("column", options.columns)):
        for name in names:
            if name not in known[kind]:
                hint = did_you_mean(name, known[kind])
                raise UserError(f"{table.name} has no {kind} {name!r}; {hint} it has {', '.join(known[kind])}")
    changed = parse_changes(options.set)
    corpus = TASKS[table.task].find_data(options.corpus) if options.corpus else ""
    own = {each.data or table.data for each in columns.values()}
    if corpus and len(own) > 1:
        raise UserError(f"{table.name} has columns of {', '.join(sorted(own))}: --corpus needs --columns, for one")
    seeds = list(dict.fromkeys(options.seeds or table.seeds))
    given = {"rows": rows, "columns": columns, "seeds": seeds, "corpus": corpus, "changed": changed}
    return table.model_copy(update=given)


def parse_changes(words: list[str]) -> dict[str, Any]:
    """``--set`` NAME=VALUE, the values as YAML has them. Raises ``UserError``."""
    changed: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            value = text
        if not name or not equals or not isinstance(value, bool | int | float | str | list):
            raise UserError(f"--set {word}: expected NAME=VALUE, an option without its dashes, such as depth=20")
        if name in changed:
            raise UserError(f"--set {word}: {name} is given twice")
        changed[name] = value
    return dashed(changed)


def with_cells(table: Table, mistakes: list[str]) -> Table:
    """``table`` with its cells and their runs; what a training command would refuse is added to ``mistakes``."""
    cells, warnings, refused = [], [], {}
    for row in table.rows:
        for name, column in table.columns.items():
            arch = row.arch.get(name, "") if isinstance(row.arch, dict) else row.arch
            reported = row.reported.get(name) if isinstance(row.reported, dict) else row.reported
            options = {k: v for part in (table, column, row) for k, v in dashed(part.options).items()} | table.changed
            sweep = dashed(table.sweep if row.sweep is None else row.sweep)
            sweep = {option: values for option, values in sweep.items() if option not in table.changed}
            runs = row.run and (not TASKS[table.task].has_architectures or bool(arch))
            cell = Cell(row, name, arch, column.data or table.data, options, sweep, reported, runs)
            try:
                cells.append(_with_runs(cell, table, warnings) if runs else cell)
            except UserError as error:
                refused.setdefault(str(error).replace(arch or " ", ""), []).append((cell, error))
    for (cell, error), *others in refused.values():
        more = f" and {len(others)} more" if others else ""
        asked = ", with --set" if table.changed else ""
        where = f"row {cell.row.label!r}" + (f", column {cell.column!r}" if cell.column else "")
        mistakes.append(f"{table.path}, {where}{more}{asked}: {error}")
    return table.model_copy(update={"cells": cells, "warnings": list(dict.fromkeys(warnings))})


def _with_runs(cell: Cell, table: Table, warnings: list[str]) -> Cell:
    """``cell`` with the run of each combination of its sweep's values. Raises ``UserError``."""
    task = TASKS[table.task]
    if cell.sweep and not task.has_architectures and not cell.options.get("valid-images"):
        raise UserError("a sweep is decided on held-out images, never on the test set; set valid-images")
    data = table.corpus or (cell.data if cell.data in table.texts else task.find_data(cell.data))
    variants = []
    for values in itertools.product(*cell.sweep.values()):
        swept = dict(zip(cell.sweep, values))
        run, warned = task.make_run(table, cell.arch, data, {**cell.options, **swept})
        variants.append((swept, run))
        warnings += warned
    return replace(cell, variants=variants)


def ready(table: Table, results: list[Result], out: Path) -> list[Run]:
    """The runs that can start now, each once: the first seed of every row comes before the second of any.

    Of a cell with a sweep these are all values with the first seeds; when they are done, the best one with all seeds.
    """
    tried = [run for cell in table.cells if cell.sweep for _, run in cell.variants]
    runs = [at(run, out, seed) for seed in table.tried for run in tried]
    runs += [result.runs[seed] for seed in table.seeds for result in results if result.runs]
    return list({run.folder: run for run in runs}.values())


def at(run: Run, out: Path, seed: int) -> Run:
    """``run`` with a seed, in its folder."""
    return replace(run, seed=seed, folder=run.place(out, seed))


def is_whole(table: Table) -> bool:
    """Whether this is the table as its file has it: its data and options."""
    return not replaced_data(table) and not _matters(table)


def replaced_data(table: Table) -> str:
    """What --corpus has trained on instead of the table's own data, as a name; "" where it is the same."""
    task = TASKS[table.task]
    own = {name for column in table.columns.values() for name in [column.data or table.data]}
    name = task.data_name(table.corpus) if table.corpus else ""
    return "" if name in own | {task.data_name(each) for each in own} else name


def _matters(table: Table) -> dict[str, Any]:
    """--set without what changes no result."""
    free = TASKS[table.task].free
    return {name: value for name, value in table.changed.items() if name not in free}


def described(table: Table) -> tuple[str, float, dict[str, Any]]:
    """A name for the table as it is run, the length of its runs relative to the file's, and what else --set changes."""
    changed, scale = _matters(table), 1.0
    cell = next((cell for cell in table.cells if cell.variants), None)
    if cell and LENGTHS.keys() & changed.keys():
        run = cell.variants[0][1]
        parts = (table, table.columns[cell.column], cell.row)
        length, unit = TASKS[table.task].whole_length(run.data, {k: v for p in parts for k, v in dashed(p.options).items()})
        if unit == run.unit and length:
            scale = run.length / length
            changed = {k: v for k, v in changed.items() if k not in {*LENGTHS, *LENGTHS.values()}}
    words = [table.name, replaced_data(table), f"scale{scale:g}" if scale != 1 else ""]
    words += [f"{name}-{value}" for name, value in sorted(changed.items())]
    return clean("-".join(filter(None, words))), scale, changed
