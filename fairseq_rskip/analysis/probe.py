"""What flows through the skip connections of a model, measured by hooks while it runs.

An example is one image of ``(batch, dim, height, width)``, or one sentence, that is one column, of
``(seq_len, batch, dim)``. Norms are Frobenius norms over all of an example's positions and features, padded positions
left out. Everything is computed inside the hooks: later in-place operations cannot spoil it, and no activation is kept.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import at_least_float32
from ..residual import SkipConnection, skips
from ..residual.profile import arguments, hooked
from ..residual.streams import StreamSkip
from .coefficients import skip_ratio

QUANTITIES = ("x_norm", "f_norm", "f_over_x", "ratio", "y_grad_norm")


class Watch:
    """Calls :meth:`see` in every forward pass of every skip connection below ``model``, within a ``with`` block only.

    A subclass says what ``see(name, skip, x, f_x, padding_mask, y)`` does; ``hooks`` removes its hooks at the end.
    """

    def __init__(self, model: nn.Module):
        self.model, self.skips, self.hooks = model, skips(model), contextlib.ExitStack()

    def __enter__(self) -> Any:
        self.hooks.enter_context(hooked(self.skips, nn.Module.register_forward_hook, self._hook))
        return self

    def __exit__(self, *_exception: Any) -> None:
        self.hooks.close()

    def _hook(self, name: str, skip: SkipConnection, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        self.see(name, skip, *arguments(*args, **kwargs), y)

    def see(
        self, name: str, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None, y: Tensor
    ) -> None:
        raise NotImplementedError


class Block:
    """What was measured at one residual block; the examples of all forward passes in order.

    Every quantity is a detached tensor of shape ``(examples,)``, at least fp32, on the model's device, or None if it
    was not measured: ``x_norm`` and ``f_norm``, the norms of x (in kinds that carry several tensors, of the one that
    the branch reads) and of F(x); ``f_over_x``, their quotient; ``ratio``, the mean of ``skip_ratio`` over an
    example's positions and features; ``y_grad_norm``, the norm of the gradient at the output y, of the passes that a
    backward pass has reached.
    """

    def __init__(self) -> None:
        self.passes: list[dict[str, Tensor]] = []

    def __getattr__(self, quantity: str) -> Tensor | None:
        if quantity not in QUANTITIES:
            raise AttributeError(quantity)
        measured = [each[quantity] for each in self.passes if quantity in each]
        return torch.cat(measured) if measured else None


class SkipProbe(Watch):
    """Measures every skip connection below ``model`` during a ``with`` block.

        with SkipProbe(model) as probe:
            loss = criterion(model(x))
            loss.backward()
        probe.blocks["blocks.3.skip"].y_grad_norm

    Args:
        model: any module, also one that DistributedDataParallel wraps.
        ratio: measure ``skip_ratio``, too.
        dtype: what norms are computed in, the tensor's own but at least fp32 by default. In fp32 a norm above 1.8e19
            is infinite, and what is below 1e-19 gets lost, as in deep stacks with lambda > 1 or < 1: float64, slower.

    ``blocks`` is module name -> :class:`Block`; empty for a model without skip connections of ours. Forward passes add
    to it, with grad or without. Under activation checkpointing the pass that is repeated during backward counts once.
    With a loss that sums over examples which do not see each other, ``y_grad_norm`` is that of each example's own loss.
    The hooks are there only within the block, so the backward pass belongs into it.
    """

    def __init__(self, model: nn.Module, ratio: bool = True, dtype: torch.dtype | None = None):
        super().__init__(model)
        self.ratio, self.dtype = ratio, dtype
        self.blocks = {name: Block() for name in self.skips}

    def see(
        self, name: str, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None, y: Tensor
    ) -> None:
        passes = self.blocks[name].passes
        repeated = torch._C._current_graph_task_id() != -1  # during backward: activation checkpointing
        if not repeated:
            passes.append(self._measure(skip, x, f_x, padding_mask))
        waiting = [each for each in passes if "y_grad_norm" not in each]
        if waiting and y.requires_grad:  # backward visits passes last to first

            def measure_gradient(gradient: Tensor, measured: dict[str, Tensor] = waiting[-1]) -> None:
                measured["y_grad_norm"] = example_norm(skip, gradient.detach(), padding_mask, self.dtype)

            self.hooks.callback(y.register_hook(measure_gradient).remove)

    @torch.no_grad()
    def _measure(self, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> dict[str, Tensor]:
        read = skip.current(x.detach())[0] if isinstance(skip, StreamSkip) else x.detach()
        sizes = (read, f_x.detach())
        x_norm, f_norm = (example_norm(skip, tensor, padding_mask, self.dtype) for tensor in sizes)
        measured = {"x_norm": x_norm, "f_norm": f_norm, "f_over_x": f_norm / x_norm}
        if self.ratio:
            with contextlib.suppress(ValueError):  # a kind or norm whose y has no coefficients of x and F
                ratio = skip_ratio(skip, x.detach(), f_x.detach(), padding_mask)
                measured["ratio"] = example_mean(skip, ratio, padding_mask)
        return measured


def example_norm(
    skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The Frobenius norm of each example of ``tensor``, which is laid out as ``skip`` takes it: ``(examples,)``."""
    values = without_padding(skip, tensor, padding_mask)
    dtype = dtype or at_least_float32(tensor.new_empty(0)).dtype
    axes = _all_but_examples(skip, values)
    if skip.channel_dim == -1 and values.dim() > 1:  # norms of rows first: ten times as fast on a CPU
        values, axes = torch.linalg.vector_norm(values, dim=-1, dtype=dtype), axes[:-1]
    if axes:
        values = torch.linalg.vector_norm(values, dim=axes, dtype=dtype)
    return values.reshape(-1)


def example_mean(skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """The mean over each example's unpadded positions and features; NaN for an example that has none."""
    values = without_padding(skip, at_least_float32(tensor), padding_mask)
    axes = _all_but_examples(skip, values)
    if padding_mask is None:
        return values.mean(axes).reshape(-1)
    kept = padding_mask.logical_not().unsqueeze(skip.channel_dim).expand_as(values)
    return (values.sum(axes) / kept.sum(axes)).reshape(-1)


def without_padding(skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``tensor``, zero where padded, whatever it holds there."""
    return tensor if padding_mask is None else tensor.masked_fill(padding_mask.unsqueeze(skip.channel_dim), 0.0)


def _all_but_examples(skip: SkipConnection, tensor: Tensor) -> list[int]:
    """The dimensions that make up an example; of sequences, examples are the dimension before the features."""
    examples = 0 if skip.channel_dim == 1 else tensor.dim() - 2
    return [axis for axis in range(tensor.dim()) if axis != examples]
