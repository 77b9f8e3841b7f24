"""What a skip connection does in the course of a training: x:F, norm of F(x) over norm of x, gradient norm, and λ.

A run is the folder of a training with --skip-log-interval N: one that train_cifar.py wrote, or the --save-dir of
train.sh. A panel shows the geometric mean of a quantity over all residual blocks, and over the seeds of a LABEL.
"""

import argparse
import collections
from pathlib import Path
from statistics import geometric_mean

from ..errors import UserError
from . import curves
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
        rows += [{"run": label, "seed": seeds[label], **row} for row in read(Path(path), options.by_block)]
    by, axis, what = ("number", "residual block", "") if options.by_block else ("step", "update", ", mean over blocks")
    logs = [curves.Log(label, stem, course(select(rows, run=label), by)) for label in seeds]
    panels = {name: f"{title}{what}" for name, title in QUANTITIES.items() if any(name in log.curves for log in logs)}
    curves.write(stem, rows, logs, panels, axis, spread=tuple(panels))


def read(folder: Path, at_the_end: bool = False) -> list[Row]:
    """Read what --skip-log-interval logged in or below ``folder``: a row for each value of a block, block by block.

    ``at_the_end``: those of the last update, with the ``number`` of their block: from 1, encoder before decoder. Raises
    ``UserError`` if there is nothing.
    """
    rows: list[Row] = []
    for path in sorted(folder.rglob(LOG)):
        for step, values in read_log(path).items():
            for tag, value in values.items():
                quantity, _, block = tag.partition("/")
                rows.append({"quantity": quantity, "block": block, "step": step, "value": value})
    rows = [row for row in rows if row["quantity"] in QUANTITIES]
    if not rows:
        raise UserError(f"{folder} has no {LOG}: expected a training with --skip-log-interval N")
    quantities, blocks = (list(dict.fromkeys(row[name] for row in rows)) for name in ("quantity", "block"))
    rows.sort(key=lambda row: (quantities.index(row["quantity"]), blocks.index(row["block"])))
    if not at_the_end:
        return rows
    last = max(row["step"] for row in rows)
    return [{**row, "number": blocks.index(row["block"]) + 1} for row in select(rows, step=last)]


def course(rows: list[Row], by: str = "step") -> dict[str, curves.Curve]:
    """Return each quantity's curve: the geometric mean of its positive values at each step, or ``by``."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["value"] > 0:
            values.setdefault(row["quantity"], {}).setdefault(row[by], []).append(row["value"])
    return {
        quantity: {x: geometric_mean(each) for x, each in sorted(found.items())} for quantity, found in values.items()
    }
