"""What a skip connection does in the course of a training: x:F, norm of F(x) over norm of x, gradient norm, and λ.

A run is the folder of a training with --skip-log-interval N: one that train_cifar.py wrote, or the --save-dir of
train.sh. A panel shows the geometric mean of a quantity over all residual blocks.
"""

import argparse
import collections
from pathlib import Path
from statistics import geometric_mean

from ..errors import UserError
from . import curves, figures
from .figures import Row, select
from .live import F_OVER_X, GRAD_NORM, LAMBDA, LOG, X_TO_F
from .live import read as read_log

QUANTITIES = {X_TO_F: "x:F in y", F_OVER_X: "‖F(x)‖ / ‖x‖", GRAD_NORM: "gradient norm at y", LAMBDA: "adaptive λ"}


def report(options: argparse.Namespace, stem: Path) -> None:
    rows: list[Row] = []
    seeds = collections.Counter()
    for argument in options.runs:
        label, path = curves.split(argument)
        seeds[label] += 1
        values = at_the_end(read(Path(path))) if options.by_block else read(Path(path))
        rows += [{"run": label, "seed": seeds[label], **row} for row in values]
    by, axis, mean = ("number", "residual block", "") if options.by_block else ("step", "update", ", mean over blocks")
    logs = [curves.Log(label, stem, course(select(rows, run=label), by)) for label in seeds]
    panels = {name: f"{title}{mean}" for name, title in QUANTITIES.items() if any(name in log.curves for log in logs)}
    figure = curves.draw(logs, panels, axis, spread=tuple(panels))
    figures.write(stem, rows, figure, table(logs), f"{len(logs)} runs")


def read(folder: Path) -> list[Row]:
    """What --skip-log-interval logged into ``folder``, or below it: a row for each value of a block, block by block.

    Raises ``UserError`` if there is nothing.
    """
    rows = [
        dict(zip(("quantity", "block", "step", "value"), (*tag.split("/", 1), step, value)))
        for path in sorted(folder.rglob(LOG))
        for step, values in read_log(path).items()
        for tag, value in values.items()
    ]
    rows = [row for row in rows if row["quantity"] in QUANTITIES]
    if not rows:
        raise UserError(f"{folder} has no {LOG}: expected a training with --skip-log-interval N")
    order = {key: number for number, key in enumerate(dict.fromkeys((row["quantity"], row["block"]) for row in rows))}
    return sorted(rows, key=lambda row: order[row["quantity"], row["block"]])


def at_the_end(rows: list[Row]) -> list[Row]:
    """The rows of the last update, with the "number" of their block: from 1, encoder before decoder."""
    numbers = {block: number for number, block in enumerate(dict.fromkeys(row["block"] for row in rows), 1)}
    last = max(row["step"] for row in rows)
    return [{**row, "number": numbers[row["block"]]} for row in rows if row["step"] == last]


def course(rows: list[Row], by: str = "step") -> dict[str, curves.Curve]:
    """Of each quantity the geometric mean over the positive values of each step, or ``by``."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["value"] > 0:
            values.setdefault(row["quantity"], {}).setdefault(row[by], []).append(row["value"])
    return {
        quantity: {x: geometric_mean(each) for x, each in sorted(points.items())} for quantity, points in values.items()
    }


def table(logs: list[curves.Log]) -> str:
    """The first and the last value of each quantity, over updates or over blocks, a line for each run."""
    lines = [["run", *(f"{title}, {end}" for title in QUANTITIES.values() for end in ("first", "last"))]]
    for log in logs:
        values = [list(log.curves.get(quantity, {}).values()) for quantity in QUANTITIES]
        lines.append([log.run, *(f"{each[end]:.4g}" if each else "-" for each in values for end in (0, -1))])
    return figures.aligned(lines)
