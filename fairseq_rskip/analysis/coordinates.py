"""Coordinate check (Yang et al. 2022, "Tensor Programs V"): the size of activations against width, in a few updates.

A stack of every kind of skip connection, with branches ``W2 relu(W1 h)`` as torch draws them, takes three Adam steps of
one learning rate towards random targets, at four widths. Where the size of a block's output does not depend on width,
before and after the steps, a learning rate found at a small width may be used at a large one. The slope is that of
log size over log width: 0 where they do not depend on each other.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..residual import KINDS, Place, SkipConnection
from ..residual.scaled import scheduled
from . import figures
from .figures import Row, select

WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
RATE = 1e-3  # Adam's
COLUMNS = 7


class Stack(nn.Module):
    """Residual blocks of one kind."""

    def __init__(self, kind: str, width: int, blocks: int):
        super().__init__()
        self.skips = nn.ModuleList()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)
        )
        for block in range(blocks):
            self.skips.append(SkipConnection(width, kind, place=Place("encoder", "ffn", block, blocks)))

    def forward(self, x: Tensor) -> list[Tensor]:
        """The outputs of all blocks; of kinds that carry several tensors, all of them in one."""
        outputs = []
        for skip, branch in zip(self.skips, self.branches):
            h, carried = skip.prepare(x)
            x = skip(x, branch(h), carried)
            outputs.append(x)
        return outputs


def measure(kind: str, widths: tuple[int, ...] = WIDTHS, steps: int = STEPS, blocks: int = BLOCKS) -> Iterator[Row]:
    """Rows of a kind: ``size``, the root mean square of block ``block``'s output, from 1, after ``step`` updates."""
    for width in widths:
        torch.manual_seed(0)
        stack = Stack(kind, width, blocks)
        optimizer = torch.optim.Adam(stack.parameters(), RATE)
        x, target = torch.randn(TOKENS, width), torch.randn(TOKENS, width)
        for step in range(steps + 1):
            for skip in scheduled(stack):
                skip.set_num_updates(step)
            outputs = stack(x)
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
    threads, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for number, kind in enumerate(KINDS, 1):
        print(f"{kind} ({number} of {len(KINDS)})", file=sys.stderr, flush=True)
        rows += measure(kind)
    torch.set_num_threads(threads)
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    figures.write(stem, rows, draw(rows), table(rows), about)


def table(rows: Sequence[Row]) -> str:
    lines = [["slope of the last block's size over width", *(f"step {step}" for step in range(STEPS + 1))]]
    for kind in KINDS:
        last = [select(rows, kind=kind, step=step, block=BLOCKS) for step in range(STEPS + 1)]
        lines.append([kind, *(f"{slope(each):+.2f}" for each in last)])
    return figures.aligned(lines)


def draw(rows: Sequence[Row]) -> Any:
    """A panel for every kind: size against width, a line for each block, before (dotted) and after the steps."""
    import matplotlib.figure

    height = math.ceil(len(KINDS) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * height), layout="constrained")
    for axis, kind in zip(figure.subplots(height, COLUMNS, squeeze=False).flat, KINDS):
        ends = [row for row in select(rows, kind=kind) if row["step"] in (0, STEPS)]
        for block in range(1, BLOCKS + 1):
            for step, line in ((0, ":"), (STEPS, "-")):
                mine = select(ends, step=step, block=block)
                x, y = ([row[name] for row in mine] for name in ("width", "size"))
                axis.plot(x, y, line, color=figures.style(block)["color"])
        axis.set(xscale="log", yscale="log", title=kind)
        axis.set_xticks(WIDTHS, map(str, WIDTHS))
        sizes = [row["size"] for row in ends]
        axis.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)  # so that a change of a per cent does not fill a panel
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    figure.suptitle(f"rms of each block's output against width: at the start (dotted) and after {STEPS} steps")
    return figure
