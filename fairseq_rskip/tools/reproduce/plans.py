"""A table as it is run: with which data, at which scale, with which changes and seeds, and which runs that takes.

Runs are told apart by their settings, not by the table that asks for them: a row that several tables share is trained
once. OUT/plans/<name>.json keeps what was asked for, OUT/runs/<name>/seed<n> is a run.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools.reproduce import images, translation
from fairseq_rskip.tools.reproduce.tables import Cell, Options, StandIn, Table, cells

TASKS = {"images": images, "translation": translation}
RUNS = "runs"
PLANS = "plans"


@dataclass(frozen=True)
class Job:
    """One run: ``settings`` of its task, and the ``seed``, in ``folder``."""

    task: str
    settings: Dict[str, Any]
    seed: int
    folder: Path

    def commands(self) -> List[List[str]]:
        return TASKS[self.task].commands(self.settings, self.seed, self.folder)


@dataclass
class Plan:
    """``table`` with the data ``data``, ``scale`` times its length, and options ``changed`` in every row.

    Of the cells, those of ``chosen`` are run, (row, column) pairs, with ``seeds``; ``settings`` holds theirs.
    """

    table: str
    data: str
    scale: float
    changed: Options
    seeds: List[int]
    name: str
    settings: Dict[Tuple[str, str], Dict[str, Any]] = field(default_factory=dict)
    stand_in: Options = field(default_factory=dict)
    updates: int = 0  # the stand-in's

    @property
    def whole(self) -> bool:
        """Whether this is the table as the paper has it: its data, its length, its options."""
        return self.scale == 1 and not self.data and not self.changed and not self.stand_in


def make_plan(
    table: Table, stand_in: StandIn, data: str, scale: float, changed: Options, seeds: List[int], chosen: List[Cell]
) -> Plan:
    """The plan to run ``chosen`` cells of ``table``; ``data`` is "" for the table's own. Raises ``UserError``."""
    task = TASKS[table.task]
    wanted = {cell.data for cell in chosen}
    if data and len(wanted) > 1:
        raise UserError(
            f"{table.name} has columns of {', '.join(sorted(wanted))}: --corpus needs --columns, for one of them"
        )
    replaces = bool(data) and not all(task.is_data(data, own) for own in wanted)
    matters = {option: value for option, value in changed.items() if not task.is_free(option)}
    plan = Plan(table.name, data if replaces else "", scale, matters, list(dict.fromkeys(seeds)), "")
    plan.name, plan.stand_in, plan.updates = _name(table, plan.data, scale, matters), stand_in.options, stand_in.updates
    for cell in chosen:
        where = f"{table.path}, row {cell.row!r}" + (f", column {cell.column!r}" if cell.column else "")
        try:
            own = data or task.find_data(cell.data)
            settings = task.settings(cell, own, stand_in, scale, {})
            if changed:
                where = f"--set, for {where}"
                settings = task.settings(cell, own, stand_in, scale, changed)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        plan.settings[cell.row, cell.column] = settings
    return plan


def with_twins(table: Table, chosen: List[Cell]) -> List[Cell]:
    """``chosen``, and the cells of ``table`` that the same runs fill."""
    return [cell for cell in cells(table) if any(is_twin(cell, other) for other in chosen)]


def is_twin(cell: Cell, other: Cell) -> bool:
    """Whether two cells of a table ask for the same run."""
    return cell.run and (cell.arch, cell.options, cell.data) == (other.arch, other.options, other.data)


def check_data(plan: Plan, task: str) -> None:
    """Raise ``UserError`` for data that is not prepared: every run would fail by it."""
    for data in dict.fromkeys(settings["data"] for settings in plan.settings.values()):
        try:
            TASKS[task].check_data(data)
        except UserError as error:
            raise UserError(f"{plan.table} cannot run: {error}") from None


def choose_cells(table: Table, rows: List[str], columns: List[str]) -> List[Cell]:
    """The cells to run of the named rows and columns, or of all. Raises ``UserError`` for a name it does not have."""
    for kind, names, known in (
        ("row", rows, [row.label for row in table.rows if row.run]),
        ("column", columns, list(table.columns)),
    ):
        for name in names:
            if name not in known:
                raise UserError(f"{table.name} has no {kind} {name!r} to run; it has {', '.join(known)}")
    chosen = [
        cell
        for cell in cells(table)
        if cell.run and (not rows or cell.row in rows) and (not columns or cell.column in columns)
    ]
    if not chosen:
        raise UserError(f"{table.name} has nothing to run there: these rows and columns only quote figures")
    return with_twins(table, chosen)


def jobs(plan: Plan, task: str, out: Path) -> Iterator[Job]:
    """The plan's runs, each once, seed by seed: the first seed of every row comes before the second of any."""
    seen = set()
    for seed in plan.seeds:
        for settings in plan.settings.values():
            job = Job(task, settings, seed, run_folder(out, task, settings, seed))
            if job.folder not in seen:
                seen.add(job.folder)
                yield job


def run_folder(out: Path, task: str, settings: Dict[str, Any], seed: int) -> Path:
    """OUT/runs/<what it is>-<hash of its settings>/seed<n>."""
    identity = TASKS[task].identity(settings)
    digest = hashlib.sha256(json.dumps([task, identity], sort_keys=True).encode()).hexdigest()[:8]
    return out / RUNS / f"{_clean(TASKS[task].slug(settings))}-{digest}" / f"seed{seed}"


def save(plan: Plan, out: Path) -> None:
    """Add ``plan`` to those in OUT: cells and seeds asked for earlier, under the same name, stay."""
    folder = out / PLANS
    path = folder / f"{plan.name}.json"
    with locked(folder, wait=True):
        earlier = load(path) if path.exists() else plan
        seeds = [*earlier.seeds, *(seed for seed in plan.seeds if seed not in earlier.seeds)]
        settings = {**earlier.settings, **plan.settings}
        content = dataclasses.asdict(dataclasses.replace(plan, seeds=seeds, settings={}))
        content["settings"] = [[row, column, value] for (row, column), value in settings.items()]
        write_json(path, content)


def load(path: Path) -> Plan:
    """A plan that ``save`` wrote. Raises ``UserError``."""
    try:
        content = json.loads(path.read_text("utf-8"))
        content["settings"] = {(row, column): value for row, column, value in content["settings"]}
        return Plan(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot read the plan {path}: {error}; remove it and run again: its runs stay") from None


def load_all(out: Path) -> List[Plan]:
    """Every plan in OUT, sorted by name."""
    return [load(path) for path in sorted((out / PLANS).glob("*.json"))]


def _name(table: Table, data: str, scale: float, changed: Options) -> str:
    """Two plans have one name only if they are one: what cannot stand in a file's name counts by its hash."""
    words = [table.name, TASKS[table.task].data_name(data) if data else "", f"scale{scale}" if scale != 1 else ""]
    words += [f"{name}-{value}" for name, value in sorted(changed.items())]
    whole = "-".join(filter(None, words))
    name = _clean(whole)
    return name if name == whole else f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:150]
