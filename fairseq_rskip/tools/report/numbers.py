"""A table as numbers: a line for each cell with ours, the paper's, differences, p-values, and what is lacking."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from scipy import stats

from fairseq_rskip.tools.reproduce import plans
from fairseq_rskip.tools.reproduce.plans import Plan
from fairseq_rskip.tools.reproduce.runs import DONE, NEW, Outcome, at_border, collect
from fairseq_rskip.tools.reproduce.tables import Cell, Table, cells

from . import significance
from .significance import LEVEL, Comparison, PairedTests, Untested, load_system

Pair = tuple["Line", "Line"]


@dataclass
class Line:
    """A cell and what has come of it.

    values: of the finished runs, by seed; missing: why the other seeds have no value, state: the same in short
    baseline: the row that it is compared with, "" for none; adjusted: the p-values corrected for their number
    is_base: whether others are compared with it; best, best_paper: whether ours, or the paper's, is its column's best
    """

    outcome: Outcome
    equation: str
    planned: int
    values: dict[int, float]
    missing: str
    state: str
    minus_paper: float | None = None
    minus_baseline: float | None = None
    baseline: str = ""
    comparison: Comparison = Comparison()
    adjusted: Mapping[str, float] = field(default_factory=dict)
    is_base: bool = False
    best: bool = False
    best_paper: bool = False

    @property
    def cell(self) -> Cell:
        return self.outcome.cell

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of a sweep that did best, {} without one."""
        return self.outcome.chosen or {}

    @property
    def border(self) -> list[str]:
        return at_border(self.outcome)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What each finished run recorded."""
        return [self.outcome.metrics[seed] for seed in self.values]

    @property
    def folders(self) -> list[Path]:
        return [self.outcome.runs[seed].folder for seed in self.values]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    def other(self, metric: str) -> list[float]:
        """Another metric than the table's of the finished seeds; [] if one lacks it."""
        values = [each["values"].get(metric) for each in self.metrics]
        return [] if None in values else values


@dataclass
class Result:
    """``table`` as ``plan`` has had it run; ``outdated`` are cells run with other settings than its file has now.

    test: what p-values are of
    lines: column by column; cells that are neither begun nor reported are left out where others are
    idle: by column, the rows to run of which nothing is begun
    """

    plan: Plan
    table: Table
    outdated: list[str]
    test: str
    lines: list[Line] = field(default_factory=list)
    idle: dict[str, list[str]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether this is the table as its file has it: data, length, every option."""
        return self.plan.whole and not self.outdated

    @property
    def data(self) -> list[str]:
        """What was trained on."""
        return list(dict.fromkeys(v.settings.identity["data"] for cell in self.plan.cells for v in cell.variants))

    @property
    def length(self) -> str:
        """Of a run."""
        settings = [variant.settings for cell in self.plan.cells for variant in cell.variants]
        return " / ".join(dict.fromkeys(f"{each.length:,} {each.unit}" for each in settings))


def build(plan: Plan, table: Table, out: Path, tests: PairedTests) -> Result:
    """The numbers of ``plan`` from its runs in ``out``."""
    test = "welch" if table.over_seeds else tests.kind or table.test or "randomisation"
    result = Result(plan, table, plans.outdated(plan, table), test)
    outcomes = {(cell.row, cell.column): collect(plan, cell, out) for cell in plan.cells}
    every = [outcomes.get((cell.row, cell.column), Outcome(cell)) for cell in cells(table)]
    every = [each for each in every if each.cell.run or each.cell.reported is not None]
    shown = [each for each in every if each.begun or each.cell.reported is not None] or every
    for column in table.columns:
        waiting = [each.cell.row for each in every if each.cell.column == column and each.cell.run and not each.begun]
        result.idle.update({column: waiting} if waiting else {})
        lines = [_line(outcome, result) for outcome in shown if outcome.cell.column == column]
        _compare(lines, result, tests)
        _mark_best(lines, table)
        result.lines += lines
    return result


def _line(outcome: Outcome, result: Result) -> Line:
    """The line of a cell, before it is compared with others."""
    values, problems, cell, name = {}, {}, outcome.cell, result.table.metric
    for seed, metrics in outcome.metrics.items():
        value = metrics["values"].get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            values[seed] = float(value)
        else:
            problems[seed] = f"done, with {name} {'not there' if value is None else 'not finite'}"
    planned = len(result.plan.seeds) if cell.variants else 0
    line = Line(outcome, result.table.row(cell.row).equation, planned, values, *_why(outcome, problems))
    if values and result.whole and cell.reported is not None:
        line.minus_paper = line.mean - cell.reported
    return line


def _why(outcome: Outcome, problems: dict[int, str]) -> tuple[str, str]:
    """What keeps the seeds without a value, in full and in short; seeds in the same state together."""
    if not outcome.runs:
        reason = outcome.waits_for_sweep if outcome.trials else NEW if outcome.cell.run else ""
        return reason, reason
    reasons = {seed: str(state) for seed, state in outcome.states.items() if state.name != DONE}
    seeds: dict[str, list[int]] = {}
    for seed, reason in sorted({**reasons, **problems}.items()):
        seeds.setdefault(reason, []).append(seed)
    short = "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in seeds))
    if list(map(len, seeds.values())) == [len(outcome.runs)]:
        return next(iter(seeds)), short
    each = (
        f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} {reason}" for reason, numbers in seeds.items()
    )
    return "; ".join(each), short


def _compare(lines: list[Line], result: Result, tests: PairedTests) -> None:
    """Give ``lines`` their differences to the baseline, p-values, and these corrected for the number of tests."""
    by_label, family = {line.cell.row: line for line in lines}, {}
    for line in lines:
        base = by_label.get(result.table.baseline_of(result.table.row(line.cell.row)), line)
        if base is not line:
            line.baseline, base.is_base = base.cell.row, True
            line.comparison = compare(line, base, result, tests)
            if line.values and base.values:
                line.minus_baseline = line.mean - base.mean
        # the same runs against the same baseline are one test, however many rows they stand in
        family.setdefault((line.baseline, *line.folders), []).append(line)
    adjusted = significance.correct([same[0].comparison for same in family.values()])
    for same, p in zip(family.values(), adjusted):
        for line in same:
            line.adjusted = p


def compare(line: Line, other: Line, result: Result, tests: PairedTests) -> Comparison:
    """Welch's test over seeds, or a test on the test set, seed by seed."""
    if not line.values:
        return Comparison()
    if not other.values:
        return Comparison(reason=f"{other.cell.row}: {other.state or NEW}")
    if line.folders == other.folders:
        return Comparison(reason="same runs")
    if result.test == "welch":
        return significance.welch(list(line.values.values()), list(other.values.values()))
    p, reasons = {}, {}
    for seed in sorted(set(line.values) & set(other.values)):
        runs = [(each.outcome.runs[seed].folder, each.outcome.metrics[seed]) for each in (line, other)]
        try:
            p[str(seed)] = tests.p_value(*(load_system(*run, result.table.metric) for run in runs), result.test)
        except Untested as reason:
            reasons[str(seed)] = str(reason)
    if not p:
        return Comparison(reason="; ".join(dict.fromkeys(reasons.values())) or "no seed in common")
    return Comparison(p, untested=reasons)


def different(lines: Iterable[Line]) -> list[Line]:
    """Those with values; of lines that share their runs the first."""
    found: dict[Any, Line] = {}
    for line in lines:
        if line.values:
            found.setdefault(tuple(line.folders), line)
    return list(found.values())


def _mark_best(lines: list[Line], table: Table) -> None:
    """The best of a column's means, and of the paper's values, where there are several."""
    choose = min if table.lower_is_better else max
    means = [line.mean for line in lines if line.values]
    papers = [line.cell.reported for line in lines if line.cell.reported is not None]
    for line in lines:
        line.best = len(means) > 1 and line.mean == choose(means)
        line.best_paper = len(papers) > 1 and line.cell.reported == choose(papers)


def power(result: Result) -> str:
    """The smallest difference that these seeds would have found, as a sentence; "" where no row has two."""
    samples = [list(line.values.values()) for line in result.lines if len(line.values) > 1]
    deviation = significance.pooled_deviation(samples)
    if not deviation:
        return ""
    seeds = min(map(len, samples))
    found = significance.detectable(deviation, seeds)
    return (
        f"Power: {seeds} seeds a row find a difference of {found:.2g} in {result.table.metric} four times of five, and"
        f" smaller ones less often (Welch's test, two-sided, {LEVEL:.0%}, not corrected; pooled standard"
        f" deviation {deviation:.2g})."
    )


def ordering(result: Result, column: str, tests: PairedTests) -> str:
    """One or two sentences on a column, or "" where fewer than two different rows have both values."""
    lines = different(line for line in result.lines if line.cell.column == column and line.cell.reported is not None)
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.cell.reported != b.cell.reported]
    if not pairs:
        return ""
    kept = [pair for pair in pairs if _order(pair) > 0]
    turned = [pair for pair in pairs if _order(pair) < 0]
    tau = stats.kendalltau([line.cell.reported for line in lines], [line.mean for line in lines]).statistic
    equal = len(pairs) - len(kept) - len(turned)
    shown = f" (Kendall's tau {tau:.2f})".replace("-", "\u2212") if math.isfinite(tau) and len(lines) > 2 else ""
    text = f"of the pairs of rows that the paper tells apart, {len(kept)} of {len(pairs)} stand in its order here"
    text += f", {equal} equal" if equal else ""
    if kept and result.test == "welch":  # paired tests of so many would take an hour
        beyond = sum(compare(*pair, result, tests).beyond_noise for pair in kept)
        shown += f"; {beyond} of those in order are beyond the noise (p < {LEVEL}, uncorrected)"
    partial = " Some of these rows lack seeds." if any(len(line.values) < line.planned for line in lines) else ""
    start = f"Ordering, {column}" if column else "Ordering"
    return f"{start}: {text}{shown}.{partial}{_turned(turned, result, tests)}"


def _order(pair: Pair) -> float:
    """Above 0 where ours differ in the direction in which the paper's do."""
    return (pair[0].cell.reported - pair[1].cell.reported) * (pair[0].mean - pair[1].mean)


def _turned(pairs: list[Pair], result: Result, tests: PairedTests) -> str:
    """What is to be said of the pairs that stand the other way round."""
    if not pairs:
        return ""
    results = [(pair, compare(*pair, result, tests)) for pair in pairs]
    beyond = [_better_first(pair, result) for pair, test in results if test.beyond_noise]
    untested = sum(not test.p for _, test in results)
    within = len(pairs) - len(beyond) - untested
    parts = [f"beyond the noise (p < {LEVEL}, uncorrected) {', '.join(beyond)}"] if beyond else []
    parts += [f"within the noise {within}"] if within else []
    parts += [f"not to be tested with these runs {untested}"] if untested else []
    return f" The other way round: {'; '.join(parts)}."


def _better_first(pair: Pair, result: Result) -> str:
    better, worse = sorted(pair, key=lambda line: line.mean, reverse=not result.table.lower_is_better)
    return f"{better.cell.row} better than {worse.cell.row}"


def options(given: Mapping[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in given.items())
