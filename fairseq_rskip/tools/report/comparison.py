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
        taken = [each for each in in_column if nothing_begun or each.cell.row.label in labels]
        compared += _compare_column(taken, experiment)
    return compared


def _is_begun(result: Result) -> bool:
    """Whether a report has something to say of it."""
    if result.cell.reported is not None:
        return True
    states = [*result.states.values(), *(trial.state for trial in result.trials)]
    return any(state.kind != NEW for state in states)


def seed_model(results: list[Result]) -> SeedModel:
    """The model of one column; rows that are the same runs count once."""
    values: dict[str, dict[int, float]] = {}
    seen = set()
    for result in results:
        if result.runs_and_values and result.runs_and_values not in seen:
            seen.add(result.runs_and_values)
            values[result.cell.row.label] = result.values
    return SeedModel(values)


def _compare_column(results: list[Result], experiment: Experiment) -> list[Result]:
    """Return the results of one column with their comparisons.

    They have p-values after Holm's correction, and the best is marked.
    """
    by_label = {result.cell.row.label: result for result in results}
    bases = {}
    for label, result in by_label.items():
        base = by_label.get(result.cell.row.baseline or experiment.baseline)
        if base is not None and base is not result:
            bases[label] = base

    model = seed_model(results)
    named = _first_labels(results)
    compared = []
    for label, result in by_label.items():
        is_baseline = any(base is result for base in bases.values())
        comparison = None
        if label in bases:
            comparison = _compare_pair(result, bases[label], model, named, experiment)
        compared.append(replace(result, is_baseline=is_baseline, comparison=comparison))
    return _mark_best(_with_holm(compared), experiment)


def _first_labels(results: list[Result]) -> dict[RunsAndValues, str]:
    """The label of each row by its runs and values; of rows with the same, that of the first."""
    labels: dict[RunsAndValues, str] = {}
    for result in results:
        labels.setdefault(result.runs_and_values, result.cell.row.label)
    return labels


def _compare_pair(
    result: Result,
    base: Result,
    model: SeedModel,
    named: dict[RunsAndValues, str],
    experiment: Experiment,
) -> Comparison:
    """Compare a row with its baseline.

    ``named`` has the label under which the model knows the runs and values of a row.
    """
    baseline = base.cell.row.label
    if not result.values:
        return Comparison(baseline)
    if not base.values:
        reason = "; ".join(str(state) for state in dict.fromkeys(base.states.values())) or NEW
        return Comparison(baseline, untested=f"{baseline}: {reason}")
    if result.runs_and_values == base.runs_and_values:
        return Comparison(baseline, 0.0, untested="same runs")

    labels = named[result.runs_and_values], named[base.runs_and_values]
    shared = model.shared_seeds(*labels)
    difference = model.difference(*labels)
    if difference is not None:
        measured = Comparison(
            baseline,
            difference=difference.value,
            interval=(difference.low, difference.high),
            p_over_seeds=difference.p,
            seeds=len(shared),
        )
    elif shared:
        mean = fmean(result.values[seed] - base.values[seed] for seed in shared)
        measured = Comparison(baseline, difference=mean, seeds=len(shared))
    else:
        measured = Comparison(baseline)

    if min(len(result.values), len(base.values)) < 2:
        return replace(measured, untested=NEEDS_SEEDS)
    if test_of(experiment) == "randomisation":
        return _test_sentences(result, base, shared, measured, experiment)
    if difference is not None:
        return replace(measured, p={"": difference.p})
    return replace(measured, untested=_why_untested(len(shared)))


def _why_untested(shared: int) -> str:
    """Why two rows with this number of seeds in common have no test over seeds."""
    if shared > 1:
        return "no variance"
    return "one seed in common" if shared else "no seed in common"


def _test_sentences(
    result: Result, base: Result, shared: list[int], measured: Comparison, experiment: Experiment
) -> Comparison:
    """``measured`` with a p for each seed that both have."""
    p, reasons = {}, []
    for seed in shared:
        try:
            of_seed, reason = _paired(result, base, seed, experiment.metric)
        except (UserError, OSError, KeyError):
            of_seed, reason = None, "translations or references are gone"
        if of_seed is None:
            reasons.append(f"seed {seed}: {reason}")
        else:
            p[str(seed)] = of_seed
    if not shared:
        reasons = ["no seed in common"]
    return replace(measured, p=p, untested="; ".join(reasons))


def _paired(result: Result, base: Result, seed: int, metric: str) -> tuple[float | None, str]:
    """The p of one seed's translations; or None, and why there is none.

    Raises ``UserError``, ``OSError`` or ``KeyError`` if their files are gone.
    """
    output, references = _translations(result, seed)
    of_baseline, its_references = _translations(base, seed)
    if references != its_references:
        return None, "other test set"
    metrics = {metric: make_metric(metric)}
    p = significance.paired(of_baseline, output, references, metrics, TRIALS)
    return p.get(metric), "hardly a translation differs"


def _translations(result: Result, seed: int) -> tuple[list[str], list[list[str]]]:
    """A row's translations with one seed, and their references."""
    record = result.records[seed]
    folder = result.runs[seed].folder / record.get("folder", EVALUATION)
    references = [read_lines(Path(path)) for path in record["references"]]
    return read_lines(folder / TRANSLATION), references


def _with_holm(results: list[Result]) -> list[Result]:
    """Return the results with p-values corrected for the tests of a column.

    Each seed's tests are corrected apart; the same runs are one test.
    """
    families: dict[str, dict[object, float]] = {}
    for result in results:
        if result.comparison:
            for seed, p in result.comparison.p.items():
                test = (result.comparison.baseline, *result.runs_and_values)
                families.setdefault(seed, {})[test] = p

    corrected = {}
    for seed, family in families.items():
        corrected[seed] = dict(zip(family, significance.holm(list(family.values()))))

    with_adjusted = []
    for result in results:
        if result.comparison and result.comparison.p:
            test = (result.comparison.baseline, *result.runs_and_values)
            adjusted = {seed: corrected[seed][test] for seed in result.comparison.p}
            tests = max(len(families[seed]) for seed in adjusted)
            comparison = replace(result.comparison, adjusted=adjusted, tests=tests)
            result = replace(result, comparison=comparison)
        with_adjusted.append(result)
    return with_adjusted


def _mark_best(results: list[Result], experiment: Experiment) -> list[Result]:
    """Mark the rows of the best mean if one of them differs from its baseline.

    They are also marked if one is a baseline from which a row differs.
    """
    lower_is_better = TASKS[experiment.task].metrics[experiment.metric]
    means = [result.mean for result in results if result.values]
    best_of = min if lower_is_better else max
    best = best_of(means, default=None)
    differing = set()
    for result in results:
        if result.comparison and _differs(result.comparison):
            differing |= {result.cell.row.label, result.comparison.baseline}
    of_best = {result.cell.row.label for result in results if result.mean == best}
    is_marked = bool(of_best & differing)
    return [
        replace(result, best=is_marked and result.cell.row.label in of_best) for result in results
    ]


def _differs(comparison: Comparison) -> bool:
    """Whether a difference is beyond chance, for every seed that was tested and over seeds."""
    over_seeds = comparison.p_over_seeds
    if not comparison.adjusted or over_seeds is None or over_seeds >= LEVEL:
        return False
    return all(p < LEVEL for p in comparison.adjusted.values())


def missing(result: Result) -> tuple[str, str]:
    """Why seeds have no value, in full and in short; seeds with the same reason together."""
    if not result.runs:
        reason = NEW if result.cell.run else ""
        if result.trials:
            done = sum(trial.held_out is not None for trial in result.trials)
            reason = f"sweep: {done} of {len(result.trials)} values done"
        return reason, reason

    by_state: dict[State, list[str]] = {}
    for seed, state in sorted(result.states.items()):
        if state.kind != DONE:
            by_state.setdefault(state, []).append(str(seed))
    full = []
    for state, seeds in by_state.items():
        which = ""
        if len(seeds) < len(result.runs):
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)} "
        full.append(f"{which}{state}")
    short = dict.fromkeys(state.short for state in by_state)
    return "; ".join(full), "; ".join(short)


def power(results: list[Result], column: str, metric: str) -> str:
    """Return the smallest difference that the seeds of a column would have found, as a sentence.

    The sentence is empty where nothing varies.
    """
    results = [
        result for result in results if result.cell.column == column and len(result.values) > 1
    ]
    model = seed_model(results)
    if model.residuals.deviation is None:
        return ""
    seeds = min(len(result.values) for result in results)
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
