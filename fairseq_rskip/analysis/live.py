"""What a training logs about its skip connections: the values of ``--skip-log-interval N``.

Every N-th update logs, for each block, means over the examples (sentences or images) of one batch:
x:F in y, ‖F(x)‖ / ‖x‖, ‖b⊙F‖ / ‖a⊙x‖, the gradient norm at y; each learned coefficient; an adaptive
lambda; of a Transformer also the cosines and gradients of :mod:`.paths`, and whether a norm follows
the sum. docs/analysis.md defines them.
"""

import math

import torch
from torch import Tensor

from ..parameters import learned
from ..residual.adaptive import lambdas
from .paths import QUANTITIES as PATH_QUANTITIES
from .paths import PathProbe
from .probe import SkipProbe
from .skip_log import (
    BF_OVER_AX,
    F_OVER_X,
    GRAD_NORM,
    LAMBDA,
    LEARNED,
    NORM_AFTER_SUM,
    X_TO_F,
    Values,
)

# the tags of what SkipProbe measures
TAGS = {
    "ratio": X_TO_F,
    "f_over_x": F_OVER_X,
    "bf_over_ax": BF_OVER_AX,
    "y_grad_norm": GRAD_NORM,
}
# quotients and cosines, which are not defined where a vector is zero
MAY_BE_UNDEFINED = (X_TO_F, F_OVER_X, BF_OVER_AX, *PATH_QUANTITIES)


def summarise(probe: SkipProbe, loss_scale: float = 1.0, paths: PathProbe | None = None) -> Values:
    """Return tag -> value of the blocks that the probe saw.

    Blocks that did not run (LayerDrop) have no tags but those of what they learn. The loss whose
    gradients the probe saw is ``loss_scale`` times the mean loss that is optimised: fp16's scale,
    and the number of tokens of a summed loss. Empty if a gradient is not finite, as fp16 then drops
    the update.
    """
    values: Values = {}
    means = _means(probe, loss_scale)
    if means:  # one wait for the device
        values.update(zip(means, torch.stack(list(means.values())).tolist()))
    for name, value in lambdas(probe.model).items():
        values[f"{LAMBDA}/{name}"] = value
    if paths is not None:
        for name, quantities in paths.means().items():
            for quantity, value in quantities.items():
                values[f"{quantity}/{name}"] = value
            if quantities:
                values[f"{NORM_AFTER_SUM}/{name}"] = float(len(paths.skips[name].post) > 0)

    defined: Values = {}
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
    for name in probe.skips:
        measured = probe.values(name)
        if "y_grad_norm" in measured:
            gradients = measured["y_grad_norm"]
            measured["y_grad_norm"] = gradients * (len(gradients) / loss_scale)
        for quantity, tag in TAGS.items():
            if quantity in measured:
                means[f"{tag}/{name}"] = measured[quantity].float().mean()
    for name, parameter in learned(probe.model).items():
        means[f"{LEARNED}/{name}"] = parameter.detach().float().mean()
    return means
