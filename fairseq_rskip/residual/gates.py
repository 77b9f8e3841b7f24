"""Gates and transforms on the shortcut: Highway, the five shortcuts of He et al. 2016b, LAuReL."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norms import at_least_float32
from . import options as opt
from .base import SkipConnection
from .inputs import refuse_drop_path
from .place import Branch
from .weighted import ConstantSkip, Weighted, skip_lambda


class Highway(Weighted, kind="highway", norm="none", gate_bias=opt.start(-1.0, "the bias of a gate")):
    """Highway network, ``y = G(T * F + (1 - T) * x)``, ``T = sigmoid(W x + b)``: Srivastava et al. 2015, "Highway
    Networks".

    W is ``(dim, dim)``, applied to the features of each position (a 1x1 convolution for images), and starts with
    standard deviation 1/sqrt(dim); b starts at ``gate_bias``, -1 to -3 in the paper. b -> -inf gives x. Weight
    decay does not apply to W and b, nor to other learned coefficients except wskip's.
    """

    def setup(self) -> None:
        self.gate_weight = nn.Parameter(self.place.draw(self.kind, self.dim, self.dim) * self.dim**-0.5)
        self.gate_bias = nn.Parameter(torch.full((self.dim,), float(self.options.gate_bias)))

    def gate(self, x: Tensor) -> Tensor:
        """sigmoid(W x + b), of x's shape."""
        return torch.sigmoid(linear(x, self.channel_dim, self.gate_weight, self.gate_bias))

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x)
        return 1.0 - gate, gate


class ExclusiveGate(Highway, kind="exclusive_gate", gate_bias=-6.0):
    """Exclusive gating, ``y = G(g * F + (1 - g) * x)``, ``g = sigmoid(W x + b)``: He et al. 2016b. b starts at -6, the
    best of 0 to -10 in the paper's Table 1."""


class ShortcutGate(ExclusiveGate, kind="shortcut_gate"):
    """Shortcut-only gating, ``y = G(F + (1 - g) * x)``: He et al. 2016b. At b -> -inf it is x + F."""

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return 1.0 - self.gate(x), 1.0


class Constant(ConstantSkip, kind="constant", norm="none", skip_lambda=skip_lambda(0.5)):
    """Constant scaling, ``y = G(lambda * x + (1 - lambda) * F)``: He et al. 2016b (lambda 0.5)."""

    def setup(self) -> None:
        super().setup()
        if not self.skip_scale < 1.0:
            raise ValueError(f"skip_lambda={self.skip_scale!r}: expected a number between 0 and 1 for constant")
        self.branch_scale = 1.0 - self.skip_scale


class ConvShortcut(SkipConnection, kind="conv_shortcut", norm="none"):
    """1x1 convolutional shortcut, ``y = G(W x + F)``: He et al. 2016b; in a Transformer W is a linear map.

    W is ``(dim, dim)`` and starts as He's initialisation with the fan-out draws it. Weight decay leaves it alone, where
    He et al. decay all weights.
    """

    def setup(self) -> None:
        self.weight = nn.Parameter(self.place.draw(self.kind, self.dim, self.dim) * (2.0 / self.dim) ** 0.5)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return linear(x, self.channel_dim, self.weight) + f_x


_RATE = opt.option(0.5, "rate of dropout on the shortcut", "rate", affects_output=False)


class DropoutShortcut(Weighted, kind="dropout_shortcut", norm="none", shortcut_dropout=_RATE):
    """Dropout shortcut, ``y = G(dropout(x) + F)``: He et al. 2016b (rate 0.5, which fails to converge). What is kept is
    multiplied by 1 / (1 - rate): the shortcut's expected scale is 1, where the paper argues from 0.5."""

    def setup(self) -> None:
        self.rate = float(self.options.shortcut_dropout)

    def scales(self, x: Tensor) -> tuple[float, float]:
        return 1.0, 1.0

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return F.dropout(x, self.rate, self.training) + f_x


class LAuReL(SkipConnection, kind="laurel", norm="none", rank=opt.option(16, "rank of laurel's BA", "count")):
    """LAuReL, ``y = G(a * F + b * x + B A x)``: Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer", its
    residual weights (RW) and low rank (LR) together.

    a and b are scalars that start at 1, A is ``(rank, dim)`` and starts with standard deviation 1/sqrt(dim), B is
    ``(dim, rank)`` and starts at 0: at the start y is the plain sum. The paper's Eq. 5 has ``b (x + B A x)``, the same
    functions with B divided by b; it bounds a and b by a softmax or sigmoid, here they are free.
    """

    def setup(self) -> None:
        rank = int(self.options.rank)
        self.branch_weight = nn.Parameter(torch.ones(1))
        self.skip_weight = nn.Parameter(torch.ones(1))
        self.low = nn.Parameter(self.place.draw(self.kind, rank, self.dim) * self.dim**-0.5)
        self.high = nn.Parameter(torch.zeros(self.dim, rank))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        augmented = linear(linear(x, self.channel_dim, self.low), self.channel_dim, self.high)
        return self.branch_weight * f_x + self.skip_weight * x + augmented


class GPAS(Weighted, kind="gpas", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """Gradient-preserving activation scaling, ``y = z - silu(g) * sg(z)``, ``z = x + F(G(x))``, sg a stop-gradient:
    Chen et al. 2025, "GPAS", arXiv 2506.22049, on pre-norm. g, ``gate``, is a scalar of each layer that starts at 0,
    where the stack is pre-norm; both sublayers share it, as in code dandingsky/GPAS. The gradient passes as through z.
    """

    def setup(self) -> None:
        self.gate = nn.Parameter(torch.zeros(1))

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        if first is not None:
            self.gate = first.gate

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - F.silu(self.gate), 1.0 - F.silu(self.gate)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        z = x + f_x
        return z - F.silu(self.gate) * z.detach()


class Orthogonal(SkipConnection, kind="orthogonal", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """Orthogonal residual update, ``y = x + F - <F, x> / (|x|^2 + eps) * x``, F of G(x), over the features of each
    position: Oh et al. 2025, "Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep
    Networks", arXiv 2505.11881, its feature-wise form, the default of code BootsofLagrangian/ortho-residual (there eps
    is 1e-6); x-transformers projects over a whole example."""

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        wide, f_wide = at_least_float32(x), at_least_float32(f_x)
        along, square = ((wide * other).sum(self.channel_dim, keepdim=True) for other in (f_wide, wide))
        return wide + f_wide - along / (square + self.eps) * wide


class DeltaResidual(SkipConnection, kind="ddl", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """Deep delta learning, ``y = x + b * (v - <k, x>) * k``, ``k = F / |F|``, ``b = 2 sigmoid(w_b . G(x) + c_b)``,
    ``v = 4 sigmoid(w_v . x + c_v)``, F of G(x): arXiv 2601.00417, as its code for one value a position has it,
    yifanzhang-pro/deep-delta-learning, ``DDL-vdim1-gpt-mha-rope.py``; in the paper's appendix v is linear in G(x). c_b
    starts at 0, so that b = 1; w_b and w_v, of shape (1, dim), and c_v at 0, so that v = 2 (ours; there at random)."""

    def setup(self) -> None:
        refuse_drop_path(self)
        for name in ("gate", "value"):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.zeros(1, self.dim)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(1)))

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, _ = super().prepare(x)
        return h, (h,)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        (h,) = carried or self.prepare(x)[1]
        h, x, f_x = (at_least_float32(tensor) for tensor in (h, x, f_x))
        gate = 2.0 * torch.sigmoid(linear(h, self.channel_dim, self.gate_weight, self.gate_bias))
        value = 4.0 * torch.sigmoid(linear(x, self.channel_dim, self.value_weight, self.value_bias))
        k = f_x * (f_x.square().sum(self.channel_dim, keepdim=True) + self.eps**2).rsqrt()
        return x + gate * (value - (k * x).sum(self.channel_dim, keepdim=True)) * k


def linear(x: Tensor, channel_dim: int, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``W x + b`` over the features of each position, W of shape ``(out, dim)``."""
    bias = None if bias is None else bias.to(x.dtype)
    if channel_dim == 1:
        return F.conv2d(x, weight.to(x.dtype)[:, :, None, None], bias)
    return F.linear(x, weight.to(x.dtype), bias)
