"""What has come of a plan: for every cell of its table the runs, their states, and the values of finished ones."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Tuple

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import plans, runs
from fairseq_rskip.tools.reproduce.plans import Job, Plan
from fairseq_rskip.tools.reproduce.runs import DONE, State
from fairseq_rskip.tools.reproduce.tables import Cell, StandIn, Table, cells


@dataclass(frozen=True)
class CellResult:
    """A cell with, by seed, its runs' folders, states, and the content of metrics.json where a run is done.

    A cell that is not planned, or only quotes a figure, has none.
    """

    cell: Cell
    folders: Dict[int, Path]
    states: Dict[int, State]
    metrics: Dict[int, Dict[str, Any]]

    def values(self, metric: str) -> Dict[int, float]:
        """The value of ``metric`` by seed, of the runs that are done."""
        return {seed: content["values"][metric] for seed, content in self.metrics.items()}


@dataclass(frozen=True)
class TableResult:
    """A ``table`` as ``plan`` has it run; ``cells`` by row and column; ``length`` says how long a run is.

    outdated: the cells that were run with other settings than the table's file has now
    """

    table: Table
    plan: Plan
    cells: Dict[Tuple[str, str], CellResult]
    data: List[str]
    length: List[str]
    outdated: List[str] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether this is the table as its file has it: data, length, every option."""
        return self.plan.whole and not self.outdated


def collect(plan: Plan, table: Table, out: Path, compare: bool = True) -> TableResult:
    """Read the state of every run of ``plan`` in ``out``; ``compare`` its settings with the table's file of today."""
    task = plans.TASKS[table.task]
    found, data, lengths, outdated = {}, [], [], []
    for cell in cells(table):
        settings = plan.settings.get((cell.row, cell.column))
        folders, states, metrics = {}, {}, {}
        for seed in plan.seeds if settings else ():
            folders[seed] = plans.run_folder(out, table.task, settings, seed)
            states[seed] = runs.state(Job(table.task, settings, seed, folders[seed]))
            if states[seed].name == DONE:
                metrics[seed] = runs.metrics(folders[seed])
        if settings:
            if compare and not _is_current(plan, table, cell, settings):
                outdated.append(" / ".join(filter(None, [cell.row, cell.column])))
            data.append(task.identity(settings)["data"])
            lengths.append(task.length(settings))
        found[cell.row, cell.column] = CellResult(cell, folders, states, metrics)
    return TableResult(table, plan, found, list(dict.fromkeys(data)), list(dict.fromkeys(lengths)), outdated)


def _is_current(plan: Plan, table: Table, cell: Cell, settings: Dict[str, Any]) -> bool:
    task, stand_in = plans.TASKS[table.task], StandIn(table.task, "", plan.stand_in, plan.updates)
    try:
        now = task.settings(cell, settings["data"], stand_in, plan.scale, plan.changed)
    except UserError:
        return False
    same_data = bool(plan.data) or task.is_data(settings["data"], cell.data)
    return same_data and task.identity(now) == task.identity(settings)
