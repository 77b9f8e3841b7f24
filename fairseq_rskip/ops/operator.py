"""``torch.ops.fairseq_rskip.recursive_skip``: its schema, its shapes for ``torch.compile`` and its derivatives.

It returns y, and what its derivative keeps beside the inputs: the moments of each step and row; for a mixture, which
has ``weights``, p where each row has its own (with a ``direction``), otherwise nothing.
"""

import contextlib

import torch
from torch import Tensor

from . import reference

_ARGUMENTS = "Tensor x, Tensor f_x, Tensor[] gains, Tensor[] biases, Tensor? weights, Tensor? direction, "
_OPTIONS = "float skip_scale, float branch_scale, float eps, bool rms"


def empty_results(x, f_x, gains, biases, weights, direction, *options) -> tuple[Tensor, Tensor]:
    """Both results, not written."""
    numbers = 2 * len(gains) if weights is None else 0 if direction is None else len(gains)
    kept = x.new_empty((numbers, *x.shape[:-1]), dtype=reference.computing_type(x, f_x, gains))
    return x.new_empty(x.shape), kept


def _empty_gradients(gradient, d_kept, x, f_x, gains, biases, weights, direction, *rest) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, f_x, *gains, *biases, weights, direction) if t is not None]


def _second_derivative(gradient, d_kept, x, f_x, gains, biases, weights, direction, kept, *options) -> list[Tensor]:
    """The gradients as functions of the inputs: the reference's."""
    with torch.enable_grad():
        # views: one tensor may be given twice
        tensors = [t if t is None else t.view_as(t) for t in (x, f_x, *gains, *biases, weights, direction)]
        tensors = [t if t is None or t.requires_grad else t.detach().requires_grad_() for t in tensors]
        arguments = _arguments(tensors, len(gains))
        if weights is None:
            outputs = (reference.skip_norm(*arguments[:4], *options),)
        else:
            outputs = reference.skip_mix(*arguments, *options)
        count = 1 if d_kept is None else 2
        outputs, upstream = outputs[:count], (gradient, d_kept)[:count]
        inputs = [t for t in tensors if t is not None]
        return torch.autograd.grad(outputs, inputs, upstream, create_graph=True, materialize_grads=True)


class RecursiveSkip(torch.autograd.Function):
    """The derivative on CUDA, as ``recursive_skip.cpp`` has it for a CPU, where a node in C++ costs less."""

    @staticmethod
    def forward(ctx, options, steps, *tensors):
        ctx.options, ctx.steps = options, steps
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            y, kept = operator(*_arguments(tensors, steps), *options)
        ctx.save_for_backward(kept, *tensors)
        if tensors[-1] is None:
            ctx.mark_non_differentiable(kept)
        return y, kept

    @staticmethod
    def backward(ctx, gradient, d_kept):
        kept, *tensors = ctx.saved_tensors
        gradient = torch.zeros_like(tensors[0]) if gradient is None else gradient
        with contextlib.nullcontext() if torch.is_grad_enabled() else torch._C._AutoDispatchBelowAutograd():
            found = _backward(gradient, d_kept, *_arguments(tensors, ctx.steps), kept, *ctx.options)
        gradients = iter(found)
        return None, None, *(None if t is None else next(gradients) for t in tensors)


def _arguments(tensors, steps):
    """x, F, gains, biases, weights and direction from one list of them all."""
    return tensors[0], tensors[1], list(tensors[2 : 2 + steps]), list(tensors[2 + steps : -2]), *tensors[-2:]


def with_derivative(x, f_x, gains, biases, weights, direction, *options) -> tuple[Tensor, Tensor]:
    """The operator where autograd may record."""
    return RecursiveSkip.apply(options, len(gains), x, f_x, *gains, *biases, weights, direction)


library = torch.library.Library("fairseq_rskip", "DEF")
library.define(f"recursive_skip({_ARGUMENTS}{_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    f"recursive_skip_backward(Tensor gradient, Tensor? d_kept, {_ARGUMENTS}Tensor kept, {_OPTIONS}) -> Tensor[]"
)
library.impl("recursive_skip", empty_results, "Meta")
library.impl("recursive_skip_backward", _empty_gradients, "Meta")
for _device in ("CPU", "CUDA"):
    library.impl("recursive_skip_backward", _second_derivative, f"Autograd{_device}")
operator = torch.ops.fairseq_rskip.recursive_skip.default
_backward = torch.ops.fairseq_rskip.recursive_skip_backward.default
