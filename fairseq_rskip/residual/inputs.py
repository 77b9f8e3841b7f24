"""Validate inputs, unify dtypes, mask padding, drop paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..option_error import OptionError

if TYPE_CHECKING:
    from .base import SkipConnection


def check(
    skip: SkipConnection, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
) -> None:
    """Raise ``ValueError`` for inputs that ``skip.forward`` does not accept."""
    if not isinstance(x, Tensor) or not isinstance(f_x, Tensor):
        types = f"{type(x).__name__} and {type(f_x).__name__}"
        raise ValueError(f"x and f_x are {types}: expected tensors")
    expected = list(x.shape)
    if skip.widths[0] > 1 and x.dim() > 0:  # x has several tensors, F is one
        expected[-1] = skip.dim
    if list(f_x.shape) != expected:
        raise ValueError(f"f_x has shape {list(f_x.shape)}: expected {expected}")
    if not (x.is_floating_point() and f_x.is_floating_point()):
        raise ValueError(
            f"x and f_x have dtypes {x.dtype} and {f_x.dtype}: expected floating point"
        )
    if skip.channel_dim == 1 and x.dim() != 4:
        raise ValueError(
            f"x has shape {list(x.shape)}: expected (batch, {skip.dim}, height, width)"
        )
    check_width(skip, x)
    if carried is not None and not isinstance(carried, tuple):
        raise ValueError(
            f"carried is a {type(carried).__name__}: expected the second result of prepare(x)"
        )
    if padding_mask is not None:
        check_mask(skip, x, padding_mask)


def check_width(skip: SkipConnection, x: Tensor) -> None:
    """Raise ``ValueError`` unless x has the channels that ``skip`` takes, in floating point."""
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}: expected floating point")
    width = skip.widths[0] * skip.dim
    if x.dim() == 0 or x.size(skip.channel_dim) != width:
        raise ValueError(
            f"x has shape {list(x.shape)}: expected {width} at dimension {skip.channel_dim}"
        )


def check_mask(skip: SkipConnection, x: Tensor, padding_mask: Tensor) -> None:
    expected = list(x.shape)
    expected.pop(skip.channel_dim)
    if padding_mask.dtype != torch.bool or list(padding_mask.shape) != expected:
        raise ValueError(
            f"padding_mask has dtype {padding_mask.dtype} and shape {list(padding_mask.shape)}: "
            f"expected a boolean mask of shape {expected}, True where padded"
        )


def align(
    skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x and F of one type, which a rule's own matrices need.

    They are zero where padding must not reach the gradients of what the rule learns.
    """
    if padding_mask is not None and skip.post.uses_padding_mask:
        padded = padding_mask.unsqueeze(skip.channel_dim)
        # masked_fill would lose channels_last
        x = torch.where(padded, x.new_zeros(()), x)
        f_x = torch.where(padded, f_x.new_zeros(()), f_x)
    if f_x.dtype != x.dtype:
        wide = torch.promote_types(x.dtype, f_x.dtype)
        x, f_x = x.to(wide), f_x.to(wide)
    return x, f_x


def drop_path(skip: SkipConnection, f_x: Tensor) -> Tensor:
    """Stochastic depth in training: ``b F / (1 - p)`` with b from Bernoulli(1 - p).

    One draw for each example (sentence or image) and the division in training are timm's; Huang et
    al. 2016 draw once for a batch and multiply in evaluation.
    """
    shape = [1] * f_x.dim()
    axis = skip.example_axis(f_x)
    if axis is not None:
        shape[axis] = f_x.size(axis)
    survives = torch.rand(shape, device=f_x.device) >= skip.drop_rate
    return torch.where(survives, f_x / (1.0 - skip.drop_rate), f_x.new_zeros(()))


def refuse_drop_path(skip: SkipConnection) -> None:
    """Raise :class:`.OptionError` for stochastic depth in a kind that uses F's direction only."""
    if skip.drop_rate > 0.0:
        raise OptionError(
            "drop_path", skip.options.drop_path, "0", reason=f"kind {skip.kind} normalises F"
        )
