"""What rules of the form ``y = G(p * x + q * F)`` share: constant weights and their operator, or learned ones."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..norms import OPERATOR, at_least_float32, channels_at_end, channels_in_front
from . import options as opt
from .base import SkipConnection

LAMBDA = "λ: scale of x in xskip (any real > 0), number of steps in rskip (integer ≥ 1); 1 is the plain skip"
ALPHA = "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step"


class Taken(NamedTuple):
    """x and F as rows ``(..., dim)``, gains and biases; eps, and whether the norm is RMSNorm."""

    rows: tuple[Tensor, Tensor, list[Tensor], list[Tensor]]
    norm: tuple[float, bool]


class ConstantSkip(SkipConnection):
    """What kinds with constant weights share: ``y = G(p * x + q * F)`` with the floats ``x_scale`` and ``f_scale``."""

    x_scale = 1.0
    f_scale = 1.0
    one_operator = False  # whether ops.skip_norm computes combine and apply_norms
    __constants__ = [*SkipConnection.__constants__, "x_scale", "f_scale"]

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        if self.x_scale == 1.0:
            return torch.add(x, f_x, alpha=self.f_scale)
        if self.f_scale == 1.0:
            return torch.add(f_x, x, alpha=self.x_scale)
        return torch.add(self.x_scale * x, f_x, alpha=self.f_scale)

    @torch.jit.unused
    def fused(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        if not self.one_operator:
            return None
        taken = self.operator_takes(x, f_x, list(self.norms))
        if taken is None:
            return None
        y = ops.kernel(*taken.rows, self.x_scale, self.f_scale, *taken.norm)
        return y if self.channel_dim == -1 else channels_in_front(y, x)

    @torch.jit.unused
    def operator_takes(self, x: Tensor, f_x: Tensor, norms: list[Any]) -> Taken | None:
        """What :mod:`fairseq_rskip.ops` is called with for these norms; None where its kernels are not in use."""
        if not norms or not ops.takes(x, f_x, len(norms), self.x_scale, self.f_scale):
            return None
        kind, eps = type(norms[0]), norms[0].eps
        rms = OPERATOR.get(kind)
        if rms is None:
            return None
        for norm in norms:
            # of the first one's class and settings, and neither replaced nor watched by a hook
            if type(norm) is not kind or norm.eps != eps or norm.norm_axes != "c":
                return None
            if is_hooked(norm):
                return None
        if self.channel_dim == 1:
            x, f_x = channels_at_end(x), channels_at_end(f_x)
        biases = [] if rms else [norm.bias for norm in norms]
        gains = [norm.weight for norm in norms]
        return Taken((x, f_x, gains, biases), (eps, rms))

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        like = at_least_float32(x)
        return like.new_full((), self.x_scale), like.new_full((), self.f_scale)

    def growth(self) -> float:
        return self.x_scale


class ScaledSkip(ConstantSkip):
    """What kinds with the options lambda and alpha share: ``x_scale`` is the one, ``f_scale`` the other."""

    @dataclasses.dataclass(frozen=True)
    class Options(ConstantSkip.Options):
        skip_lambda: float = opt.option(1.0, LAMBDA, "positive")
        branch_scale: float = opt.option(1.0, ALPHA, "positive", short="alpha")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.x_scale = float(self.options.skip_lambda)
        self.f_scale = float(self.options.branch_scale)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.x_scale, "alpha": self.f_scale}


_HOOKS_OF_ALL = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook, or a ``forward`` of its own, sees what the module takes or returns."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(_HOOKS_OF_ALL)
    )


class LearnedSkip(SkipConnection):
    """What kinds with learned weights or gates share: ``y = G(p * x + q * F)``, p and q from :meth:`scales`.

    A kind whose p or q is 1 has its own ``combine``, which saves the product.
    """

    learns = True

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        p, q = self.scales(x, f_x)
        return p * x + q * f_x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``W x + b`` over the features of each position, W of shape ``(out, dim)``."""
        bias = None if bias is None else bias.to(x.dtype)
        if self.channel_dim == 1:
            return F.conv2d(x, weight.to(x.dtype)[:, :, None, None], bias)
        return F.linear(x, weight.to(x.dtype), bias)
