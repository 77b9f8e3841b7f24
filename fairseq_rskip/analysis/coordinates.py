"""Coordinate check (Yang et al. 2022, "Tensor Programs V"): the size of activations against width, in a few updates.

A stack of every kind of skip connection, with branches ``W2 relu(W1 h)`` as torch draws them, takes three Adam steps of
one learning rate towards random targets, at four widths. Where the size of a block's output does not depend on width,
before and after the steps, a learning rate found at a small width may be used at a large one. The slope is that of
log size over log width: 0 where they do not depend on each other.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..console import progress
from ..residual import KINDS, Place, SkipConnection
from ..residual.scaled import scheduled
from . import figures
from .depth import Stack
from .figures import Row, select

WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
RATE = 1e-3  # Adam's
COLUMNS = 7


def measure(kind: str, widths: tuple[int, ...] = WIDTHS, steps: int = STEPS, blocks: int = BLOCKS) -> Iterator[Row]:
    """Rows of a kind: ``size``, the root mean square of block ``block``'s output, from 1, after ``step`` updates."""
    for width in widths:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)]
        branches = nn.ModuleList(nn.Sequential(*each) for each in layers)
        places = [Place("encoder", "ffn", block, blocks) for block in range(blocks)]
        skips = nn.ModuleList(SkipConnection(width, kind, place=place) for place in places)
        optimizer = torch.optim.Adam([*skips.parameters(), *branches.parameters()], RATE)
        x, target = torch.randn(TOKENS, width), torch.randn(TOKENS, width)
        for step in range(steps + 1):
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
    x, y = ([math.log(max(row[name], 1e-30)) for row in rows] for name in ("width", "size"))
    return linear_regression(x, y).slope


def report(options: argparse.Namespace, stem: Path) -> None:
    """Measure every kind; write ``stem``'s CSV and figure, print the slopes. On one thread: the matrices are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [row for kind in progress(KINDS, len(KINDS), "kinds", "kind") for row in measure(kind)]
    torch.set_num_threads(threads)
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    figures.write(stem, rows, draw(rows), table(rows), about)


def table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["slope of the last block's size over width", *(f"step {step}" for step in range(STEPS + 1))]]
    for kind in KINDS:
        last = [select(rows, kind=kind, step=step, block=BLOCKS) for step in range(STEPS + 1)]
        lines.append([kind, *(f"{slope(each):+.2f}" for each in last)])
    return lines


def draw(rows: Sequence[Row]) -> Any:
    """A panel for every kind: size against width, a line for each block, before (dotted) and after the steps."""
    import matplotlib.figure

    height = math.ceil(len(KINDS) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * height), layout="constrained")
    for axis, kind in zip(figure.subplots(height, COLUMNS, squeeze=False).flat, KINDS):
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
