"""Two rows of a translation table beside each other, seed by seed, from the start to the end.

``python experiments/seed_pairs.py RUNS BASELINE OTHER`` reads the finished runs below RUNS (such as
results/gpu/multi30k.tar.xz, unpacked) whose labels are BASELINE and OTHER, or LABEL@RATE where a
row has runs at several learning rates, and prints the mean of OTHER − BASELINE over the seeds that
both have, with its 95 % t-interval: the scores, the best validation loss, and the validation loss
at the validations nearest to ``--updates``. ``--figure`` draws the last of these over the whole
training.
"""

from pathlib import Path

import pandas
from scipy import stats

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.experiments.text_runs import LOSSES, read_runs, runs_of

FEWEST = 2  # seeds, for an interval


def differences(runs: pandas.DataFrame, baseline: str, other: str) -> pandas.DataFrame:
    """OTHER − BASELINE for each value: by seed, the mean and its interval. Raises ``UserError``."""
    first, second = (runs_of(runs, name).drop(columns=LOSSES) for name in (baseline, other))
    by_seed = (second - first).dropna(how="all")
    if len(by_seed) < FEWEST:
        raise UserError(f"the rows share {len(by_seed)} seeds; an interval needs {FEWEST}")

    rows = []
    for name, differences_of_seeds in by_seed.items():
        values = differences_of_seeds.dropna()
        if len(values) < FEWEST:
            print_line(f"{name}: the rows share {len(values)} seeds that have it")
            continue
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        row = {"value": name, "seeds": len(values), "mean": values.mean()}
        row |= {"low": interval.low, "high": interval.high}
        row |= {f"seed {seed}": value for seed, value in values.items()}
        rows.append(row)
    return pandas.DataFrame(rows)


def draw(runs: pandas.DataFrame, baseline: str, other: str, stem: Path) -> None:
    """The difference of the validation losses of each seed over the training, and their mean."""
    losses = {name: runs_of(runs, name)[LOSSES] for name in (baseline, other)}
    figure, (axis,) = figures.new_figure(width=7)
    curves = []
    for seed in sorted(set(losses[baseline].index) & set(losses[other].index)):
        # by epochs: an epoch of two runs may differ by an update, and one may have stopped early
        epochs = min(len(losses[baseline][seed]), len(losses[other][seed]))
        first = losses[baseline][seed].iloc[:epochs]
        second = losses[other][seed].iloc[:epochs]
        curves.append(second.to_numpy() - first.to_numpy())
        axis.plot(first.index, curves[-1], color="0.7", linewidth=1)
    epochs = min(map(len, curves))
    mean = sum(curve[:epochs] for curve in curves) / len(curves)
    axis.plot(first.index[:epochs], mean, label=f"mean of {len(curves)} seeds")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel("updates")
    axis.set_ylabel(f"validation loss, bits: {other} − {baseline}")
    axis.legend()
    figures.save(figure, stem)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of finished runs")
    parser.add_argument("baseline", metavar="BASELINE", help="label of a row")
    parser.add_argument("other", metavar="OTHER", help="label of another row")
    parser.add_argument(
        "--updates",
        nargs="+",
        type=whole_number(1),
        default=[300, 1000, 2000, 5000],
        metavar="N",
        help="(default: %(default)s)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--figure", type=Path, metavar="STEM", help="write STEM.png and STEM.pdf")
    options = parser.parse_args()
    if options.figure:
        options.figure = figures.check_stem(options.figure)
    runs = read_runs(options.runs, options.updates)
    table = differences(runs, options.baseline, options.other)
    print_line(table.round(3).to_string(index=False))
    if options.csv:
        table.round(4).to_csv(options.csv, index=False)
    if options.figure:
        draw(runs, options.baseline, options.other, options.figure)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
