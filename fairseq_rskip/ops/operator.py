"""``torch.ops.fairseq_rskip.recursive_skip``: its schema, its shapes for ``torch.compile`` and its
derivative.

It returns y and the values that its derivative needs beside the inputs. These are the moments of
each step and row, the mean and 1 / sqrt(var + eps) in the order of the kernel, or for a mixture
(with ``weights``) p if each row has its own p (with a ``direction``), and otherwise nothing.
"""

import torch
from torch import Tensor

from ..errors import UserError

_ARGUMENTS = (
    "Tensor x, Tensor f_x, Tensor[] gains, Tensor[] biases, Tensor? weights, Tensor? direction, "
)
_OPTIONS = "float skip_scale, float branch_scale, float eps, bool rms"


def empty_results(x, f_x, gains, biases, weights, direction, *options) -> tuple[Tensor, Tensor]:
    """Allocate both outputs, uninitialised."""
    numbers = 2 * len(gains)  # the moments of each step
    if weights is not None:
        numbers = 0 if direction is None else len(gains)
    saved = x.new_empty((numbers, *x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(x.shape), saved


def _no_kernel(x, *arguments):
    """Raise ``UserError``: no kernel is loaded for the device of ``x``."""
    raise UserError(
        f"the skip connections' operator has no kernel for {x.device.type} tensors in this "
        "process; expected inputs that fairseq_rskip.ops.should_fuse accepts"
    )


def _empty_gradients(
    gradient, d_saved, x, f_x, gains, biases, weights, direction, *rest
) -> list[Tensor]:
    tensors = (x, f_x, *gains, *biases, weights, direction)
    return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor is not None]


def _first_derivative(*arguments) -> list[Tensor]:
    """The gradients.

    Raises ``UserError`` with ``create_graph``: the kernels' gradients have none of their own.
    """
    if torch.is_grad_enabled():
        raise UserError(
            "the skip connections' operator has no second derivative; RSKIP_OPS=torch, set before "
            "the process starts, has"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*arguments)


class RecursiveSkip(torch.autograd.Function):
    """The derivative on CUDA.

    On a CPU ``recursive_skip.cpp`` has it, where a node in C++ costs less.
    """

    @staticmethod
    def forward(ctx, options, steps, x, f_x, *parameters):
        ctx.options, ctx.steps = options, steps
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            y, moments = operator(
                x, f_x, parameters[:steps], parameters[steps:], None, None, *options
            )
        ctx.save_for_backward(moments, x, f_x, *parameters)
        ctx.mark_non_differentiable(moments)
        return y, moments

    @staticmethod
    def backward(ctx, gradient, _d_moments):
        moments, x, f_x, *parameters = ctx.saved_tensors
        gradient = torch.zeros_like(x) if gradient is None else gradient
        gains, biases = parameters[: ctx.steps], parameters[ctx.steps :]
        inputs = (x, f_x, gains, biases, None, None)
        gradients = _backward(gradient, None, *inputs, moments, *ctx.options)
        return None, None, *gradients


def with_derivative(x, f_x, gains, biases, _weights, _direction, *options) -> tuple[Tensor, Tensor]:
    """The operator, not of a mixture, where autograd may record."""
    return RecursiveSkip.apply(options, len(gains), x, f_x, *gains, *biases)


library = torch.library.Library("fairseq_rskip", "DEF")
library.define(f"recursive_skip({_ARGUMENTS}{_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    "recursive_skip_backward"
    f"(Tensor gradient, Tensor? d_saved, {_ARGUMENTS}Tensor saved, {_OPTIONS}) -> Tensor[]"
)
library.impl("recursive_skip", _no_kernel, "CompositeExplicitAutograd")  # of devices without one
library.impl("recursive_skip", empty_results, "Meta")
library.impl("recursive_skip_backward", _empty_gradients, "Meta")
for _device in ("CPU", "CUDA"):
    library.impl("recursive_skip_backward", _first_derivative, f"Autograd{_device}")
operator = torch.ops.fairseq_rskip.recursive_skip.default
_backward = torch.ops.fairseq_rskip.recursive_skip_backward.default
