"""What a training writes to TensorBoard about its skip connections at every ``--skip-log-interval``-th update.

Per block, means over the examples (sentences or images) of one batch:

* ``skip_x_to_F/<block>``: the ratio x:F in y (:func:`.coefficients.skip_ratio`), unless the weight of F is still 0;
* ``skip_F_over_x/<block>``: ‖F(x)‖ / ‖x‖, where a kind carries several tensors of the one that the branch stands on;
* ``skip_grad_norm/<block>``: ``n * ‖dL/dy‖`` over the example's part of y, with L the mean loss that is optimised and n
  the examples in the batch, whose number thereby does not enter. For images that is the gradient of an image's own
  cross entropy; for sentences that of a sentence's summed loss, divided by the batch's mean number of target tokens
  (not divided where the criterion averages over sentences).
* ``skip_learned/<block>.<name>``: the mean of each coefficient that the rule learns;
* ``skip_lambda/<block>``: lambda, where it adapts.

``<block>`` is the module's name in the model, for example ``encoder.layers.0.self_attn_skip`` or ``blocks.3.skip``.
"""

import math

import torch
from torch import Tensor

from ..residual.adaptive import lambdas
from .learned import learned
from .probe import SkipProbe

X_TO_F = "skip_x_to_F"
F_OVER_X = "skip_F_over_x"
GRAD_NORM = "skip_grad_norm"
LEARNED = "skip_learned"
LAMBDA = "skip_lambda"
# of a SummaryWriter: tensorboardX writes from a thread, whose file its flush() does not wait for. In seconds; and room
# for what one update logs, so that training does not wait for the thread
WRITING = {"flush_secs": 5, "max_queue": 1000}


def summarise(probe: SkipProbe, loss_scale: float = 1.0) -> dict[str, float]:
    """Tag -> value, of the blocks that the probe saw; those that did not run (LayerDrop) have no tags.

    ``loss_scale`` is what the loss whose gradients the probe saw is divided by to give L, the mean loss that is
    optimised: fp16's scale, and the number of tokens where the loss is a sum over them. Empty where a gradient is not
    finite: fp16 overflowed and the update is dropped.
    """
    tags: list[str] = []
    means: list[Tensor] = []
    for name, block in probe.blocks.items():
        gradients = block.y_grad_norm
        if gradients is not None:
            gradients = gradients * (len(gradients) / loss_scale)
        for quantity, values in ((X_TO_F, block.ratio), (F_OVER_X, block.f_over_x), (GRAD_NORM, gradients)):
            if values is not None:
                tags.append(f"{quantity}/{name}")
                means.append(values.float().mean())
    for name, parameter in learned(probe.model).items():
        tags.append(f"{LEARNED}/{name}")
        means.append(parameter.detach().float().mean())
    found = dict(zip(tags, torch.stack(means).tolist())) if means else {}  # one wait for the device
    found.update({f"{LAMBDA}/{name}": value for name, value in lambdas(probe.model).items()})
    found = {tag: value for tag, value in found.items() if math.isfinite(value) or not tag.startswith(X_TO_F)}
    finite = all(math.isfinite(value) for tag, value in found.items() if tag.startswith(GRAD_NORM))
    return found if finite else {}
