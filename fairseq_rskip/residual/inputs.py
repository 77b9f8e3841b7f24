"""What happens to x and F on their way into a skip connection: checks, common types, padding, stochastic depth."""

from typing import Any

import torch
from torch import Tensor


def check(skip: Any, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None) -> None:
    """Raise ``ValueError`` for inputs that ``skip.forward`` does not accept."""
    width = skip.widths[0] * skip.dim
    if f_x.shape != x.shape or width > skip.dim:
        expected = [*x.shape[:-1], skip.dim] if width > skip.dim and x.dim() > 0 else list(x.shape)
        if list(f_x.shape) != expected:
            raise ValueError(f"f_x has shape {list(f_x.shape)}: expected {expected}")
    if not (x.is_floating_point() and f_x.is_floating_point()):
        raise ValueError(f"x and f_x have dtypes {x.dtype} and {f_x.dtype}: expected floating point")
    if skip.channel_dim == 1 and x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}: expected (batch, {skip.dim}, height, width)")
    if x.dim() == 0 or x.size(skip.channel_dim) != width:
        raise ValueError(f"x has shape {list(x.shape)}: expected {width} at dimension {skip.channel_dim}")
    if carried is not None and not isinstance(carried, tuple):
        raise ValueError(f"carried is a {type(carried).__name__}: expected the second result of prepare(x)")
    if padding_mask is not None:
        expected = list(x.shape)
        expected.pop(skip.channel_dim)
        if padding_mask.dtype != torch.bool or list(padding_mask.shape) != expected:
            raise ValueError(
                f"padding_mask has dtype {padding_mask.dtype} and shape {list(padding_mask.shape)}: "
                f"expected a boolean mask of shape {expected}, True where padded"
            )


def align(skip: Any, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x and F for learned coefficients: zero where padding must not reach their gradients, and of one type."""
    if padding_mask is not None and any(norm.uses_padding_mask for norm in skip.post):
        padded = padding_mask.unsqueeze(skip.channel_dim)  # masked_fill would lose channels_last
        x, f_x = (torch.where(padded, tensor.new_zeros(()), tensor) for tensor in (x, f_x))
    if f_x.dtype != x.dtype:
        wide = torch.promote_types(x.dtype, f_x.dtype)
        x, f_x = x.to(wide), f_x.to(wide)
    return x, f_x


def drop_path(skip: Any, f_x: Tensor) -> Tensor:
    """Stochastic depth: b F with b from Bernoulli(1 - p), one draw per example (sentence or image) as in timm, where
    Huang et al. 2016 draw once for a batch; in evaluation (1 - p) F."""
    if not skip.training:
        return f_x * (1.0 - skip.drop_rate)
    shape = [1] * f_x.dim()
    axis = skip.batch_dim if skip.batch_dim >= 0 else f_x.dim() + skip.batch_dim
    if 0 <= axis < f_x.dim() - 1:
        shape[axis] = f_x.size(axis)
    kept = torch.rand(shape, device=f_x.device) >= skip.drop_rate
    return torch.where(kept, f_x, f_x.new_zeros(()))


def refuse_drop_path(skip: Any) -> None:
    """Raise ``ValueError`` for stochastic depth in a kind that takes F's direction alone: (1 - p) F would be F."""
    if skip.drop_rate > 0.0:
        raise ValueError(f"drop_path={skip.options.drop_path}: kind {skip.kind} normalises F: expected 0.0")
