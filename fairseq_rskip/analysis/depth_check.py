"""How much of the gradient the residuals of a stack pass on, by the weight that x keeps.

A norm after the sum z = a x + b F divides by the length of z. A gradient that reaches x by the skip
is therefore multiplied by the weight of x in z,

    p = |a x| / |a x + b F| = 1 / sqrt(1 + 2 t c + t^2),  t = |b F| / |a x|,  c = cos(x, F)

(a gradient at right angles to x, F and 1, gains 1, |x| = |z| after the norm; docs/depth.md). A LOG
has t and c at every logged update (``--skip-log-interval``), and what the branch returns: the sum
of the two gradients is p sqrt(1 + r^2 + 2 r k) times the gradient at y, r and k the size and cosine
of the branch's beside the skip's. A CHECKPOINT is measured on examples, without gradients: p alone.
The product over a stack is what it passes on from the last residual to the first. Without a norm
after the sum, as in pre-norm, x keeps its weight: such residuals are left out.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from ..console import label_and_path, print_line
from ..errors import UserError
from . import figures, skip_log
from .figures import Row, select
from .live import summarise
from .paths import PathProbe
from .probe import SkipProbe
from .skip_log import (
    BF_OVER_AX,
    BRANCH_OVER_SKIP,
    COS_GRADIENTS,
    COS_X_F,
    F_OVER_X,
    LOST,
    NORM_AFTER_SUM,
    SKIP_LOG,
    X_TO_F,
    Values,
    by_block,
)
from .study import SIDES, Study

LEAST = 1 / LOST  # of the gradient: a stack that passes on less is taken to lose it
MORE = 1.05  # from here on a stack is said to enlarge the gradient
LONG = 100  # updates: a stack that passes on less in all logged ones of so many is reported
CURVES = 5  # updates of a log that the figure shows
WRITES_THEM = (
    "expected a Transformer's training with --skip-log-interval N and skip connections a x + b F "
    "with a norm after the sum, which writes them"
)
WITHOUT_NORMS = "has no skip connection a x + b F with a norm after the sum: x keeps its weight"


class Residual(NamedTuple):
    """What a residual passes on of the gradient, and the cosine of x and F there."""

    factor: float
    cosine: float


Residuals = dict[str, Residual]  # by block, from the first to the last


def weight_of_x(t: float, cosine: float) -> float:
    """p of a sum whose second term has ``t`` times the length of its first."""
    length = math.sqrt(max(0.0, 1.0 + 2.0 * t * cosine + t * t))
    return 1.0 / length if length else math.inf


def gain_of_branch(size: float, cosine: float) -> float:
    """The gradient at x over its part through the skip, where the branch returns ``size`` times
    that part, with ``cosine`` between the two.
    """
    return math.sqrt(max(0.0, 1.0 + size * size + 2.0 * size * cosine))


def residuals_in(values: Values) -> Residuals:
    """Those of one logged update, of the blocks with a norm after the sum.

    A log that does not say which have one, as an older one, is taken for post-norm's.
    """
    cosines, norms = by_block(values, COS_X_F), by_block(values, NORM_AFTER_SUM)
    lengths = branch_over_skip(values)
    sizes, gradient_cosines = by_block(values, BRANCH_OVER_SKIP), by_block(values, COS_GRADIENTS)
    residuals = {}
    for block, cosine in cosines.items():
        if norms.get(block) == 0 or block not in lengths:
            continue
        factor = weight_of_x(lengths[block], cosine)
        if block in sizes and block in gradient_cosines:
            factor *= gain_of_branch(sizes[block], gradient_cosines[block])
        residuals[block] = Residual(factor, cosine)
    return residuals


def branch_over_skip(values: Values) -> dict[str, float]:
    """Block -> t, the length of b F over that of a x.

    An older log does not have it: there it is ‖F‖ / ‖x‖ over the mean of a / b, which a gain near
    zero spoils.
    """
    lengths = {}
    shares = by_block(values, F_OVER_X)
    for block, ratio in by_block(values, X_TO_F).items():
        if ratio and block in shares:
            lengths[block] = shares[block] / ratio
    return {**lengths, **by_block(values, BF_OVER_AX)}


def passed_on(residuals: Residuals) -> dict[str, float]:
    """Block -> what is passed on of the gradient, from the last of its stack to this one."""
    passed: dict[str, float] = {}
    of_stack: dict[str, float] = {}
    for block, residual in reversed(residuals.items()):
        side = side_of(block)
        of_stack[side] = of_stack.get(side, 1.0) * residual.factor
        passed[block] = of_stack[side]
    return {block: passed[block] for block in residuals}


def stacks_in(residuals: Residuals) -> dict[str, Residuals]:
    """Stack -> its residuals."""
    stacks: dict[str, Residuals] = {}
    for block, residual in residuals.items():
        stacks.setdefault(side_of(block), {})[block] = residual
    return stacks


def side_of(block: str) -> str:
    """The stack that a block belongs to: encoder, decoder, or "network" for a ResNet."""
    side = next((side for side in SIDES if side in block.split(".")), None)
    return side or "network"


def layer_of(block: str) -> int:
    """The number of a block's layer, from 1."""
    number = re.search(r"\d+", block)
    return int(number.group()) + 1 if number else 1


class Worst(NamedTuple):
    """The update at which a stack passes on least."""

    update: int | None  # None for a checkpoint
    passed: float
    residuals: Residuals


class Losses:
    """Finds the stacks that pass on less than ``LEAST`` at every logged update of ``LONG``.

    ``long`` names those that ever did; ``worst`` has each stack's update with the least. A
    checkpoint, whose update is None, is judged as it is.
    """

    def __init__(self) -> None:
        self.since: dict[str, int] = {}  # stack -> the first of the updates in a row
        self.long: set[str] = set()
        self.worst: dict[str, Worst] = {}

    def see(self, step: int | None, residuals: Residuals) -> None:
        """Take in a logged update, or a checkpoint."""
        for side, of_stack in stacks_in(residuals).items():
            passed = math.prod(residual.factor for residual in of_stack.values())
            if math.isnan(passed):
                continue  # a training that diverged: fairseq reports it
            if side not in self.worst or passed < self.worst[side].passed:
                self.worst[side] = Worst(step, passed, of_stack)
            if passed >= LEAST:
                self.since.pop(side, None)
                continue
            if step is None:
                self.long.add(side)
                continue
            first = self.since.setdefault(side, step)
            if step - first >= LONG:
                self.long.add(side)


class GradientWarning:
    """One warning in the log of a training, when one of its stacks loses the gradient for long."""

    def __init__(self) -> None:
        self.losses = Losses()
        self.has_warned = False

    def line(self, step: int, values: Values) -> str:
        """The warning, from the tags of a logged update; "" where none is due."""
        self.losses.see(step, residuals_in(values))
        if self.has_warned or not self.losses.long:
            return ""
        self.has_warned = True
        stacks = [side for side in self.losses.worst if side in self.losses.long]
        lines = "; ".join(sentence(side, self.losses.worst[side]) for side in stacks)
        return f"too little for {LONG} updates or more: {lines} (rskip analyze depth-check)"


def sentence(side: str, worst: Worst, for_long: bool = True) -> str:
    """The result for a stack."""
    when = "" if worst.update is None else f" at update {worst.update}"
    passed = fraction(worst.passed)
    of = "" if worst.passed >= MORE else "of "
    result = f"the residuals of the {side} pass on {passed} {of}the gradient{when}"
    if worst.passed >= LEAST:
        return f"{result}: it reaches the first layer (docs/depth.md)"
    if not for_long:
        return f"{result}, but less than {fraction(LEAST)} not for {LONG} updates in a row"
    share = -ln(LEAST) / len(worst.residuals)  # of each residual, if all lose alike
    beyond = [b for b, each in worst.residuals.items() if -ln(each.factor) > share]
    layers = ranges(sorted(set(map(layer_of, beyond))))
    cosine = fmean(residual.cosine for residual in worst.residuals.values())
    return (
        f"{result}, most of it lost in layers {layers}: expect it to vanish. The cosine of x and F "
        f"is {cosine:.2f} on average; {advice(worst.passed)} (docs/depth.md)"
    )


def advice(passed: float) -> str:
    """The λ that would pass on ``LEAST``, by the first order of ln p.

    ln p falls as 1/λ in xSkip, and by half with each step of rSkip, where F points along x.
    """
    factor = ln(passed) / ln(LEAST)
    steps = max(1, math.ceil(math.log2(factor)))
    return f"about {factor:.2g} times the λ of xSkip, or {steps} more in rSkip, would be enough"


def ln(share: float) -> float:
    """The natural logarithm; that of the smallest float for 0, to which a product may underflow."""
    return math.log(max(share, sys.float_info.min))


def fraction(share: float) -> str:
    """``share`` as 1/12, 1/1.3, 1/2.5e+07 or 12 times; "all" where it is 1 to two digits."""
    if share >= MORE:
        return f"{share:.2g} times" if share < 10 else f"{share:,.0f} times"
    if share > 0.95:
        return "all"
    if share <= 0:
        return "nothing"
    inverse = 1 / share
    if inverse < 10:
        return f"1/{inverse:.2g}"
    return f"1/{inverse:,.0f}" if inverse < 1e6 else f"1/{inverse:.1e}"


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
    updates: dict[int | None, Residuals]
    if log is None:
        if Path(path).is_dir():
            print_line(
                f"{label}: {path} has no log of --skip-log-interval N, or fewer than N updates: "
                "its checkpoint is measured, without what the branches return of the gradient"
            )
        study = load_study()
        (label,) = study.models
        updates = {None: measure(study, label)}
    else:
        print_line(f"{label}: the log {log}; a checkpoint is measured if it is named itself")
        updates = read(log)
    losses = Losses()
    rows = []
    for update, residuals in updates.items():
        losses.see(update, residuals)
        rows += rows_of(label, update, residuals)
    about = "what is passed on of the gradient, from the last residual of a stack"
    figures.write(stem, rows, draw(rows, label), table_of(losses), about)
    for side, worst in losses.worst.items():
        line = sentence(side, worst, side in losses.long)
        print_line(f"{line[0].upper()}{line[1:]}.")


def table_of(losses: Losses) -> list[list[str]]:
    """A line for each stack: its size, and the update at which it passes on least."""
    table = [["stack", "residuals", "passed on, least", "at update", "mean cosine of x and F"]]
    for side, worst in losses.worst.items():
        update = "" if worst.update is None else str(worst.update)
        cosine = fmean(residual.cosine for residual in worst.residuals.values())
        count = str(len(worst.residuals))
        table.append([side, count, fraction(worst.passed), update, f"{cosine:.2f}"])
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


def read(log: Path) -> dict[int | None, Residuals]:
    """Update -> the residuals of a skip log.

    Raises ``UserError`` for a log that lacks what they are made of, and for one of residuals
    without a norm after the sum.
    """
    logged = skip_log.read(log)
    for tag in (COS_X_F, X_TO_F, F_OVER_X):
        if not any(by_block(values, tag) for values in logged.values()):
            raise UserError(f"{log} has no tag {tag}/…: {WRITES_THEM}")
    updates: dict[int | None, Residuals] = {}
    for update, values in logged.items():
        updates[update] = residuals_in(values)
    if not any(updates.values()):
        raise UserError(f"{log} {WITHOUT_NORMS}")
    return updates


@torch.no_grad()
def measure(study: Study, label: str) -> Residuals:
    """The residuals of a checkpoint or a fresh network, by means over the examples.

    Raises ``UserError`` where there is none.
    """
    model = study.models[label]
    with SkipProbe(model) as probe, PathProbe(model) as paths:
        for batch in study.show_batches(label):
            study.losses(model, batch)
    residuals = residuals_in(summarise(probe, paths=paths))
    if not residuals:
        raise UserError(f"{label} {WITHOUT_NORMS}")
    return residuals


def rows_of(label: str, update: int | None, residuals: Residuals) -> list[Row]:
    """A row for each residual, numbered within its stack."""
    passed = passed_on(residuals)
    rows = []
    for side, of_stack in stacks_in(residuals).items():
        for number, (block, residual) in enumerate(of_stack.items(), start=1):
            rows.append(
                {
                    "model": label,
                    "update": update,
                    "block": block,
                    "stack": side,
                    "layer": layer_of(block),
                    "residual": number,
                    "factor": residual.factor,
                    "cosine": residual.cosine,
                    "passed_on": passed[block],
                }
            )
    return rows


def draw(rows: Sequence[Row], label: str) -> Any:
    """A panel for each stack: what is passed on, by depth, a line for each update."""
    stacks = list(dict.fromkeys(row["stack"] for row in rows))
    figure, axes = figures.new_figure(len(stacks))
    updates = shown_updates([row["update"] for row in rows])
    for axis, stack in zip(axes, stacks):
        mine = select(rows, stack=stack)
        for number, update in enumerate(updates):
            line = select(mine, update=update)
            name = label if update is None else f"update {update}"
            depths = [row["residual"] for row in line]
            values = [row["passed_on"] for row in line]
            axis.plot(depths, values, **figures.style(number), label=figures.label_text(name))
        axis.axhline(LEAST, color="0.3", linestyle="--", label=fraction(LEAST))
        axis.set(xlabel=f"residual of the {stack}", ylabel="gradient that is passed on")
        axis.set_yscale("log")
        axis.legend(fontsize="small")
    return figure


def shown_updates(updates: Sequence[int | None]) -> list[int | None]:
    """The first, the last and some between of the ``updates``."""
    distinct = list(dict.fromkeys(updates))
    if len(distinct) <= CURVES:
        return distinct
    last = len(distinct) - 1
    return [distinct[round(number * last / (CURVES - 1))] for number in range(CURVES)]
