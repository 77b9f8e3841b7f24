"""The normalisations G of ``y = G(...)``, reached by name through :func:`create_norm`.

Every class in ``NORMS`` is a module ``norm(x, padding_mask=None)`` that returns ``x``'s shape and dtype, with
``x`` laid out as

* ``channel_dim=-1``: ``(..., dim)``, for example fairseq's ``(seq_len, batch, embed_dim)``;
* ``channel_dim=1``: image maps ``(batch, dim, height, width)``.

``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True where padded. Moments of fp16 and
bf16 inputs are taken in fp32.
"""

from torch import nn

from .base import KeepsStatistics, Layout, Norm, at_least_float32, check_layout, is_recomputed
from .batch import BatchNorm
from .rows import AdaNorm, Derf, DyT, LayerNorm, NoNorm, RMSNorm, ScaleNorm

NORMS = {
    "none": NoNorm,
    "layer": LayerNorm,
    "batch": BatchNorm,
    "rms": RMSNorm,
    "scale": ScaleNorm,
    "ada": AdaNorm,
    "dyt": DyT,
    "derf": Derf,
}
OPERATOR = {LayerNorm: False, RMSNorm: True}  # norms that ops.skip_norm computes (norm_axes="c") -> whether as RMS

__all__ = ["NORMS", "OPERATOR", "AdaNorm", "BatchNorm", "Derf", "DyT", "LayerNorm", "NoNorm", "Norm"]
__all__ += ["RMSNorm", "ScaleNorm"]
__all__ += ["KeepsStatistics", "Layout", "at_least_float32", "check_layout", "create_norm", "is_recomputed"]
__all__ += ["parameters_of_norms"]


def parameters_of_norms(model: nn.Module) -> set[int]:
    """The ids of the parameters that belong to norms of this package."""
    norms = (module for module in model.modules() if isinstance(module, Norm))
    return {id(parameter) for norm in norms for parameter in norm.parameters()}


def create_norm(name: str, dim: int, channel_dim: int = -1, norm_axes: str = "c", eps: float = 1e-5) -> Norm:
    """Build the normalisation ``name``, one of ``NORMS``, over ``dim`` features.

    Raises ``ValueError``, naming argument, value and what is accepted, for an unknown ``name``, ``dim <= 0``,
    ``channel_dim`` other than -1 or 1, ``norm_axes`` that is unknown or does not fit, or ``eps <= 0``.
    """
    if not isinstance(name, str) or name not in NORMS:
        raise ValueError(f"norm={name!r}: expected one of {', '.join(NORMS)}")
    return NORMS[name](dim, channel_dim, norm_axes, eps)
