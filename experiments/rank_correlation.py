"""Does the order of rules carry over from one table to another?

Spearman's ρ with its 95 % interval.

``python experiments/rank_correlation.py A.csv B.csv`` takes two reports (``report.csv`` of ``rskip
run`` or of ``reproduce.py report``) and compares the means of the rows that both have, with every
seed that was planned. The interval is the percentile bootstrap over rules: it covers which rules
were tried, not the choice of seeds.
"""

from pathlib import Path

import numpy
import pandas
from scipy import stats

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.report.reading import read_rows

FEWEST = 10  # with fewer rows some resamples are one row, and p is an approximation


def rank_correlation(
    first: numpy.ndarray, second: numpy.ndarray
) -> tuple[float, float, float, float]:
    """ρ, its p-value and the two ends of its interval. Raises ``UserError`` below ten rows."""
    if len(first) < FEWEST:
        raise UserError(
            f"the tables share {len(first)} rows with a result; "
            f"a rank correlation needs {FEWEST} or more"
        )
    test = stats.spearmanr(first, second)
    interval = stats.bootstrap(
        (first, second),
        lambda a, b: stats.spearmanr(a, b).statistic,
        paired=True,
        vectorized=False,
        method="percentile",
        rng=numpy.random.default_rng(1),
    ).confidence_interval
    return test.statistic, test.pvalue, interval.low, interval.high


def lower_is_better(metric: str) -> bool:
    """Whether a row with a lower value of ``metric`` is the better one."""
    metrics = {name: lower for task in TASKS.values() for name, lower in task.metrics.items()}
    return metrics.get(metric, True)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs=2, type=Path, metavar="CSV")
    paths = parser.parse_args().tables
    if paths[0] == paths[1]:
        raise UserError(f"{paths[0]} is given twice: expected two tables")

    means = {}
    ascending = {}
    for path in paths:
        rows = read_rows(path)
        means[str(path)] = pandas.Series(
            {row: line.mean for row, line in rows.items() if line.is_whole}
        )
        ascending[str(path)] = lower_is_better(next(iter(rows.values())).metric)
    both = pandas.DataFrame(means).dropna()
    ranks = pandas.DataFrame({name: both[name].rank(ascending=ascending[name]) for name in means})
    rho, p, low, high = rank_correlation(*ranks.to_numpy().T)
    table = both.join(ranks.add_suffix(", rank")).sort_values(list(means))
    print_line(table.rename_axis("row").to_markdown(floatfmt=".3f"))
    print_line(
        f"Spearman's ρ = {rho:.2f} (95 % interval {low:.2f} to {high:.2f}), p = {p:.2g}, "
        f"{len(both)} rows"
    )


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
