"""Rules of the form ``y = G(p * x + q * F + r)``: constant p and q and their operator, or learned ones."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..norms import OPERATOR, channels_at_end, channels_in_front
from . import options as opt
from .base import SkipConnection

_LAMBDA = "λ: scale of x in xskip (any real > 0), number of steps in rskip (integer ≥ 1); 1 is the plain skip"
_ALPHA = "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step"


def skip_lambda(default: float, accepts: str = "positive") -> Any:
    return opt.option(default, _LAMBDA, accepts)


def branch_scale(default: float = 1.0) -> Any:
    return opt.option(default, _ALPHA, "positive", short="alpha")


class Weighted(SkipConnection):
    """``y = G(p * x + q * F + r)``; :mod:`fairseq_rskip.analysis.coefficients` reads p, q and r."""

    def scales(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """p and q: numbers, or tensors that broadcast to x."""
        raise NotImplementedError

    def offset(self) -> Tensor | float:
        """r, broadcastable to x."""
        return 0.0

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        p, q = self.scales(x)
        if isinstance(p, float) and isinstance(q, float) and p != 1.0 == q:
            return torch.add(f_x, x, alpha=p)
        if not (isinstance(p, float) and p == 1.0):
            x = p * x
        return x + q * f_x if isinstance(q, Tensor) else torch.add(x, f_x, alpha=q)

    def per_channel(self, vector: Tensor) -> Tensor:
        """View a ``(dim,)`` vector so that it broadcasts along the channel dimension."""
        return vector.view(-1, 1, 1) if self.channel_dim == 1 else vector


class ConstantSkip(Weighted):
    """``y = G(skip_scale * x + branch_scale * F)`` with constants λ and α, by :mod:`fairseq_rskip.ops` where its
    kernels are in use."""

    skip_scale = 1.0
    branch_scale = 1.0

    def setup(self) -> None:
        """Take λ and α from the options of kinds that have them."""
        for option, constant in (("skip_lambda", "skip_scale"), ("branch_scale", "branch_scale")):
            if hasattr(self.options, option):
                setattr(self, constant, float(getattr(self.options, option)))

    def scales(self, x: Tensor) -> tuple[float, float]:
        return self.skip_scale, self.branch_scale

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


_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global_{kind}") for kind in _HOOKS]


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook, or a ``forward`` of its own, sees what the module takes or returns."""
    own = any(getattr(module, f"_{kind}") for kind in _HOOKS)
    return own or "forward" in vars(module) or any(_HOOKS_OF_ALL)


class BranchWeight(Weighted, init=opt.start(0.0)):
    """``y = G(x + weight * F)`` with one learned weight."""

    def setup(self) -> None:
        self.weight = nn.Parameter(torch.full((1,), float(self.options.init)))

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        return 1.0, self.weight
