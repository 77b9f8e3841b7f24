"""Normalisations of one position's features, or, with ``norm_axes="chw"``, of one image.

Positions do not see each other, so none of them uses ``padding_mask``.
"""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Norm, at_least_float32


class NoNorm(Norm):
    """G = identity; no parameters."""

    def __init__(self, dim: int, *args: Any, **options: Any):
        super().__init__(dim, *args, gain=False, bias=False, **options)

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        return x

    def affine(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        return x.new_ones(()), x.new_zeros(())


class LayerNorm(Norm, nn.LayerNorm):
    """Layer normalisation (Ba et al., 2016): ``w * (x - mean) / sqrt(var + eps) + b`` per row.

    A row is one position's ``dim`` features (``norm_axes="c"``, both layouts); ``norm_axes="chw"``, image maps only,
    takes one example's ``dim * height * width`` values instead, as ``nn.GroupNorm(1, dim)`` does.
    """

    takes_chw = True
    elementwise_affine = True

    def __init__(self, dim: int, channel_dim: int = -1, norm_axes: str = "c", eps: float = 1e-5, **options: bool):
        super().__init__(dim, channel_dim, norm_axes, eps, **options)
        self.normalized_shape = (self.dim,)
        self.owns_output = channel_dim == -1

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        z, weight, bias = x, self.weight, self.bias
        if z.dtype != weight.dtype:
            # the wider of the two types: under amp the gain is fp32 while x may be half
            dtype = (z.new_empty(0) + weight.new_empty(0)).dtype
            z, weight, bias = z.to(dtype), weight.to(dtype), bias.to(dtype)
        if self.channel_dim == -1:
            y = torch.layer_norm(z, [self.dim], weight, bias, self.eps)
        elif self.norm_axes == "c":
            y = self.to_layout(torch.layer_norm(self.channels_at_end(z), [self.dim], weight, bias, self.eps), x)
        else:
            y = F.group_norm(z, 1, weight, bias, self.eps)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def affine(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        axes = (1, 2, 3) if self.norm_axes == "chw" else (self.channel_dim,)
        z = at_least_float32(x)
        mean = z.mean(axes, keepdim=True)
        deviation = ((z - mean).square().mean(axes, keepdim=True) + self.eps).sqrt()
        scale = self.per_channel(self.weight) / deviation
        return scale, self.per_channel(self.bias) - mean * scale

    def extra_repr(self) -> str:
        return f"{self.dim}, channel_dim={self.channel_dim}, eps={self.eps:g}, norm_axes={self.norm_axes}"
