"""How much of x and of F(x) is in y: ``y = a * x + b * F + c`` with the statistics of every G held constant.

Most skip connections are such an elementwise affine map for a given input, with gates held constant, too;
``SkipConnection.coefficients`` knows it. That a * x + b * F + c is the real output, and a / b the closed form of
``skip_ratio``, is measured here on what the skip connection has just seen. Kinds and norms that are no such map (they
mix features or streams, or are a tanh) are left out.

What of this may be the paper's undefined "effective scale" is listed in ``readings``.
"""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ..residual import SkipConnection
from .probe import example_mean, example_norm, inputs


@dataclasses.dataclass
class Scales:
    """What :class:`CoefficientProbe` found at one skip connection; a list holds one value an example, float64."""

    a: List[Tensor] = dataclasses.field(default_factory=list)
    b: List[Tensor] = dataclasses.field(default_factory=list)
    ratio: List[Tensor] = dataclasses.field(default_factory=list)
    closed_form: List[Tensor] = dataclasses.field(default_factory=list)
    parts: List[Tensor] = dataclasses.field(default_factory=list)
    norm: List[Tensor] = dataclasses.field(default_factory=list)
    difference: float = 0.0
    mismatch: float = 0.0


class CoefficientProbe:
    """Coefficients of every skip connection below ``model`` in the forward passes of a ``with`` block.

    ``scales`` is module name -> :class:`Scales`: per example the means over positions and features of ``|a|``,
    ``|b|``, ``a / b`` and of ``skip_ratio`` (``closed_form``), and ``parts``, ``||a * x|| / ||b * F||``;
    ``norm``, the mean over positions of the norm of a over the features;
    ``difference``, the largest relative difference between a / b and the closed form at any position and feature;
    ``mismatch``, the largest difference between the real output and ``a*x + b*F + c``, relative to the largest value of
    that output. All of it in float64. Hooks are there only within the block.
    """

    def __init__(self, model: nn.Module):
        self.skips: Dict[str, SkipConnection] = {
            name: module for name, module in model.named_modules() if isinstance(module, SkipConnection)
        }
        self.scales = {name: Scales() for name in self.skips}
        self._handles: List[Any] = []

    def __enter__(self) -> "CoefficientProbe":
        for name, skip in self.skips.items():
            hook = _measuring_hook(self.scales[name])
            self._handles.append(skip.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _measuring_hook(scales: Scales) -> Callable[..., None]:
    def hook(skip: SkipConnection, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Tensor) -> None:
        x, f_x, padding_mask = inputs(*args, **kwargs)
        x, f_x, output = x.detach().double(), f_x.detach().double(), output.detach().double()
        with torch.no_grad():
            try:
                a, b, c = skip.coefficients(x, f_x, padding_mask)
            except ValueError:
                return
            closed = skip.skip_ratio(x, f_x, padding_mask)
            for values, per_position in (
                (scales.a, a.abs()),
                (scales.b, b.abs()),
                (scales.ratio, a / b),
                (scales.closed_form, closed),
                (scales.norm, a.expand_as(x).norm(dim=skip.channel_dim, keepdim=True)),
            ):
                values.append(example_mean(skip, per_position, padding_mask).cpu())
            parts = [example_norm(skip, part, padding_mask) for part in (a * x, b * f_x)]
            scales.parts.append((parts[0] / parts[1]).cpu())
            apart = torch.where(a / b == closed, torch.zeros_like(closed), (a / b - closed) / closed)  # 0 or inf twice
            scales.difference = _larger(scales.difference, _largest(apart, skip, padding_mask))
            apart = _largest(a * x + b * f_x + c - output, skip, padding_mask)
            scales.mismatch = _larger(scales.mismatch, apart / _largest(output, skip, padding_mask))

    return hook


def _largest(values: Tensor, skip: SkipConnection, padding_mask: Optional[Tensor]) -> float:
    """The largest absolute value at an unpadded position."""
    if padding_mask is not None:
        values = values.masked_fill(padding_mask.unsqueeze(skip.channel_dim), 0.0)
    return float(values.abs().max())


def _larger(old: float, new: float) -> float:
    return old if new <= old else new  # NaN is the larger
