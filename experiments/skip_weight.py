"""What shrinks the gradient of a deep decoder: the angle between y and x, or the weight of x?

``python experiments/skip_weight.py RUNS ...`` takes folders of runs with a log of their skip
connections, such as ``weight`` of results/skip_weight_logs.tar.xz, unpacked. It writes
results/skip_weight.csv, a row for each logged update, and a figure, and answers what
docs/depth-history.md registers ("the older trainings once more" and "the weight of x"). With
``--output STEM`` it writes STEM.csv, .png and .pdf instead. The columns:

``ratio``: the gradient's norm behind the decoder's last residual over that behind the last one of
its first layer, infinite where none is left. ``predicted``: that ratio by the weights of x and by
what the branches return. ``by_weights``: the sum over the residuals between of -ln p, p the weight
of x, and ``by_weights_across``, the same with F at right angles to x. ``cos_x_F``: the mean cosine
of x and F over these residuals. ``angle``: the root mean square, over all residuals of the decoder,
of the arccos of the logged mean cosine of y and x. ``angle_from_norms``: the same of the angle that
|F| / |x| makes if F is at right angles to x.
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
from fairseq_rskip.analysis.depth_check import gain_of_branch, layer_of, ln
from fairseq_rskip.analysis.skip_log import LOST
from fairseq_rskip.console import Parser, in_columns, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.residual import Place, SkipConnection, create_skip
from fairseq_rskip.tools.experiments.finished import FinishedRun, finished_runs

RESULTS = Path(__file__).resolve().parents[1] / "results"
# the rules that the page has a formula for: y = G(a x + b F), or rSkip+LN's recursion
KIND_OF_ARCH = {
    "rskip_ln": "rskip",
    "xskip_ln": "xskip",
    "deepnorm": "deepnorm",
    "keel": "keel",
    "angle": "angle",
    "preln": "preln",
}
OLDER = ["rskip", "xskip", "deepnorm"]  # the rules of the older trainings, at up to 36 layers
# the runs that the idea came from, all at 36 layers and 0.003: rule and λ
LOOKED_AT = [("rskip", 4), ("rskip", 6), ("xskip", 4), ("xskip", 6), ("xskip", 8)]
TRANSLATION, LANGUAGE_MODEL = "translation", "language model"
RESIDUALS = {TRANSLATION: 3, LANGUAGE_MODEL: 2}  # of a decoder layer
LAYER = "decoder.layers."
EDGE = (5.0, 0.80)  # the largest angle is 5.0 / N^0.80 by results/angle_edge.csv at 0.003
FIRST_UPDATE = 50  # of the logged updates that count
CLOSE = (1.0, 0.15)  # |ln ratio - ln predicted| is close up to the first + the second * ln ratio
RUN = ["task", "rule", "lambda", "c", "layers", "lr", "seed"]  # the columns that name a run

# The registered sentences: what each says of a run, from its largest values and its residuals N.
# Each is a number that is above 1 where it calls the run lost.
SENTENCES: dict[str, Callable[[pandas.DataFrame], pandas.Series]] = {
    "estimated θN above 10": lambda runs: runs["angle_from_norms"] * runs["N"] / 10,
    "estimated θ√N above 1": lambda runs: runs["angle_from_norms"] * numpy.sqrt(runs["N"]),
    "measured θ beyond the edge": lambda runs: runs["angle"] / edge(runs),
    "predicted ratio above 30": lambda runs: runs["predicted"] / LOST,
}


def edge(runs: pandas.DataFrame) -> pandas.Series:
    """The largest angle that kept the gradient where a rule set the angle, in radians."""
    return EDGE[0] / runs["N"] ** EDGE[1]


def weight_by_constants(t: float, cosine: float, steps: int = 1) -> float:
    """The weight that x keeps in y behind the norm, for unit lengths of x and y.

    ``t`` is the length of the branch's term over that of the skip's, ``cosine`` the cosine of x and
    F. One step is ``y = (x + t F) / |x + t F|``; ``steps`` of them rSkip+LN's recursion. With one
    step it is :func:`.depth_check.weight_of_x`, which takes the lengths of the last sum from a log.
    """
    sine = math.sqrt(max(0.0, 1 - cosine**2))  # a logged cosine may be rounded to above 1
    along, across = t * cosine, t * sine  # F, in the plane of x and F
    weight = 0.0
    for _ in range(steps):
        along += 1.0  # x + y_{k-1}
        length = math.hypot(along, across)
        along, across, weight = along / length, across / length, (weight + 1.0) / length
    return weight


def skip_of(run: FinishedRun, task: str) -> SkipConnection | None:
    """A skip connection of the run's decoder; None of a rule without a formula."""
    kind = KIND_OF_ARCH.get(run.arch.removeprefix("transformer_").removeprefix("lm_"))
    if kind is None:
        return None
    depth = run.options["decoder-layers"]
    encoder = depth if task == TRANSLATION else 0
    place = Place("decoder", index=1, depth=depth, other_depth=encoder, sublayers=RESIDUALS[task])
    options = {}
    if "skip-lambda" in run.options:
        options["skip_lambda"] = run.options["skip-lambda"]
    if "skip-angle" in run.options:
        options["angle"] = run.options["skip-angle"]
    return create_skip(kind, 1, place=place, **options)


def read_run(run: FinishedRun) -> list[dict[str, Any]]:
    """A row for each logged update of a run; [] without a log or a formula."""
    task = LANGUAGE_MODEL if run.arch.startswith("transformer_lm_") else TRANSLATION
    log, skip = run.skip_log, skip_of(run, task)
    if log is None or skip is None:
        return []
    layers = run.options["decoder-layers"]
    about = {
        "task": task,
        "rule": skip.kind,
        "lambda": run.options.get("skip-lambda", ""),
        "c": run.options.get("skip-angle", ""),
        "layers": layers,
        "lr": run.options["lr"],
        "seed": run.seed,
        "loss": run.values["valid_loss"],
    }
    return [
        {**about, "update": update, **measured(values, layers, skip)}
        for update, values in skip_log.read(log).items()
    ]


def of_decoder(values: skip_log.Values, quantity: str) -> dict[str, float]:
    """Block -> value of a quantity, of the decoder's residuals."""
    everything = skip_log.by_block(values, quantity)
    return {block: value for block, value in everything.items() if block.startswith(LAYER)}


def measured(values: skip_log.Values, layers: int, skip: SkipConnection) -> dict[str, str]:
    """The columns of one logged update, see the top of this file."""
    shares = of_decoder(values, skip_log.F_OVER_X)
    cosines = of_decoder(values, skip_log.COS_X_F)
    has_norm = of_decoder(values, skip_log.NORM_AFTER_SUM)
    sizes = of_decoder(values, skip_log.BRANCH_OVER_SKIP)
    gradient_cosines = of_decoder(values, skip_log.COS_GRADIENTS)

    lengths = {}  # of the branch's term over the skip's
    for block, share in shares.items():
        # with a norm on the branch x and F have one length
        f_over_x = 1.0 if skip.branch else share
        lengths[block] = f_over_x * skip.branch_scale / skip.skip_scale
    between = [block for block in shares if layer_of(block) > 1]
    by_weights = by_weights_across = returned = 0.0
    for block in between:
        if has_norm[block]:
            t = lengths[block]
            by_weights -= math.log(weight_by_constants(t, cosines[block], skip.steps))
            by_weights_across -= math.log(weight_by_constants(t, 0.0, skip.steps))
        if block in sizes and block in gradient_cosines:
            returned += ln(gain_of_branch(sizes[block], gradient_cosines[block]))
        else:
            returned = math.nan  # no gradient is left there
    predicted = math.exp(by_weights - returned) if between else 1.0

    angles = skip_log.angles(values)
    estimates = [math.atan(t) / 2 ** (skip.steps - 1) for t in lengths.values()]
    estimate = math.sqrt(fmean(angle**2 for angle in estimates))
    top, bottom = f"{LAYER}{layers - 1}.final_skip", f"{LAYER}0.final_skip"
    numbers = {
        "ratio": skip_log.gradient_ratio(values, top, bottom),
        "predicted": predicted,
        "by_weights": by_weights,
        "by_weights_across": by_weights_across,
        "cos_x_F": fmean(cosines[block] for block in between),
        "angle": math.sqrt(fmean(angles[block] ** 2 for block in shares)),
        "angle_from_norms": estimate,
    }
    return {name: f"{number:.4g}" for name, number in numbers.items()}


def largest_of_runs(table: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each run: N, the largest values of its updates, and whether it is lost.

    ``by_weights`` and ``by_weights_across`` are those of the update with the largest ratio.
    """
    counted = table[table["update"] >= FIRST_UPDATE]
    groups = counted.groupby(RUN, dropna=False)
    runs = groups[["angle", "angle_from_norms", "ratio", "predicted"]].max()
    by_weights = ["by_weights", "by_weights_across"]
    runs[by_weights] = counted.loc[groups["ratio"].idxmax(), by_weights].to_numpy()
    runs = runs.reset_index()
    runs["N"] = runs["layers"] * runs["task"].map(RESIDUALS)
    runs["lost"] = runs["ratio"] >= LOST
    return runs


def print_sentences(runs: pandas.DataFrame) -> None:
    """How many runs each sentence calls wrongly, and how well its number orders lost and kept."""
    lost = runs["lost"]
    print_line(f"older trainings: {len(runs)} runs, {lost.sum()} of them lost")
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


def was_looked_at(table: pandas.DataFrame) -> pandas.Series:
    """Which rows are of the runs that the idea came from."""
    looked = pandas.Series(False, index=table.index)
    for rule, scale in LOOKED_AT:
        has_scale = pandas.to_numeric(table["lambda"], errors="coerce") == scale  # not "auto"
        looked |= (table["rule"] == rule) & has_scale
    return looked & (table["layers"] == 36) & (table["lr"] == 0.003)


def print_closeness(table: pandas.DataFrame) -> None:
    """How often the prediction is close, by task, of the updates at which a gradient is left.

    The runs that the idea came from do not count.
    """
    counted = table[(table["update"] >= FIRST_UPDATE) & numpy.isfinite(table["ratio"])]
    counted = counted[~was_looked_at(counted)]
    for task, part in counted.groupby("task"):
        actual, predicted = numpy.log(part["ratio"]), numpy.log(part["predicted"])
        close = (actual - predicted).abs() <= CLOSE[0] + CLOSE[1] * actual.abs()
        correlation = actual.corr(predicted)
        print_line(
            f"{task}: predicted ratio close at {close.sum()} of {len(part)} updates, "
            f"correlation of the logarithms {correlation:.3f}"
        )


def print_runs(runs: pandas.DataFrame) -> None:
    """Each run's largest ratios, and the share of alignment in what the weights of x lose."""
    lines = [[*RUN, "ratio", "predicted", "by weights", "share of alignment"]]
    for run in runs.to_dict("records"):
        name = ["" if pandas.isna(run[column]) else str(run[column]) for column in RUN]
        share = 1 - run["by_weights_across"] / run["by_weights"] if run["by_weights"] else 0.0
        numbers = [f"{run[column]:.3g}" for column in ("ratio", "predicted", "by_weights")]
        lines.append([*name, *numbers, f"{share:.2f}"])
    for line in in_columns(lines):
        print_line(line)


def draw(runs: pandas.DataFrame, stem: Path) -> None:
    """The figure: each run's largest ratio against its angle over the edge, and as predicted."""
    figure, (left, right) = figures.new_figure(2)
    runs = runs[numpy.isfinite(runs["ratio"])]
    for number, (about, part) in enumerate(runs.groupby(["task", "layers"])):
        task, layers = about
        look = {"s": 18, "color": figures.style(number)["color"], "label": f"{task}, {layers}"}
        left.scatter(part["angle"] / edge(part), part["ratio"], **look)
        right.scatter(part["predicted"], part["ratio"], **look)
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xlabel("largest angle between y and x, over the edge 5.0 / N^0.80")
    ends = [runs[["ratio", "predicted"]].min().min(), runs[["ratio", "predicted"]].max().max()]
    right.plot(ends, ends, color="grey", linewidth=0.8)
    right.set_xlabel("the ratio by the weights of x and the branches")
    for axis in (left, right):
        axis.set(xscale="log", yscale="log", ylabel="gradient at the last layer / at the first")
    right.legend(fontsize=7, title="layers")
    figures.save(figure, stem)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUNS", nargs="+", type=Path)
    parser.add_argument("--output", metavar="STEM", type=Path, default=RESULTS / "skip_weight")
    options = parser.parse_args()
    rows = []
    for run in finished_runs(*options.runs):
        rows += read_run(run)
    if not rows:
        raise UserError(
            f"{options.runs[0]}: expected runs of {', '.join(OLDER)} with a skips.jsonl"
        )
    rows.sort(key=lambda row: [str(row[name]) for name in RUN])
    csv = options.output.with_suffix(".csv")
    figures.write_csv(csv, rows)

    table = pandas.read_csv(csv)
    runs = largest_of_runs(table)
    print_runs(runs)
    print_closeness(table)
    older = runs[(runs["task"] == TRANSLATION) & runs["rule"].isin(OLDER) & (runs["layers"] <= 36)]
    if older["lost"].nunique() > 1:
        print_sentences(older)
    draw(runs, options.output)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
