"""Rules of the form ``y = G(p * x + q * F + r)``: constant p and q and their operator, or learned ones."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..norms import OPERATOR, at_least_float32, channels_at_end, channels_in_front
from . import options as opt
from .base import SkipConnection

LAMBDA = "λ: scale of x in xskip (any real > 0), number of steps in rskip (integer ≥ 1); 1 is the plain skip"
ALPHA = "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step"


class Weighted(SkipConnection):
    """``y = G(p * x + q * F + r)``; :mod:`fairseq_rskip.analysis.coefficients` reads p, q and r."""

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        """p and q, broadcastable to x."""
        raise NotImplementedError

    def offset(self) -> Tensor | float:
        """r, broadcastable to x."""
        return 0.0

    def per_channel(self, vector: Tensor) -> Tensor:
        """View a ``(dim,)`` vector so that it broadcasts along the channel dimension."""
        return vector.view(-1, 1, 1) if self.channel_dim == 1 else vector


class ConstantSkip(Weighted):
    """``y = G(skip_scale * x + branch_scale * F)`` with constants λ and α, by :mod:`fairseq_rskip.ops` where its
    kernels are in use."""

    skip_scale = 1.0
    branch_scale = 1.0

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        like = at_least_float32(x)
        return like.new_full((), self.skip_scale), like.new_full((), self.branch_scale)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        if self.skip_scale == 1.0:
            return torch.add(x, f_x, alpha=self.branch_scale)
        if self.branch_scale == 1.0:
            return torch.add(f_x, x, alpha=self.skip_scale)
        return torch.add(self.skip_scale * x, f_x, alpha=self.branch_scale)

    def _output(self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None) -> Tensor:
        operands = self.operands(x, f_x, list(self.post))
        if operands is None:
            return super()._output(x, f_x, carried, padding_mask)
        tensors, norm = operands
        y = ops.kernel(*tensors, self.skip_scale, self.branch_scale, *norm)
        return y if self.channel_dim == -1 else channels_in_front(y, x)

    def operands(self, x: Tensor, f_x: Tensor, norms: list[Any]) -> tuple[Any, Any] | None:
        """x and F as rows, gains and biases; eps, and whether the norm is RMSNorm: what the operator is called with
        for these norms. None where its kernels are not in use."""
        if not norms or not ops.takes(x, f_x, len(norms), self.skip_scale, self.branch_scale):
            return None
        kind, eps = type(norms[0]), norms[0].eps
        rms = OPERATOR.get(kind)
        if rms is None:
            return None
        for norm in norms:
            # of the first one's class and settings, and neither replaced nor watched by a hook
            if type(norm) is not kind or norm.eps != eps or norm.norm_axes != "c" or is_hooked(norm):
                return None
        if self.channel_dim == 1:
            x, f_x = channels_at_end(x), channels_at_end(f_x)
        return (x, f_x, [norm.weight for norm in norms], [] if rms else [norm.bias for norm in norms]), (eps, rms)


class ScaledSkip(ConstantSkip):
    """Constant rules with the options λ and α."""

    @dataclasses.dataclass(frozen=True)
    class Options(ConstantSkip.Options):
        skip_lambda: float = opt.option(1.0, LAMBDA, "positive")
        branch_scale: float = opt.option(1.0, ALPHA, "positive", short="alpha")

    def setup(self) -> None:
        self.skip_scale = float(self.options.skip_lambda)
        self.branch_scale = float(self.options.branch_scale)


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


class LearnedSkip(Weighted):
    """Rules with learned weights or gates; one whose p or q is 1 has its own ``combine``, which saves the product."""

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        p, q = self.scales(x, f_x)
        return p * x + q * f_x


class BranchWeight(LearnedSkip):
    """``y = G(x + weight * F)`` with one learned weight."""

    @dataclasses.dataclass(frozen=True)
    class Options(LearnedSkip.Options):
        init: float = opt.start(0.0)

    def setup(self) -> None:
        self.weight = nn.Parameter(torch.full((1,), float(self.options.init)))

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(()), self.weight

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return x + self.scales(x, f_x)[1] * f_x
