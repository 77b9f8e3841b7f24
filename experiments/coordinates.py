"""Size of activations against width, as muP's coordinate check (Yang et al. 2022, "Tensor Programs V"), for every rule.

``python experiments/coordinates.py [KIND ...]`` writes results/coordinates.csv and the figure in half a minute on one
core, and prints the slopes of log size over log width. A stack of six blocks ``W2 relu(W1 h)`` as torch draws them
takes three Adam steps towards random targets, at four widths. Where the slope is 0 before and after the steps, a
learning rate found at a small width may be used at a large one.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import matplotlib.figure
import torch
from torch import nn
from torch.nn import functional

from fairseq_rskip.analysis import figures
from fairseq_rskip.analysis.depth import Stack
from fairseq_rskip.analysis.figures import Row, select
from fairseq_rskip.residual import KINDS, Place, SkipConnection
from fairseq_rskip.residual.scaled import scheduled

STEM = Path(__file__).resolve().parents[1] / "results" / "coordinates"
WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
RATE = 1e-3  # Adam's
COLUMNS = 7


def measure(kind: str) -> Iterator[Row]:
    """Rows of a kind: ``size``, the root mean square of block ``block``'s output, from 1, after ``step`` updates."""
    for width in WIDTHS:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(BLOCKS)]
        branches = nn.ModuleList(nn.Sequential(*each) for each in layers)
        places = [Place("encoder", "ffn", block, BLOCKS) for block in range(BLOCKS)]
        skips = nn.ModuleList(SkipConnection(width, kind, place=place) for place in places)
        optimizer = torch.optim.Adam([*skips.parameters(), *branches.parameters()], RATE)
        x, target = torch.randn(TOKENS, width), torch.randn(TOKENS, width)
        for step in range(STEPS + 1):
            for skip in scheduled(skips):
                skip.set_num_updates(step)
            _, outputs = Stack(branches, skips)(x)
            for block, output in enumerate(outputs, 1):
                size = float(output.detach().square().mean().sqrt())
                yield {"kind": kind, "width": width, "step": step, "block": block, "size": size}
            optimizer.zero_grad()
            functional.mse_loss(outputs[-1], target).backward()
            optimizer.step()


def slope(rows: Sequence[Row]) -> float:
    """The slope of log size over log width, by least squares."""
    return linear_regression(*([math.log(row[name]) for row in rows] for name in ("width", "size"))).slope


def plot(rows: Sequence[Row], kinds: Sequence[str]) -> Any:
    """A panel for every kind: size against width, a line for each block, before (dotted) and after the steps."""
    height = math.ceil(len(kinds) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * height), layout="constrained")
    for axis, kind in zip(figure.subplots(height, COLUMNS, squeeze=False).flat, kinds):
        mine = select(rows, kind=kind)
        for block, (step, line) in itertools.product(range(1, BLOCKS + 1), ((0, ":"), (STEPS, "-"))):
            sizes = [row["size"] for row in select(mine, step=step, block=block)]
            axis.plot(WIDTHS, sizes, line, color=figures.style(block)["color"])
        axis.set(xscale="log", yscale="log", title=kind)
        axis.set_xticks(WIDTHS, map(str, WIDTHS))
        sizes = [row["size"] for row in mine if row["step"] in (0, STEPS)]
        axis.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)  # so that a change of a per cent does not fill a panel
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    figure.suptitle(f"rms of each block's output against width: at the start (dotted) and after {STEPS} steps")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help="rules (every one)")
    parser.add_argument("--output", type=Path, default=STEM, metavar="STEM", help="of the CSV and the figure")
    given = parser.parse_args()
    kinds = given.kinds or list(KINDS)
    torch.set_num_threads(1)  # the matrices are small
    rows = [row for kind in kinds for row in measure(kind)]
    table = [["slope of the last block's size over width", *(f"step {step}" for step in range(STEPS + 1))]]
    for kind in kinds:
        slopes = [slope(select(rows, kind=kind, step=step, block=BLOCKS)) for step in range(STEPS + 1)]
        table.append([kind, *(f"{value:+.2f}" for value in slopes)])
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    figures.write(given.output, rows, plot(rows, kinds), table, about)


if __name__ == "__main__":
    main()
