"""Compare the rows of a table with their baseline: differences, p-values, which is best, what could be found."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools import significance
from fairseq_rskip.tools.experiments.records import DONE, NEW, Result, Run, Table
from fairseq_rskip.tools.experiments.tasks import EVALUATION, TASKS
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.significance import LEVEL

KINDS = {"randomisation": ("ar", 10000), "bootstrap": ("bs", 1000)}  # sacreBLEU's name, and trials
UNPAIRED = ("tokenised BLEU", "compound-split BLEU")  # of text that evaluate.sh does not keep


class PairedTests:
    """sacreBLEU's tests of two runs' translations, ``trials`` times; the file ``cache`` keeps the p-values."""

    def __init__(self, cache: Path, kind: str, trials: int | None):
        self.cache, self.name = cache, KINDS.get(kind, ("", 0))[0]
        self.trials = trials or KINDS.get(kind, ("", 0))[1]
        try:
            self.known = dict(json.loads(cache.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self.known = {}

    def p_value(self, ours: tuple[Run, dict], base: tuple[Run, dict], metric: str) -> float | str:
        """The p of a difference, or why there is none."""
        from fairseq_rskip.tools.score import make_metric

        try:
            systems = [read_lines(run.folder / EVALUATION / "hyp.txt") for run, _ in (ours, base)]
            references = [[read_lines(Path(path)) for path in about["references"]] for _, about in (ours, base)]
        except (UserError, KeyError):
            return "translations or references are gone"
        if references[0] != references[1]:
            return "other test set"
        facts = [metric, self.name, self.trials, significance.SEED, systems, references[0]]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if key not in self.known:
            metrics = {metric: make_metric(metric)}
            (p,) = significance.paired(systems[1], [systems[0]], references[0], metrics, self.name, self.trials)
            self.known[key] = p.get(metric)
            write_json(self.cache, self.known)
        return "hardly a translation differs" if self.known[key] is None else self.known[key]


def test_of(table: Table, asked: str | None) -> str:
    """What the p-values are of: welch, randomisation or bootstrap."""
    if table.metric in (*TASKS[table.task].over_seeds, *UNPAIRED):
        return "welch"
    return asked or table.test or "randomisation"


def compare(table: Table, results: list[Result], tests: PairedTests | None) -> list[Result]:
    """The results that a report shows, column by column, compared; ``tests`` is None for Welch's test over seeds.

    Cells that are neither begun nor published are left out where others are.
    """
    every = [each for each in results if each.cell.run or each.cell.reported is not None]
    shown = [each for each in every if each.begun or each.cell.reported is not None] or every
    compared = []
    for column in table.columns:
        lines = _compare([each for each in shown if each.cell.column == column], table, tests)
        compared += _mark_best(lines, table)
    return compared


def _compare(lines: list[Result], table: Table, tests: PairedTests | None) -> list[Result]:
    by_label = {line.cell.row.label: line for line in lines}
    bases = {table.baseline_of(line.cell.row) for line in lines} & by_label.keys()
    compared = []
    for line in lines:
        base = by_label.get(table.baseline_of(line.cell.row), line)
        about: dict[str, Any] = {"is_baseline": line.cell.row.label in bases}
        if base is not line:
            about["baseline"] = base.cell.row.label
            about |= _test(line, base, table, tests)
            if line.values and base.values:
                about["difference"] = line.mean - base.mean
        compared.append(replace(line, **about))
    return _corrected(compared)


def _test(line: Result, base: Result, table: Table, tests: PairedTests | None) -> dict[str, Any]:
    """p-values by seed, or one over seeds with the key "", or why there are none."""
    if not line.values:
        return {}
    if not base.values:
        return {"untested": f"{base.cell.row.label}: {missing(base)[1] or NEW}"}
    if line.folders == base.folders:
        return {"untested": "same runs"}
    if min(len(line.values), len(base.values)) < 2:
        return {"untested": "needs 2 seeds"}
    if tests is None:
        p = significance.welch(list(line.values.values()), list(base.values.values()))
        return {"p": {"": p}} if p is not None else {"untested": "no variance"}
    found = {}
    for seed in sorted(line.values.keys() & base.values.keys()):
        runs = [(each.runs[seed], each.records[seed]) for each in (line, base)]
        found[str(seed)] = tests.p_value(*runs, table.metric)
    reasons = [f"seed {seed}: {why}" for seed, why in found.items() if isinstance(why, str)]
    p = {seed: value for seed, value in found.items() if not isinstance(value, str)}
    return {"p": p, "untested": "; ".join(reasons) or ("" if p else "no seed in common")}


def _corrected(lines: list[Result]) -> list[Result]:
    """``lines`` with p-values corrected by Holm for their number, seed by seed; the same runs are one test."""
    families: dict[str, dict[Any, float]] = {}
    for line in lines:
        for seed, p in line.p.items():
            families.setdefault(seed, {})[(line.baseline, *line.folders)] = p
    adjusted = {seed: dict(zip(each, significance.holm(list(each.values())))) for seed, each in families.items()}
    return [replace(x, adjusted={s: adjusted[s][(x.baseline, *x.folders)] for s in x.p}) for x in lines]


def _mark_best(lines: list[Result], table: Table) -> list[Result]:
    """``lines`` with the best mean marked, if it differs beyond chance from the baseline, or the baseline from others."""
    means = [line.mean for line in lines if line.values]
    best = (min if TASKS[table.task].metrics[table.metric] else max)(means, default=None)
    told = {line.cell.row.label for line in lines if line.p and all(p < LEVEL for p in line.adjusted.values())}
    told |= {line.baseline for line in lines if line.cell.row.label in told}
    return [replace(line, best=line.mean == best and line.cell.row.label in told) for line in lines]


def missing(line: Result) -> tuple[str, str]:
    """Why seeds have no value, in full and in short; seeds with the same reason together."""
    if not line.runs:
        reason = line.waits if line.trials else NEW if line.cell.run else ""
        return reason, reason
    seeds: dict[str, list[int]] = {}
    for seed, state in sorted(line.states.items()):
        if state != DONE:
            seeds.setdefault(state, []).append(seed)
    short = "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in seeds))
    if [len(each) for each in seeds.values()] == [len(line.runs)]:
        return next(iter(seeds)), short
    plural = {reason: "s" * (len(each) > 1) for reason, each in seeds.items()}
    return "; ".join(f"seed{plural[r]} {', '.join(map(str, each))} {r}" for r, each in seeds.items()), short


def different(lines: Iterable[Result]) -> list[Result]:
    """Those with values; of several with the same runs the first."""
    return list({tuple(line.folders): line for line in reversed(list(lines)) if line.values}.values())[::-1]


def power(lines: list[Result], metric: str) -> str:
    """The smallest difference that these seeds would have found, as a sentence; "" where no row has two."""
    samples = [list(line.values.values()) for line in lines if len(line.values) > 1]
    deviation = significance.pooled_deviation(samples)
    if not deviation:
        return ""
    seeds = min(map(len, samples))
    found = f"{significance.detectable(deviation, seeds):.2g} in {metric} four times of five"
    about = f"Welch's test, two-sided, {LEVEL:.0%}, not corrected; pooled standard deviation {deviation:.2g}"
    return f"Power: {seeds} seeds per row find a difference of {found} ({about})."
