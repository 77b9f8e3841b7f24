"""The tables of a report as text."""

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas
import statsmodels

from fairseq_rskip.tools.experiments.changes import changes_of
from fairseq_rskip.tools.experiments.records import (
    DIVERGED,
    FAILED,
    NO_VALUE,
    Experiment,
    Result,
    Row,
    RunsAndValues,
    Trial,
    dashed,
)
from fairseq_rskip.tools.experiments.run_folder import read_record
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.score import digits
from fairseq_rskip.tools.significance import BY_SEED, LEVEL, PAIRED

from .comparison import NEEDS_SEEDS, TRIALS, missing, test_of
from .sweep import ends, listed

MINUS = "\u2212"
DEVIATION = "± is the sample standard deviation over seeds."


def frame(experiment: Experiment, results: list[Result]) -> pandas.DataFrame:
    """The table as text; a column in which no row has anything is left out."""
    base = f"{MINUS} {_baseline(results)}"
    nothing_changed = changes_of(experiment).are_none
    shown = pandas.DataFrame(
        [_texts(experiment, result, base, nothing_changed) for result in results]
    )
    shown["column"] = shown["column"].mask(shown["column"].duplicated(), "")
    return shown.loc[:, (shown != "").any()]


def _baseline(results: list[Result]) -> str:
    """The row that all others are compared with, or "its baseline" where there are several."""
    bases = {result.comparison.baseline for result in results if result.comparison}
    return bases.pop() if len(bases) == 1 else "its baseline"


def legend(
    experiment: Experiment, results: list[Result], shown: pandas.DataFrame
) -> dict[str, str]:
    """What each column of ``shown`` means, by its heading."""
    better = "lower" if TASKS[experiment.task].metrics[experiment.metric] else "higher"
    value = f"{better} is better"
    if any(len(result.values) > 1 for result in results):
        value = f"mean over seeds; {DEVIATION} {value.capitalize()}"
    if any(result.best for result in results):
        value += f". Bold: the best, if its difference is below {LEVEL} after Holm's correction "
        value += "and over seeds"
    baseline = _baseline(results)
    difference = f"the row's value minus that of {baseline}"
    if _is_any_tested(results):
        difference += ", the mean over the seeds of both, and its "
        difference += f"95 % interval, not corrected: {BY_SEED}"
    meaning = {
        experiment.metric: value,
        "n": "seeds with a value",
        f"{MINUS} {baseline}": difference,
        "p": _meaning_of_p(experiment, results),
        "p, Holm": (
            "p corrected for all tests of the column. < 0.001 *: below 0.001; "
            f"* marks what is below {LEVEL}"
        ),
        "tests": "the seeds that both rows have, and the tests that the correction counts",
        "length ratio": "tokens of the output over tokens of the reference, as sacreBLEU counts "
        "them: punctuation marks are tokens",
        "seconds": "duration of a training, of one that was interrupted since it was resumed, on "
        "the machine that ran it, whatever else that machine did",
        "chosen": "the value that the sweep chose",
        "published": "the value in the source named above",
        f"{MINUS} published": "the row's value minus the published one",
    }
    for name, about in TASKS[experiment.task].meanings.items():
        meaning[name] = f"{about}; {meaning[name]}" if name in meaning else about
    return {name: meaning[name] for name in shown if name in meaning}


def _is_any_tested(results: list[Result]) -> bool:
    return any(result.comparison and result.comparison.p for result in results)


def _meaning_of_p(experiment: Experiment, results: list[Result]) -> str:
    """What the p of a table is, or why it has none."""
    if _is_any_tested(results):
        about = "how likely so large a difference is if the two rows do not differ: "
        if test_of(experiment) != "randomisation":
            return f"{about}{BY_SEED}, by statsmodels {statsmodels.__version__}"
        about += f"{PAIRED}, {TRIALS:,} trials, for the translations of each seed (seed 1: …); "
        return f"{about}it covers the choice of test sentences, not of seeds"

    about = "none; each row has the reason"
    untested = [result.comparison.untested for result in results if result.comparison]
    if NEEDS_SEEDS in untested:
        about += ". A report tests rows with two seeds or more in common; rskip compare "
        about += "tests the sentences of a pair, or the documents of a text"
    return about


def _texts(
    experiment: Experiment, result: Result, base: str, nothing_changed: bool
) -> dict[str, str]:
    """Return a row as text, by the headings of the table.

    ``nothing_changed`` says that nothing differs from the table's file.
    """
    metric = experiment.metric
    texts = {
        "column": result.cell.column,
        "row": result.cell.row.label,
        "equation": result.cell.row.equation,
    }
    texts[metric] = _value(result, metric)
    texts["n"] = _count(result)
    for name in experiment.table.also:
        texts[name] = spread(result.also(name), name)
    texts |= _compared(result, metric, base)
    for name, form in (
        ("length_ratio", "{:.3f}"),
        ("parameters", "{:,.0f}"),
        ("seconds", "{:,.0f}"),
    ):
        values = [result.records[seed].get(name) for seed in result.values]
        values = [value for value in values if value is not None]
        texts[name.replace("_", " ")] = form.format(statistics.fmean(values)) if values else ""
    texts["parameters, published"] = result.cell.row.parameters
    texts["chosen"] = listed(result.chosen)

    reported = result.cell.reported
    texts["published"] = "" if reported is None else spread([reported], metric)
    minus = minus_published(result) if nothing_changed else None
    texts[f"{MINUS} published"] = "" if minus is None else spread([minus], metric, "+")
    return texts


def _value(result: Result, metric: str) -> str:
    """The mean over seeds, the best in bold; or why there is none."""
    ours = spread([*result.values.values()], metric)
    if not ours:
        return missing(result)[1] or "quoted"
    return f"**{ours}**" if result.best else ours


def _count(result: Result) -> str:
    """The number of seeds, and of how many where some are missing."""
    if not result.runs:
        return ""
    planned = len(result.runs)
    if result.values.keys() == result.runs.keys():
        return str(planned)
    return f"{len(result.values)} of {planned}"


def minus_published(result: Result) -> float | None:
    """The difference from the published value."""
    if not result.values or result.cell.reported is None:
        return None
    return result.mean - result.cell.reported


def _compared(result: Result, metric: str, base: str) -> dict[str, str]:
    """The cells of a row that compare it with its baseline."""
    comparison = result.comparison
    if comparison is None:
        return {base: "baseline" if result.is_baseline else "", "p": "", "p, Holm": "", "tests": ""}
    difference = ""
    if comparison.difference is not None:
        difference = spread([comparison.difference], metric, "+")
    if comparison.interval is not None:
        low, high = (spread([end], metric, "+") for end in comparison.interval)
        difference += f" ({low} to {high})"
    untested = comparison.untested
    if untested == NEEDS_SEEDS:
        untested = "one seed"
    tests = ""
    if comparison.p:
        plural = "" if comparison.tests == 1 else "s"
        tests = f"{comparison.seeds} seeds, {comparison.tests} test{plural}"
    return {
        base: difference,
        "p": _p_values(comparison.p, False) or untested,
        "p, Holm": _p_values(comparison.adjusted, True),
        "tests": tests,
    }


def spread(values: list[float], metric: str, sign: str = "") -> str:
    """Return the mean of ``values``, and their standard deviation if there are several.

    Rules differ by 0.01 of a loss.
    """
    if not values:
        return ""
    places = digits(metric)
    text = f"{statistics.fmean(values):{sign}.{places}f}".replace("-", MINUS)
    if len(values) > 1:
        text += f" \u00b1 {statistics.stdev(values):.{places}f}"
    return text


def _p_values(p: Mapping[str, float], mark: bool) -> str:
    """One after the other in the order of seeds, which are named; ``mark`` those below 0.05."""
    texts = []
    for seed, value in p.items():
        text = "< 0.001" if value < 0.001 else f"{value:.3f}"
        if mark and value < LEVEL:
            text += " *"
        texts.append(f"seed {seed}: {text}" if seed else text)
    return ", ".join(texts)


def distinct_text(values: Iterable[Any]) -> str:
    """The different ``values`` that are not empty, in a row."""
    return " / ".join(dict.fromkeys(str(value) for value in values if value))


def facts(experiment: Experiment, results: list[Result]) -> dict[str, str]:
    """What the numbers were made with, and what each column and row is made of."""
    about = _about_all(experiment) | _about_the_runs(experiment, results) | _about_rows(results)
    for name, column in experiment.columns.items():
        texts = [listed(column.options)]
        if column.sweep_of:
            factors = [f"{option} times {factor:g}" for option, factor in column.scale.items()]
            texts.append(", ".join([f"the choice of {column.sweep_of}", *factors]))
        about[f"column {name}"] = "; ".join(filter(None, texts))
    return {name: text for name, text in about.items() if text}


def _about_rows(results: list[Result]) -> dict[str, str]:
    """What each row is made of: its architecture, in each column if they differ, and options."""
    archs: dict[str, dict[str, str]] = {}  # row -> column -> architecture
    rows: dict[str, Row] = {}
    for result in results:
        if result.cell.run:
            label = result.cell.row.label
            rows[label] = result.cell.row
            archs.setdefault(label, {})[result.cell.column] = result.cell.arch

    about = {}
    for label, row in rows.items():
        text = distinct_text(archs[label].values())
        if len(set(archs[label].values())) > 1:
            text = ", ".join(f"{column}: {arch}" for column, arch in archs[label].items())
        text = f"{text} {listed(row.options)}".strip()
        if row.evaluate:
            text += f"; evaluation: {listed(row.evaluate)}"
        about[f"row {label}"] = text
    return about


def _about_all(experiment: Experiment) -> dict[str, str]:
    """What a table says of all its runs."""
    table, task = experiment.table, TASKS[experiment.task]
    runs = [trial.run for cell in experiment.cells for trial in cell.trials]
    better = "lower" if task.metrics[experiment.metric] else "higher"
    sweep = listed({name: distinct_text(values) for name, values in dashed(table.sweep).items()})
    if sweep:
        sweep += f"; the best {task.held_out} of seed {experiment.sweep_seed}"
    return {
        "metric": f"{experiment.metric}, {better} is better",
        "data": distinct_text(run.identity["data"] for run in runs),
        "length of a run": distinct_text(f"{run.length:,} {run.unit}" for run in runs),
        "seeds": ", ".join(map(str, experiment.seeds)),
        "options of every row": listed({**dashed(table.options), **experiment.changed}),
        "evaluation": listed(table.evaluate),
        "sweep": sweep,
    }


def _about_the_runs(experiment: Experiment, results: list[Result]) -> dict[str, str]:
    """What the runs recorded: the score's signature, which weights, versions, commit."""
    measured = [result.records[seed] for result in results for seed in result.values]
    signatures = [record.get("signatures", {}).get(experiment.metric) for record in measured]
    weights = []
    for record in measured:
        which = str(record.get("weights") or "").partition(":")[0]
        weights.append(re.sub(r"checkpoint .*/", "checkpoint ", which))  # without its folder

    records = [read_record(folder) for result in results for folder, _ in result.runs_and_values]
    versions = []
    for record in records:
        for part in (record, record.get("metrics") or {}):  # the command's, and the training's
            versions += [f"{name} {number}" for name, number in part.get("versions", {}).items()]
    return {
        "signature": distinct_text(signatures),
        "weights": distinct_text(weights),
        "versions": distinct_text(versions),
        "computed in": distinct_text(_computed(result) for result in results),
        "commit": distinct_text(short_commit(record.get("git") or "") for record in records),
    }


def warnings(results: list[Result]) -> list[str]:
    """Which models failed, which outputs are degenerate, whose scores say nothing, and which rows
    have seeds of several precisions or devices.
    """
    texts = _failures(results)
    outputs = degenerate = 0
    for result in results:
        if " / " in _computed(result):
            texts.append(f"{result.cell}: its seeds were computed in {_computed(result)}.")
        for seed in result.values:
            outputs += 1
            reason = result.records[seed].get("degenerate")
            if reason:
                degenerate += 1
                texts.append(f"{result.cell}, seed {seed}: the output is degenerate: {reason}.")
    if degenerate > outputs / 2:
        texts.append(
            "Scores of degenerate outputs do not compare the rules. With metric: valid_loss in "
            "the file their losses are compared, and nothing is trained again."
        )
    return texts


def _computed(result: Result) -> str:
    """Precision and device of the trainings behind a result's values, where they are recorded."""
    records = [read_record(result.runs[seed].folder) for seed in result.values]
    return distinct_text((record.get("metrics") or {}).get("computed") for record in records)


def _failures(results: list[Result]) -> list[str]:
    """Which models have no value, and which values of sweeps: a sentence each, or none."""
    reasons: dict[Any, str] = {}  # by run: rows that are the same runs count once
    tried: dict[Any, str] = {}
    for result in results:
        for seed, state in result.states.items():
            folder = result.runs[seed].folder
            if state.kind in (DIVERGED, FAILED, NO_VALUE):
                reasons.setdefault(folder, f"{result.cell}, seed {seed}: {state}")
        for trial in result.trials:
            if trial.state.kind in (DIVERGED, FAILED):
                text = f"{result.cell}, {listed(trial.values)}: {outcome(trial)}"
                tried.setdefault(trial.deciding_run.folder_in(Path(), 0), text)

    texts = []
    if reasons:
        subject = "1 model has" if len(reasons) == 1 else f"{len(reasons)} models have"
        why = "; ".join(reasons.values())
        texts.append(f"{subject} no value: {why}. The table shows the others.")
    if tried:
        subject = "1 value" if len(tried) == 1 else f"{len(tried)} values"
        was = "was" if len(tried) == 1 else "were"
        texts.append(
            f"{subject} of sweeps {was} not chosen, because training failed or diverged: "
            f"{'; '.join(tried.values())}."
        )
    return texts


def notes(experiment: Experiment, results: list[Result]) -> list[str]:
    """What the table has no room for: missing seeds, rows that are the same, those without runs."""
    texts = []
    first: dict[RunsAndValues, Result] = {}
    for result in results:
        if missing(result)[0]:
            texts.append(f"{result.cell}: {missing(result)[0]}.")
        same = first.setdefault(result.runs_and_values, result)
        if result.values and same is not result:
            texts.append(f"{result.cell} has the settings, and the runs, of {same.cell}.")
    shown = {str(result.cell) for result in results}
    idle = [str(cell) for cell in experiment.cells if cell.run and str(cell) not in shown]
    if idle:
        texts.append(f"Not run yet: {', '.join(idle) if len(idle) < 9 else f'{len(idle)} cells'}.")
    return texts


def sweeps(experiment: Experiment, results: list[Result]) -> list[str]:
    """What each row's sweep gave, a sentence each."""
    held_out = TASKS[experiment.task].held_out
    return [_sweep(result, held_out) for result in results if result.trials]


def outcome(trial: Trial) -> str:
    """The held-out metric of a value that was tried, or what became of its training.

    Why it diverged is in the run's folder.
    """
    if trial.held_out is not None:
        return f"{trial.held_out:.3f}"
    return trial.state.short if trial.state.kind == DIVERGED else str(trial.state)


def _sweep(result: Result, held_out: str) -> str:
    """What a row's sweep has given, a sentence."""
    tried = []
    for trial in result.trials:
        tried.append(f"{listed(trial.values)}: {outcome(trial)}")
    if result.chosen:
        chosen = f"chosen {listed(result.chosen)}"
        if any(trial.state.kind == FAILED for trial in result.trials):
            chosen += ", for now: what failed is tried again and may be better"
    elif all(trial.state.kind in (DIVERGED, FAILED) for trial in result.trials):
        chosen = "none chosen, since no training has a value"
    else:
        chosen = "not decided yet"
    at_an_end = ends([trial.values for trial in result.trials], result.chosen)
    if at_an_end:
        chosen += ", the end of the sweep"
        if len(result.chosen) > 1:
            chosen += f" of {' and '.join(at_an_end)}"
        chosen += ": a value beyond it may be better"
    return f"Sweep of {result.cell}, {held_out}: {', '.join(tried)}; {chosen}."


def markdown(text: Any) -> str:
    """One line of text for Markdown, in and out of tables; a value that is bold stays bold."""
    return re.sub(r"([\\`_\[\]|$~#<]|(?<!\*)\*(?!\*))", r"\\\1", " ".join(str(text).split()))


def short_commit(commit: str) -> str:
    """Ten digits of a commit; "+changes" stays, for files that no commit has."""
    digits, changes, _ = commit.partition("+changes")
    return digits[:10] + changes
