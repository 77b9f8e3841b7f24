"""The angle between y and x in training, and the decoder's remaining gradient, for docs/depth.md.

``python experiments/depth_angles.py RUNS ...`` takes folders ``runs`` of ``reproduce.py run
depth``, and from them all logged updates of each run that logged its skip connections.
``results/depth_angles.csv`` has ``angle_from_norms``, the root mean square of θ over the decoder's
N residuals, from |F| / |x| in the log by the page's formulas; ``by_law``, that times sqrt(N); and
``gradient``, the gradient's norm behind the last layer over that behind the first (infinite where
none is left).

θ is not measured: it is what |F| / |x| makes of it if x and F are orthogonal, in rules with one λ
for all residuals (Keel's first layer has another).
"""

import math
from pathlib import Path
from typing import Any

import pandas

from fairseq_rskip.analysis import figures, skip_log
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.residual import Place, create_skip
from fairseq_rskip.tools.experiments.finished import FinishedRun, finished_runs

STEM = Path(__file__).resolve().parents[1] / "results" / "depth_angles"
KIND_OF_ARCH = {"rskip_ln": "rskip", "xskip_ln": "xskip", "deepnorm": "deepnorm"}
LAYER = "decoder.layers."


def measure(run: FinishedRun) -> list[dict[str, Any]]:
    """A row for each logged update of a run; [] if its rule has no angle, or it has no log."""
    kind = KIND_OF_ARCH.get(run.arch.removeprefix("transformer_"))
    log = run.skip_log
    if kind is None or log is None:
        return []
    layers = run.options["decoder-layers"]
    place = Place("decoder", index=1, depth=layers, other_depth=layers, sublayers=3)
    skip_options = {}
    if "skip-lambda" in run.options:
        skip_options["skip_lambda"] = run.options["skip-lambda"]
    skip = create_skip(kind, 1, place=place, **skip_options)
    scale, steps = skip.skip_scale, skip.steps
    about = {
        "rule": kind,
        "lambda": f"{steps if kind == 'rskip' else scale:.3g}",
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
        angles = [math.atan(share / scale) / 2 ** (steps - 1) for share in decoder]
        angle = math.sqrt(sum(each * each for each in angles) / len(angles))
        law = {
            "angle_from_norms": f"{angle:.3f}",
            "by_law": f"{angle * math.sqrt(len(angles)):.2f}",
            "gradient": f"{skip_log.gradient_ratio(values, top, bottom):.3g}",
        }
        rows.append({**about, "update": update, **law})
    return rows


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", metavar="RUNS", nargs="+", type=Path)
    folders = parser.parse_args().runs
    rows = []
    for run in finished_runs(*folders):
        rows += measure(run)
    if not rows:
        raise UserError(
            f"{folders[0]}: expected runs of rskip, xskip or deepnorm with a skips.jsonl"
        )
    order = ("rule", "layers", "lr", "lambda", "seed")
    rows.sort(key=lambda row: [row[name] for name in order])
    figures.write_csv(STEM.with_suffix(".csv"), rows)
    table = pandas.DataFrame(rows).astype({"by_law": float, "gradient": float})
    print_bins(table)
    draw(table)


def print_bins(table: pandas.DataFrame) -> None:
    """The gradient's ratio by the angle over 1/√N, and their rank correlation."""
    for low, high in ((0, 0.7), (0.7, 1), (1, 1.25), (1.25, math.inf)):
        part = table[(table.by_law >= low) & (table.by_law < high)].gradient
        print_line(
            f"{low} to {high}: {len(part)} values, gradient {part.median():.3g}, "
            f"at most {part.max():.3g}"
        )
    print_line(f"rank correlation {table.by_law.corr(table.gradient, method='spearman'):.2f}")


def draw(table: pandas.DataFrame) -> None:
    """The figure: the gradient's ratio against the angle over 1/√N, by depth."""
    figure, (axis,) = figures.new_figure(width=7)
    for number, (layers, part) in enumerate(table.groupby("layers")):
        axis.scatter(
            part.by_law,
            part.gradient,
            label=f"{layers} layers",
            s=12,
            color=figures.style(number)["color"],
        )
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", ylabel="gradient at the last layer / at the first")
    axis.set_xlabel("angle between y and x, over the law's 1/√N")
    axis.legend(fontsize=8)
    figures.save(figure, STEM)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
