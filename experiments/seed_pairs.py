"""Two rows of a translation table beside each other, seed by seed, from the start to the end.

``python experiments/seed_pairs.py RUNS BASELINE OTHER`` reads the finished runs below RUNS (such as
results/gpu/multi30k.tar.xz, unpacked) whose labels are BASELINE and OTHER, and prints the mean of
OTHER − BASELINE over the seeds that both have, with its 95 % t-interval: the scores, the best
validation loss, and the validation loss at the validations nearest to ``--updates``. ``--figure``
draws the last of these over the whole training.
"""

import argparse
import json
from pathlib import Path

import pandas
from scipy import stats

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.fairseq_log import records

SCORES = ["sacreBLEU 13a", "chrF", "chrF++", "tokenised BLEU lower-cased"]
FEWEST = 2  # seeds, for an interval


def validation_losses(run: Path) -> pandas.Series:
    """The validation losses in bits, by the number of updates, of the run in the folder ``run``."""
    valid = [each for each in records(run / "checkpoints" / "train.log") if each.source == "valid"]
    return pandas.Series({each.updates: each.values["loss"] for each in valid})


def read_runs(runs: Path, updates: list[int]) -> pandas.DataFrame:
    """A row for each finished run: its label, its seed and its values.

    Raises ``UserError`` for a run with several evaluations.
    """
    rows = []
    for path in sorted(runs.rglob("run.json")):
        record = json.loads(path.read_text("utf-8"))
        if not record.get("scores"):
            continue
        if len(record["scores"]) > 1:
            names = ", ".join(record["scores"])
            raise UserError(f"{path} has the evaluations {names}; expected one")
        (scores,) = record["scores"].values()
        row = {"label": record["settings"]["label"], "seed": record["seed"]}
        row |= {name: scores["values"][name] for name in SCORES}
        row["best validation loss"] = record["metrics"]["values"]["valid_loss"]
        losses = validation_losses(path.parent)
        row["losses"] = losses
        for update in updates:
            nearest = min(losses.index, key=lambda at: abs(at - update))
            row[f"validation loss near update {update:,}"] = losses[nearest]
        rows.append(row)
    return pandas.DataFrame(rows)


def differences(runs: pandas.DataFrame, baseline: str, other: str) -> pandas.DataFrame:
    """OTHER − BASELINE for each value: by seed, the mean and its interval. Raises ``UserError``."""
    by_label = {}
    for label in (baseline, other):
        chosen = runs[runs["label"] == label] if len(runs) else runs
        if chosen.empty:
            raise UserError(f"there is no finished run of {label!r}; expected a row's label")
        by_label[label] = chosen.drop(columns=["label", "losses"]).set_index("seed")
    by_seed = (by_label[other] - by_label[baseline]).dropna()
    if len(by_seed) < FEWEST:
        raise UserError(f"the rows share {len(by_seed)} seeds; an interval needs {FEWEST}")

    rows = []
    for name, values in by_seed.items():
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        row = {"value": name, "seeds": len(values), "mean": values.mean()}
        row |= {"low": interval.low, "high": interval.high}
        row |= {f"seed {seed}": value for seed, value in values.items()}
        rows.append(row)
    return pandas.DataFrame(rows)


def draw(runs: pandas.DataFrame, baseline: str, other: str, stem: Path) -> None:
    """The difference of the validation losses of each seed over the training, and their mean."""
    losses = runs.set_index(["label", "seed"])["losses"]
    figure, (axis,) = figures.new_figure(width=7)
    curves = []
    for seed in sorted(set(losses[baseline].index) & set(losses[other].index)):
        # by epochs: an epoch of two runs may differ by an update, and one may have stopped early
        epochs = min(len(losses[baseline, seed]), len(losses[other, seed]))
        first = losses[baseline, seed].iloc[:epochs]
        second = losses[other, seed].iloc[:epochs]
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    runs = read_runs(options.runs, options.updates)
    table = differences(runs, options.baseline, options.other)
    print_line(table.round(3).to_string(index=False))
    if options.csv:
        table.round(4).to_csv(options.csv, index=False)
    if options.figure:
        draw(runs, options.baseline, options.other, options.figure)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
