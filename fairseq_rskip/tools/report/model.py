"""A table as numbers: per row and column ours, the paper's, both differences and p-values; and why a cell has none."""

import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fairseq_rskip.tools.report import significance
from fairseq_rskip.tools.report.paired import PairedTests, Untested, load_system
from fairseq_rskip.tools.report.significance import Comparison
from fairseq_rskip.tools.reproduce.plans import TASKS
from fairseq_rskip.tools.reproduce.results import CellResult, TableResult
from fairseq_rskip.tools.reproduce.runs import DONE, NEW
from fairseq_rskip.tools.reproduce.tables import Table


@dataclass(frozen=True)
class Line:
    """A row in one column of the table. ``values`` are by seed, finished ones; ``planned`` is how many seeds there are.

    baseline: the label of the row that it is compared with, "" for itself or none
    missing: what keeps the other seeds, each with its state: "seed 2 failed: out of memory"
    states: the same in one or two words
    best, best_reported: whether no row of the column is better, of ours and of the paper's
    """

    label: str
    equation: str
    column: str
    reported: Optional[float]
    values: Dict[int, float]
    planned: int
    folders: Dict[int, Path]
    metrics: Dict[int, Dict[str, Any]]
    missing: str = ""
    states: str = ""
    baseline: str = ""
    minus_paper: Optional[float] = None
    minus_baseline: Optional[float] = None
    comparison: Comparison = field(default_factory=Comparison)
    adjusted: Dict[str, float] = field(default_factory=dict)
    best: bool = False
    best_reported: bool = False

    @property
    def mean(self) -> Optional[float]:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> Optional[float]:
        """The sample's standard deviation, of two seeds or more."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Group:
    """One column of the table: a line a row. ``data`` is what the paper trained on there."""

    title: str
    data: str
    lines: List[Line]


def build(result: TableResult, tests: PairedTests) -> List[Group]:
    """The numbers of ``result``, column by column."""
    groups = []
    for name, column in result.table.columns.items():
        lines = [_line(result, result.cells[row.label, name]) for row in result.table.rows]
        lines = [line for line in lines if line.planned or line.missing or line.reported is not None]
        lines = _compare(lines, result.table, tests)
        groups.append(Group(name, column.data or result.table.data, _mark_best(lines, result.table)))
    return groups


def _line(result: TableResult, found: CellResult) -> Line:
    table, cell = result.table, found.cell
    values, problems = {}, {}
    for seed, metrics in found.metrics.items():
        value = metrics.get("values", {}).get(table.metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            values[seed] = float(value)
        else:
            problems[seed] = f"done, with {table.metric} {'not there' if value is None else 'not finite'}"
    missing, states = _why(found, problems)
    row = table.row(cell.row)
    line = Line(
        label=cell.row,
        equation=row.equation,
        column=cell.column,
        reported=cell.reported,
        values=values,
        planned=len(found.folders),
        folders={seed: found.folders[seed] for seed in values},
        metrics={seed: found.metrics[seed] for seed in values},
        missing=missing,
        states=states,
    )
    if values and result.whole and cell.reported is not None:
        return replace(line, minus_paper=line.mean - cell.reported)
    return line


def _why(found: CellResult, problems: Dict[int, str]) -> Tuple[str, str]:
    """What keeps the seeds without a value, in full and in short; seeds in the same state together."""
    if not found.folders:
        return (NEW, NEW) if found.cell.run else ("", "")
    reasons = {seed: str(state) for seed, state in found.states.items() if state.name != DONE}
    reasons.update(problems)
    seeds: Dict[str, List[int]] = {}
    for seed, reason in sorted(reasons.items()):
        seeds.setdefault(reason, []).append(seed)
    if len(seeds) == 1 and len(reasons) == len(found.folders):
        full = next(iter(seeds))
        return full, full.partition(":")[0]
    full = "; ".join(f"seed{'s' * (len(s) > 1)} {', '.join(map(str, s))} {reason}" for reason, s in seeds.items())
    return full, "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in seeds))


def _compare(lines: List[Line], table: Table, tests: PairedTests) -> List[Line]:
    """``lines`` with their differences to the baseline, p-values, and these corrected for the number of tests."""
    by_label = {line.label: line for line in lines}
    compared, seen = [], {}
    for line in lines:
        name = table.baseline_of(table.row(line.label))
        base = by_label.get(name)
        if base is not None and name != line.label:
            comparison = compare(line, base, table, tests)
            difference = line.mean - base.mean if line.values and base.values else None
            line = replace(line, baseline=name, comparison=comparison, minus_baseline=difference)
        compared.append(line)
        # the same runs against the same baseline are one test, however many rows they stand in
        seen.setdefault(_test_name(line), line.comparison)
    adjusted = significance.correct(seen)
    return [replace(line, adjusted=adjusted[_test_name(line)]) for line in compared]


def _test_name(line: Line) -> str:
    return f"{line.baseline} {sorted(map(str, line.folders.values()))}"


def compare(line: Line, other: Line, table: Table, tests: PairedTests) -> Comparison:
    """The test of the table's task: over seeds for images, on the test set, seed by seed, for translation."""
    if not line.planned or not line.values:
        return Comparison()
    if not other.values:
        return Comparison(reason=f"{other.label}: {other.states or NEW}")
    if line.folders == other.folders:
        return Comparison(reason="same runs")
    if table.task == "images":
        return significance.welch(list(line.values.values()), list(other.values.values()))
    p, reasons = {}, {}
    for seed in sorted(set(line.values) & set(other.values)):
        try:
            systems = [load_system(each.folders[seed], each.metrics[seed], table.metric) for each in (line, other)]
            p[str(seed)] = tests.p_value(*systems)
        except Untested as reason:
            reasons[str(seed)] = str(reason)
    if not p:
        return Comparison(reason="; ".join(dict.fromkeys(reasons.values())) or "no seed in common")
    return Comparison(p, untested=reasons)


def _mark_best(lines: List[Line], table: Table) -> List[Line]:
    choose = min if TASKS[table.task].LOWER_IS_BETTER else max
    ours = [line.mean for line in lines if line.values]
    papers = [line.reported for line in lines if line.reported is not None]
    return [
        replace(
            line,
            best=len(ours) > 1 and bool(line.values) and line.mean == choose(ours),
            best_reported=len(papers) > 1 and line.reported == choose(papers),
        )
        for line in lines
    ]
