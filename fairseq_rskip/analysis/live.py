"""What a training logs about its skip connections: the lines of ``--skip-log-interval N``.

Every N-th update logs, for each block, means over the examples (sentences or images) of one batch:
x:F in y, ‖F(x)‖ / ‖x‖, the gradient norm at y; each learned coefficient; an adaptive lambda; of a
Transformer also the cosines and gradients of :mod:`.paths`, and whether a norm follows the sum.
docs/analysis.md defines them.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from ..files import append_json, read_json_lines, write_json_lines
from ..residual.adaptive import lambdas
from ..training import learned
from .curves import F_OVER_X, GRAD_NORM, LAMBDA, SKIP_LOG, X_TO_F
from .paths import QUANTITIES as PATH_QUANTITIES
from .paths import PathProbe
from .probe import SkipProbe

LEARNED = "skip_learned"
NORM_AFTER_SUM = "skip_norm_after_sum"  # 1 or 0
# quotients and cosines, which are not defined where a vector is zero
MAY_BE_UNDEFINED = (X_TO_F, F_OVER_X, *(f"skip_{quantity}" for quantity in PATH_QUANTITIES))


class SkipLines:
    """The file ``skips.jsonl`` of a training in ``folder``, from update number ``first`` on.

    A resumed training repeats updates: an earlier process' lines about them are removed.
    """

    def __init__(self, folder: Path, first: int):
        self.path = folder / SKIP_LOG
        if self.path.is_file():
            lines = [line for line in read_json_lines(self.path) if line["step"] < first]
            write_json_lines(self.path, lines)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append the values, tag -> value, of update number ``step``."""
        append_json(self.path, {"step": step, **values})


def summarise(
    probe: SkipProbe, loss_scale: float = 1.0, paths: PathProbe | None = None
) -> dict[str, float]:
    """Return tag -> value of the blocks that the probe saw.

    Blocks that did not run (LayerDrop) have no tags. The loss whose gradients the probe saw is
    ``loss_scale`` times the mean loss that is optimised: fp16's scale, and the number of tokens of
    a summed loss. Empty if a gradient is not finite, as fp16 then drops the update.
    """
    values: dict[str, float] = {}
    means = _means(probe, loss_scale)
    if means:  # one wait for the device
        values.update(zip(means, torch.stack(list(means.values())).tolist()))
    for name, value in lambdas(probe.model).items():
        values[f"{LAMBDA}/{name}"] = value
    if paths is not None:
        for name, quantities in paths.values().items():
            for quantity, value in quantities.items():
                values[f"skip_{quantity}/{name}"] = value
            values[f"{NORM_AFTER_SUM}/{name}"] = float(len(paths.skips[name].post) > 0)

    defined: dict[str, float] = {}
    for tag, value in values.items():
        if not math.isfinite(value):
            if tag.startswith(GRAD_NORM):
                return {}
            if tag.startswith(MAY_BE_UNDEFINED):
                continue
        defined[tag] = value
    return defined


def _means(probe: SkipProbe, loss_scale: float) -> dict[str, Tensor]:
    """Tag -> mean over examples of what the probe measured, or over a learned coefficient."""
    means: dict[str, Tensor] = {}
    for name, block in probe.blocks.items():
        gradients = block.y_grad_norm
        if gradients is not None:
            gradients = gradients * (len(gradients) / loss_scale)
        measured = {X_TO_F: block.ratio, F_OVER_X: block.f_over_x, GRAD_NORM: gradients}
        for quantity, values in measured.items():
            if values is not None:
                means[f"{quantity}/{name}"] = values.float().mean()
    for name, parameter in learned(probe.model).items():
        means[f"{LEARNED}/{name}"] = parameter.detach().float().mean()
    return means
