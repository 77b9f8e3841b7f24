"""The norms after the sum, and the choice between the operator and torch.

``y_1 = G_1(skip_scale * x + branch_scale * F)``, ``y_k = G_k(skip_scale * x + y_{k-1})``: Eq. 3 of
Liu et al. 2020 with one norm, Eq. 4 with several and ``skip_scale`` 1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from .base import Layout, Norm, at_least_float32
from .create import create_norm
from .rows import LayerNorm, RMSNorm


class RecursiveNorm(Layout, nn.ModuleList):
    """The norms of a skip connection's steps, one for each; without norms, only the sum.

    Where all are layer or RMS norms over the features, :mod:`fairseq_rskip.ops` computes all steps
    as one operator if its kernels are in use; otherwise the norms are called one after the other. A
    forward hook belongs on this module: hooks of a single norm are not called where the operator
    computes. :meth:`mixture` calls no hook.

    Args:
        norm: one of ``NORMS``.
        dim, channel_dim, norm_axes, eps, device, dtype: see :class:`.Norm`.
        steps: the number of norms.
    """

    def __init__(
        self,
        norm: str,
        dim: int,
        steps: int = 1,
        channel_dim: int = -1,
        norm_axes: str = "c",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        norms = [
            create_norm(norm, dim, channel_dim, norm_axes, eps, device, dtype) for _ in range(steps)
        ]
        super().__init__(norms)
        self.dim, self.channel_dim, self.eps = dim, channel_dim, eps
        kinds = {type(each) for each in norms}
        self.has_operator = norm_axes == "c" and kinds in ({LayerNorm}, {RMSNorm})
        self.is_rms = kinds == {RMSNorm}
        self.uses_padding_mask = any(each.uses_padding_mask for each in norms)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def forward(
        self,
        x: Tensor,
        f_x: Tensor | None = None,
        skip_scale: float = 1.0,
        branch_scale: float = 1.0,
        padding_mask: Tensor | None = None,
        steps: int | None = None,
    ) -> Tensor:
        """Return y of the last step, or of step number ``steps``.

        Args:
            x, f_x: of one shape; without ``f_x``, x is the sum of a single step.
            padding_mask: see :mod:`fairseq_rskip.norms`.
        """
        norms: list[Any] = list(self)[:steps]
        scales = (skip_scale, branch_scale)
        if (
            self.has_operator
            and f_x is not None
            and ops.should_fuse(x, f_x, self.dim, len(norms), *scales)
        ):
            rows = self.channels_at_end(x), self.channels_at_end(f_x)
            parameters = _gains_and_biases(norms)
            y = ops.skip_norm(*rows, *parameters, *scales, self.eps, self.is_rms)
            return self.to_layout(y, x)
        return _every_step(norms, x, f_x, *scales, padding_mask)[-1]

    def mixture(
        self,
        x: Tensor,
        f_x: Tensor,
        weights: Tensor,
        direction: Tensor | None = None,
        branch_scale: float = 1.0,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``y = sum_k p_k y_k`` over all steps, of x's shape, and p.

        Args:
            weights: p, of shape ``(K,)``; with a ``direction``, the biases of the first K - 1
                steps.
            direction: u of shape ``(dim,)``, with which each position halts by itself: see
                :func:`fairseq_rskip.ops.skip_mix`. p then has shape ``(K, ...)``, a value for each
                position.
        """
        norms: list[Any] = list(self)
        scales = (1.0, branch_scale)
        if self.has_operator and ops.should_fuse(x, f_x, self.dim, len(norms), *scales, mixed=True):
            rows = self.channels_at_end(x), self.channels_at_end(f_x)
            parameters = (*_gains_and_biases(norms), weights, direction)
            y, p = ops.skip_mix(*rows, *parameters, *scales, self.eps, self.is_rms)
            return self.to_layout(y, x), p

        ys = _every_step(norms, x, f_x, *scales, padding_mask)
        if direction is None:
            return _mix(list(weights), ys).to(x.dtype), weights
        p = halting(self._stack(ys), weights, direction)
        shares = [share.unsqueeze(self.channel_dim) for share in p]
        return _mix(shares, ys).to(x.dtype), p

    def _stack(self, ys: list[Tensor]) -> Tensor:
        """The y_k as rows ``(K, ..., dim)``, at least fp32."""
        return at_least_float32(torch.stack([y.movedim(self.channel_dim, -1) for y in ys]))


def weighted_sum(
    x: Tensor, f_x: Tensor, skip_scale: float | Tensor, branch_scale: float | Tensor
) -> Tensor:
    """``skip_scale * x + branch_scale * F``."""
    if _is_one(skip_scale):
        return _add_scaled(x, branch_scale, f_x)
    if _is_one(branch_scale):
        return _add_scaled(f_x, skip_scale, x)
    return _add_scaled(skip_scale * x, branch_scale, f_x)


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def _add_scaled(a: Tensor, scale: float | Tensor, b: Tensor) -> Tensor:
    """``a + scale * b``; for a number in one kernel."""
    return a + scale * b if isinstance(scale, Tensor) else torch.add(a, b, alpha=scale)


def _every_step(
    norms: list[Norm],
    x: Tensor,
    f_x: Tensor | None,
    skip_scale: float,
    branch_scale: float,
    padding_mask: Tensor | None,
) -> list[Tensor]:
    """y_1 ... y_K by torch; without norms, only the sum."""
    z = x if f_x is None else weighted_sum(x, f_x, skip_scale, branch_scale)
    if not norms:
        return [z]
    ys = [norms[0](z, padding_mask)]
    if len(norms) > 1:
        skipped = x if skip_scale == 1.0 else skip_scale * x
        for norm in norms[1:]:
            ys.append(norm(skipped + ys[-1], padding_mask))
    return ys


def halting(steps: Tensor, bias: Tensor, direction: Tensor) -> Tensor:
    """p of shape ``(K, ...)`` for ``steps`` of ``(K, ..., dim)``.

    ``h_k = sigmoid(direction . y_k + bias_k)``, ``p_k = h_k prod_{j<k} (1 - h_j)``, p_K the rest.
    """
    # a product and a sum rather than matmul, whose type autocast would narrow
    logits = (steps[:-1] * direction.to(steps.dtype)).sum(-1)
    logits = logits + bias.view(-1, *[1] * (steps.dim() - 2))
    halts = logits.sigmoid()
    reached = torch.cat((torch.ones_like(steps[:1, ..., 0]), (1.0 - halts).cumprod(0)))
    return reached * torch.cat((halts, torch.ones_like(reached[:1])))


def _gains_and_biases(norms: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The gains of the norms, and as many biases or, of RMS norms, none."""
    return [norm.weight for norm in norms], [norm.bias for norm in norms if norm.has_bias]


def _mix(shares: list[Tensor], ys: list[Tensor]) -> Tensor:
    """``sum_k p_k y_k``, one by one, which keeps the memory format."""
    # a value of shape (1,) widens a half type, one of shape () does not
    shares = [share.reshape(-1) if share.dim() == 0 else share for share in shares]
    total = shares[0] * ys[0]
    for share, y in zip(shares[1:], ys[1:]):
        total = total + share * y
    return total
