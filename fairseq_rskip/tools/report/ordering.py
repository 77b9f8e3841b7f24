"""Where the paper's ordering of rows holds among those that have been run."""

import math
from itertools import combinations
from typing import List, Tuple

from scipy import stats

from fairseq_rskip.tools.report.model import Group, Line, compare
from fairseq_rskip.tools.report.paired import PairedTests
from fairseq_rskip.tools.report.significance import LEVEL
from fairseq_rskip.tools.reproduce.plans import TASKS
from fairseq_rskip.tools.reproduce.tables import Table


def describe(group: Group, table: Table, tests: PairedTests) -> str:
    """One or two sentences, or "" where fewer than two different rows have both values."""
    lines = _different(group)
    pairs = [(a, b) for a, b in combinations(lines, 2) if a.reported != b.reported]
    if not pairs:
        return ""
    kept = [(a, b) for a, b in pairs if (a.reported - b.reported) * (a.mean - b.mean) > 0]
    turned = [(a, b) for a, b in pairs if (a.reported - b.reported) * (a.mean - b.mean) < 0]
    tau = float(stats.kendalltau([line.reported for line in lines], [line.mean for line in lines]).statistic)
    equal = len(pairs) - len(kept) - len(turned)
    shown = f" (Kendall's tau {tau:.2f})".replace("-", "\u2212") if math.isfinite(tau) and len(lines) > 2 else ""
    text = f"of the pairs of rows that the paper tells apart, {len(kept)} of {len(pairs)} stand in its order here"
    text += f", {equal} equal" if equal else ""
    partial = " Some of these rows lack seeds." if any(len(line.values) < line.planned for line in lines) else ""
    start = f"Ordering, {group.title}" if group.title else "Ordering"
    return f"{start}: {text}{shown}{_kept(kept, table, tests)}.{partial}{_turned(turned, table, tests)}"


def _different(group: Group) -> List[Line]:
    """The lines with both values; of rows that share their runs the first."""
    found: List[Line] = []
    for line in group.lines:
        if line.values and line.reported is not None and all(line.folders != other.folders for other in found):
            found.append(line)
    return found


def _kept(pairs: List[Tuple[Line, Line]], table: Table, tests: PairedTests) -> str:
    """How many of the pairs are beyond the noise; only where that takes no hour of paired tests."""
    if not pairs or table.task != "images":
        return ""
    beyond = sum(compare(*pair, table, tests).beyond_noise for pair in pairs)
    return f"; {beyond} of those in order are beyond the noise (p < {LEVEL}, uncorrected)"


def _turned(pairs: List[Tuple[Line, Line]], table: Table, tests: PairedTests) -> str:
    """What is to be said of the pairs that stand the other way round."""
    if not pairs:
        return ""
    results = [(pair, compare(*pair, table, tests)) for pair in pairs]
    beyond = [pair for pair, result in results if result.beyond_noise]
    untested = [pair for pair, result in results if not result.p]
    within = len(pairs) - len(beyond) - len(untested)
    parts = []
    if beyond:
        parts.append(f"beyond the noise (p < {LEVEL}, uncorrected) {_named(beyond, table)}")
    if within:
        parts.append(f"within the noise {within}")
    if untested:
        parts.append(f"not to be tested with these runs {len(untested)}")
    return f" The other way round: {'; '.join(parts)}."


def _named(pairs: List[Tuple[Line, Line]], table: Table) -> str:
    """Each pair with the row first that is better here."""
    sign = 1 if TASKS[table.task].LOWER_IS_BETTER else -1
    ordered = [sorted(pair, key=lambda line: sign * line.mean) for pair in pairs]
    return ", ".join(f"{better.label} better than {worse.label}" for better, worse in ordered)
