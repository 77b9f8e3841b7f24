"""Tests of whether systems differ.

Over seeds: a linear model with Holm's correction. Over sentences: approximate randomisation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pandas
from sacrebleu.metrics.base import Metric
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

LEVEL = 0.05
POWER = 0.8
OUTLIER = 0.01  # corrected for the number of rules
PAIRED = "approximate randomisation, two-sided"
BY_SEED = "rule + seed in one linear model (least squares, t-test, two-sided)"
LEAST_DIFFERENT = 10  # with fewer differing sentences, ties make p too small
RANDOM_SEED = 12345  # with a fixed seed a comparison is repeatable
ROUNDING = 1e-9  # scores and sums that are equal but for rounding are ties


@dataclass(frozen=True)
class Difference:
    """The difference of two rules with its 95 % interval and its two-sided p, neither corrected."""

    value: float
    low: float
    high: float
    p: float

    @property
    def side(self) -> int:
        """-1 where the whole interval is below 0, 1 where it is above, 0 where it holds 0."""
        if self.high < 0:
            return -1
        return 1 if self.low > 0 else 0


@dataclass(frozen=True)
class Squares:
    """A sum of squared residuals and their degrees of freedom."""

    sum: float
    freedom: int

    @property
    def deviation(self) -> float | None:
        """The standard deviation; None where nothing varies."""
        if self.freedom < 1:
            return None
        deviation = math.sqrt(self.sum / self.freedom)
        return deviation if deviation > ROUNDING else None


def fit(values: Mapping[str, Mapping[int, float]]) -> tuple[Squares, dict[str, Squares]]:
    """Least squares of value = rule + seed, and for each rule what it adds to the residuals.

    That is the sum of the squares of this fit minus that of a fit without the rule (Cook and
    Weisberg 1982, deletion of several cases): ``e' (I - H)^-1 e`` over the rule's residuals e and
    its part of the hat matrix H, without another fit.
    """
    observed = []
    for rule, by_seed in values.items():
        for seed, value in by_seed.items():
            observed.append((rule, seed, value))
    if not observed:
        return Squares(0.0, 0), {}
    table = pandas.DataFrame(observed, columns=["rule", "seed", "value"])
    design = pandas.get_dummies(table[["rule", "seed"]].astype(str), dtype=float).to_numpy()
    y = table["value"].to_numpy(dtype=float)
    to_residuals = np.eye(len(y)) - design @ np.linalg.pinv(design, ROUNDING)
    residuals = to_residuals @ y
    added = {}
    for rule in values:
        of_rule = np.flatnonzero(table["rule"] == rule)
        block = to_residuals[np.ix_(of_rule, of_rule)]
        own = residuals[of_rule]
        squares = own @ np.linalg.pinv(block, ROUNDING, hermitian=True) @ own
        freedom = np.linalg.matrix_rank(block, ROUNDING, hermitian=True)
        added[rule] = Squares(float(squares), int(freedom))
    # the trace of a projection is its rank
    everything = Squares(float(residuals @ residuals), round(np.trace(to_residuals)))
    return everything, added


def most_scattered(everything: Squares, added: Mapping[str, Squares]) -> str | None:
    """The rule that scatters most, if at least two others scatter much less (``OUTLIER``).

    The F-test of what it adds to the residuals against those of the others' own fit: in the fit of
    all, a rule that scatters moves the effects of the seeds, and with them the others' residuals.
    """
    if len(added) < 3:
        return None
    p_values = {}
    for rule, own in added.items():
        rest = Squares(max(0.0, everything.sum - own.sum), everything.freedom - own.freedom)
        if own.freedom < 1 or rest.deviation is None:
            continue
        ratio = own.sum / own.freedom / rest.deviation**2
        p_values[rule] = float(stats.f.sf(ratio, own.freedom, rest.freedom))
    if not p_values:
        return None
    worst = min(p_values, key=p_values.__getitem__)
    return worst if p_values[worst] * len(added) < OUTLIER else None


class SeedModel:
    """Least squares of value = rule + seed + residual, for rules trained with the same seeds.

    Runs of one seed share the order of the data and the random draws, so that part of a seed's
    effect is common to all rules; the model removes it. With two rules this is the paired t-test.

    The model needs residuals of one variance. A rule whose residuals are much larger than those of
    the others (F-test, p below ``OUTLIER``) is therefore left out, and compared by its own paired
    differences.

    Args:
        values: the value of each seed, by rule.

    ``residuals`` are those of the rules that are not ``scattered``.
    """

    def __init__(self, values: Mapping[str, Mapping[int, float]]) -> None:
        self.values = {rule: dict(by_seed) for rule, by_seed in values.items() if by_seed}
        self.scattered: list[str] = []  # the rules that are left out
        self.residuals, added = fit(self.values)
        worst = most_scattered(self.residuals, added)
        while worst is not None:
            self.scattered.append(worst)
            kept = {rule: self.values[rule] for rule in added if rule != worst}
            self.residuals, added = fit(kept)
            worst = most_scattered(self.residuals, added)

    def difference(self, rule: str, baseline: str) -> Difference | None:
        """``rule`` minus ``baseline`` on the seeds of both: the mean of their differences.

        Its standard error has the deviation of all rules. (Where both have the same seeds, that is
        the contrast of least squares; else the contrast would also use other rules' values.) None
        with fewer than two shared seeds or equal values.
        """
        shared = self.shared_seeds(rule, baseline)
        if len(shared) < 2:
            return None
        if {rule, baseline} & {*self.scattered}:
            return self._paired_difference(rule, baseline)
        if self.residuals.deviation is None:
            return None
        value = fmean(self.differences(rule, baseline).values())
        error = self.residuals.deviation * math.sqrt(2 / len(shared))
        margin = error * float(stats.t.isf(LEVEL / 2, self.residuals.freedom))
        p = 2 * float(stats.t.sf(abs(value) / error, self.residuals.freedom))
        return Difference(value, value - margin, value + margin, p)

    def shared_seeds(self, rule: str, baseline: str) -> list[int]:
        """The seeds with which both were trained."""
        return sorted(self.values.get(rule, {}).keys() & self.values.get(baseline, {}).keys())

    def differences(self, rule: str, baseline: str) -> dict[int, float]:
        """Seed -> the value of ``rule`` minus that of ``baseline``."""
        ours, theirs = self.values[rule], self.values[baseline]
        return {seed: ours[seed] - theirs[seed] for seed in self.shared_seeds(rule, baseline)}

    def _paired_difference(self, rule: str, baseline: str) -> Difference | None:
        """The paired t-test of these two rules alone."""
        differences = list(self.differences(rule, baseline).values())
        if np.ptp(differences) <= ROUNDING:
            return None
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(1 - LEVEL)
        return Difference(float(np.mean(differences)), float(low), float(high), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of one family of tests, adjusted by Holm's step-down method (Holm 1979)."""
    if not len(p_values):
        return []
    _, adjusted, *_ = multipletests(p_values, LEVEL, "holm")
    return adjusted.tolist()


def detectable(deviation: float, seeds: int, freedom: int) -> float:
    """The smallest difference of two rules that a t-test finds with probability ``POWER``.

    Args:
        deviation: the standard deviation of the residuals.
        seeds: runs of each rule.
        freedom: degrees of freedom of the residuals.
    """
    critical = stats.t.isf(LEVEL / 2, freedom)

    def excess_power(shift: float) -> float:
        return float(stats.nct.sf(critical, freedom, shift)) - POWER

    shift = optimize.brentq(excess_power, 1.0, 30.0)
    return float(shift) * math.sqrt(2 / seeds) * deviation


def paired_values(baseline: Sequence[float], other: Sequence[float], trials: int) -> float:
    """The two-sided p of approximate randomisation.

    It is twice the smaller of two shares of random sign flips, those with a summed difference of at
    least the observed one and of at most that; where differences are few, of all flips. With one
    difference p is 1.
    """
    if len(baseline) < 2:
        return 1.0
    differences = [b - a for a, b in zip(baseline, other, strict=True)]
    test = stats.permutation_test(
        (differences,),
        lambda sample, axis=-1: sample.sum(axis=axis),
        permutation_type="samples",
        n_resamples=trials,
        random_state=RANDOM_SEED,
    )
    return float(test.pvalue)


def paired(
    baseline: list[str],
    system: list[str],
    references: list[list[str]],
    metrics: Mapping[str, Metric],
    trials: int,
) -> dict[str, float]:
    """The p-values of ``system`` against ``baseline``, by name of the metric.

    {} with fewer than ``LEAST_DIFFERENT`` differing sentences. The draws are those of sacrebleu
    --paired-ar, but a trial counts when its difference is at least as large as the observed one.
    sacreBLEU counts only larger ones, which makes p tiny where two systems tie.
    """
    if not are_tested(baseline, system):
        return {}
    p_values = {}
    for name, metric in metrics.items():
        p_values[name] = _randomisation(metric, baseline, system, references, trials)
    return p_values


def are_tested(baseline: list[str], system: list[str]) -> bool:
    """Whether enough sentences differ for the test to be meaningful."""
    differing = sum(ours != theirs for ours, theirs in zip(system, baseline, strict=True))
    return differing >= LEAST_DIFFERENT


def _randomisation(
    metric: Metric,
    baseline: list[str],
    system: list[str],
    references: list[list[str]],
    trials: int,
) -> float:
    """The two-sided p of one corpus score.

    Each trial swaps the two systems' translations of random sentences.
    """
    ours = np.array(metric._extract_corpus_statistics(system, references))
    theirs = np.array(metric._extract_corpus_statistics(baseline, references))

    def score(statistics: np.ndarray) -> float:
        return metric._aggregate_and_compute(statistics[None]).score

    observed = abs(score(ours.sum(axis=0)) - score(theirs.sum(axis=0)))
    if observed <= ROUNDING:
        return 1.0

    swap = np.random.default_rng(RANDOM_SEED).integers(2, size=(trials, len(system)), dtype=bool)
    first = swap @ theirs + ~swap @ ours
    second = ~swap @ theirs + swap @ ours
    as_large = 0
    for one, other in zip(first, second):
        if abs(score(one) - score(other)) >= observed - ROUNDING:
            as_large += 1
    return (as_large + 1) / (trials + 1)
