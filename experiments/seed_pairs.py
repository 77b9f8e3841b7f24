"""Two rows of a translation table beside each other, seed by seed, from the start to the end.

``python experiments/seed_pairs.py RUNS BASELINE OTHER`` reads the finished runs below RUNS (such as
results/gpu/multi30k.tar.xz, unpacked) whose labels are BASELINE and OTHER, or LABEL@RATE where a
row has runs at several learning rates, and prints the mean of OTHER − BASELINE over the seeds that
both have, with its 95 % t-interval: the scores, the best validation loss, and the validation loss
at the validations nearest to ``--updates``. ``--figure`` draws the last of these over the whole
training.
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
    """The validation losses in bits, by the number of updates, of the run in the folder ``run``.

    Empty where the record is kept without its log.
    """
    log = run / "checkpoints" / "train.log"
    if not log.exists():
        return pandas.Series(dtype=float)
    valid = [each for each in records(log) if each.source == "valid"]
    return pandas.Series({each.updates: each.values["loss"] for each in valid})


def read_runs(runs: Path, updates: list[int]) -> pandas.DataFrame:
    """A row for each finished run: its label, learning rate, seed and values.

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
        settings = record["settings"]
        row = {"label": settings["label"], "lr": settings["options"].get("lr")}
        row["seed"] = record["seed"]
        row |= {name: scores["values"][name] for name in SCORES}
        row["best validation loss"] = record["metrics"]["values"]["valid_loss"]
        losses = validation_losses(path.parent)
        row["losses"] = losses
        for update in updates if len(losses) else []:
            nearest = min(losses.index, key=lambda at: abs(at - update))
            row[f"validation loss near update {update:,}"] = losses[nearest]
        rows.append(row)
    return pandas.DataFrame(rows)


def runs_of(runs: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """The runs of a row by seed; ``name`` is its label, or LABEL@RATE. Raises ``UserError``."""
    label, _, rate = name.partition("@")
    chosen = runs[runs["label"] == label] if len(runs) else runs
    if rate:
        chosen = chosen[chosen["lr"] == float(rate)]
    if chosen.empty:
        raise UserError(f"there is no finished run of {name!r}; expected a row's label")
    if chosen["seed"].duplicated().any():
        rates = ", ".join(f"{lr:g}" for lr in sorted(chosen["lr"].unique()))
        raise UserError(f"{name!r} has runs at the rates {rates}; expected {label}@RATE")
    return chosen.drop(columns=["label", "lr"]).set_index("seed")


def differences(runs: pandas.DataFrame, baseline: str, other: str) -> pandas.DataFrame:
    """OTHER − BASELINE for each value: by seed, the mean and its interval. Raises ``UserError``."""
    first, second = (runs_of(runs, name).drop(columns="losses") for name in (baseline, other))
    by_seed = (second - first).dropna(how="all")
    if len(by_seed) < FEWEST:
        raise UserError(f"the rows share {len(by_seed)} seeds; an interval needs {FEWEST}")

    rows = []
    for name, values in by_seed.dropna(axis="columns").items():
        interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        row = {"value": name, "seeds": len(values), "mean": values.mean()}
        row |= {"low": interval.low, "high": interval.high}
        row |= {f"seed {seed}": value for seed, value in values.items()}
        rows.append(row)
    return pandas.DataFrame(rows)


def draw(runs: pandas.DataFrame, baseline: str, other: str, stem: Path) -> None:
    """The difference of the validation losses of each seed over the training, and their mean."""
    losses = {name: runs_of(runs, name)["losses"] for name in (baseline, other)}
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
