"""What a skip connection does in the course of a training: x:F, norm of F(x) over norm of x, gradient norm, and λ.

A run is the folder of a training with --skip-log-interval N: one that train_cifar.py wrote, or the --save-dir of
train.sh. A panel shows the geometric mean of a quantity over all residual blocks; runs of one LABEL are its seeds, and
count into the mean. The CSV has the value of every block.
"""

import argparse
import math
from pathlib import Path
from typing import Any, Dict, List, Tuple

from ..errors import UserError
from .curves import split
from .figures import aligned, check_stem, label_text, new_figure, save, scale_values, style, write_csv
from .live import F_OVER_X, GRAD_NORM, LAMBDA, X_TO_F

QUANTITIES = {X_TO_F: "x:F in y", F_OVER_X: "‖F(x)‖ / ‖x‖", GRAD_NORM: "gradient norm at y", LAMBDA: "adaptive λ"}
Values = Dict[Tuple[str, str, int], float]  # (quantity, block, step) -> value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="LABEL is the folder's name if not said")
    parser.add_argument("--output", required=True, type=Path, help="the figure's path without its ending")


def run(options: argparse.Namespace) -> None:
    stem = check_stem(options.output)
    runs: Dict[str, List[Values]] = {}
    for argument in options.runs:
        label, path = split(argument)
        runs.setdefault(label, []).append(read(Path(path)))
    write_csv(stem.with_name(f"{stem.name}.csv"), rows(runs))
    save(draw(runs), stem)
    print(table(runs))
    print(f"{stem}.png, .pdf and .csv: {len(runs)} run{'s' if len(runs) > 1 else ''}")


def read(folder: Path) -> Values:
    """What --skip-log-interval logged into ``folder``, or below it. Raises ``UserError`` if there is nothing."""
    try:
        from .events import read_scalars
    except ImportError:
        raise UserError("reading what a training logged needs tensorboardX: pip install tensorboardX") from None
    found: Values = {}
    for place in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        for tag, points in read_scalars(place).items():
            quantity, _, block = tag.partition("/")
            if quantity in QUANTITIES:
                found.update({(quantity, block, step): value for step, value in points.items()})
    if not found:
        raise UserError(f"{folder} has no log of skip connections: expected a training with --skip-log-interval N")
    return found


def course(seeds: List[Values], quantity: str) -> Dict[int, float]:
    """Step -> geometric mean of ``quantity`` over blocks and seeds; a block where it is not positive is left out."""
    logs: Dict[int, List[float]] = {}
    for values in seeds:
        for (name, _, step), value in values.items():
            if name == quantity and value > 0:
                logs.setdefault(step, []).append(math.log(value))
    return {step: math.exp(sum(each) / len(each)) for step, each in sorted(logs.items())}


def rows(runs: Dict[str, List[Values]]) -> List[Dict[str, Any]]:
    """One row a logged value."""
    return [
        {"run": label, "seed": number, "quantity": quantity, "block": block, "step": step, "value": value}
        for label, seeds in runs.items()
        for number, values in enumerate(seeds, 1)
        for (quantity, block, step), value in values.items()
    ]


def draw(runs: Dict[str, List[Values]]) -> Any:
    """A panel for each quantity that was logged, a line for each run."""
    lines = {quantity: {label: course(seeds, quantity) for label, seeds in runs.items()} for quantity in QUANTITIES}
    lines = {quantity: each for quantity, each in lines.items() if any(each.values())}
    figure, axes = new_figure(len(lines))
    for axis, (quantity, each) in zip(axes, lines.items()):
        for number, (label, line) in enumerate(each.items()):
            axis.plot(list(line), list(line.values()), **style(number), label=label_text(label))
        axis.set_xlabel("update")
        axis.set_ylabel(f"{QUANTITIES[quantity]}, mean over blocks")
        scale_values(axis, [value for line in each.values() for value in line.values()])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def table(runs: Dict[str, List[Values]]) -> str:
    """The first and the last value of each quantity, a line for each run."""
    lines = [["run", *(f"{title}, {end}" for title in QUANTITIES.values() for end in ("first", "last"))]]
    for label, seeds in runs.items():
        ends = []
        for quantity in QUANTITIES:
            values = list(course(seeds, quantity).values())
            ends += [f"{value:.4g}" for value in (values[0], values[-1])] if values else ["-", "-"]
        lines.append([label, *ends])
    return aligned(lines)
