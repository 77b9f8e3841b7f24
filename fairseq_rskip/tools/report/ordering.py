"""Where the paper's ordering of rows holds among those that have been run."""

import math
from itertools import combinations
from typing import List, Tuple

from scipy import stats

from .numbers import Line, Result, compare, different
from .paired import PairedTests
from .significance import LEVEL

Pair = Tuple[Line, Line]


def describe(result: Result, column: str, tests: PairedTests) -> str:
    """One or two sentences on a column, or "" where fewer than two different rows have both values."""
    lines = different(line for line in result.lines if line.cell.column == column and line.cell.reported is not None)
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.cell.reported != b.cell.reported]
    if not pairs:
        return ""
    kept = [pair for pair in pairs if _order(pair) > 0]
    turned = [pair for pair in pairs if _order(pair) < 0]
    tau = stats.kendalltau([line.cell.reported for line in lines], [line.mean for line in lines]).statistic
    equal = len(pairs) - len(kept) - len(turned)
    shown = f" (Kendall's tau {tau:.2f})".replace("-", "\u2212") if math.isfinite(tau) and len(lines) > 2 else ""
    text = f"of the pairs of rows that the paper tells apart, {len(kept)} of {len(pairs)} stand in its order here"
    text += f", {equal} equal" if equal else ""
    if kept and result.test == "welch":  # paired tests of so many would take an hour
        beyond = sum(compare(*pair, result, tests).beyond_noise for pair in kept)
        shown += f"; {beyond} of those in order are beyond the noise (p < {LEVEL}, uncorrected)"
    partial = " Some of these rows lack seeds." if any(len(line.values) < line.planned for line in lines) else ""
    start = f"Ordering, {column}" if column else "Ordering"
    return f"{start}: {text}{shown}.{partial}{_turned(turned, result, tests)}"


def _order(pair: Pair) -> float:
    """Above 0 where ours differ in the direction in which the paper's do."""
    return (pair[0].cell.reported - pair[1].cell.reported) * (pair[0].mean - pair[1].mean)


def _turned(pairs: List[Pair], result: Result, tests: PairedTests) -> str:
    """What is to be said of the pairs that stand the other way round."""
    if not pairs:
        return ""
    results = [(pair, compare(*pair, result, tests)) for pair in pairs]
    beyond = [_better_first(pair, result) for pair, test in results if test.beyond_noise]
    untested = sum(not test.p for _, test in results)
    within = len(pairs) - len(beyond) - untested
    parts = [f"beyond the noise (p < {LEVEL}, uncorrected) {', '.join(beyond)}"] if beyond else []
    parts += [f"within the noise {within}"] if within else []
    parts += [f"not to be tested with these runs {untested}"] if untested else []
    return f" The other way round: {'; '.join(parts)}."


def _better_first(pair: Pair, result: Result) -> str:
    better, worse = sorted(pair, key=lambda line: line.mean, reverse=not result.table.lower_is_better)
    return f"{better.cell.row} better than {worse.cell.row}"
