"""A weighted sum over the steps of the recursive skip, as one operator: what ``askip`` computes.

``torch.ops.fairseq_rskip.skip_mix`` is registered here, with one derivative for all devices; the kernels are those of
:mod:`.dispatch`, and register themselves as theirs do.
"""

import torch
from torch import Tensor

from . import reference
from .dispatch import has_kernel, library

_LISTS = "Tensor[] gains, Tensor[] biases"
_OPTIONS = "float skip_scale, float branch_scale, float eps, bool rms"


def skip_mix(
    x: Tensor,
    f_x: Tensor,
    gains: list[Tensor],
    biases: list[Tensor],
    weights: Tensor,
    direction: Tensor | None = None,
    skip_scale: float = 1.0,
    branch_scale: float = 1.0,
    eps: float = 1e-5,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """``y = sum_k p_k y_k`` with the y_k of :func:`.skip_norm`, none of which is written to memory; and p.

    Args:
        weights: p, of shape ``(K,)`` for K gains; with a ``direction``, the b of the first K - 1 steps.
        direction: u of shape ``(dim,)``, with which each row halts by itself: ``h_k = sigmoid(u . y_k + b_k)``,
            ``p_k = h_k prod_{j<k} (1 - h_j)``, p_K the rest.

    The other arguments are :func:`.skip_norm`'s. Returns y, of ``x``'s shape and dtype, and p: the weights, or with a
    direction ``(K, ...)``, a number for each step and row, at least fp32. Both have their gradients.
    """
    if not has_kernel(x, f_x, x.size(-1), len(gains), mixed=True):
        return reference.skip_mix(x, f_x, gains, biases, weights, direction, skip_scale, branch_scale, eps, rms)
    arguments = (x, f_x, gains, biases, weights, direction, skip_scale, branch_scale, eps, rms)
    y, p = torch.ops.fairseq_rskip.skip_mix.default(*arguments)
    return y, weights if direction is None else p


class SkipMix(torch.autograd.Function):
    """The operator's derivative: backward keeps x, F and p; a second derivative is the reference's."""

    @staticmethod
    def forward(ctx, options, steps, x, f_x, weights, direction, *parameters):
        ctx.options, ctx.steps = options, steps
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            gains, biases = list(parameters[:steps]), list(parameters[steps:])
            y, p = torch.ops.fairseq_rskip.skip_mix.default(x, f_x, gains, biases, weights, direction, *options)
        ctx.save_for_backward(p, x, f_x, weights, direction, *parameters)
        if direction is None:
            ctx.mark_non_differentiable(p)
        return y, p

    @staticmethod
    def backward(ctx, gradient, d_p):
        p, *tensors = ctx.saved_tensors
        x, f_x, weights, direction, *parameters = tensors
        gradient = torch.zeros_like(x) if gradient is None else gradient
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx, tensors, gradient, d_p))
        gains, biases = parameters[: ctx.steps], parameters[ctx.steps :]
        p = weights if direction is None else p
        found = torch.ops.fairseq_rskip.skip_mix_backward.default(
            gradient, d_p, x, f_x, gains, biases, p, direction, *ctx.options
        )
        of_weights = found[2].to(weights.dtype)
        rest = [None, *found[3:]] if direction is None else found[3:]
        return (None, None, found[0], found[1], of_weights, *rest)


def _differentiable(ctx, tensors, gradient, d_p):
    """The gradients as functions of the inputs, for a second derivative: those of the reference."""
    # a tensor may stand in two places
    x, f_x, weights, direction, *parameters = copies = [None if t is None else t.view_as(t) for t in tensors]
    gains, biases = parameters[: ctx.steps], parameters[ctx.steps :]
    outputs = reference.skip_mix(x, f_x, gains, biases, weights, direction, *ctx.options)
    wanted = [copy for copy, need in zip(copies, ctx.needs_input_grad[2:]) if need]
    outputs, upstream = zip(*(pair for pair in zip(outputs, (gradient, d_p)) if pair[1] is not None))
    found = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in ctx.needs_input_grad[2:]]


def _with_derivative(x, f_x, gains, biases, weights, direction, *options):
    return SkipMix.apply(options, len(gains), x, f_x, weights, direction, *gains, *biases)


def _shapes(x, f_x, gains, biases, weights, direction, *options):
    shape = (0,) if direction is None else (len(gains), *x.shape[:-1])
    return x.new_empty(x.shape), x.new_empty(shape, dtype=reference.computing_type(x, f_x, gains))


def _shapes_backward(gradient, d_p, x, f_x, gains, biases, p, direction, *options):
    along = [] if direction is None else [direction]
    weights = x.new_empty((len(gains) - len(along),), dtype=reference.computing_type(x, f_x, gains))
    return [torch.empty_like(t) for t in (x, f_x, weights, *along, *gains, *biases)]


library.define(
    f"skip_mix(Tensor x, Tensor f_x, {_LISTS}, Tensor weights, Tensor? direction, {_OPTIONS}) -> (Tensor, Tensor)"
)
library.define(
    f"skip_mix_backward(Tensor gradient, Tensor? d_p, Tensor x, Tensor f_x, {_LISTS}, Tensor p, Tensor? direction, "
    f"{_OPTIONS}) -> Tensor[]"
)
library.impl("skip_mix", _shapes, "Meta")
library.impl("skip_mix_backward", _shapes_backward, "Meta")
for device in ("CPU", "CUDA"):
    library.impl("skip_mix", _with_derivative, f"Autograd{device}")
