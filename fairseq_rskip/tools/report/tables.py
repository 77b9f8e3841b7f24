"""The tables of a report: rows compared with their baseline, as text and as records of CSV."""

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import significance
from fairseq_rskip.tools.experiments.plan import described, read_record
from fairseq_rskip.tools.experiments.records import DONE, NEW, Result, Table, dashed
from fairseq_rskip.tools.experiments.tasks import EVALUATION, TASKS
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.score import make_metric
from fairseq_rskip.tools.significance import LEVEL

MINUS = "\u2212"


def test_of(table: Table) -> str:
    """The test that gives the p-values: welch or randomisation."""
    return "welch" if table.metric in TASKS[table.task].over_seeds else table.test or "randomisation"


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
    decided = {x.cell.row.label: x.baseline for x in lines if x.p and all(p < LEVEL for p in x.adjusted.values())}
    if test_of(table) == "randomisation":  # which covers the choice of sentences, not of seeds
        samples = {label: [*by_label[label].values.values()] for label in {*decided, *decided.values()}}
        decided = {a: b for a, b in decided.items() if (significance.welch(samples[a], samples[b]) or 1) < LEVEL}
    return [replace(x, best=x.mean == best and x.cell.row.label in {*decided, *decided.values()}) for x in lines]


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
    results = {str(seed): _paired(line, base, seed, table) for seed in sorted(line.values.keys() & base.values.keys())}
    reasons = [f"seed {seed}: {why}" for seed, why in results.items() if isinstance(why, str)]
    p = {seed: value for seed, value in results.items() if not isinstance(value, str)}
    return {"p": p, "untested": "; ".join(reasons) or ("" if p else "no seed in common")}


def _paired(line: Result, base: Result, seed: int, table: Table) -> float | str:
    """The p of sacreBLEU's paired test of one seed's translations, or why there is none."""
    try:
        systems = [read_lines(each.runs[seed].folder / EVALUATION / "hyp.txt") for each in (line, base)]
        references = [[read_lines(Path(path)) for path in each.records[seed]["references"]] for each in (line, base)]
    except (UserError, OSError, KeyError):
        return "translations or references are gone"
    if references[0] != references[1]:
        return "other test set"
    metrics = {table.metric: make_metric(table.metric)}
    p = significance.paired(systems[1], systems[0], references[0], metrics, trials=10_000)
    return p.get(table.metric, "hardly a translation differs")


def missing(line: Result) -> tuple[str, str]:
    """Why seeds have no value, in full and in short; seeds with the same reason together."""
    if not line.runs:
        done = sum(value is not None for _, value, _ in line.trials)
        reason = f"sweep: {done} of {len(line.trials)} values done" if line.trials else NEW * line.cell.run
        return reason, reason
    reasons = dict.fromkeys(state for _, state in sorted(line.states.items()) if state != DONE)
    short, full = "; ".join(dict.fromkeys(reason.partition(":")[0] for reason in reasons)), []
    for reason in reasons:
        seeds = [str(seed) for seed, state in sorted(line.states.items()) if state == reason]
        which = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)} " * (len(seeds) < len(line.runs))
        full.append(which + reason)
    return "; ".join(full), short


def power(lines: list[Result], column: str, metric: str) -> str:
    """The smallest difference that the seeds of a column would have found, a sentence; "" where no row has two."""
    samples = [list(line.values.values()) for line in lines if line.cell.column == column and len(line.values) > 1]
    if not (deviation := significance.pooled_deviation(samples)):
        return ""
    least = f"{significance.detectable(deviation, seeds := min(map(len, samples))):.3g} in {metric} four times of five"
    about = f"Welch's test, two-sided, {LEVEL:.0%}, not corrected; pooled standard deviation {deviation:.3g}"
    return f"Power{' of ' * bool(column)}{column}: {seeds} seeds per row find a difference of {least} ({about})."


def frame(table: Table, lines: list[Result]) -> pandas.DataFrame:
    """The table as text; a column in which no row has anything is left out."""
    bases = {line.baseline for line in lines if line.baseline}
    base = f"{MINUS} {bases.pop() if len(bases) == 1 else 'its baseline'}"
    shown = pandas.DataFrame([_texts(table, line, base) for line in lines])
    shown["column"] = shown["column"].mask(shown["column"].duplicated(), "")
    return shown.loc[:, (shown != "").any()]


def _texts(table: Table, line: Result, base: str) -> dict[str, str]:
    records = [line.records[seed] for seed in line.values]
    ours = spread([*line.values.values()], table.metric)
    count = f"{len(line.values)} of " * (line.runs.keys() != line.values.keys())
    reported, (_, scale, data, changed) = line.cell.reported, described(table)
    comparable = line.values and reported is not None and not data and not changed and scale == 1
    about = {"column": line.cell.column, "row": line.cell.row.label, "equation": line.cell.row.equation}
    about[table.metric] = f"**{ours}**" if line.best else ours or missing(line)[1] or "quoted"
    about["n"] = f"{count}{len(line.runs)}" if line.runs else ""
    about |= {name: spread(line.also(name), name) for name in table.also}
    for name, form in (("length_ratio", "{:.3f}"), ("parameters", "{:,.0f}"), ("seconds", "{:,.0f}")):
        values = [record[name] for record in records if record.get(name) is not None]
        about[name.replace("_", " ")] = form.format(statistics.fmean(values)) if values else ""
    about |= {"chosen": listed(line.chosen), "published": "" if reported is None else spread([reported], table.metric)}
    about[f"{MINUS} published"] = spread([line.mean - reported], table.metric, "+") if comparable else ""
    differences = [line.difference] if line.difference is not None else []
    about[base] = spread(differences, table.metric, "+") if line.baseline else "baseline" * line.is_baseline
    about["p"] = _p_values(line.p, False) or line.untested.replace("needs 2 seeds", "one seed")
    return {**about, "p, Holm": _p_values(line.adjusted, True)}


def spread(values: list[float], metric: str, sign: str = "") -> str:
    """The mean of ``values``, and their standard deviation if there are several; rules differ by 0.01 of a loss."""
    digits = 3 if "loss" in metric else 2
    text = f"{statistics.fmean(values):{sign}.{digits}f}".replace("-", MINUS) if values else ""
    return text + (f" \u00b1 {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def _p_values(p: Mapping[str, float], mark: bool) -> str:
    """One after the other in the order of seeds, which are named; ``mark`` those below 0.05."""
    texts = {seed: ("< 0.001" if v < 0.001 else f"{v:.3f}") + " *" * (mark and v < LEVEL) for seed, v in p.items()}
    return ", ".join(f"seed {seed}: " * bool(seed) + text for seed, text in texts.items())


def listed(options: Mapping[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def each(values: Iterable[Any]) -> str:
    """Different ``values`` in a row."""
    return " / ".join(dict.fromkeys(str(value) for value in values if value))


def facts(table: Table, lines: list[Result]) -> dict[str, str]:
    """What the numbers were made with, and what each column and row is made of."""
    task, runs = TASKS[table.task], [run for cell in table.cells for _, run in cell.variants]
    measured = [line.records[seed] for line in lines for seed in line.values]
    records = [read_record(folder) for line in lines for folder in line.folders]
    sweep = listed({name: each(values) for name, values in dashed(table.sweep).items()})
    settings = {
        "metric": f"{table.metric}, {'lower' if task.metrics[table.metric] else 'higher'} is better",
        "signature": each(record.get("signatures", {}).get(table.metric) for record in measured),
        "data": each(run.identity["data"] for run in runs),
        "length of a run": each(f"{run.length:,} {run.unit}" for run in runs),
        "seeds": ", ".join(map(str, table.seeds)),
        "options of every row": listed({**dashed(table.options), **table.changed}),
        "evaluation": listed(table.evaluate),
        "sweep": f"{sweep}; the best {task.held_out} of seed {table.tried}" if sweep else "",
        "weights": each(str(record.get("weights") or "").partition(":")[0] for record in measured),
        "versions": each(f"{k} {v}" for record in records for k, v in record.get("versions", {}).items()),
        "commit": each((record.get("git") or "")[:10] for record in records),
    }
    settings |= {f"column {name}": listed(column.options) for name, column in table.columns.items()}
    settings |= {x.cell.row.label: f"{x.cell.arch} {listed(x.cell.row.options)}".strip() for x in lines if x.cell.run}
    return {name: value for name, value in settings.items() if value}


def notes(table: Table, lines: list[Result]) -> list[str]:
    """What the table has no room for: missing seeds, rows without runs, the values of sweeps."""
    shown, texts = {str(line.cell) for line in lines}, []
    idle = [str(cell) for cell in table.cells if cell.run and str(cell) not in shown]
    texts += [f"{line.cell}: {missing(line)[0]}." for line in lines if missing(line)[0]]
    texts += [f"Not run yet: {', '.join(idle) if len(idle) < 9 else f'{len(idle)} cells'}."] if idle else []
    for line in lines:
        tried = ", ".join(f"{listed(swept)}: {how if v is None else f'{v:.3f}'}" for swept, v, how in line.trials)
        chosen = f"chosen {listed(line.chosen)}" if line.chosen else "not decided yet"
        ends = [swept for swept, *_ in (line.trials[:1] + line.trials[-1:])]
        chosen += ", the end of the sweep" * (line.chosen in ends)
        texts += [f"Sweep of {line.cell}, {TASKS[table.task].held_out}: {tried}; {chosen}."] if tried else []
    return texts


def record(table: Table, line: Result) -> dict[str, Any]:
    """A row of the CSV file, with every digit. Its columns are those of earlier reports."""
    name, scale, data, changed = described(table)
    runs, reported = [run for _, run in line.cell.variants], line.cell.reported
    whole = not data and not changed and scale == 1
    deviation = statistics.stdev(line.values.values()) if len(line.values) > 1 else None
    swept = "; ".join(f"{listed(swept)}: {how if value is None else repr(value)}" for swept, value, how in line.trials)
    minus = line.mean - reported if line.values and whole and reported is not None else None
    test = "over seeds" if test_of(table) == "welch" else "on the test set"
    cells = {"plan": name, "table": table.name, "column": line.cell.column, "row": line.cell.row.label}
    cells |= {"equation": line.cell.row.equation, "metric": table.metric}
    cells |= {"papers_experiment": whole and bool(table.source), "data": each(run.identity["data"] for run in runs)}
    cells |= {"scale": scale, "length": each(f"{run.length:,} {run.unit}" for run in runs), "changed": listed(changed)}
    cells |= {"swept": swept, "chosen": listed(line.chosen)}
    cells |= {"seeds_planned": len(table.seeds) if line.cell.run else 0, "seeds_done": len(line.values)}
    cells |= {"values_by_seed": _by_seed(line.values), "mean": line.mean, "standard_deviation": deviation}
    cells |= {metric: statistics.fmean(values) if (values := line.also(metric)) else None for metric in table.also}
    cells |= {"state": missing(line)[0] or ("done" if line.values else "quoted"), "paper": reported}
    cells |= {"papers_data": line.cell.data, "ours_minus_paper": minus, "baseline": line.baseline}
    cells |= {"ours_minus_baseline": line.difference, "test": test if line.p else line.untested}
    return cells | {"untested": line.untested * bool(line.p), "p": _by_seed(line.p), "p_holm": _by_seed(line.adjusted)}


def _by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())


def markdown(text: Any) -> str:
    """One line of text for Markdown, in and out of tables; a value that is bold stays bold."""
    return re.sub(r"([\\`_\[\]|$~#<]|(?<!\*)\*(?!\*))", r"\\\1", " ".join(str(text).split()))
