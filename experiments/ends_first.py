"""Does the row that starts first end first? The rows of a translation table, each at its own rate.

``python experiments/ends_first.py RUNS BASELINE ROW ...`` reads the finished runs below RUNS whose
labels are BASELINE and ROW, or LABEL@RATE where a row has runs at several learning rates. It prints
for each row

* the best validation loss and the scores, means over its seeds with their sample standard
  deviations;
* the difference of the best validation loss from BASELINE's by seed, with its 95 % t-interval where
  two seeds or more are shared;

and Spearman's correlation over the rows, with its exact two-sided p, between the validation loss at
the validations nearest to ``--updates`` and the best one. ``--figure`` draws the validation losses
of the rows over the training, means over their seeds. ``--tests`` writes each difference by two
tests: the paired t-test of two rows alone, and the linear model of all rows (rule + seed), which is
that of rskip run's reports.
"""

import argparse
import math
from pathlib import Path

import numpy
import pandas
from scipy import stats

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.experiments.text_runs import BEST, LOSSES, read_runs, runs_of
from fairseq_rskip.tools.significance import SeedModel, holm

FEWEST_ROWS = 5  # for a rank correlation
MOST_ROWS = 10  # 3,628,800 orders take ten seconds
FEWEST_SEEDS = 2  # for an interval
SCORES = ["sacreBLEU 13a", "chrF", "tokenised BLEU lower-cased"]
TESTED = [BEST, "sacreBLEU 13a"]
SCATTER = ", deviation"  # behind the name of a value: the sample standard deviation of its seeds


def exact_rank_correlation(first: pandas.Series, second: pandas.Series) -> tuple[float, float]:
    """Spearman's ρ, and its two-sided p over all orders of the rows."""
    ranks = stats.rankdata(second)

    def statistic(orders, axis):
        spread = orders.std(axis) * ranks.std()
        return ((orders * ranks).mean(axis) - orders.mean(axis) * ranks.mean()) / spread

    test = stats.permutation_test(
        [stats.rankdata(first)],
        statistic,
        permutation_type="pairings",
        n_resamples=numpy.inf,
        batch=10_000,
    )
    return float(test.statistic), float(test.pvalue)


def runs_with(runs: pandas.DataFrame, name: str, seeds: list[int]) -> pandas.DataFrame:
    """The runs of the row ``name`` with ``seeds``, or all of them. Raises ``UserError``."""
    chosen = runs_of(runs, name)
    if seeds:
        chosen = chosen[chosen.index.isin(seeds)]
    if chosen.empty:
        raise UserError(f"{name!r} has no run with the seeds {', '.join(map(str, seeds))}")
    return chosen


def row_of(runs: pandas.DataFrame, name: str, baseline: str, seeds: list[int]) -> dict:
    """The values of the row ``name``, of ``seeds`` or all of them. Raises ``UserError``."""
    own, other = (runs_with(runs, each, seeds).drop(columns=LOSSES) for each in (name, baseline))
    row = {"row": name, "seeds": len(own), **own.mean(), **own.std().add_suffix(SCATTER)}
    if name == baseline:
        return row
    by_seed = (own[BEST] - other[BEST]).dropna()
    row["difference"] = by_seed.mean()
    if len(by_seed) >= FEWEST_SEEDS:
        row["low"], row["high"] = stats.ttest_1samp(by_seed, 0.0).confidence_interval(0.95)
    row["by seed"] = " ".join(f"{seed}:{value:+.3f}" for seed, value in by_seed.items())
    return row


def tests_of(runs: pandas.DataFrame, names: list[str], seeds: list[int]) -> pandas.DataFrame:
    """Each row minus the first of ``names`` by the paired t-test and by the linear model of all.

    Each p also after Holm's correction over the rows, for each value of ``TESTED`` and each test.
    """
    tables = []
    for value in TESTED:
        by_row = {}
        for name in names:
            by_row[name] = runs_with(runs, name, seeds)[value].dropna().to_dict()
        model = SeedModel(by_row)
        baseline, *others = names
        lines = []
        for name in others:
            shared = model.shared_seeds(name, baseline)
            if len(shared) < FEWEST_SEEDS:
                raise UserError(
                    f"--tests: {name} and {baseline} share {len(shared)} seeds: "
                    f"expected {FEWEST_SEEDS} or more"
                )
            paired = [by_row[name][seed] - by_row[baseline][seed] for seed in shared]
            test = stats.ttest_1samp(paired, 0.0)
            low, high = test.confidence_interval(0.95)
            line = {"value": value, "row": name, "difference": numpy.mean(paired)}
            line |= {"paired low": low, "paired high": high, "paired p": test.pvalue}
            line |= {"model low": math.nan, "model high": math.nan, "model p": math.nan}
            by_model = model.difference(name, baseline)
            if by_model is not None:
                line |= {"model low": by_model.low, "model high": by_model.high}
                line["model p"] = by_model.p
            lines.append(line)
        table = pandas.DataFrame(lines)
        for kind in ("paired", "model"):
            p_values = table[f"{kind} p"].dropna()
            table.loc[p_values.index, f"{kind} Holm p"] = holm(p_values.tolist())
        tables.append(table)
    return pandas.concat(tables, ignore_index=True)


def mean_by_epoch(runs: pandas.Series) -> pandas.Series:
    """The mean loss over ``runs`` at each epoch that all have, at the updates of the first run.

    An epoch of two runs may differ by an update.
    """
    epochs = min(map(len, runs))
    mean = sum(losses.to_numpy()[:epochs] for losses in runs) / len(runs)
    return pandas.Series(mean, index=runs.iloc[0].index[:epochs])


def draw(losses: dict[str, pandas.Series], stem: Path) -> None:
    """The validation losses of each row: over the training less the rows' mean, which shows who is
    ahead while all fall, and as they are at the end.
    """
    figure, (course, end) = figures.new_figure(columns=2)
    epochs = min(map(len, losses.values()))
    middle = sum(values.to_numpy()[:epochs] for values in losses.values()) / len(losses)
    for number, (name, values) in enumerate(losses.items()):
        values = values.iloc[:epochs]
        course.plot(values.index, values - middle, label=name, **figures.style(number))
        part = values.iloc[epochs // 2 :]
        end.plot(part.index, part, **figures.style(number))
    course.set_ylabel("validation loss less the mean of the rows, bits")
    end.set_ylabel("validation loss, bits")
    for axis in (course, end):
        axis.set_xlabel("updates")
    course.legend(fontsize=8)
    figures.save(figure, stem)


def table_of(runs: pandas.DataFrame, rows: list[str], seeds: list[int]) -> pandas.DataFrame:
    """A line for each of ``rows``, the first of which is the baseline, best loss first."""
    lines = [row_of(runs, name, rows[0], seeds) for name in rows]
    table = pandas.DataFrame(lines).sort_values(BEST)
    columns = ["row", "seeds", BEST, BEST + SCATTER, "difference", "low", "high", "by seed"]
    for score in SCORES:
        columns += [score, score + SCATTER]
    columns += starts(table)
    return table[[name for name in columns if name in table]]


def starts(table: pandas.DataFrame) -> list[str]:
    """The columns of the losses near the updates that were asked for."""
    near = [name for name in table.columns if name.startswith("validation loss near")]
    return [name for name in near if not name.endswith(SCATTER)]


def parse() -> argparse.Namespace:
    """The command line. Raises ``UserError`` for a number of rows that is not accepted."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of finished runs")
    parser.add_argument("rows", nargs="+", metavar="ROW", help="labels; the first is the baseline")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="only these")
    parser.add_argument(
        "--updates",
        nargs="+",
        type=whole_number(1),
        default=[300, 1000],
        metavar="N",
        help="(default: %(default)s)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="write both tests there")
    parser.add_argument("--figure", type=Path, metavar="STEM", help="write STEM.png and STEM.pdf")
    options = parser.parse_args()
    if options.figure:  # refused before anything is read
        options.figure = figures.check_stem(options.figure)
    if not FEWEST_ROWS <= len(options.rows) <= MOST_ROWS:
        raise UserError(
            f"{len(options.rows)} rows; expected {FEWEST_ROWS} to {MOST_ROWS}: the correlation's p "
            "is over all their orders"
        )
    return options


def main() -> None:
    options = parse()
    runs = read_runs(options.runs, options.updates)
    table = table_of(runs, options.rows, options.seeds)
    print_line(table.round(3).to_string(index=False, na_rep=""))
    for name in starts(table):
        rho, p = exact_rank_correlation(table[name], table[BEST])
        if math.isfinite(rho):
            print_line(f"{name} and {BEST}: Spearman's ρ = {rho:.2f}, p = {p:.3f}")
    if options.csv:
        table.round(4).to_csv(options.csv, index=False)
    if options.tests:
        tests = tests_of(runs, options.rows, options.seeds)
        print_line(tests.round(3).to_string(index=False))
        tests.round(4).to_csv(options.tests, index=False)
    if options.figure:
        losses = {}
        for name in options.rows:
            losses[name] = mean_by_epoch(runs_with(runs, name, options.seeds)[LOSSES])
        draw(losses, options.figure)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
