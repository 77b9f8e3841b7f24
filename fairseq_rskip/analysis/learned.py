"""The coefficients that skip connections learn: their values, whether they moved, what does not decay."""

import torch
from torch import Tensor, nn

from ..residual import skips


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
