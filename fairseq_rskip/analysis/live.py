"""What a training logs about its skip connections: learned coefficients, and the lines of ``--skip-log-interval N``.

Every N-th update logs, for each block, means over the examples (sentences or images) of one batch: x:F in y,
‖F(x)‖ / ‖x‖, the gradient norm at y; each learned coefficient; an adaptive lambda. docs/analysis.md defines them.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from ..files import append_json, read_json_lines, write_json_lines
from ..residual import skips
from ..residual.adaptive import lambdas
from .curves import F_OVER_X, GRAD_NORM, LAMBDA, SKIP_LOG, X_TO_F
from .probe import SkipProbe

LEARNED = "skip_learned"


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """``<block>.<name>`` -> parameter, of every rule below ``model``; one that blocks share counts once."""
    owners: dict[int, str] = {}
    values: dict[str, nn.Parameter] = {}
    for block, skip in skips(model).items():
        for name, parameter in skip.learned().items():
            if owners.setdefault(id(parameter), block) == block:
                values[f"{block}.{name}"] = parameter
    return values


def without_decay(model: nn.Module) -> list[nn.Parameter]:
    """Return the learned coefficients without weight decay: all but wskip's w, which decays in the paper."""
    decaying = {id(p) for skip in skips(model).values() if skip.decays for p in skip.parameters()}
    return [parameter for parameter in learned(model).values() if id(parameter) not in decaying]


class Movement:
    """Finds the learned coefficients of ``model`` that are still exactly what they were when this was made."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.starts: dict[str, Tensor] = {name: value.detach().cpu().clone() for name, value in learned(model).items()}

    def unmoved(self) -> list[str]:
        now = {name: value.detach().cpu() for name, value in learned(self.model).items()}
        # in the type of now: fairseq halves a model after it is built
        return [name for name, start in self.starts.items() if torch.equal(now[name], start.to(now[name].dtype))]

    def warning(self) -> str:
        """One line that names those that never moved, or "" where all did."""
        if not (names := self.unmoved()):
            return ""
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        count = f"{len(names)} of {len(self.starts)}"
        return f"{count} learned coefficients of the skip connections never moved from their start: {shown}"


class SkipLines:
    """The file ``skips.jsonl`` of a training in ``folder`` that begins, or resumes, with update ``first``.

    Lines of an earlier process about updates that are repeated are removed.
    """

    def __init__(self, folder: Path, first: int):
        self.path = folder / SKIP_LOG
        if self.path.is_file():
            write_json_lines(self.path, (line for line in read_json_lines(self.path) if line["step"] < first))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append the values, tag -> value, of update number ``step``."""
        append_json(self.path, {"step": step, **values})


def summarise(probe: SkipProbe, loss_scale: float = 1.0) -> dict[str, float]:
    """Return tag -> value of the blocks that the probe saw; blocks that did not run (LayerDrop) have no tags.

    The loss whose gradients the probe saw is ``loss_scale`` times the mean loss that is optimised: fp16's scale, and
    the number of tokens of a summed loss. Empty if a gradient is not finite, as fp16 then drops the update.
    """
    means: dict[str, Tensor] = {}
    for name, block in probe.blocks.items():
        gradients = block.y_grad_norm
        if gradients is not None:
            gradients = gradients * (len(gradients) / loss_scale)
        measured = ((X_TO_F, block.ratio), (F_OVER_X, block.f_over_x), (GRAD_NORM, gradients))
        means |= {f"{quantity}/{name}": each.float().mean() for quantity, each in measured if each is not None}
    for name, parameter in learned(probe.model).items():
        means[f"{LEARNED}/{name}"] = parameter.detach().float().mean()
    values = dict(zip(means, torch.stack(list(means.values())).tolist())) if means else {}  # one wait for the device
    values.update({f"{LAMBDA}/{name}": value for name, value in lambdas(probe.model).items()})
    values = {tag: value for tag, value in values.items() if math.isfinite(value) or not tag.startswith(X_TO_F)}
    finite = all(math.isfinite(value) for tag, value in values.items() if tag.startswith(GRAD_NORM))
    return values if finite else {}
