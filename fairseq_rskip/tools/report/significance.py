"""Whether two rows differ, and what could have been found: Welch's t-test over seeds, Holm's correction, power."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence

from scipy import optimize, stats

LEVEL, POWER = 0.05, 0.8
OVER_SEEDS = ""  # the key of a test that has all seeds in it


@dataclass(frozen=True)
class Comparison:
    """p-values of a row against another: by seed ("1", "2", ...), or one over all seeds; or the ``reason`` for none.

    ``untested`` are the seeds without a p beside others that have one, each with the reason.
    """

    p: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    untested: Mapping[str, str] = field(default_factory=dict)

    @property
    def beyond_noise(self) -> bool:
        """Whether every test says so."""
        return bool(self.p) and all(value < LEVEL for value in self.p.values())


def welch(ours: Sequence[float], others: Sequence[float]) -> Comparison:
    """Welch's t-test, two-sided, of two samples of seeds."""
    if min(len(ours), len(others)) < 2:
        return Comparison(reason="needs 2 seeds")
    if len(set(ours)) == len(set(others)) == 1:
        return Comparison(reason="no variance")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nearly equal values: what comes out is looked at
        p = float(stats.ttest_ind(ours, others, equal_var=False).pvalue)
    return Comparison({OVER_SEEDS: p}) if math.isfinite(p) else Comparison(reason="no variance")


def holm(p: Mapping[int, float]) -> Dict[int, float]:
    """Holm's step-down adjustment of the p-values of one family (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = adjusted[name] = max(largest, min(1.0, (len(p) - rank) * p[name]))
    return adjusted


def correct(comparisons: Sequence[Comparison]) -> List[Dict[str, float]]:
    """Holm-adjusted p-values of each; what is compared here is one family, and each seed's tests one of their own."""
    adjusted: List[Dict[str, float]] = [{} for _ in comparisons]
    for seed in sorted({seed for comparison in comparisons for seed in comparison.p}):
        family = {n: comparison.p[seed] for n, comparison in enumerate(comparisons) if seed in comparison.p}
        for n, p in holm(family).items():
            adjusted[n][seed] = p
    return adjusted


def pooled_deviation(samples: Sequence[Sequence[float]]) -> Optional[float]:
    """The standard deviation within samples, all taken together; None without two values in any."""
    squares = sum(stats.tvar(sample) * (len(sample) - 1) for sample in samples if len(sample) > 1)
    freedom = sum(len(sample) - 1 for sample in samples if len(sample) > 1)
    return math.sqrt(squares / freedom) if freedom else None


def detectable(deviation: float, seeds: int) -> float:
    """The smallest difference of two means of so many seeds that Welch's test finds with ``POWER`` at ``LEVEL``.

    Two-sided, not corrected, where both rows have the standard deviation ``deviation``: Welch's degrees of freedom
    are then 2 (seeds - 1), and t is noncentral with d / (deviation sqrt(2 / seeds)). The chance to find it with the
    wrong sign is below 1e-5 there, and left out.
    """
    freedom = 2 * (seeds - 1)
    limit = stats.t.ppf(1 - LEVEL / 2, freedom)
    centre = optimize.brentq(lambda centre: POWER - stats.nct.sf(limit, freedom, centre), 0.0, 2 * limit + 3)
    return float(centre) * deviation * math.sqrt(2 / seeds)
