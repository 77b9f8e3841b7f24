"""The coefficients that skip connections learn: all, without weight decay, never moved."""

import torch
from torch import Tensor, nn

from ..residual import skips

SHOWN = 3  # names in a warning


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    """``<block>.<name>`` -> parameter, of every rule below ``model``.

    One that blocks share counts once.
    """
    seen: set[int] = set()
    values: dict[str, nn.Parameter] = {}
    for block, skip in skips(model).items():
        for name, parameter in skip.learned().items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                values[f"{block}.{name}"] = parameter
    return values


def without_decay(model: nn.Module) -> list[nn.Parameter]:
    """The learned coefficients without weight decay: all but wskip's w, which the paper decays."""
    decaying: set[int] = set()
    for skip in skips(model).values():
        if skip.decays:
            decaying.update(id(parameter) for parameter in skip.parameters())
    return [parameter for parameter in learned(model).values() if id(parameter) not in decaying]


class UnmovedCoefficients:
    """Finds the learned coefficients of ``model`` that are still exactly what they were here.

    Those that have no gradient at their place are left out.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        still: set[str] = set()
        for block, skip in skips(model).items():
            still.update(f"{block}.{name}" for name in skip.without_gradient())
        self.initial: dict[str, Tensor] = {}
        for name, value in learned(model).items():
            if name not in still:
                self.initial[name] = value.detach().cpu().clone()

    def names(self) -> list[str]:
        """The names of the coefficients that never moved."""
        unmoved = []
        now = learned(self.model)
        for name, initial in self.initial.items():
            value = now[name].detach().cpu()
            # in the type of the value: fairseq halves a model after it is built
            if torch.equal(value, initial.to(value.dtype)):
                unmoved.append(name)
        return unmoved

    def warning(self) -> str:
        """One line that names those that never moved, or "" where all did."""
        names = self.names()
        if not names:
            return ""
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        return (
            f"{len(names)} of {len(self.initial)} learned coefficients of the skip connections "
            f"never moved from their initial value: {shown}"
        )
