"""The skip log of a training, ``skips.jsonl``: its tags, its writer and its reader.

``--skip-log-interval N`` writes a line for every N-th update, such as ``{"step": 10,
"skip_grad_norm/decoder.layers.0.final_skip": 0.04, ...}``. A tag is ``quantity/block``, where a
block is the module name of a skip connection. docs/analysis.md defines the quantities.
"""

import math
import re
from pathlib import Path

from ..errors import UserError
from ..files import append_json, read_json_lines, write_json_lines

SKIP_LOG = "skips.jsonl"
EXPECTED = f"expected the {SKIP_LOG} of a training with --skip-log-interval N"
UPDATE = "step"  # the key of the update's number

# the quantities of the tags
X_TO_F = "skip_x_to_F"
F_OVER_X = "skip_F_over_x"
BF_OVER_AX = "skip_bF_over_ax"  # of the last sum, a x + b F + c
GRAD_NORM = "skip_grad_norm"
COS_Y_X = "skip_cos_y_x"
COS_X_F = "skip_cos_x_F"
COS_GRADIENTS = "skip_cos_gradients"
BRANCH_OVER_SKIP = "skip_branch_over_skip_gradient"
NORM_AFTER_SUM = "skip_norm_after_sum"  # 1 or 0
LEARNED = "skip_learned"  # the mean of a coefficient; the block is followed by its name
LAMBDA = "skip_lambda"  # of a rule whose λ adapts

# the gradient's norm at the top of a stack over that at its bottom, from which it counts as lost
LOST = 30.0

Values = dict[str, float]  # tag -> value, of one update


class SkipLines:
    """The file ``skips.jsonl`` of a training in ``folder``, from update number ``first`` on.

    A resumed training repeats updates: an earlier process' lines about them are removed.
    """

    def __init__(self, folder: Path, first: int):
        self.path = folder / SKIP_LOG
        if self.path.is_file():
            lines = [line for line in read_json_lines(self.path) if line[UPDATE] < first]
            write_json_lines(self.path, lines)

    def write(self, step: int, values: Values) -> None:
        """Append the values of update number ``step``."""
        append_json(self.path, {UPDATE: step, **values})


def read(path: Path) -> dict[int, Values]:
    """The logged updates of a skip log, update -> tag -> value, in the file's order.

    Raises ``UserError`` for a file that is no skip log.
    """
    updates: dict[int, Values] = {}
    try:
        for line in read_json_lines(path):
            updates[line.pop(UPDATE)] = line
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not a skip log: {EXPECTED}") from None
    return updates


def logs_below(folder: Path) -> list[Path]:
    """The skip logs in ``folder`` and below it, those of seed 2 before those of seed 10."""

    def numbers(path: Path) -> tuple[list[int], Path]:
        return [int(digits) for digits in re.findall(r"\d+", str(path))], path

    return sorted(folder.rglob(SKIP_LOG), key=numbers)


def by_block(values: Values, quantity: str) -> dict[str, float]:
    """Block -> value of one quantity; {} if it was not logged."""
    start = f"{quantity}/"
    return {
        tag.removeprefix(start): value for tag, value in values.items() if tag.startswith(start)
    }


def gradient_ratio(values: Values, top: str, bottom: str) -> float:
    """The gradient norm at the output of the block ``top`` over that of the block ``bottom``.

    Infinite where none is left at the bottom.
    """
    norms = by_block(values, GRAD_NORM)
    return norms[top] / norms[bottom] if norms[bottom] > 0 else math.inf


def angles(values: Values) -> dict[str, float]:
    """Block -> the angle between y and x of one update: arccos of the mean cosine; NaN of NaN."""
    cosines = by_block(values, COS_Y_X)
    return {block: _arccos(cosine) for block, cosine in cosines.items()}


def _arccos(cosine: float) -> float:
    """arccos, of a cosine that rounding may have taken beyond 1; NaN of NaN."""
    if math.isnan(cosine):
        return math.nan
    return math.acos(min(1.0, max(-1.0, cosine)))
