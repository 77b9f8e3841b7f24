"""How far each residual of a training turns x, beside the angle that its depth allows.

docs/depth.md derives the bound. The angle of a residual is arccos of the mean cosine of y and x. A
LOG has it at every logged update (``--skip-log-interval``), a CHECKPOINT is measured on examples.
The bound is about stacks in which a norm follows the sum: without one, as in pre-norm, the gradient
passes by every branch unchanged.
"""

import collections
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from ..console import label_and_path, print_line
from ..errors import UserError
from ..residual import skips
from . import figures, skip_log
from .figures import Row, select
from .paths import PathProbe
from .skip_log import COS_Y_X, NORM_AFTER_SUM, SKIP_LOG, Values, by_block
from .study import SIDES, Study

# The largest angle is CONSTANT / N^EXPONENT radians for each of N residuals: one line through the
# edges measured in language models and translation, 6 to 216 residuals of 64 features at the
# learning rate 0.003 (experiments/angle_edge.py, docs/depth.md). At 0.006 many edges of deep stacks
# are up to a sixth smaller, and at 256 features one depth's is 0.9 times as large.
CONSTANT = 5.0
EXPONENT = 0.80
LEAST_MEASURED = 6
LONG = 100  # updates: a residual that is beyond the bound in all logged ones of so many is reported
CURVES = 5  # updates of a log that the figure shows
WRITES_ANGLES = "expected a Transformer's training with --skip-log-interval N, which writes them"
WITHOUT_NORMS = "has no skip connection with a norm after the sum, so that no angle is too large"
Angles = dict[str, float]  # block -> radians


def largest_angle(residuals: int) -> float:
    """The angle of y and x, in radians, up to which a stack of ``residuals`` keeps its gradient."""
    return CONSTANT / residuals**EXPONENT


def least_lambda(angle: float) -> int:
    """rSkip+LN's smallest λ that keeps every residual within ``angle``, for any branch.

    A step of the recursion halves the angle, and the first is below π / 2: π / 2^λ at most. That
    holds for gains of 1 and biases of 0; training moves them (docs/depth.md).
    """
    return max(1, math.ceil(math.log2(math.pi / angle)))


def side_of(block: str) -> str:
    """The stack that a block belongs to: encoder, decoder, or "network" for a ResNet."""
    side = next((side for side in SIDES if side in block.split(".")), None)
    return side or "network"


def layer_of(block: str) -> int:
    """The number of a block's layer, from 1."""
    number = re.search(r"\d+", block)
    return int(number.group()) + 1 if number else 1


def with_norm_after_the_sum(model: nn.Module) -> list[str]:
    """The names of the skip connections that the bound is about."""
    return [name for name, skip in skips(model).items() if skip.post and skip.widths == (1, 1)]


def bounds_of(blocks: Iterable[str]) -> Angles:
    """Block -> the bound of its stack, if ``blocks`` are all residuals of the network."""
    blocks = list(blocks)
    residuals = collections.Counter(map(side_of, blocks))
    return {block: largest_angle(residuals[side_of(block)]) for block in blocks}


def angles_in(values: Values) -> Angles:
    """The angles of one logged update, each the arccos of a block's mean cosine of y and x."""
    return {block: angle_of(cosine) for block, cosine in by_block(values, COS_Y_X).items()}


def angle_of(cosine: float) -> float:
    """arccos, of a cosine that rounding may have taken beyond 1; NaN of NaN."""
    if math.isnan(cosine):
        return math.nan
    return math.acos(min(1.0, max(-1.0, cosine)))


def quadratic_means(angles: Angles) -> dict[str, float]:
    """Stack -> the root mean square of its residuals' angles.

    A stack is judged by it: where angles differ, it is their squares that add up, so that one large
    angle among many small ones loses little of the gradient.
    """
    squares: dict[str, list[float]] = {}
    for block, angle in angles.items():
        squares.setdefault(side_of(block), []).append(angle**2)
    return {side: math.sqrt(fmean(values)) for side, values in squares.items()}


class Crossings:
    """Finds what is beyond its bound at every logged update of ``LONG`` in a row.

    ``long`` names the residuals that ever were, and the stacks whose root mean square was; a stack
    is called by its side, which no residual is called by.
    """

    def __init__(self, bounds: Angles):
        self.bounds = bounds
        self.beyond_since: dict[str, int] = {}  # name -> the first of the updates in a row
        self.long: set[str] = set()

    def see(self, step: int, angles: Angles) -> None:
        """Take in the angles of a logged update; those of blocks without a bound are left out."""
        judged = {block: angle for block, angle in angles.items() if block in self.bounds}
        beyond_now = beyond(judged, self.bounds)
        for name in (*judged, *sides_of(judged)):
            if name not in beyond_now:
                self.beyond_since.pop(name, None)
                continue
            first = self.beyond_since.setdefault(name, step)
            if step - first >= LONG:
                self.long.add(name)


def beyond(angles: Angles, bounds: Angles) -> set[str]:
    """The blocks whose angle is above their bound, and the stacks whose root mean square is."""
    blocks = {block for block, angle in angles.items() if angle > bounds[block]}
    means = quadratic_means(angles)
    return blocks | {side_of(block) for block in angles if means[side_of(block)] > bounds[block]}


class AngleWarning:
    """One warning in the log of a training, when one of its stacks is beyond the bound for long."""

    def __init__(self, model: nn.Module):
        bounds = bounds_of(skips(model))
        judged = {name: bounds[name] for name in with_norm_after_the_sum(model)}
        self.crossings = Crossings(judged)
        self.has_warned = False

    def line(self, step: int, values: Values) -> str:
        """The warning, from the tags of a logged update; "" where none is due."""
        self.crossings.see(step, angles_in(values))
        bounds = self.crossings.bounds
        crossed = self.crossings.long
        stacks = [side for side in sides_of(bounds) if side in crossed]
        if self.has_warned or not stacks:
            return ""
        self.has_warned = True
        lines = "; ".join(sentence(side, crossed, bounds) for side in stacks)
        return f"since {LONG} updates or more {lines} (rskip analyze depth-check)"


def sides_of(blocks: Iterable[str]) -> list[str]:
    """The stacks that ``blocks`` belong to, in order."""
    return list(dict.fromkeys(map(side_of, blocks)))


def sentence(side: str, crossed: set[str], bounds: Angles) -> str:
    """The result for a stack; ``crossed`` names the blocks and stacks beyond their bound."""
    stack = [block for block in bounds if side_of(block) == side]
    bound = bounds[stack[0]]
    blocks = [block for block in stack if block in crossed]
    numbers = sorted(set(map(layer_of, blocks)))
    source = "docs/depth.md"
    if bound > largest_angle(LEAST_MEASURED):
        source = f"extrapolated: {source} measured {LEAST_MEASURED} residuals and more"
    limit = f"{bound:.2f}, the largest angle for its depth ({source})"
    if not numbers and side not in crossed:
        return f"no layer of the {side} is beyond {limit}"
    if not numbers:  # another layer at each update
        result = f"the {side} as a whole is beyond {limit}"
    elif len(numbers) > 1:
        result = f"layers {ranges(numbers)} of the {side} are beyond {limit}"
    else:
        result = f"layer {numbers[0]} of the {side} is beyond {limit}"
    if side not in crossed:
        return f"{result}, but the stack as a whole is within it"
    advice = f"λ ≥ {least_lambda(bound)} in rSkip keeps within it"
    return f"{result}: expect the gradient to vanish; {advice}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: 1-3, 5, 7-9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def report(models: Sequence[str], stem: Path, load_study: Callable[[], Study]) -> None:
    """Write ``stem``'s CSV and figure, print a table, and a sentence for each stack.

    ``models`` is one model or log; ``load_study()`` is called only if it is a model. Raises
    ``UserError``.
    """
    if len(models) != 1:
        raise UserError(f"{len(models)} models or logs: depth-check expects one")
    label, path = label_and_path(models[0])
    log = find_log(Path(path))
    if log is None:
        rows, crossed = measure(load_study())
    else:
        rows, crossed = read(log, label)
    about = "the angle between y and x of each residual, in radians"
    figures.write(stem, rows, draw(rows, label), table_of(rows), about)
    bounds = {row["block"]: row["bound"] for row in rows}
    for side in sides_of(bounds):
        line = sentence(side, crossed, bounds)
        print_line(f"{line[0].upper()}{line[1:]}.")


def table_of(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each stack: its size, its bound, and the largest angle of all updates."""
    table = [["stack", "residuals", "largest angle allowed", "largest measured", "in"]]
    for side in dict.fromkeys(row["stack"] for row in rows):
        mine = select(rows, stack=side)
        largest = max(mine, key=lambda row: row["angle"])
        update = "" if largest["update"] is None else f", update {largest['update']}"
        count = len({row["block"] for row in mine})
        shown = [f"{largest[column]:.3f}" for column in ("bound", "angle")]
        table.append([side, str(count), *shown, f"{largest['block']}{update}"])
    return table


def find_log(path: Path) -> Path | None:
    """The skip log that ``path`` is or holds; None if there is none, as for a checkpoint.

    Raises ``UserError``.
    """
    if path.is_file():
        return path if path.suffix == ".jsonl" else None
    if not path.is_dir():
        return None
    logs = skip_log.logs_below(path)
    if len(logs) > 1:
        listed = ", ".join(str(log) for log in logs[:3])
        raise UserError(f"{path} holds {len(logs)} of {SKIP_LOG}: expected one of {listed}")
    return logs[0] if logs else None


def read(log: Path, label: str) -> tuple[list[Row], set[str]]:
    """The rows of a skip log, and the blocks and stacks that were beyond their bound for long.

    Raises ``UserError`` for a log without angles, and for one of residuals without a norm after the
    sum. A log that does not say which have one, as an older one, is taken for post-norm's.
    """
    logged = skip_log.read(log)
    updates = {update: angles_in(values) for update, values in logged.items()}
    blocks = dict.fromkeys(block for angles in updates.values() for block in angles)
    if not blocks:
        raise UserError(f"{log} has no angles, no tag {COS_Y_X}/…: {WRITES_ANGLES}")
    *_, last = logged.values()
    norms = by_block(last, NORM_AFTER_SUM)
    without_norm = {block for block in blocks if norms.get(block) == 0}
    bounds = bounds_of(blocks)
    bounds = {block: bound for block, bound in bounds.items() if block not in without_norm}
    if not bounds:
        raise UserError(f"{log} {WITHOUT_NORMS}")
    crossings = Crossings(bounds)
    rows = []
    for update, every_angle in updates.items():
        angles = {block: angle for block, angle in every_angle.items() if block in bounds}
        crossings.see(update, angles)
        rows += rows_of(label, update, angles, bounds)
    return rows, crossings.long


def measure(study: Study) -> tuple[list[Row], set[str]]:
    """The same of a checkpoint or a fresh network: the blocks and stacks that are beyond it now."""
    (label,) = study.models
    angles = angles_of(study, label)
    bounds = bounds_of(skips(study.models[label]))
    return rows_of(label, None, angles, bounds), beyond(angles, bounds)


@torch.no_grad()
def angles_of(study: Study, label: str) -> Angles:
    """The angle of each residual that the bound is about, by its mean cosine over the examples.

    Raises ``UserError`` where there is none.
    """
    model = study.models[label]
    judged = with_norm_after_the_sum(model)
    if not judged:
        raise UserError(f"{label} {WITHOUT_NORMS}")
    with PathProbe(model) as probe:
        for batch in study.show_batches(label):
            study.losses(model, batch)
    measured = probe.means()
    return {block: angle_of(measured[block][COS_Y_X]) for block in judged}


def rows_of(label: str, update: int | None, angles: Angles, bounds: Angles) -> list[Row]:
    """A row for each residual, numbered within its stack."""
    numbers = {block: number for number, block in enumerate(bounds)}
    first: dict[str, int] = {}
    for block, number in numbers.items():
        first.setdefault(side_of(block), number)
    return [
        {
            "model": label,
            "update": update,
            "block": block,
            "stack": side_of(block),
            "layer": layer_of(block),
            "residual": numbers[block] - first[side_of(block)] + 1,
            "angle": angle,
            "bound": bounds[block],
        }
        for block, angle in angles.items()
    ]


def draw(rows: Sequence[Row], label: str) -> Any:
    """A panel for each stack: the angle by depth, a line for each update, the bound dashed."""
    stacks = list(dict.fromkeys(row["stack"] for row in rows))
    figure, axes = figures.new_figure(len(stacks))
    updates = shown_updates([row["update"] for row in rows])
    for axis, stack in zip(axes, stacks):
        mine = select(rows, stack=stack)
        for number, update in enumerate(updates):
            line = select(mine, update=update)
            name = label if update is None else f"update {update}"
            depths = [row["residual"] for row in line]
            angles = [row["angle"] for row in line]
            axis.plot(depths, angles, **figures.style(number), label=figures.label_text(name))
        bound = mine[0]["bound"]
        axis.axhline(bound, color="0.3", linestyle="--", label=f"largest allowed, {bound:.2f}")
        axis.set(xlabel=f"residual of the {stack}", ylabel="angle between y and x (radians)")
        axis.set_ylim(bottom=0.0)
        axis.legend(fontsize="small")
    return figure


def shown_updates(updates: Sequence[int | None]) -> list[int | None]:
    """The first, the last and some between of the ``updates``."""
    distinct = list(dict.fromkeys(updates))
    if len(distinct) <= CURVES:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(number * last / (CURVES - 1))] for number in range(CURVES)]
