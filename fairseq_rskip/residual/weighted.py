"""Rules of the form ``y = G(p * x + q * F + r)``, among them those of Liu et al. 2020, "Rethinking Skip Connection with
Layer Normalization in Transformers and ResNets" (COLING). If p and q are constant, the operator computes them."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..norms import OPERATOR, Norm
from . import options as opt
from .base import SkipConnection
from .place import Place

_LAMBDA = (
    "λ: scale of x in xskip (any real > 0), number of steps in rskip (integer ≥ 1); 1 is the plain skip; auto: the "
    "least for the depth (docs/depth.md)"
)
_ALPHA = "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step"


def skip_lambda(default: float, accepts: str = "positive", auto: Any = None) -> Any:
    return opt.option(default, _LAMBDA, accepts, auto=auto)


def least_scale(place: Place) -> float:
    """``λ = sqrt(N)``: LN(λx + F) in a stack of N residuals then keeps e^(-1/2) of a gradient (docs/depth.md)."""
    return math.sqrt(place.num_blocks)


def least_steps(place: Place) -> int:
    """``λ = 1 + log_4(N) + log_2(atan(1))``, rounded up: the same for Eq. 4, where each step halves the angle."""
    return max(1, math.ceil(1 + math.log(place.num_blocks, 4) + math.log2(math.atan(1.0))))


def branch_scale(default: float = 1.0) -> Any:
    return opt.option(default, _ALPHA, "positive", short="alpha")


ALPHA = branch_scale()


class Weighted(SkipConnection):
    """``y = G(p * x + q * F + r)``; :mod:`fairseq_rskip.analysis.coefficients` reads p, q and r."""

    def scales(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """p and q: numbers, or tensors that broadcast to x, as r of :meth:`offset`."""
        raise NotImplementedError

    def offset(self) -> Tensor | float:
        return 0.0

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        p, q = self.scales(x)
        if isinstance(p, float) and isinstance(q, float) and p != 1.0 and q == 1.0:
            return torch.add(f_x, x, alpha=p)
        if isinstance(p, Tensor) or p != 1.0:
            x = p * x
        y = x + q * f_x if isinstance(q, Tensor) else torch.add(x, f_x, alpha=q)
        r = self.offset()
        return y + r if isinstance(r, Tensor) else y


class ConstantSkip(Weighted):
    """``y = G(skip_scale * x + branch_scale * F)`` with constants λ and α, by :mod:`fairseq_rskip.ops` where its
    kernels are in use."""

    skip_scale = branch_scale = 1.0

    def setup(self) -> None:
        """Take λ and α from the options of kinds that have them."""
        for option, constant in (("skip_lambda", "skip_scale"), ("branch_scale", "branch_scale")):
            if hasattr(self.options, option):
                setattr(self, constant, float(getattr(self.options, option)))

    def scales(self, x: Tensor) -> tuple[float, float]:
        return self.skip_scale, self.branch_scale

    def norms_in_use(self) -> list[Any]:
        return list(self._modules["post"]._modules.values())  # a quarter of list(self.post)'s time

    def _output(self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None) -> Tensor:
        norms = self.norms_in_use()
        norm = self._norm_of_operator(norms, x, f_x)
        if norm is None:
            return super()._output(x, f_x, carried, padding_mask)
        rows = (x, f_x) if self.channel_dim == -1 else (self.channels_at_end(x), self.channels_at_end(f_x))
        gains, biases = parameters(norms, "weight"), [] if norm[1] else parameters(norms, "bias")
        y = self._fused((*rows, gains, biases), (self.skip_scale, self.branch_scale), norm, padding_mask)
        return y if self.channel_dim == -1 else self.to_layout(y, x)

    def _fused(self, rows: Any, scales: Any, norm: Any, padding_mask: Tensor | None) -> Tensor:
        return ops.kernel(*rows, *scales, *norm)

    def _norm_of_operator(self, norms: list[Any], x: Tensor, f_x: Tensor) -> tuple[float, bool] | None:
        """eps and whether the norms are RMSNorm; None where the operator's kernels are not in use."""
        if not norms or not ops.takes(x, f_x, self.dim, len(norms), self.skip_scale, self.branch_scale):
            return None
        kind, eps = type(norms[0]), norms[0].eps
        if kind not in OPERATOR:
            return None
        if any(_HOOKS_OF_ALL):
            return None
        for norm in norms:  # all must have the first one's class and settings, no hook and no replaced forward
            if type(norm) is not kind or norm.eps != eps or norm.norm_axes != "c" or is_watched(norm):
                return None
        return eps, OPERATOR[kind]


_KINDS_OF_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
_HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global_{kind}") for kind in _KINDS_OF_HOOKS]


def is_watched(module: nn.Module) -> bool:
    """Whether a hook of the module, or a ``forward`` of its own, sees what it takes or returns."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return True
    return "forward" in own


def parameters(norms: list[Any], name: str) -> list[Tensor]:
    """Each norm's weight or bias, in a quarter of the time of ``norm.weight``, which counts in beam search."""
    owned = [norm._parameters for norm in norms]
    return [own[name] if name in own else getattr(norm, name) for own, norm in zip(owned, norms)]


class BranchWeight(Weighted, init=opt.start(0.0)):
    """``y = G(x + weight * F)`` with one learned weight."""

    def setup(self) -> None:
        self.weight = nn.Parameter(torch.full((1,), float(self.options.init)))

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        return 1.0, self.per_channel(self.weight)


class XSkip(ConstantSkip, kind="xskip", skip_lambda=skip_lambda(2.0, auto=least_scale), branch_scale=ALPHA):
    """Expanded skip ``y = G(lambda * x + alpha * F)``: Eq. 2 without G, Eq. 3 with it; lambda < 1 contracts.

    lambda = alpha = 1 without G is the plain skip ``x + F``, with layer norm Transformer's post-norm. LN(lambda * x +
    F) is LN(x + F / lambda) with eps / lambda^2 for eps, so that LN(0.5x + F) and LN(x + 2F) of the paper's Table 3 are
    one function.
    """


class RSkip(
    ConstantSkip, kind="rskip", norm=opt.SOME_NORM, skip_lambda=skip_lambda(2, "steps", least_steps), branch_scale=ALPHA
):
    """Recursive skip ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``, ``y = y_lambda``: Eq. 4.

    Each step owns its gain and bias. lambda, an integer >= 1, is the number of ``steps``; lambda = 1 is Transformer's
    post-norm.
    """

    def setup(self) -> None:
        self.branch_scale = float(self.options.branch_scale)

    @property
    def steps(self) -> int:
        return int(self.options.skip_lambda)

    def _post_norms(self, make: Any) -> list[Norm]:
        return [make() for _ in range(self.steps)]

    def rule(self) -> dict[str, Any]:
        same = self.kind == "rskip" and self.steps == 1
        return {**super().rule(), "kind": "xskip" if same else self.kind}

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Eq. 4 from the first sum z on."""
        for step, norm in enumerate(self.post):
            z = norm(z if step == 0 else z + x, padding_mask)
        return z


class WSkip(Weighted, kind="wskip", init=opt.start(1.0), branch_scale=ALPHA):
    """Learned skip ``y = G(w * x + alpha * F)``: section 4.3; the parameter ``weight`` is w, of shape ``(dim,)``.

    ``init`` is its starting value; the paper tries 1 and 2.
    """

    decays = True

    def setup(self) -> None:
        self.branch_scale = float(self.options.branch_scale)
        self.weight = nn.Parameter(torch.full((self.dim,), float(self.options.init)))

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return self.per_channel(self.weight), self.branch_scale
