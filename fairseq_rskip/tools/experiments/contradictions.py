"""Mistakes in a table that no single key shows: unknown names, duplicates, contradictory keys."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fairseq_rskip.errors import did_you_mean

from .records import Row, Table, dashed
from .tasks import TASKS


class Reference(NamedTuple):
    """A name in a file that must be one of ``known``; ``where`` begins the message about it."""

    where: str
    name: str
    known: Collection[str]


def contradictions(table: Table, task: str, metric: str, baseline: str) -> Iterator[str]:
    """Yield the mistakes, each as the text after the file's name in a message."""
    for number in range(1, len(table.rows) + 1):
        yield from _in_row(table, number, task)

    for where, name, known in _references(table, task, metric, baseline):
        if name not in known:
            expected = f"expected one of {', '.join(known)}"
            yield f"{where} is {name!r}; {did_you_mean(name, known, expected)}"

    for name, column in table.columns.items():
        for mistake in _in_sweep_of(table, column):
            yield f", column {name!r}: {mistake}"

    for name, values in _lists(table):
        if len(set(values)) < len(values):
            yield f": {name} has the values {values}; expected different ones"


def _name_of(number: int, row: Row) -> str:
    return f", row {number} ({row.label!r}): "


def _in_row(table: Table, number: int, task_name: str) -> Iterator[str]:
    """Yield the mistakes in the row of this number, which counts from 1."""
    row = table.rows[number - 1]
    where = _name_of(number, row)

    earlier = [other.label for other in table.rows[: number - 1]]
    if row.label in earlier:
        yield f"{where}row {earlier.index(row.label) + 1} has that label, too"

    task = TASKS.get(task_name)
    if task and row.run and bool(row.arch) != task.has_architectures:
        if row.arch:
            yield f"{where}images take no 'arch'; expected a rule in 'options', as skip-kind: xskip"
        else:
            alone = f"or '- {row.label}' alone for that row of rows_from"
            yield f"{where}expected 'arch', 'run: false', {alone}"

    if isinstance(row.reported, int | float) and len(table.columns) > 1:
        columns = ", ".join(table.columns)
        yield f"{where}reported is {row.reported}; expected a mapping from the columns {columns}"


def _in_sweep_of(table: Table, column: Table.Column) -> Iterator[str]:
    """Yield what is wrong with a column's ``sweep_of`` and ``scale``."""
    swept: dict[str, list[Any]] = {}
    for part in [table, *table.rows]:
        for name, values in dashed(part.sweep or {}).items():
            swept.setdefault(name, []).extend(values)

    if column.scale and not column.sweep_of:
        yield "scale needs sweep_of, the column whose choice is scaled"
    if column.sweep_of and not swept:
        yield "sweep_of needs a sweep, of the table or of its rows"
    for row in table.rows:
        if column.sweep_of and isinstance(row.arch, dict) and column.sweep_of not in row.arch:
            yield f"sweep_of {column.sweep_of!r}, where the row {row.label!r} has no arch"
    if swept:
        yield from _in_scale(table, column, swept)


def _in_scale(table: Table, column: Table.Column, swept: dict[str, list[Any]]) -> Iterator[str]:
    """Yield what is wrong with a column's ``scale``; ``swept``: name -> the values tried."""
    for name in dashed(column.scale):
        if name not in swept:
            yield f"scale has {name!r}, which is not swept; expected one of {', '.join(swept)}"
            continue
        if not all(isinstance(value, int | float) for value in swept[name]):
            yield f"scale has {name!r}, whose values are not all numbers"
        for row in table.rows:
            if row.run and row.sweep is not None and name not in dashed(row.sweep):
                yield f"scale has {name!r}, which the row {row.label!r} does not sweep"


def _references(table: Table, task: str, metric: str, baseline: str) -> Iterator[Reference]:
    """Yield the task, the metrics, and the columns and baselines that rows name."""
    yield Reference(": task", task, TASKS)
    if task in TASKS:
        yield Reference(": metric", metric, TASKS[task].metrics)
        for name in table.also:
            yield Reference(": also", name, TASKS[task].metrics)

    for name, column in table.columns.items():
        if column.sweep_of:
            where = f", column {name!r}: sweep_of"
            swept = [other for other, each in table.columns.items() if not each.sweep_of]
            yield Reference(where, column.sweep_of, swept)

    labels = [row.label for row in table.rows]
    if baseline:
        yield Reference(": baseline", baseline, labels)
    for number in range(1, len(table.rows) + 1):
        yield from _references_of_row(table, number, labels)


def _references_of_row(table: Table, number: int, labels: list[str]) -> Iterator[Reference]:
    """Yield the columns and the baseline of the row of this number, which counts from 1."""
    row = table.rows[number - 1]
    where = _name_of(number, row)
    for by_column in (row.arch, row.reported):
        names = by_column if isinstance(by_column, dict) else {}
        for name in names:
            yield Reference(f"{where}a column", name, [*table.columns])
    if row.baseline:
        yield Reference(f"{where}baseline", row.baseline, labels)


def _lists(table: Table) -> list[tuple[str, list[Any]]]:
    """The seeds and the values of sweeps, by name."""
    lists: list[tuple[str, list[Any]]] = [("seeds", table.seeds)]
    for part in [table, *table.rows]:
        if part.sweep:
            lists += part.sweep.items()
    for row in table.rows:
        if row.seeds:
            lists.append(("seeds", row.seeds))
    return lists
