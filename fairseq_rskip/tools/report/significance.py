"""Whether two rows differ: Welch's t-test over seeds, sacreBLEU's paired tests on a test set, Holm's correction."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Sequence

from scipy import stats

LEVEL = 0.05
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


def holm(p: Sequence[float]) -> List[float]:
    """Holm's step-down adjustment of the p-values of one family (Holm 1979), in their order."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def correct(comparisons: Mapping[str, Comparison]) -> Dict[str, Dict[str, float]]:
    """Holm-adjusted p-values; what is compared here is one family, and each seed's tests one of their own."""
    adjusted: Dict[str, Dict[str, float]] = {name: {} for name in comparisons}
    for seed in sorted({seed for comparison in comparisons.values() for seed in comparison.p}):
        names = [name for name, comparison in comparisons.items() if seed in comparison.p]
        for name, p in zip(names, holm([comparisons[name].p[seed] for name in names])):
            adjusted[name][seed] = p
    return adjusted
