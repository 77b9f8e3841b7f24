"""Coordinate check (Yang et al. 2022, "Tensor Programs V"): the size of activations against width, in a few updates.

A stack of every kind of skip connection, with branches ``W2 relu(W1 h)`` as torch draws them, takes three Adam steps of
one learning rate towards random targets, at four widths. Where the size of a block's output does not depend on width,
before and after the steps, a learning rate found at a small width may be used at a large one. The slope is that of
log size over log width: 0 where they do not depend on each other.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..residual import KINDS, Place, SkipConnection
from . import figures

WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
RATE = 1e-3  # Adam's
COLUMNS = 7


class Size(NamedTuple):
    """The root mean square of block ``block``'s output, from 1, after ``step`` updates."""

    kind: str
    width: int
    step: int
    block: int
    size: float


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


def measure(kind: str, widths: tuple[int, ...] = WIDTHS, steps: int = STEPS, blocks: int = BLOCKS) -> Iterator[Size]:
    """The sizes of a kind, by width, step and block."""
    for width in widths:
        torch.manual_seed(0)
        stack = Stack(kind, width, blocks)
        optimizer = torch.optim.Adam(stack.parameters(), RATE)
        x, target = torch.randn(TOKENS, width), torch.randn(TOKENS, width)
        for step in range(steps + 1):
            outputs = stack(x)
            for block, output in enumerate(outputs, 1):
                yield Size(kind, width, step, block, float(output.detach().square().mean().sqrt()))
            optimizer.zero_grad()
            functional.mse_loss(outputs[-1], target).backward()
            optimizer.step()


def slope(sizes: list[Size]) -> float:
    """The slope of log size over log width, by least squares."""
    x, y = [math.log(s.width) for s in sizes], [math.log(max(s.size, 1e-30)) for s in sizes]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def report(options: argparse.Namespace, stem: Path) -> None:
    """Measure every kind; write ``stem``'s CSV and figure, print the slopes."""
    sizes = [size for kind in KINDS for size in measure(kind)]
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    figures.write(stem, [size._asdict() for size in sizes], draw(sizes), table(sizes), about)


def of(sizes: list[Size], **wanted: Any) -> list[Size]:
    return [size for size in sizes if all(getattr(size, name) == value for name, value in wanted.items())]


def table(sizes: list[Size]) -> str:
    lines = [["slope of the last block's size over width", *(f"step {step}" for step in range(STEPS + 1))]]
    for kind in dict.fromkeys(size.kind for size in sizes):
        last = [of(sizes, kind=kind, step=step, block=BLOCKS) for step in range(STEPS + 1)]
        lines.append([kind, *(f"{slope(each):+.2f}" for each in last)])
    return figures.aligned(lines)


def draw(sizes: list[Size]) -> Any:
    """A panel for every kind: size against width, a line for each block, before (dotted) and after the steps."""
    import matplotlib.figure

    kinds = list(dict.fromkeys(size.kind for size in sizes))
    rows = math.ceil(len(kinds) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * rows), layout="constrained")
    for axis, kind in zip(figure.subplots(rows, COLUMNS, squeeze=False).flat, kinds):
        for block in range(1, BLOCKS + 1):
            for step, line in ((0, ":"), (STEPS, "-")):
                found = of(sizes, kind=kind, step=step, block=block)
                axis.plot([s.width for s in found], [s.size for s in found], line, color=figures.style(block)["color"])
        axis.set(xscale="log", yscale="log", title=kind)
        axis.set_xticks(WIDTHS, map(str, WIDTHS))
        shown = [s.size for s in of(sizes, kind=kind) if s.step in (0, STEPS)]
        axis.set_ylim(min(shown) / 1.5, max(shown) * 1.5)  # so that a change of a per cent does not fill a panel
        axis.minorticks_off()
    figure.suptitle(f"rms of each block's output against width: at the start (dotted) and after {STEPS} steps")
    return figure
