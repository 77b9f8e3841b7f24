"""Gates and transforms on the shortcut: Highway, the five shortcuts of He et al. 2016b, LAuReL."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import options as opt
from .weighted import ConstantSkip, LearnedSkip


class Highway(LearnedSkip, norm="none"):
    """Highway network, ``y = G(T * F + (1 - T) * x)``, ``T = sigmoid(W x + b)``: Srivastava et al. 2015, "Highway
    Networks".

    W is ``(dim, dim)``, applied to the features of each position (a 1x1 convolution for images), and starts with
    standard deviation 1/sqrt(dim); b starts at ``gate_bias``, -1 to -3 in the paper. b -> -inf gives x. Weight decay
    leaves W and b alone, as all learned coefficients but wskip's.
    """

    kind = "highway"

    @dataclasses.dataclass(frozen=True)
    class Options(LearnedSkip.Options):
        gate_bias: float = opt.start(-1.0, "the bias of a gate")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.gate_weight = nn.Parameter(self.draw(self.dim, self.dim) * self.dim**-0.5)
        self.gate_bias = nn.Parameter(torch.full((self.dim,), float(self.options.gate_bias)))

    def constants(self) -> dict[str, float]:
        return {"b": float(self.gate_bias.detach().mean())}

    def gate(self, x: Tensor) -> Tensor:
        """sigmoid(W x + b), of x's shape."""
        return torch.sigmoid(self.linear(x, self.gate_weight, self.gate_bias))

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate(x)
        return 1.0 - gate, gate


class ExclusiveGate(Highway, gate_bias=-6.0):
    """Exclusive gating, ``y = G(g * F + (1 - g) * x)``, ``g = sigmoid(W x + b)``: He et al. 2016b. It is Highway's
    equation; b starts at -6, the best of 0 to -10 in the paper's Table 1.
    """

    kind = "exclusive_gate"


class ShortcutGate(ExclusiveGate):
    """Shortcut-only gating, ``y = G(F + (1 - g) * x)``: He et al. 2016b. At b -> -inf it is x + F."""

    kind = "shortcut_gate"

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        return 1.0 - self.gate(x), x.new_ones(())


class Constant(ConstantSkip, norm="none"):
    """Constant scaling, ``y = G(lambda * x + (1 - lambda) * F)``: He et al. 2016b (lambda 0.5)."""

    kind = "constant"

    @dataclasses.dataclass(frozen=True)
    class Options(ConstantSkip.Options):
        skip_lambda: float = opt.option(0.5, "λ: scale of x", "positive")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.x_scale = float(self.options.skip_lambda)
        if not self.x_scale < 1.0:
            raise ValueError(f"skip_lambda={self.x_scale!r}: expected a number between 0 and 1 for constant")
        self.f_scale = 1.0 - self.x_scale

    def constants(self) -> dict[str, float]:
        return {"lambda": self.x_scale, "alpha": self.f_scale}


class ConvShortcut(LearnedSkip, norm="none"):
    """1x1 convolutional shortcut, ``y = G(W x + F)``: He et al. 2016b; in a Transformer W is a linear map.

    W is ``(dim, dim)`` and starts as He's initialisation with the fan-out draws it. Weight decay leaves it alone, where
    He et al. decay all weights. y mixes the features of x, so that x:F has no meaning.
    """

    kind = "conv_shortcut"

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.weight = nn.Parameter(self.draw(self.dim, self.dim) * (2.0 / self.dim) ** 0.5)

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        return self.linear(x, self.weight) + f_x


class DropoutShortcut(ConstantSkip, norm="none"):
    """Dropout shortcut, ``y = G(dropout(x) + F)``: He et al. 2016b (rate 0.5, which fails to converge)."""

    kind = "dropout_shortcut"

    @dataclasses.dataclass(frozen=True)
    class Options(ConstantSkip.Options):
        shortcut_dropout: float = opt.option(0.5, "rate of dropout on the shortcut", "rate", in_rule=False)

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.rate = float(self.options.shortcut_dropout)

    def constants(self) -> dict[str, float]:
        return {"rate": self.rate}

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training) + f_x


class LAuReL(LearnedSkip, norm="none"):
    """LAuReL, ``y = G(a * F + b * x + B A x)``: Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer", its
    residual weights (RW) and low rank (LR) together.

    a and b are scalars that start at 1, A is ``(rank, dim)`` and starts with standard deviation 1/sqrt(dim), B is
    ``(dim, rank)`` and starts at 0: at the start y is the plain sum. The paper's Eq. 5 has ``b (x + B A x)``, the same
    functions with B divided by b; it bounds a and b by a softmax or sigmoid, here they are free. y mixes the features
    of x, so that x:F has no meaning.
    """

    kind = "laurel"

    @dataclasses.dataclass(frozen=True)
    class Options(LearnedSkip.Options):
        rank: int = opt.option(16, "rank of laurel's BA", "count")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        rank = int(self.options.rank)
        self.branch_weight = nn.Parameter(torch.ones(()))
        self.skip_weight = nn.Parameter(torch.ones(()))
        self.low = nn.Parameter(self.draw(rank, self.dim) * self.dim**-0.5)
        self.high = nn.Parameter(torch.zeros(self.dim, rank))

    def constants(self) -> dict[str, float]:
        a, b = (float(weight.detach()) for weight in (self.branch_weight, self.skip_weight))
        return {"rank": float(self.low.size(0)), "a": a, "b": b}

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        augmented = self.linear(self.linear(x, self.low), self.high)
        return self.branch_weight * f_x + self.skip_weight * x + augmented
