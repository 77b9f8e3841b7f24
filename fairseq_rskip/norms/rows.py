"""Normalisations of one position's features; layer norm also of one image (``"chw"``).

Positions do not see each other, so none of them uses ``padding_mask``.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Norm, at_least_float32


class NoNorm(Norm):
    """G = identity; no parameters."""

    has_gain = has_bias = False

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return x

    def affine_map(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.new_ones(()), x.new_zeros(())


class LayerNorm(Norm, nn.LayerNorm):
    """Layer normalisation (Ba et al., 2016): ``w * (x - mean) / sqrt(var + eps) + b`` per row.

    A row is one position's ``dim`` features (``norm_axes="c"``, both layouts); ``norm_axes="chw"``,
    image maps only, takes one example's ``dim * height * width`` values instead, as
    ``nn.GroupNorm(1, dim)`` does.
    """

    takes_chw = True
    elementwise_affine = True
    eps: float

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.normalized_shape = (self.dim,)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        z = x
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if z.dtype != weight.dtype:
            # the wider of the two types: under amp the gain is fp32 while x may be half
            dtype = torch.promote_types(z.dtype, weight.dtype)
            z, weight, bias = z.to(dtype), weight.to(dtype), bias.to(dtype)
        if self.channel_dim == -1:
            y = torch.layer_norm(z, [self.dim], weight, bias, self.eps)
        elif self.norm_axes == "c":
            rows = self.channels_at_end(z)
            y = self.to_layout(torch.layer_norm(rows, [self.dim], weight, bias, self.eps), x)
        else:
            y = F.group_norm(z, 1, weight, bias, self.eps)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def affine_map(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        axes = (1, 2, 3) if self.norm_axes == "chw" else (self.channel_dim,)
        z = at_least_float32(x)
        mean = z.mean(axes, keepdim=True)
        deviation = ((z - mean).square().mean(axes, keepdim=True) + self.eps).sqrt()
        scale = self.per_channel(self.weight) / deviation
        return scale, self.per_channel(self.bias) - mean * scale


class RowNorm(Norm):
    """Base class of norms over the feature dimension.

    :meth:`rows` computes ``(..., dim)`` of either layout, at least fp32.
    """

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return self.to_layout(self.rows(self.channels_at_end(at_least_float32(x))), x).to(x.dtype)

    def affine_map(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale, shift = self.row_affine(self.channels_at_end(at_least_float32(x)))
        return self.to_layout(scale, x), self.to_layout(shift, x)

    def rows(self, z: Tensor) -> Tensor:
        """The normalised rows, a new tensor of ``z``'s shape."""
        raise NotImplementedError

    def row_affine(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`affine_map` of rows."""
        raise NotImplementedError


class RMSNorm(RowNorm, nn.RMSNorm):
    """RMS normalisation (Zhang and Sennrich, 2019): ``w * x / sqrt(mean(x^2) + eps)`` per row.

    The values of ``torch.nn.RMSNorm``; eps is 1e-5 as for the other norms, where torch's own
    default is the type's.
    """

    has_bias = False
    elementwise_affine = True
    eps: float

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.normalized_shape = (self.dim,)

    def inverse(self, z: Tensor) -> Tensor:
        return (z.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def rows(self, z: Tensor) -> Tensor:
        return z * self.inverse(z) * self.weight

    def row_affine(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.inverse(z) * self.weight, torch.zeros_like(z)


class ScaleNorm(RowNorm):
    """``g * x / max(|x|, eps)`` per row, with one learned scalar g (Nguyen and Salazar, 2019).

    g starts at sqrt(dim). The parameter ``weight``, of shape ``(1,)``, is g.
    """

    has_bias = False
    gain_size = 1

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        nn.init.constant_(self.weight, math.sqrt(self.dim))

    def scale(self, z: Tensor) -> Tensor:
        return self.weight / length(z).clamp(min=self.eps)

    def rows(self, z: Tensor) -> Tensor:
        return z * self.scale(z)

    def row_affine(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale(z).expand_as(z), torch.zeros_like(z)


class AdaNorm(RowNorm):
    """Adaptive normalisation (Xu et al., 2019): ``C * (1 - k * z) * z`` per row.

    k is 1/10 and C is 1, as in the command of the authors' README; their code's default and its
    other scripts have C = 2, and only the norms at the ends of the two stacks are adaptive there.
    ``z = (x - mean) / (s + eps)`` with the unbiased standard deviation s (0
    where there is one feature only); no gradient flows through ``1 - k * z``. No parameters.
    """

    has_gain = has_bias = False

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.root = math.sqrt(max(self.dim - 1, 1))

    def rows(self, z: Tensor) -> Tensor:
        z = z - z.mean(-1, keepdim=True)
        z = z / (length(z) / self.root + self.eps)
        return z * (1.0 - 0.1 * z.detach())

    def row_affine(self, z: Tensor) -> tuple[Tensor, Tensor]:
        mean = z.mean(-1, keepdim=True)
        inverse = 1.0 / (length(z - mean) / self.root + self.eps)
        scale = inverse * (1.0 - 0.1 * (z - mean) * inverse)
        return scale, -mean * scale


class DyT(RowNorm):
    """Dynamic tanh (Zhu et al., 2025): ``w * tanh(alpha * x) + b``, alpha a learned scalar.

    alpha starts at 0.5, which ``norm_alpha`` changes. In the authors' language models it starts at
    0.05 to 1 by width and sublayer, the smaller the wider; there is no b, and a learned scalar,
    sqrt(dim) at first, follows the embedding, which fairseq multiplies by that constant. There are
    no statistics to hold constant, so it is no affine map of its
    input, and :meth:`affine_map` raises.
    """

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.alpha = nn.Parameter(self.weight.new_full((1,), 0.5))

    def rows(self, z: Tensor) -> Tensor:
        return torch.tanh(self.alpha * z) * self.weight + self.bias

    affine_map = Norm.affine_map


class Derf(DyT):
    """Dynamic erf: ``w * erf(alpha * x + s) + b``, alpha and s learned scalars.

    They start at 0.5 and 0, as in code zlab-princeton/Derf for images; its GPT-2, 768 wide, has
    alpha 1, for DyT too (``norm_alpha``). Chen
    et al. 2025, "Stronger Normalization-Free Transformers", arXiv 2512.10938.
    """

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.shift = nn.Parameter(self.weight.new_zeros(1))

    def rows(self, z: Tensor) -> Tensor:
        return torch.erf(self.alpha * z + self.shift) * self.weight + self.bias


def length(z: Tensor) -> Tensor:
    """The Euclidean norm of each row; its gradient is 0, not NaN, at a row of zeros."""
    return torch.linalg.vector_norm(z, 2.0, [-1], True)
