"""Compare the rows of a table with their baseline: differences, p-values, which is best, what could be found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import significance
from fairseq_rskip.tools.experiments.records import DONE, NEW, Result, Table
from fairseq_rskip.tools.experiments.tasks import EVALUATION, TASKS
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.significance import LEVEL

PAIRED = {"randomisation": ("ar", 10000), "bootstrap": ("bs", 1000)}  # sacreBLEU's name, and trials
UNPAIRED = ("tokenised BLEU", "compound-split BLEU")  # of text that evaluate.sh does not keep


def test_of(table: Table) -> str:
    """What the p-values are of: welch, randomisation or bootstrap."""
    over_seeds = table.metric in (*TASKS[table.task].over_seeds, *UNPAIRED)
    return "welch" if over_seeds else table.test or "randomisation"


def compare(table: Table, results: list[Result]) -> list[Result]:
    """The results that a report shows, column by column, compared. What is neither begun nor published is left out."""
    every = [each for each in results if each.cell.run or each.cell.reported is not None]
    states = [[*each.states.values(), *(state for *_, state in each.trials)] for each in every]
    begun = [each for each, of in zip(every, states) if each.cell.reported is not None or any(s != NEW for s in of)]
    compared = []
    for column in table.columns:
        compared += _compare([each for each in begun or every if each.cell.column == column], table)
    return compared


def _compare(lines: list[Result], table: Table) -> list[Result]:
    """The results of one column with differences, p-values, these after Holm's correction, and the best marked."""
    by_label, tested = {line.cell.row.label: line for line in lines}, []
    bases = {label: by_label.get(line.cell.row.baseline or table.baseline, line) for label, line in by_label.items()}
    for label, line in by_label.items():
        about: dict[str, Any] = {"is_baseline": any(base is line and key != label for key, base in bases.items())}
        if (base := bases[label]) is not line:
            about |= {"baseline": base.cell.row.label, **_test(line, base, table)}
            about["difference"] = line.mean - base.mean if line.values and base.values else None
        tested.append(replace(line, **about))
    families: dict[str, dict[Any, float]] = {}  # each seed's tests; the same runs are one test
    for line in tested:
        for seed, p in line.p.items():
            families.setdefault(seed, {})[(line.baseline, *line.folders)] = p
    holm = {seed: dict(zip(family, significance.holm(list(family.values())))) for seed, family in families.items()}
    lines = [replace(x, adjusted={seed: holm[seed][(x.baseline, *x.folders)] for seed in x.p}) for x in tested]
    means = [line.mean for line in lines if line.values]
    best = (min if TASKS[table.task].metrics[table.metric] else max)(means, default=None)
    told = {x.cell.row.label: x.baseline for x in lines if x.p and all(p < LEVEL for p in x.adjusted.values())}
    if test_of(table) in PAIRED:  # which covers the choice of sentences, not of seeds
        samples = {label: [*by_label[label].values.values()] for label in {*told, *told.values()}}
        told = {a: b for a, b in told.items() if (significance.welch(samples[a], samples[b]) or 1) < LEVEL}
    return [replace(x, best=x.mean == best and x.cell.row.label in {*told, *told.values()}) for x in lines]


def _test(line: Result, base: Result, table: Table) -> dict[str, Any]:
    """p-values by seed, or one over seeds with the key "", or why there are none."""
    if not line.values or not base.values:
        return {"untested": f"{base.cell.row.label}: {missing(base)[1] or NEW}"} if line.values else {}
    if line.folders == base.folders:
        return {"untested": "same runs"}
    if min(len(line.values), len(base.values)) < 2:
        return {"untested": "needs 2 seeds"}
    if test_of(table) == "welch":
        p = significance.welch(list(line.values.values()), list(base.values.values()))
        return {"p": {"": p}} if p is not None else {"untested": "no variance"}
    found = {str(seed): _paired(line, base, seed, table) for seed in sorted(line.values.keys() & base.values.keys())}
    reasons = [f"seed {seed}: {why}" for seed, why in found.items() if isinstance(why, str)]
    p = {seed: value for seed, value in found.items() if not isinstance(value, str)}
    return {"p": p, "untested": "; ".join(reasons) or "" if p else "no seed in common"}


def _paired(line: Result, base: Result, seed: int, table: Table) -> float | str:
    """The p of sacreBLEU's paired test of one seed's translations, or why there is none."""
    from fairseq_rskip.tools.score import make_metric

    try:
        systems = [read_lines(each.runs[seed].folder / EVALUATION / "hyp.txt") for each in (line, base)]
        references = [[read_lines(Path(path)) for path in each.records[seed]["references"]] for each in (line, base)]
    except (UserError, KeyError):
        return "translations or references are gone"
    if references[0] != references[1]:
        return "other test set"
    metrics = {table.metric: make_metric(table.metric)}
    (p,) = significance.paired(systems[1], [systems[0]], references[0], metrics, *PAIRED[test_of(table)])
    return p.get(table.metric, "hardly a translation differs")


def missing(line: Result) -> tuple[str, str]:
    """Why seeds have no value, in full and in short; seeds with the same reason together."""
    if not line.runs:
        done = sum(value is not None for _, value, _ in line.trials)
        reason = NEW if line.cell.run else ""
        reason = f"sweep: {done} of {len(line.trials)} values done" if line.trials else reason
        return reason, reason
    seeds: dict[str, list[str]] = {}
    for seed, state in sorted(line.states.items()):
        if state != DONE:
            seeds.setdefault(state, []).append(str(seed))
    short = "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in seeds))
    if [len(each) for each in seeds.values()] == [len(line.runs)]:
        return next(iter(seeds)), short
    each = [f"seed{'s' * (len(numbers) > 1)} {', '.join(numbers)} {reason}" for reason, numbers in seeds.items()]
    return "; ".join(each), short


def power(lines: list[Result], metric: str) -> str:
    """The smallest difference that these seeds would have found, as a sentence; "" where no row has two."""
    samples = [list(line.values.values()) for line in lines if len(line.values) > 1]
    if not (deviation := significance.pooled_deviation(samples)):
        return ""
    seeds = min(map(len, samples))
    found = f"{significance.detectable(deviation, seeds):.2g} in {metric} four times of five"
    about = f"Welch's test, two-sided, {LEVEL:.0%}, not corrected; pooled standard deviation {deviation:.2g}"
    return f"Power: {seeds} seeds per row find a difference of {found} ({about})."
