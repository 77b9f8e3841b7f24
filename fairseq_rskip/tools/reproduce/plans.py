"""A table as it is run: with which data, at which scale, with which changes and seeds, and which runs that takes.

Runs are told apart by their settings, not by the table that asks for them: a row that several tables share is trained
once. OUT/plans/<name>.json keeps what was asked for, and the table; OUT/runs/<name>/seed<n> is a run.
"""

import dataclasses
import hashlib
import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dacite

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json

from . import images, loading, translation
from .tables import Cell, Options, Settings, StandIn, Table, Variant, cells
from .yaml_files import Mistakes

TASKS = {"images": images, "translation": translation}
RUNS = "runs"
PLANS = "plans"


@dataclass(frozen=True)
class Run:
    """One run: ``settings`` of its task, and the ``seed``, in ``folder``."""

    task: str
    settings: Settings
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def commands(self) -> list[list[str]]:
        return TASKS[self.task].commands(self.settings, self.seed, self.folder)


@dataclass
class Plan:
    """``table`` with the data ``data`` ("" for its own), ``scale`` times its length, and ``changed`` in every row.

    cells: those that are run with ``seeds``, each with its variants
    stand_in: the options that came with the data
    """

    name: str
    table: Table
    data: str
    scale: float
    changed: Options
    seeds: list[int]
    stand_in: Options = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether this is the table as its file has it: its data, its length, its options."""
        return self.scale == 1 and not self.data and not self.changed and not self.stand_in


def make_plan(
    table: Table, stand_in: StandIn, data: str, scale: float, changed: Options, seeds: list[int], chosen: list[Cell]
) -> Plan:
    """The plan to run ``chosen`` cells of ``table``; ``data`` is "" for the table's own. Raises ``UserError``."""
    task = TASKS[table.task]
    wanted = {cell.data for cell in chosen}
    if data and len(wanted) > 1:
        named = ", ".join(sorted(wanted))
        raise UserError(f"{table.name} has columns of {named}: --corpus needs --columns, for one of them")
    # the table's own data, wherever it lies, stands in for nothing
    same = data and all(task.data_name(data) in (own, task.data_name(_own_data(table, own))) for own in wanted)
    replaced = "" if same else data
    matters = {option: value for option, value in changed.items() if option not in task.FREE}
    seeds, name = list(dict.fromkeys(seeds)), _name(table, replaced, scale, matters)
    plan = Plan(name, table, replaced, scale, matters, seeds, stand_in.options)
    refused: dict[str, list[tuple[Cell, UserError]]] = {}
    for cell in chosen:
        try:
            plan.cells.append(_with_variants(plan, cell, stand_in, data, changed))
        except UserError as error:
            told = str(error).replace(cell.arch or " ", "")  # one mistake, whatever the architecture
            refused.setdefault(told, []).append((cell, error))
    Mistakes(_refusal(plan, *bad[0], len(bad) - 1) for bad in refused.values()).refuse()
    return plan


def _refusal(plan: Plan, cell: Cell, error: UserError, more: int) -> str:
    """A mistake in ``cell`` and ``more`` others."""
    where = f"{'--set, for ' if plan.changed else ''}{plan.table.path}, row {cell.row!r}"
    where += f", column {cell.column!r}" if cell.column else ""
    return f"{where}{f' and {more} more' if more else ''}: {error}"


def _own_data(table: Table, named: str) -> str:
    """What a table names, as its tool takes it; text of one's own need not be prepared. Raises ``UserError``."""
    return named if named in table.corpora else TASKS[table.task].find_data(named)


def _with_variants(plan: Plan, cell: Cell, stand_in: StandIn, data: str, changed: Options) -> Cell:
    """``cell`` with the settings of each combination of values that its sweep has; an option of --set is not swept.

    Raises ``UserError``.
    """
    variants = []
    sweep = {name: values for name, values in cell.sweep.items() if name not in changed}
    for values in itertools.product(*sweep.values()):
        swept = dict(zip(sweep, values))
        tried = dataclasses.replace(cell, options={**cell.options, **swept})
        own = data or _own_data(plan.table, cell.data)
        settings = TASKS[plan.table.task].settings(tried, own, stand_in, plan.scale, changed)
        variants.append(Variant(swept, settings))
    return dataclasses.replace(cell, variants=variants)


def choose_cells(table: Table, rows: list[str], columns: list[str]) -> list[Cell]:
    """The cells to run of the named rows and columns, or of all, and those that the same runs fill.

    Raises ``UserError`` for a name that the table does not have.
    """
    labels = [row.label for row in table.rows if row.run]
    for kind, names, known in (("row", rows, labels), ("column", columns, list(table.columns))):
        for name in names:
            if name not in known:
                raise UserError(f"{table.name} has no {kind} {name!r} to run; it has {', '.join(known)}")
    every = [cell for cell in cells(table) if cell.run]
    chosen = [cell for cell in every if (not rows or cell.row in rows) and (not columns or cell.column in columns)]
    if not chosen:
        raise UserError(f"{table.name} has nothing to run there: these rows and columns only quote figures")
    return [cell for cell in every if any(cell.is_twin(other) for other in chosen)]


def check_data(plan: Plan) -> None:
    """Raise ``UserError`` for data that is not prepared: every run would fail by it."""
    for data in dict.fromkeys(variant.settings.data for cell in plan.cells for variant in cell.variants):
        try:
            TASKS[plan.table.task].check_data(data)
        except UserError as error:
            own = f"; rskip run {plan.table.path} prepares it" if data in plan.table.corpora else ""
            raise UserError(f"{plan.table.name} cannot run: {error}{own}") from None


def make_run(plan: Plan, variant: Variant, seed: int, out: Path) -> Run:
    """The run of ``variant``, in OUT/runs/<what it is>-<hash of its settings>/seed<n>."""
    task, settings = plan.table.task, variant.settings
    digest = hashlib.sha256(json.dumps([task, settings.identity], sort_keys=True).encode()).hexdigest()[:8]
    return Run(task, settings, seed, out / RUNS / f"{_clean(settings.name)}-{digest}" / f"seed{seed}")


def outdated(plan: Plan, table: Table) -> list[str]:
    """The cells that were run with other settings than ``table``, its file of today, asks for."""
    now = {(cell.row, cell.column): cell for cell in cells(table)}
    return [str(cell) for cell in plan.cells if not cell.is_twin(now.get((cell.row, cell.column)))]


def save(plan: Plan, out: Path) -> None:
    """Add ``plan`` to those in OUT: cells and seeds asked for earlier, under the same name, stay.

    Raises ``UserError`` if the earlier one is of another file's table.
    """
    path = out / PLANS / f"{plan.name}.json"
    with locked(path.parent, wait=True):
        earlier = load(path) if path.exists() else plan
        there = Path(earlier.table.path)
        if there != Path(plan.table.path) and there.exists():
            said = f"{out} has runs of a table {plan.table.name} from {there}"
            raise UserError(f"{said}; rename one, or choose another --output")
        seeds = [*earlier.seeds, *(seed for seed in plan.seeds if seed not in earlier.seeds)]
        found = {(cell.row, cell.column): cell for cell in (*earlier.cells, *plan.cells)}
        write_json(path, dataclasses.asdict(dataclasses.replace(plan, seeds=seeds, cells=list(found.values()))))


def load(path: Path) -> Plan:
    """A plan that ``save`` wrote. Raises ``UserError``."""
    try:
        return dacite.from_dict(Plan, json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, dacite.DaciteError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"cannot read the plan {path}: {reason}; remove it and run again: its runs stay") from None


def load_all(out: Path) -> list[Plan]:
    """Every plan in OUT, sorted by name. Raises ``UserError``."""
    return [load(path) for path in sorted((out / PLANS).glob("*.json"))]


def current_table(plan: Plan, warn: Any) -> Table:
    """The plan's table as its file has it today; as it was when it was run where that is gone or cannot be read."""
    if not Path(plan.table.path).exists():
        return plan.table
    try:
        return loading.load(Path(plan.table.path))
    except UserError as error:
        warn(f"warning: {plan.name} is shown as it was run: {str(error).splitlines()[0]}")
        return plan.table


def _name(table: Table, data: str, scale: float, changed: Options) -> str:
    """Two plans have one name only if they are one: what cannot stand in a file's name counts by its hash."""
    words = [table.name, TASKS[table.task].data_name(data) if data else "", f"scale{scale}" if scale != 1 else ""]
    words += [f"{name}-{value}" for name, value in sorted(changed.items())]
    whole = "-".join(filter(None, words))
    name = _clean(whole)
    return name if name == whole else f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:150]
