"""Whether systems differ: Welch's t-test over seeds, Holm's correction, power; approximate randomisation of two."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

LEVEL, POWER = 0.05, 0.8
PAIRED = "approximate randomisation, two-sided"
LEAST_DIFFERENT = 10  # with fewer differing sentences, ties make p too small
SEED = "12345"  # sacreBLEU's own; with a fixed seed a comparison is repeatable


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The two-sided p of Welch's t-test of two samples; None with fewer than two values in one, or no variance."""
    if min(len(a), len(b)) < 2 or len(set(a)) == len(set(b)) == 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nearly equal values: the p itself is checked
        p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
    return p if math.isfinite(p) else None


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of one family of tests, adjusted by Holm's step-down method (Holm 1979), in the same order."""
    return multipletests(p_values, LEVEL, "holm")[1].tolist() if len(p_values) else []


def pooled_deviation(samples: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation within samples, pooled by degrees of freedom; None without two values in any."""
    samples = [sample for sample in samples if len(sample) > 1]
    freedom = sum(len(sample) - 1 for sample in samples)
    return math.sqrt(sum(stats.tvar(s) * (len(s) - 1) for s in samples) / freedom) if samples else None


def detectable(deviation: float, seeds: int) -> float:
    """The smallest difference of two means that Welch's t-test finds with probability ``POWER``, with ``seeds`` runs,
    two or more, of standard ``deviation`` each. Two-sided, not corrected, equal variances."""
    # Welch's degrees of freedom depend only on one sample's share of the variances, and t does not: a mean over shares
    share = stats.beta.ppf((np.arange(200) + 0.5) / 200, (seeds - 1) / 2, (seeds - 1) / 2)
    critical = stats.t.isf(LEVEL / 2, (seeds - 1) / (share**2 + (1 - share) ** 2))
    found = optimize.brentq(lambda d: stats.nct.sf(critical, 2 * (seeds - 1), d).mean() - POWER, 1.0, 12.0)
    return float(found) * math.sqrt(2 / seeds) * deviation


def paired_values(baseline: Sequence[float], other: Sequence[float], trials: int) -> float:
    """The two-sided p of approximate randomisation: the share of random sign flips whose summed difference is at least
    as far from 0. With one difference p is 1."""
    if len(baseline) < 2:
        return 1.0
    differences = [b - a for a, b in zip(baseline, other, strict=True)]
    drawn = {"permutation_type": "samples", "n_resamples": trials, "random_state": int(SEED)}
    return float(stats.permutation_test((differences,), lambda x, axis=-1: x.sum(axis=axis), **drawn).pvalue)


def paired(
    baseline: list[str], system: list[str], references: list[list[str]], metrics: Mapping[str, Metric], trials: int
) -> dict[str, float]:
    """The p-values of ``system`` against ``baseline``, by name of the metric: those of sacrebleu --paired-ar; {} with
    fewer than ``LEAST_DIFFERENT`` differing sentences."""
    if sum(ours != theirs for ours, theirs in zip(system, baseline, strict=True)) < LEAST_DIFFERENT:
        return {}
    with patch.dict(os.environ, SACREBLEU_SEED=SEED):  # sacreBLEU takes the seed from there alone
        _, results = PairedTest([("baseline", baseline), ("system", system)], metrics, references, "ar", trials)()
    _, *columns = results.values()  # the first has the systems' names
    return {name: float(tested.p_value) for name, (_, tested) in zip(metrics, columns)}
