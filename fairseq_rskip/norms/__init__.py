"""The normalisations G of ``y = G(...)``, reached by name through :func:`create_norm`.

Every class in ``NORMS`` is a module ``norm(x, padding_mask=None)`` that returns ``x``'s shape and
dtype, with ``x`` laid out as

* ``channel_dim=-1``: ``(..., dim)``, for example fairseq's ``(seq_len, batch, embed_dim)``;
* ``channel_dim=1``: image maps ``(batch, dim, height, width)``.

``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True where padded.
Moments of fp16 and bf16 inputs are taken in fp32.
"""

from torch import nn

from .base import (
    KeepsStatistics,
    Layout,
    NoCoefficients,
    Norm,
    at_least_float32,
    check_layout,
    is_recomputed,
    root_mean_square,
)
from .batch import BatchNorm
from .create import NORMS, create_norm
from .recursive import RecursiveNorm, halting, weighted_sum
from .rows import AdaNorm, Derf, DyT, LayerNorm, NoNorm, RMSNorm, ScaleNorm

__all__ = [
    "NORMS",
    "AdaNorm",
    "BatchNorm",
    "Derf",
    "DyT",
    "KeepsStatistics",
    "LayerNorm",
    "Layout",
    "NoCoefficients",
    "NoNorm",
    "Norm",
    "RMSNorm",
    "RecursiveNorm",
    "ScaleNorm",
    "at_least_float32",
    "check_layout",
    "create_norm",
    "halting",
    "is_recomputed",
    "parameters_of_norms",
    "root_mean_square",
    "weighted_sum",
]


def parameters_of_norms(model: nn.Module) -> set[int]:
    """The ids of the parameters that belong to norms of this package."""
    norms = (module for module in model.modules() if isinstance(module, Norm))
    return {id(parameter) for norm in norms for parameter in norm.parameters()}
