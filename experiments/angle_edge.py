"""The largest angle of a residual at which a decoder of N residuals keeps its gradient.

Does it fall as 1/√N or as 1/N?

``python experiments/angle_edge.py RUNS ...`` reads folders of runs of experiments/angle.yaml,
angle-lm.yaml and angle-settings.yaml, adds them to results/angle_runs.csv (a row for each logged
update) and analyses that file; without RUNS it analyses what is archived. docs/depth-history.md
registers the tests: the definition of the edge, the exclusions, and what refutes what.

The column ``mean_angle`` of results/angle_runs.csv is the mean, over the residuals of the decoder,
of the arccos of the logged mean cosine of y and x. The edge is not made of it: its angle is the one
that the rule fixes, c / √N.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy
import pandas
import statsmodels.api
from scipy import stats

from fairseq_rskip.analysis import figures, skip_log
from fairseq_rskip.analysis.skip_log import BRANCH_OVER_SKIP, COS_GRADIENTS, LOST, by_block
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.tools.experiments.finished import FinishedRun, finished_runs

RESULTS = Path(__file__).resolve().parents[1] / "results"
RUNS = RESULTS / "angle_runs.csv"
EDGES = RESULTS / "angle_edge"

FIRST_UPDATE, INTERVAL = 50, 10  # of the logged updates that count, to the end of the training
KEPT = 10.0  # the ratio below which a gradient counts as kept, for the cosine of the two paths
CONFIDENCE = 0.95
FEWEST_DEPTHS = 3  # for a fit
# the settings of the registered test; angle-settings.yaml changes one at a time
REGISTERED = {"width": 64, "warmup": 60, "updates": 250}
# the columns that name a run
RUN = ["task", "rule", "layers", "residuals", "lr", *REGISTERED, "seed", "c"]


class Fit(NamedTuple):
    """``theta = constant / N^exponent``, by least squares in ln, with the exponent's interval."""

    constant: float
    exponent: float
    low: float
    high: float


def read_run(run: FinishedRun) -> list[dict[str, Any]]:
    """A row for each logged update of a run; [] if it has no log."""
    log = run.skip_log
    if log is None:
        return []
    layers = run.options["decoder-layers"]
    is_language_model = run.arch.startswith("transformer_lm_")
    residuals = layers * (2 if is_language_model else 3)
    about = {
        "task": "language model" if is_language_model else "translation",
        "rule": "angle" if run.arch.endswith("_angle") else "pre-norm",
        "layers": layers,
        "residuals": residuals,
        "lr": run.options["lr"],
        "width": run.options["decoder-embed-dim"],
        "warmup": run.options["warmup-updates"],
        "updates": run.options["max-update"],
        "seed": run.seed,
        "c": run.options.get("skip-angle", ""),
        "loss": run.values["valid_loss"],
    }

    top, bottom = f"decoder.layers.{layers - 1}.final_skip", "decoder.layers.0.self_attn_skip"
    rows = []
    for update, values in skip_log.read(log).items():
        angles = skip_log.angles(values)
        measured = {
            "ratio": skip_log.gradient_ratio(values, top, bottom),
            "mean_angle": decoder_mean(angles),
            "cos_gradients": decoder_mean(by_block(values, COS_GRADIENTS)),
            "branch_over_skip": decoder_mean(by_block(values, BRANCH_OVER_SKIP)),
        }
        texts = {name: f"{value:.4g}" for name, value in measured.items()}
        rows.append({**about, "update": update, **texts})
    return rows


def decoder_mean(values: dict[str, float]) -> float:
    """The mean over the blocks of the decoder; NaN if none was logged."""
    logged = [value for block, value in values.items() if block.startswith("decoder.layers.")]
    return fmean(logged) if logged else math.nan


def collect(folders: list[Path]) -> None:
    """Add the runs below ``folders`` to :data:`RUNS`; they replace rows of the same runs."""
    rows = []
    for run in finished_runs(*folders):
        rows += read_run(run)
    if not rows:
        raise UserError(
            f"{folders[0]}: no finished run of angle.yaml, angle-lm.yaml or angle-settings.yaml "
            "in it"
        )

    table = pandas.DataFrame(rows)
    # 1, 1.0 and "1" are one run; pre-norm has no c
    table[["c", "update"]] = table[["c", "update"]].apply(pandas.to_numeric)
    if RUNS.exists():
        old = pandas.read_csv(RUNS)
        new_runs = table[RUN].drop_duplicates()
        origin = old.merge(new_runs, how="left", on=RUN, indicator=True)["_merge"]
        table = pandas.concat([old[(origin == "left_only").to_numpy()], table])
    write_text(RUNS, table.sort_values([*RUN, "update"]).to_csv(index=False))


def largest_ratio(run: pandas.DataFrame) -> float:
    """The largest ratio over the updates that count; infinite if a gradient was not finite."""
    last = run["updates"].iloc[0]
    counted = run[(run["update"] >= FIRST_UPDATE) & (run["update"] <= last)]
    expected = (last - FIRST_UPDATE) // INTERVAL + 1
    if len(counted) < expected:  # an update whose gradient is not finite is not logged
        return math.inf
    return counted["ratio"].max()


def angle_of(c: float, residuals: int) -> float:
    """theta = c / sqrt(N), at most a right angle, as in ``residual.angle.FixedAngle``."""
    return min(c / math.sqrt(residuals), math.pi / 2)


def edge(angles: list[float], ratios: list[float]) -> float:
    """The angle at which the ratio first crosses 30; NaN if it does not.

    ln ratio is linear in ln angle between neighbours, and ``angles`` ascend. Where the upper ratio
    is infinite, it is the geometric mean of the two angles.
    """
    points = list(zip(angles, ratios))
    for (below, kept), (above, lost) in zip(points, points[1:]):
        if not kept < LOST <= lost:
            continue
        share = 0.5
        if not math.isinf(lost):
            share = math.log(LOST / kept) / math.log(lost / kept)
        return below * (above / below) ** share
    return math.nan


def edges(table: pandas.DataFrame) -> pandas.DataFrame:
    """The edge of each task, rate, depth, setting and seed, and the number of its angles."""
    rows = []
    fixed = table[table["rule"] == "angle"]
    keys = ["task", "lr", *REGISTERED, "residuals", "seed"]
    for values, runs in fixed.groupby(keys):
        about = dict(zip(keys, values))
        residuals = about["residuals"]
        by_c = {c: largest_ratio(run) for c, run in runs.groupby("c")}
        angles = [angle_of(c, residuals) for c in by_c]
        angle = edge(angles, list(by_c.values()))
        about |= {"angles": len(by_c), "edge": angle, "c_at_edge": angle * math.sqrt(residuals)}
        rows.append(about)
    return pandas.DataFrame(rows)


def as_registered(table: pandas.DataFrame) -> pandas.Series:
    """Which rows have the settings of the registered test."""
    same = pandas.Series(True, index=table.index)
    for name, value in REGISTERED.items():
        same &= table[name] == value
    return same


def other_settings(edge_table: pandas.DataFrame) -> pandas.DataFrame:
    """The edges under other settings, over the registered one of the same depth, rate and seed."""
    same = as_registered(edge_table)
    keys = ["task", "lr", "residuals", "seed"]
    registered = edge_table[same].set_index(keys)["edge"]
    others = edge_table[~same].copy()
    matched = registered.reindex(pandas.MultiIndex.from_frame(others[keys]))
    others["over_registered"] = others["edge"].to_numpy() / matched.to_numpy()
    return others


def fit_exponent(edge_table: pandas.DataFrame) -> Fit:
    """Fit the edges of one task and rate."""
    line = stats.linregress(numpy.log(edge_table["residuals"]), numpy.log(edge_table["edge"]))
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(edge_table) - 2) * line.stderr
    return Fit(math.exp(line.intercept), -line.slope, -line.slope - half, -line.slope + half)


def path_cosine(table: pandas.DataFrame) -> tuple[float, int]:
    """The mean cosine of the gradients by skip and branch, and the number of runs.

    Only runs that keep the gradient count.
    """
    cosines = []
    for _, run in table[table["rule"] == "angle"].groupby(RUN):
        if largest_ratio(run) < KEPT:
            cosines.append(run[run["update"] >= FIRST_UPDATE]["cos_gradients"].mean())
    return float(numpy.mean(cosines)) if cosines else math.nan, len(cosines)


def losses(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """Validation loss at c = 1 and in pre-norm, by depth.

    The difference by seed is negative where c = 1 is better.
    """
    ends = table.drop_duplicates(RUN)
    rows = []
    for (task, lr, layers), runs in ends.groupby(["task", "lr", "layers"]):
        ours = runs[runs["c"] == 1].set_index("seed")["loss"]
        pre_norm = runs[runs["rule"] == "pre-norm"].set_index("seed")["loss"]
        differences = (ours - pre_norm).dropna()
        if differences.empty:
            continue
        by_seed = " ".join(f"{value:+.3f}" for value in differences)
        best = runs[runs["rule"] == "angle"].groupby("c")["loss"].mean()
        rows.append(
            {
                "task": task,
                "lr": lr,
                "layers": layers,
                "c = 1": f"{ours.mean():.3f}",
                "pre-norm": f"{pre_norm.mean():.3f}",
                "by seed": by_seed,
                "best c": f"{best.idxmin():g} ({best.min():.3f})",
            }
        )
    return rows


def by_residuals_and_layers(edge_table: pandas.DataFrame) -> list[str]:
    """Translation's edges over the language model's, at equal residuals and at equal layers.

    ln edge has one slope for both tasks and an offset for translation: 1 with the right count.
    """
    lines = []
    is_translation = (edge_table["task"] == "translation").astype(float)
    layers = edge_table["residuals"] / numpy.where(is_translation == 1, 3, 2)
    for name, count in (("residuals", edge_table["residuals"]), ("layers", layers)):
        about = pandas.DataFrame({"ln N": numpy.log(count), "translation": is_translation})
        model = statsmodels.api.OLS(
            numpy.log(edge_table["edge"]), statsmodels.api.add_constant(about)
        ).fit()
        ratio = math.exp(model.params["translation"])
        low, high = numpy.exp(model.conf_int(1 - CONFIDENCE).loc["translation"])
        lines.append(f"at equal {name} {ratio:.2f} ({low:.2f} to {high:.2f})")
    return lines


def describe(edge_table: pandas.DataFrame) -> str:
    """The fit to the edges in words."""
    fit = fit_exponent(edge_table)
    return (
        f"{fit.constant:.2f} / N^e, e = {fit.exponent:.2f} "
        f"({fit.low:.2f} to {fit.high:.2f}), {len(edge_table)} edges"
    )


def verdict(fit: Fit) -> str:
    """What the registered rule says of 1/sqrt(N) and 1/N."""
    refuted = [name for name, e in (("1/√N", 0.5), ("1/N", 1.0)) if not fit.low <= e <= fit.high]
    return f"refuted: {', '.join(refuted)}" if refuted else "nothing refuted"


def draw(edge_table: pandas.DataFrame) -> None:
    """results/angle_edge.png: the edges against N and their fits, beside 1/sqrt(N) and 1/N."""
    figure, (axis,) = figures.new_figure(width=7)
    for number, ((task, lr), part) in enumerate(edge_table.groupby(["task", "lr"])):
        look = figures.style(number)
        axis.scatter(
            part["residuals"],
            part["edge"],
            label=f"{task}, rate {lr:g}",
            color=look["color"],
            marker=look["marker"],
            s=28,
        )
        if part["residuals"].nunique() >= FEWEST_DEPTHS:
            fit = fit_exponent(part)
            ends = numpy.array([part["residuals"].min(), part["residuals"].max()], dtype=float)
            label = f"{fit.constant:.1f} / N^{fit.exponent:.2f}"
            axis.plot(ends, fit.constant * ends**-fit.exponent, color=look["color"], label=label)
    depths = numpy.array(sorted(edge_table["residuals"].unique()), dtype=float)
    middle = numpy.exp(numpy.log(edge_table["edge"]).mean())
    centre = numpy.exp(numpy.log(edge_table["residuals"]).mean())
    for exponent, label, dashes in ((0.5, "1/√N", "--"), (1.0, "1/N", ":")):
        line = middle * (depths / centre) ** -exponent
        axis.plot(depths, line, dashes, color="grey", label=label)
    axis.set(xscale="log", yscale="log", xlabel="N, residuals of the decoder")
    axis.set_ylabel("largest angle that keeps the gradient (rad)")
    axis.legend(fontsize=8)
    figures.save(figure, EDGES)


def print_registered(table: pandas.DataFrame, inside: pandas.DataFrame) -> None:
    """The registered tests, of each task and rate with enough depths.

    ``table`` has the logged updates and ``inside`` the edges, both of the registered settings.
    """
    for (task, lr), part in inside.groupby(["task", "lr"]):
        if part["residuals"].nunique() < FEWEST_DEPTHS:
            continue
        print_line(f"{task}, rate {lr:g}: {describe(part)}; {verdict(fit_exponent(part))}")
        cosine, runs = path_cosine(table[(table["task"] == task) & (table["lr"] == lr)])
        print_line(f"  cosine of the two gradients where kept: {cosine:.3f} ({runs} runs)")


def print_not_registered(inside: pandas.DataFrame) -> None:
    """Both tasks together, and the deeper half of the depths."""
    print_line("not registered: both tasks, and the deeper half of the depths")
    for lr, part in inside.groupby("lr"):
        if part["task"].nunique() > 1:
            print_line(f"  both tasks, rate {lr:g}: {describe(part)}")
            ratios = ", ".join(by_residuals_and_layers(part))
            print_line(f"  translation's edge over the language model's: {ratios}")
    for (task, lr), part in inside.groupby(["task", "lr"]):
        deeper = part[part["residuals"] >= part["residuals"].median()]
        if deeper["residuals"].nunique() >= FEWEST_DEPTHS:
            least = deeper["residuals"].min()
            print_line(f"  {task}, rate {lr:g}, N from {least} on: {describe(deeper)}")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUNS", nargs="*", type=Path)
    folders = parser.parse_args().runs
    if folders:
        collect(folders)
    table = pandas.read_csv(RUNS)

    edge_table = edges(table)
    figures.write_csv(EDGES.with_suffix(".csv"), edge_table.round(4).to_dict("records"))
    print_line(edge_table.round(3).to_string(index=False))
    others = other_settings(edge_table)
    if not others.empty:
        print_line("other settings: the edge over that of the registered settings")
        print_line(others.round(3).to_string(index=False))

    table = table[as_registered(table)]
    inside = edge_table[as_registered(edge_table)].dropna(subset="edge")
    print_registered(table, inside)
    print_not_registered(inside)
    print_line(pandas.DataFrame(losses(table)).to_string(index=False))
    if not inside.empty:
        draw(inside)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
