"""The norms by name, and the factory."""

import torch

from ..option_error import OptionError
from .base import Norm
from .batch import BatchNorm
from .rows import AdaNorm, Derf, DyT, LayerNorm, NoNorm, RMSNorm, ScaleNorm

NORMS: dict[str, type[Norm]] = {
    "none": NoNorm,
    "layer": LayerNorm,
    "batch": BatchNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "ada": AdaNorm,
    "dyt": DyT,
    "derf": Derf,
}


def create_norm(
    name: str,
    dim: int,
    channel_dim: int = -1,
    norm_axes: str = "c",
    eps: float = 1e-5,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Norm:
    """Build the normalisation ``name``, one of ``NORMS``, over ``dim`` features.

    Raises ``ValueError``, naming argument, value and what is accepted, for an unknown ``name``,
    ``dim <= 0``, ``channel_dim`` other than -1 or 1, ``norm_axes`` that is unknown or does not fit,
    or ``eps <= 0``.
    """
    if not isinstance(name, str) or name not in NORMS:
        raise OptionError("norm", name, f"one of {', '.join(NORMS)}")
    return NORMS[name](dim, channel_dim, norm_axes, eps, device, dtype)
