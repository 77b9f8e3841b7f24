"""Which comes first in a training, an angle beyond the edge or a lost gradient?

``python experiments/angle_cause.py RUNS ...`` reads runs of experiments/angle-cause.yaml and
angle-lambda.yaml, writes results/angle_cause.csv (a row for each logged update) and analyses that
file; without RUNS it analyses what is archived. The questions were registered in
docs/depth-history.md.

The column ``rms_angle`` is the root mean square, over the residuals of the decoder, of the arccos
of the logged mean cosine of y and x.
"""

import math
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import pandas

from fairseq_rskip.analysis import figures, skip_log
from fairseq_rskip.analysis.skip_log import LOST
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.experiments.finished import FinishedRun, finished_runs

RESULTS = Path(__file__).resolve().parents[1] / "results"
ARCHIVE = RESULTS / "angle_cause.csv"
EDGES = RESULTS / "angle_edge.csv"
RESIDUALS = 3  # of a decoder layer


def read_run(run: FinishedRun) -> list[dict[str, Any]]:
    """A row for each logged update of a run; [] if it has no log."""
    log = run.skip_log
    if log is None:
        return []
    layers = run.options["decoder-layers"]
    about = {
        "rule": run.arch.removeprefix("transformer_").removesuffix("_ln"),
        "lambda": run.options["skip-lambda"],
        "layers": layers,
        "lr": run.options["lr"],
        "seed": run.seed,
        "loss": run.values["valid_loss"],
    }
    top, bottom = f"decoder.layers.{layers - 1}.final_skip", "decoder.layers.0.self_attn_skip"
    rows = []
    for update, values in skip_log.read(log).items():
        ratio = skip_log.gradient_ratio(values, top, bottom)
        angles = skip_log.angles(values)
        squares = [angles[block] ** 2 for block in angles if block.startswith("decoder.")]
        angle = math.sqrt(fmean(squares))
        measured = {"rms_angle": f"{angle:.4g}", "ratio": f"{ratio:.4g}"}
        rows.append({**about, "update": update, **measured})
    return rows


def edge_at(residuals: int, lr: float) -> float:
    """The angle at the edge for ``residuals``, by the fit to translation's edges at the rate.

    The settings are the registered test's: 64 wide. Raises ``UserError`` if fewer than three depths
    have been measured.
    """
    table = pandas.read_csv(EDGES).dropna(subset="edge")
    table = table[(table["task"] == "translation") & (table["lr"] == lr) & (table["width"] == 64)]
    if table["residuals"].nunique() < 3:
        raise UserError(
            f"{EDGES} has fewer than three depths of translation at rate {lr}; run angle.yaml"
        )
    logarithms = table[["residuals", "edge"]].map(math.log)
    slope, intercept = linear_regression(logarithms["residuals"], logarithms["edge"])
    return math.exp(intercept + slope * math.log(residuals))


def first_update(run: pandas.DataFrame, condition: pandas.Series) -> int | None:
    """The first update of ``run`` at which ``condition`` is true; None if it never is."""
    updates = run.loc[condition, "update"]
    return int(updates.min()) if len(updates) else None


def longest_stretch(condition: pandas.Series) -> int:
    """The largest number of logged updates in a row at which ``condition`` is true."""
    longest = current = 0
    for is_true in condition:
        current = current + 1 if is_true else 0
        longest = max(longest, current)
    return longest


def answer(run: pandas.DataFrame, edge: float) -> dict[str, Any]:
    """What happened first in a run: the angle beyond ``edge``, or the gradient's ratio above 30."""
    run = run.sort_values("update")
    lost_at = first_update(run, run["ratio"] >= LOST)
    last = int(run["update"].max()) if lost_at is None else lost_at
    at_last = run[run["update"] == last].iloc[0]
    return {
        "angle beyond the edge from": first_update(run, run["rms_angle"] > edge),
        "most updates in a row beyond it": longest_stretch(run["rms_angle"] > edge),
        "ratio above 30 from": lost_at,
        "angle at first": run["rms_angle"].iloc[0],
        "largest angle": run["rms_angle"].max(),
        "angle when lost, or at the end": at_last["rms_angle"],
        "largest ratio": run["ratio"].max(),
        "largest ratio from update 50 on": run.loc[run["update"] >= 50, "ratio"].max(),
    }


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUNS", nargs="*", type=Path)
    folders = parser.parse_args().runs
    if folders:
        rows = []
        for run in finished_runs(*folders):
            rows += read_run(run)
        if not rows:
            raise UserError(f"no finished run with a skip log in {', '.join(map(str, folders))}")
        figures.write_csv(ARCHIVE, rows)

    table = pandas.read_csv(ARCHIVE)
    for about, run in table.groupby(["rule", "lambda", "layers", "lr", "seed"]):
        rule, scale, layers, lr, seed = about
        edge = edge_at(RESIDUALS * layers, lr)
        training = f"{rule}, λ = {scale}, {layers} layers, rate {lr}, seed {seed}"
        print_line(f"{training}; edge {edge:.3f} rad")
        for name, value in answer(run, edge).items():
            print_line(f"  {name}: {value}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
