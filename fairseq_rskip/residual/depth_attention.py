"""Attention over what earlier blocks stored, with a backward pass that keeps only its inputs."""

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..norms import at_least_float32


def depth_attention(
    history: Tensor, query: Tensor, eps: float, heads: int = 1, temperature: float = 1.0
) -> Tensor:
    """``sum_k p_k v_k`` with ``p = softmax_k(query . v_k / (temperature * rms(v_k)))``.

    Each of ``heads`` groups of channels has its own p. ``history``, of shape ``(..., k, dim)``,
    holds the v_k; ``query`` is ``(dim,)``. A group is dim / heads neighbouring channels, rms is
    that of all channels. Returns ``(..., dim)`` in the type of ``history``.
    """
    options = (eps, heads, temperature)
    if ops.is_transformed():
        return _mixture(history, query, *options)
    return _DepthAttention.apply(history, query, *options)


def depth_weights(
    history: Tensor, query: Tensor, eps: float, heads: int = 1, temperature: float = 1.0
) -> Tensor:
    """The p of :func:`depth_attention`, ``(..., heads, k)``."""
    _, _, share = _attend(at_least_float32(history), query, eps, heads, temperature)
    return share.mT


def _mixture(history: Tensor, query: Tensor, eps: float, heads: int, temperature: float) -> Tensor:
    values = at_least_float32(history)
    _, _, share = _attend(values, query, eps, heads, temperature)
    mixture = (_grouped(values, heads) * share.unsqueeze(-1)).sum(-3)
    return mixture.flatten(-2).to(history.dtype)


class _DepthAttention(torch.autograd.Function):
    """Every block reads all that is stored, so a stack of L blocks reads L^2 / 2 tensors.

    Of plain operations autograd would keep several tensors as large as the history; here backward
    computes them again.
    """

    @staticmethod
    def forward(ctx, history: Tensor, query: Tensor, *options: Any) -> Tensor:
        ctx.options = options
        ctx.save_for_backward(history, query)
        return _mixture(history, query, *options)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        history, query = ctx.saved_tensors
        eps, heads, temperature = ctx.options
        values = at_least_float32(history)
        grouped = _grouped(values, heads)
        rms, scores, share = _attend(values, query, eps, heads, temperature)
        gradient = _grouped(at_least_float32(gradient), heads).unsqueeze(-3)

        d_share = (grouped * gradient).sum(-1)
        d_scores = share * (d_share - (share * d_share).sum(-2, keepdim=True))
        d_product = (d_scores / (temperature * rms)).unsqueeze(-1)  # of query . v_k
        d_query = (grouped * d_product).flatten(-2).flatten(0, -2).sum(0)

        # scores = query . v_k / (temperature * rms), and rms' derivative is v_k / (dim * rms)
        by_rms = -(d_scores * scores).sum(-1, keepdim=True) / (values.size(-1) * rms.square())
        d_values = share.unsqueeze(-1) * gradient
        d_values = d_values.addcmul_(d_product, _grouped(query, heads).to(values.dtype))
        d_values = d_values.flatten(-2).addcmul_(by_rms, values)
        return d_values.to(history.dtype), d_query.to(query.dtype), None, None, None


def _attend(
    values: Tensor, query: Tensor, eps: float, heads: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """rms of the v_k, ``(..., k, 1)``; the scores and their softmax over k, ``(..., k, heads)``."""
    square = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square()
    rms = (square / values.size(-1) + eps).sqrt()
    # a product and a sum rather than matmul, whose type autocast would narrow
    scores = _grouped(values * query, heads).sum(-1) / (temperature * rms)
    return rms, scores, torch.softmax(scores, -2)


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, [heads, -1])
