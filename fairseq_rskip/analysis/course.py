"""What a skip connection does in the course of a training: x:F, norm of F(x) over norm of x, gradient norm, and λ.

A run is the folder of a training with --skip-log-interval N: one that train_cifar.py wrote, or the --save-dir of
train.sh. A panel shows the geometric mean of a quantity over all residual blocks; runs of one LABEL are its seeds, and
count into the mean. The CSV has the value of every block. With --by-block,
each block at the last update that was logged.
"""

import argparse
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import curves, figures
from .live import F_OVER_X, GRAD_NORM, LAMBDA, X_TO_F

QUANTITIES = {X_TO_F: "x:F in y", F_OVER_X: "‖F(x)‖ / ‖x‖", GRAD_NORM: "gradient norm at y", LAMBDA: "adaptive λ"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="LABEL is the folder's name if not given")
    parser.add_argument("--by-block", action="store_true", help="against depth: each block, at the last update")


def report(options: argparse.Namespace, stem: Path) -> None:
    rows: list[dict[str, Any]] = []
    seeds: dict[str, int] = {}
    for argument in options.runs:
        label, path = curves.split(argument)
        seeds[label] = seeds.get(label, 0) + 1
        found = at_the_end(read(Path(path))) if options.by_block else read(Path(path))
        rows += [{"run": label, "seed": seeds[label], **row} for row in found]
    by, axis, mean = ("number", "residual block", "") if options.by_block else ("step", "update", ", mean over blocks")
    logs = [curves.Log(label, stem, course([row for row in rows if row["run"] == label], by)) for label in seeds]
    logged = {name for log in logs for name in log.curves}
    panels = {name: f"{title}{mean}" for name, title in QUANTITIES.items() if name in logged}
    figure = curves.draw(logs, panels, axis, spread=tuple(panels))
    figures.write(stem, rows, figure, table(logs), curves.count(logs))


def read(folder: Path) -> list[dict[str, Any]]:
    """What --skip-log-interval logged into ``folder``, or below it: a row for each value of a block.

    Raises ``UserError`` if there is nothing.
    """
    found: dict[Any, float] = {}
    for place in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        for tag, points in read_scalars(place).items():
            quantity, _, block = tag.partition("/")
            if quantity in QUANTITIES:
                found.update({(quantity, block, step): value for step, value in points.items()})
    if not found:
        raise UserError(f"{folder} has no log of skip connections: expected a training with --skip-log-interval N")
    return [dict(zip(("quantity", "block", "step", "value"), (*key, value))) for key, value in found.items()]


def at_the_end(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last update, with the "number" of their block: from 1, encoder before decoder."""
    numbers = {block: number for number, block in enumerate(dict.fromkeys(row["block"] for row in rows), 1)}
    last = max(row["step"] for row in rows)
    return [{**row, "number": numbers[row["block"]]} for row in rows if row["step"] == last]


def read_events(path: Path) -> Iterator[Any]:
    """The events of one file of TensorBoard, read without tensorboard.

    The file is records of length (8 bytes), its checksum (4), the event, its checksum (4).
    """
    from tensorboardX.proto.event_pb2 import Event

    data, start = path.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + length])
        start += length + 16


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value of all event files in ``folder``, as TensorBoard shows them: a file that says it starts at a
    step voids what earlier files hold from that step on.
    """
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in read_events(path):
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                found = {tag: {s: v for s, v in values.items() if s < event.step} for tag, values in found.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: values for tag, values in found.items() if values}


def course(rows: list[dict[str, Any]], by: str = "step") -> dict[str, curves.Curve]:
    """Of each quantity the geometric mean over the rows of each step, or ``by``; one that is not positive is left
    out.
    """
    logs: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["value"] > 0:
            logs.setdefault(row["quantity"], {}).setdefault(row[by], []).append(math.log(row["value"]))
    return {
        quantity: {place: math.exp(sum(each) / len(each)) for place, each in sorted(found.items())}
        for quantity, found in logs.items()
    }


def table(logs: list[curves.Log]) -> str:
    """The first and the last value of each quantity, over updates or over blocks, a line for each run."""
    lines = [["run", *(f"{title}, {end}" for title in QUANTITIES.values() for end in ("first", "last"))]]
    for log in logs:
        found = [list(log.curves.get(quantity, {}).values()) for quantity in QUANTITIES]
        ends = [f"{values[end]:.4g}" if values else "-" for values in found for end in (0, -1)]
        lines.append([log.run, *ends])
    return figures.aligned(lines)
