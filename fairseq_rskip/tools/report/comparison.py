"""Compare the rows of a table with their baselines.

That is done over seeds, and for translations over sentences.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import significance
from fairseq_rskip.tools.evaluate.scores_file import TRANSLATION
from fairseq_rskip.tools.experiments.records import (
    DONE,
    NEW,
    Comparison,
    Experiment,
    Result,
    RunsAndValues,
    State,
)
from fairseq_rskip.tools.experiments.run_folder import EVALUATION
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.score import make_metric
from fairseq_rskip.tools.significance import LEVEL, SeedModel

TRIALS = 10_000
NEEDS_SEEDS = "needs 2 seeds"  # why a row with one seed is not tested


def test_of(experiment: Experiment) -> str:
    """The test that gives the p-values: seeds or randomisation."""
    if experiment.metric in TASKS[experiment.task].over_seeds:
        return "seeds"
    return experiment.table.test or "randomisation"


def compare(experiment: Experiment, results: list[Result]) -> list[Result]:
    """Return the results that a report shows, column by column, compared.

    What is neither begun nor published is left out, unless nothing has begun, or it is the baseline
    of a row that has.
    """
    shown = [each for each in results if each.cell.run or each.cell.reported is not None]
    nothing_begun = not any(map(_is_begun, shown))
    compared = []
    for column in experiment.columns:
        in_column = [each for each in shown if each.cell.column == column]
        begun = [each.cell.row for each in in_column if _is_begun(each)]
        labels = {row.label for row in begun}
        labels |= {row.baseline or experiment.baseline for row in begun}
        lines = [each for each in in_column if nothing_begun or each.cell.row.label in labels]
        compared += _compare_column(lines, experiment)
    return compared


def _is_begun(result: Result) -> bool:
    """Whether a report has something to say of it."""
    if result.cell.reported is not None:
        return True
    states = [*result.states.values(), *(trial.state for trial in result.trials)]
    return any(state.kind != NEW for state in states)


def seed_model(lines: list[Result]) -> SeedModel:
    """The model of one column; rows that are the same runs count once."""
    values: dict[str, dict[int, float]] = {}
    seen = set()
    for line in lines:
        if line.runs_and_values and line.runs_and_values not in seen:
            seen.add(line.runs_and_values)
            values[line.cell.row.label] = line.values
    return SeedModel(values)


def _compare_column(lines: list[Result], experiment: Experiment) -> list[Result]:
    """Return the results of one column with their comparisons.

    They have p-values after Holm's correction, and the best is marked.
    """
    by_label = {line.cell.row.label: line for line in lines}
    bases = {}
    for label, line in by_label.items():
        base = by_label.get(line.cell.row.baseline or experiment.baseline)
        if base is not None and base is not line:
            bases[label] = base

    model = seed_model(lines)
    named = _first_labels(lines)
    compared = []
    for label, line in by_label.items():
        is_baseline = any(base is line for base in bases.values())
        comparison = None
        if label in bases:
            comparison = _compare_pair(line, bases[label], model, named, experiment)
        compared.append(replace(line, is_baseline=is_baseline, comparison=comparison))
    return _mark_best(_with_holm(compared), experiment)


def _first_labels(lines: list[Result]) -> dict[RunsAndValues, str]:
    """The label of each row by its runs and values; of rows with the same, that of the first."""
    labels: dict[RunsAndValues, str] = {}
    for line in lines:
        labels.setdefault(line.runs_and_values, line.cell.row.label)
    return labels


def _compare_pair(
    line: Result,
    base: Result,
    model: SeedModel,
    named: dict[RunsAndValues, str],
    experiment: Experiment,
) -> Comparison:
    """Compare a row with its baseline.

    ``named`` has the label under which the model knows the runs and values of a row.
    """
    baseline = base.cell.row.label
    if not line.values:
        return Comparison(baseline)
    if not base.values:
        reason = "; ".join(str(state) for state in dict.fromkeys(base.states.values())) or NEW
        return Comparison(baseline, untested=f"{baseline}: {reason}")
    if line.runs_and_values == base.runs_and_values:
        return Comparison(baseline, 0.0, untested="same runs")

    labels = named[line.runs_and_values], named[base.runs_and_values]
    shared = model.shared_seeds(*labels)
    difference = model.difference(*labels)
    about = Comparison(baseline, seeds=len(shared))
    if shared:
        mean = fmean(line.values[seed] - base.values[seed] for seed in shared)
        about = replace(about, difference=mean)
    if difference is not None:
        interval = (difference.low, difference.high)
        about = replace(
            about, difference=difference.value, interval=interval, p_over_seeds=difference.p
        )

    if min(len(line.values), len(base.values)) < 2:
        return replace(about, untested=NEEDS_SEEDS)
    if test_of(experiment) == "randomisation":
        return _test_sentences(line, base, shared, about, experiment)
    if difference is not None:
        return replace(about, p={"": difference.p})
    if len(shared) > 1:
        return replace(about, untested="no variance")
    return replace(about, untested="one seed in common" if shared else "no seed in common")


def _test_sentences(
    line: Result, base: Result, shared: list[int], about: Comparison, experiment: Experiment
) -> Comparison:
    """``about`` with a p for each seed that both have."""
    p, reasons = {}, []
    for seed in shared:
        try:
            of_seed, reason = _paired(line, base, seed, experiment.metric)
        except (UserError, OSError, KeyError):
            of_seed, reason = None, "translations or references are gone"
        if of_seed is None:
            reasons.append(f"seed {seed}: {reason}")
        else:
            p[str(seed)] = of_seed
    if not shared:
        reasons = ["no seed in common"]
    return replace(about, p=p, untested="; ".join(reasons))


def _paired(line: Result, base: Result, seed: int, metric: str) -> tuple[float | None, str]:
    """The p of one seed's translations; or None, and why there is none.

    Raises ``UserError``, ``OSError`` or ``KeyError`` if their files are gone.
    """
    output, references = _translations(line, seed)
    of_baseline, its_references = _translations(base, seed)
    if references != its_references:
        return None, "other test set"
    metrics = {metric: make_metric(metric)}
    p = significance.paired(of_baseline, output, references, metrics, TRIALS)
    return p.get(metric), "hardly a translation differs"


def _translations(line: Result, seed: int) -> tuple[list[str], list[list[str]]]:
    """A row's translations with one seed, and their references."""
    record = line.records[seed]
    folder = line.runs[seed].folder / record.get("folder", EVALUATION)
    references = [read_lines(Path(path)) for path in record["references"]]
    return read_lines(folder / TRANSLATION), references


def _with_holm(lines: list[Result]) -> list[Result]:
    """Return the lines with p-values corrected for the tests of a column.

    Each seed's tests are corrected apart; the same runs are one test.
    """
    families: dict[str, dict[object, float]] = {}
    for line in lines:
        if line.comparison:
            for seed, p in line.comparison.p.items():
                test = (line.comparison.baseline, *line.runs_and_values)
                families.setdefault(seed, {})[test] = p

    corrected = {}
    for seed, family in families.items():
        corrected[seed] = dict(zip(family, significance.holm(list(family.values()))))

    result = []
    for line in lines:
        if line.comparison and line.comparison.p:
            test = (line.comparison.baseline, *line.runs_and_values)
            adjusted = {seed: corrected[seed][test] for seed in line.comparison.p}
            tests = max(len(families[seed]) for seed in adjusted)
            comparison = replace(line.comparison, adjusted=adjusted, tests=tests)
            line = replace(line, comparison=comparison)
        result.append(line)
    return result


def _mark_best(lines: list[Result], experiment: Experiment) -> list[Result]:
    """Mark the best mean if its row differs from its baseline.

    It is also marked if it is a baseline from which a row differs.
    """
    lower_is_better = TASKS[experiment.task].metrics[experiment.metric]
    means = [line.mean for line in lines if line.values]
    best = (min if lower_is_better else max)(means, default=None)
    differing = set()
    for line in lines:
        if line.comparison and _differs(line.comparison):
            differing |= {line.cell.row.label, line.comparison.baseline}
    return [
        replace(line, best=line.mean == best and line.cell.row.label in differing) for line in lines
    ]


def _differs(comparison: Comparison) -> bool:
    """Whether a difference is beyond chance, for every seed that was tested and over seeds."""
    over_seeds = comparison.p_over_seeds
    if not comparison.adjusted or over_seeds is None or over_seeds >= LEVEL:
        return False
    return all(p < LEVEL for p in comparison.adjusted.values())


def missing(line: Result) -> tuple[str, str]:
    """Why seeds have no value, in full and in short; seeds with the same reason together."""
    if not line.runs:
        reason = NEW if line.cell.run else ""
        if line.trials:
            done = sum(trial.held_out is not None for trial in line.trials)
            reason = f"sweep: {done} of {len(line.trials)} values done"
        return reason, reason

    by_state: dict[State, list[str]] = {}
    for seed, state in sorted(line.states.items()):
        if state.kind != DONE:
            by_state.setdefault(state, []).append(str(seed))
    full = []
    for state, seeds in by_state.items():
        which = ""
        if len(seeds) < len(line.runs):
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)} "
        full.append(f"{which}{state}")
    short = dict.fromkeys(state.short for state in by_state)
    return "; ".join(full), "; ".join(short)


def power(lines: list[Result], column: str, metric: str) -> str:
    """Return the smallest difference that the seeds of a column would have found, as a sentence.

    The sentence is empty where nothing varies.
    """
    lines = [line for line in lines if line.cell.column == column and len(line.values) > 1]
    model = seed_model(lines)
    if model.residuals.deviation is None:
        return ""
    seeds = min(len(line.values) for line in lines)
    least = significance.detectable(model.residuals.deviation, seeds, model.residuals.freedom)
    subject = f"Power of {column}" if column else "Power"
    text = f"{subject}: {seeds} seeds per row find a difference of {least:.3g} in {metric} four "
    text += f"times of five (two-sided, {LEVEL:.0%}, not corrected; residual standard deviation "
    text += f"{model.residuals.deviation:.3g}, {model.residuals.freedom} degrees of freedom)."
    if model.scattered:
        text += (
            " Left out of that residual, because their seeds scatter more, and compared by their"
        )
        text += f" own paired differences: {', '.join(model.scattered)}."
    return text
