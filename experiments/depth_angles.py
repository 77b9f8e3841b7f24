"""The angle between y and x in training, and the decoder's remaining gradient, for docs/depth.md.

``python experiments/depth_angles.py RUNS ...`` takes folders of runs of experiments/depth.yaml that
logged their skip connections, such as results/depth_logs.tar.xz unpacked. It writes
results/depth_angles.csv, a row for each logged update, and its figure, and answers the question
that docs/depth-history.md registers ("the older trainings once more"). The columns:

``gradient``: the gradient's norm behind the decoder's last residual over that behind the last one
of its first layer, infinite where none is left. ``angle``: the root mean square, over the decoder's
residuals, of the arccos of the logged mean cosine of y and x. ``angle_from_norms``: the same of the
angle that |F| / |x| makes if x and F are orthogonal; empty for rules that the page has no formula
for.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import pandas
from scipy.stats import mannwhitneyu

from fairseq_rskip.analysis import figures, skip_log
from fairseq_rskip.analysis.depth_check import angles_in, largest_angle, quadratic_means
from fairseq_rskip.console import Parser, in_columns, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.residual import Place, create_skip
from fairseq_rskip.tools.experiments.finished import FinishedRun, finished_runs

STEM = Path(__file__).resolve().parents[1] / "results" / "depth_angles"
KIND_OF_ARCH = {"rskip_ln": "rskip", "xskip_ln": "xskip", "deepnorm": "deepnorm"}
LAYER = "decoder.layers."
RESIDUALS = 3  # of a decoder layer
FIRST_UPDATE = 50  # of the logged updates that count
LOST = 30.0  # the gradient's ratio from which a run counts as lost
RUN = ["rule", "lambda", "layers", "lr", "seed"]  # the columns that name a run

# The registered sentences: what each says of a run, from its largest angles and its residuals N.
# Each is a number that is above 1 where it calls the run lost.
SENTENCES: dict[str, Callable[[pandas.DataFrame], pandas.Series]] = {
    "estimated θN above 10": lambda runs: runs["angle_from_norms"] * runs["N"] / 10,
    "estimated θ√N above 1": lambda runs: runs["angle_from_norms"] * numpy.sqrt(runs["N"]),
    "measured θ beyond the edge": lambda runs: runs["angle"] / runs["N"].map(largest_angle),
}


def read_run(run: FinishedRun) -> list[dict[str, Any]]:
    """A row for each logged update of a run; [] if it has no log."""
    log = run.skip_log
    if log is None:
        return []
    layers = run.options["decoder-layers"]
    rule = run.arch.removeprefix("transformer_")
    estimate = estimate_of(rule, run.options)
    about = {
        "rule": rule.removesuffix("_ln"),
        "lambda": run.options.get("skip-lambda", ""),
        "layers": layers,
        "lr": run.options["lr"],
        "seed": run.seed,
        "loss": run.values["valid_loss"],
    }
    top, bottom = f"{LAYER}{layers - 1}.final_skip", f"{LAYER}0.final_skip"
    rows = []
    for update, values in skip_log.read(log).items():
        shares = skip_log.by_block(values, skip_log.F_OVER_X)
        decoder = [share for block, share in shares.items() if block.startswith(LAYER)]
        measured = {
            "angle": f"{quadratic_means(angles_in(values))['decoder']:.4g}",
            "angle_from_norms": f"{estimate(decoder):.4g}" if estimate else "",
            "gradient": f"{skip_log.gradient_ratio(values, top, bottom):.4g}",
        }
        rows.append({**about, "update": update, **measured})
    return rows


def estimate_of(rule: str, options: dict[str, Any]) -> Callable[[list[float]], float] | None:
    """What makes the root mean square angle of residuals of their |F| / |x|; None without one."""
    kind = KIND_OF_ARCH.get(rule)
    if kind is None:
        return None
    layers = options["decoder-layers"]
    place = Place("decoder", index=1, depth=layers, other_depth=layers, sublayers=RESIDUALS)
    skip_options = {}
    if "skip-lambda" in options:
        skip_options["skip_lambda"] = options["skip-lambda"]
    skip = create_skip(kind, 1, place=place, **skip_options)

    def estimate(shares: list[float]) -> float:
        angles = [math.atan(share / skip.skip_scale) / 2 ** (skip.steps - 1) for share in shares]
        return math.sqrt(fmean(angle**2 for angle in angles))

    return estimate


def largest_of_runs(table: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each run with an estimated angle: its largest angles, N, and whether it is lost."""
    counted = table[(table["update"] >= FIRST_UPDATE) & table["angle_from_norms"].notna()]
    columns = ["angle", "angle_from_norms", "gradient"]
    runs = counted.groupby(RUN, dropna=False)[columns].max().reset_index()
    runs["N"] = RESIDUALS * runs["layers"]
    runs["lost"] = runs["gradient"] >= LOST
    return runs


def print_answer(runs: pandas.DataFrame) -> None:
    """How many runs each sentence calls wrongly, and how well its angle orders lost and kept."""
    lost = runs["lost"]
    print_line(f"{len(runs)} runs, {lost.sum()} of them lost")
    heads = ["lost if the largest", "wrong", "kept called lost", "lost called kept", "area"]
    lines = [heads]
    for sentence, measure in SENTENCES.items():
        values = measure(runs)
        called = values > 1
        kept_wrong, lost_wrong = (called & ~lost).sum(), (~called & lost).sum()
        area = mannwhitneyu(values[lost], values[~lost]).statistic / (lost.sum() * (~lost).sum())
        counts = (kept_wrong + lost_wrong, kept_wrong, lost_wrong)
        lines.append([sentence, *map(str, counts), f"{area:.3f}"])
    for line in in_columns(lines):
        print_line(line)


def draw(runs: pandas.DataFrame) -> None:
    """The figure: each run's largest ratio against its largest measured angle over the edge."""
    figure, (axis,) = figures.new_figure(width=7)
    for number, (layers, part) in enumerate(runs.groupby("layers")):
        axis.scatter(
            part["angle"] / part["N"].map(largest_angle),
            part["gradient"],
            label=f"{layers} layers",
            s=18,
            color=figures.style(number)["color"],
        )
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.axhline(LOST, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", ylabel="gradient at the last layer / at the first")
    axis.set_xlabel("largest angle between y and x, over the edge 5.0 / N^0.80")
    axis.legend(fontsize=8)
    figures.save(figure, STEM)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUNS", nargs="+", type=Path)
    folders = parser.parse_args().runs
    rows = []
    for run in finished_runs(*folders):
        rows += read_run(run)
    if not any(row["angle_from_norms"] for row in rows):
        raise UserError(
            f"{folders[0]}: expected runs of rskip, xskip or deepnorm with a skips.jsonl"
        )
    rows.sort(key=lambda row: [str(row[name]) if name == "lambda" else row[name] for name in RUN])
    figures.write_csv(STEM.with_suffix(".csv"), rows)
    runs = largest_of_runs(pandas.read_csv(STEM.with_suffix(".csv")))
    print_answer(runs)
    draw(runs)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
