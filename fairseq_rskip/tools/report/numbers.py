"""A table as numbers, a data frame with a line for each cell: ours, the paper's, differences, p-values, what lacks."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pandas as pd

from fairseq_rskip.tools.reproduce import plans
from fairseq_rskip.tools.reproduce.plans import Plan
from fairseq_rskip.tools.reproduce.results import Outcome, at_border, collect
from fairseq_rskip.tools.reproduce.runs import DONE, NEW
from fairseq_rskip.tools.reproduce.tables import Table, cells

from . import significance
from .paired import PairedTests, Untested, load_system
from .significance import Comparison

Line = Any  # a row of ``Result.frame`` as itertuples() gives it; ``COLUMNS`` are its fields
COLUMNS = (
    "label equation column paper planned values metrics folders missing states trials chosen border baseline comparison"
    " adjusted mean deviation minus_paper minus_baseline best best_paper"
).split()


@dataclass(frozen=True)
class Result:
    """``table`` as ``plan`` has had it run; ``outdated`` are cells run with other settings than its file has now.

    data, length: of the runs; frame: a line for each cell, column by column (``COLUMNS``)
    """

    plan: Plan
    table: Table
    outdated: List[str]
    data: List[str]
    length: List[str]
    test: str
    frame: pd.DataFrame

    @property
    def whole(self) -> bool:
        """Whether this is the table as its file has it: data, length, every option."""
        return self.plan.whole and not self.outdated

    @property
    def lines(self) -> List[Line]:
        return list(self.frame.itertuples(index=False))

    @property
    def groups(self) -> List[Tuple[str, List[Line]]]:
        """The lines column by column."""
        found = ((name, [line for line in self.lines if line.column == name]) for name in self.table.columns)
        return [(name, lines) for name, lines in found if lines]


def build(plan: Plan, table: Table, out: Path, tests: PairedTests) -> Result:
    """The numbers of ``plan`` from its runs in ``out``."""
    settings = [variant.settings for cell in plan.cells for variant in cell.variants]
    outdated = plans.outdated(plan, table)
    whole = plan.whole and not outdated
    outcomes = {(cell.row, cell.column): collect(plan, cell, out) for cell in plan.cells}
    found, test = [], "welch" if table.over_seeds else tests.kind or table.test or "randomisation"
    for column in table.columns:
        outcome_of = [outcomes.get((cell.row, column), Outcome(cell)) for cell in cells(table) if cell.column == column]
        lines = [_line(outcome, table, whole, len(plan.seeds)) for outcome in outcome_of]
        lines = [line for line in lines if line["planned"] or line["missing"] or line["paper"] is not None]
        _compare(lines, table, tests, test)
        _mark_best(lines, table)
        found += lines
    return Result(
        plan,
        table,
        outdated,
        list(dict.fromkeys(each.identity["data"] for each in settings)),
        list(dict.fromkeys(f"{each.length:,} {each.unit}" for each in settings)),
        test,
        pd.DataFrame(found, columns=COLUMNS, dtype=object),
    )


def _line(outcome: Outcome, table: Table, whole: bool, seeds: int) -> Dict[str, Any]:
    """``values`` are by seed, finished ones; ``missing`` says what keeps the others, ``states`` the same in short."""
    cell, values, problems = outcome.cell, {}, {}
    for seed, metrics in outcome.metrics.items():
        value = metrics["values"].get(table.metric)
        if isinstance(value, (int, float)) and math.isfinite(value):
            values[seed] = float(value)
        else:
            problems[seed] = f"done, with {table.metric} {'not there' if value is None else 'not finite'}"
    missing, states = _why(outcome, problems)
    mean = statistics.fmean(values.values()) if values else None
    return {
        "label": cell.row,
        "equation": table.row(cell.row).equation,
        "column": cell.column,
        "paper": cell.reported,
        "planned": seeds if cell.variants else 0,
        "values": values,
        "metrics": {seed: outcome.metrics[seed] for seed in values},
        "folders": {seed: outcome.runs[seed].folder for seed in values},
        "missing": missing,
        "states": states,
        "trials": outcome.trials,
        "chosen": outcome.chosen or {},
        "border": at_border(outcome),
        "mean": mean,
        "deviation": statistics.stdev(values.values()) if len(values) > 1 else None,
        "minus_paper": mean - cell.reported if values and whole and cell.reported is not None else None,
    }


def _why(outcome: Outcome, problems: Dict[int, str]) -> Tuple[str, str]:
    """What keeps the seeds without a value, in full and in short; seeds in the same state together."""
    if not outcome.runs:
        reason = outcome.waits_for_sweep if outcome.trials else NEW if outcome.cell.run else ""
        return reason, reason
    reasons = {seed: str(state) for seed, state in outcome.states.items() if state.name != DONE}
    reasons.update(problems)
    seeds: Dict[str, List[int]] = {}
    for seed, reason in sorted(reasons.items()):
        seeds.setdefault(reason, []).append(seed)
    if len(seeds) == 1 and len(reasons) == len(outcome.runs):
        full = next(iter(seeds))
        return full, full.partition(":")[0]
    full = "; ".join(f"seed{'s' * (len(s) > 1)} {', '.join(map(str, s))} {reason}" for reason, s in seeds.items())
    return full, "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in seeds))


def _compare(lines: List[Dict[str, Any]], table: Table, tests: PairedTests, test: str) -> None:
    """Give ``lines`` their differences to the baseline, p-values, and these corrected for the number of tests."""
    by_label, seen = {line["label"]: line for line in lines}, {}
    for line in lines:
        name = table.baseline_of(table.row(line["label"]))
        base = by_label.get(name)
        line.update(baseline="", comparison=Comparison(), minus_baseline=None)
        if base is not None and name != line["label"]:
            line.update(baseline=name, comparison=compare(line, base, table, tests, test))
            if line["values"] and base["values"]:
                line["minus_baseline"] = line["mean"] - base["mean"]
        # the same runs against the same baseline are one test, however many rows they stand in
        line["test_name"] = f"{line['baseline']} {sorted(map(str, line['folders'].values()))}"
        seen.setdefault(line["test_name"], line["comparison"])
    adjusted = significance.correct(seen)
    for line in lines:
        line["adjusted"] = adjusted[line.pop("test_name")]


def compare(line: Any, other: Any, table: Table, tests: PairedTests, test: str) -> Comparison:
    """Welch's test over seeds, or a test on the test set, seed by seed, of two lines as dicts."""
    if not line["planned"] or not line["values"]:
        return Comparison()
    if not other["values"]:
        return Comparison(reason=f"{other['label']}: {other['states'] or NEW}")
    if line["folders"] == other["folders"]:
        return Comparison(reason="same runs")
    if test == "welch":
        return significance.welch(list(line["values"].values()), list(other["values"].values()))
    p, reasons = {}, {}
    for seed in sorted(set(line["values"]) & set(other["values"])):
        try:
            systems = [
                load_system(each["folders"][seed], each["metrics"][seed], table.metric) for each in (line, other)
            ]
            p[str(seed)] = tests.p_value(*systems, test)
        except Untested as reason:
            reasons[str(seed)] = str(reason)
    if not p:
        return Comparison(reason="; ".join(dict.fromkeys(reasons.values())) or "no seed in common")
    return Comparison(p, untested=reasons)


def _mark_best(lines: List[Dict[str, Any]], table: Table) -> None:
    choose = min if table.lower_is_better else max
    for name, mark in (("mean", "best"), ("paper", "best_paper")):
        values = [line[name] for line in lines if line[name] is not None]
        for line in lines:
            line[mark] = len(values) > 1 and line[name] == choose(values)


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
        f" smaller ones less often (Welch's test, two-sided, {significance.LEVEL:.0%}, not corrected; pooled standard"
        f" deviation {deviation:.2g})."
    )


def records(result: Result) -> List[Dict[str, Any]]:
    """A row of the CSV file for each line, with every digit."""
    return [_record(result, line) for line in result.lines]


def _record(result: Result, line: Line) -> Dict[str, Any]:
    table, plan = result.table, result.plan
    tested = "over seeds" if result.test == "welch" else "on the test set"
    return {
        "plan": plan.name,
        "table": table.name,
        "column": line.column,
        "row": line.label,
        "equation": line.equation,
        "metric": table.metric,
        "papers_experiment": result.whole and bool(table.source),
        "data": " / ".join(result.data),
        "scale": plan.scale,
        "length": " / ".join(result.length),
        "changed": options({**plan.changed, **plan.stand_in}),
        "outdated": " / ".join(filter(None, [line.label, line.column])) in result.outdated,
        "swept": "; ".join(f"{options(t.swept)}: {t.state if t.value is None else repr(t.value)}" for t in line.trials),
        "chosen": options(line.chosen),
        "seeds_planned": line.planned,
        "seeds_done": len(line.values),
        "values_by_seed": by_seed(line.values),
        "mean": line.mean,
        "standard_deviation": line.deviation,
        **{name: mean_of(line, name) for name in table.also},
        "state": line.missing or ("done" if line.values else "quoted"),
        "paper": line.paper,
        "papers_data": table.columns[line.column].data or table.data,
        "ours_minus_paper": line.minus_paper,
        "baseline": line.baseline,
        "ours_minus_baseline": line.minus_baseline,
        "test": tested if line.comparison.p else line.comparison.reason,
        "untested": "; ".join(f"seed {seed}: {reason}" for seed, reason in line.comparison.untested.items()),
        "p": by_seed(line.comparison.p),
        "p_holm": by_seed(line.adjusted),
    }


def mean_of(line: Line, name: str) -> Any:
    """The mean of another metric than the table's over the finished seeds; None if one lacks it."""
    values = [metrics["values"].get(name) for metrics in line.metrics.values()]
    return statistics.fmean(values) if values and None not in values else None


def options(given: Dict[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in given.items())


def by_seed(values: Any) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())
