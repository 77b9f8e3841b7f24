"""What flows through the skip connections of a model, measured by hooks while it runs.

An example is one image of ``(batch, dim, height, width)``, or one sentence of ``(seq_len, batch,
dim)``, or of ``(batch, seq_len, dim)`` where a skip connection has ``batch_dim=0``. Norms are
Frobenius norms over all of an example's positions and features, padded positions left out.
Everything is computed inside the hooks: later in-place operations cannot spoil it, and no
activation is kept.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..norms import NoCoefficients, at_least_float32, is_recomputed
from ..residual import SkipConnection, skips
from ..residual.hooks import hooked, inputs_of_call


class Call(NamedTuple):
    """One forward pass ``y = skip(x, f_x, padding_mask=mask)`` of a skip connection."""

    x: Tensor
    f_x: Tensor
    mask: Tensor | None
    y: Tensor


class Watch:
    """Calls :meth:`see` of a subclass in every forward pass of every skip connection of ``model``.

    It does so within a ``with`` block only; ``hooks`` removes the hooks at the end. ``passes`` is
    module name -> what was measured in each forward pass: quantity -> tensor.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.skips = skips(model)
        self.hooks = contextlib.ExitStack()
        self.passes: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self.skips}

    def __enter__(self) -> Any:
        self.hooks.enter_context(hooked(self.skips, nn.Module.register_forward_hook, self._call))
        return self

    def _call(
        self,
        name: str,
        skip: SkipConnection,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        y: Tensor,
    ) -> None:
        x, f_x, mask = inputs_of_call(*args, **kwargs)
        self.see(name, skip, Call(x, f_x, mask, y))

    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        """Measure one forward pass of ``skip``, the skip connection named ``name``."""
        raise NotImplementedError

    def values(self, name: str) -> dict[str, Tensor]:
        """Each quantity at the skip connection ``name``, of all passes in which it was measured.

        The tensors are ``(examples,)``, detached. A quantity that was never measured has no key.
        """
        measured: dict[str, list[Tensor]] = {}
        for quantities in self.passes[name]:
            for quantity, tensor in quantities.items():
                measured.setdefault(quantity, []).append(tensor)
        return {quantity: torch.hstack(tensors) for quantity, tensors in measured.items()}

    def __exit__(self, *_exception: Any) -> None:
        self.hooks.close()


class SkipProbe(Watch):
    """Measures every skip connection of ``model`` during a ``with`` block.

    The backward pass belongs into the block::

        with SkipProbe(model) as probe:
            criterion(model(x)).backward()
        probe.values("blocks.3.skip")["y_grad_norm"]

    The quantities, each at least fp32 and on the model's device:

    * ``f_over_x``: the norm of F(x) over that of x (in kinds that carry several tensors, of the one
      that the branch reads).
    * ``ratio``: the mean of x:F in y over an example's positions and features.
    * ``bf_over_ax``: the norm of b * F over that of a * x in the sum a * x + b * F + c that the
      last norm reads. A gain near zero changes it little, the mean of a / b without bounds.
    * ``y_grad_norm``: the norm of the gradient at the output y, of passes that a backward pass has
      reached.

    Args:
        model: any module, also one that DistributedDataParallel wraps.
        ratio: measure the two quantities of x and F in y, too.
        dtype: what norms are computed in, the tensor's own but at least fp32 by default. In fp32 a
            norm above 1.8e19 is infinite, and what is below 1e-19 gets lost, as in deep stacks with
            lambda > 1 or < 1: float64, slower.

    Forward passes count with grad or without; one that activation checkpointing repeats counts
    once. With a loss that sums over examples which do not see each other, ``y_grad_norm`` is that
    of each example's own loss.
    """

    def __init__(self, model: nn.Module, ratio: bool = True, dtype: torch.dtype | None = None):
        super().__init__(model)
        self.ratio, self.dtype = ratio, dtype

    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        if not is_recomputed():
            measured = self._measure(skip, call.x.detach(), call.f_x.detach(), call.mask)
            self.passes[name].append(measured)
        if call.y.requires_grad:
            self._measure_gradient_later(name, skip, call.y, call.mask)

    def _measure_gradient_later(
        self, name: str, skip: SkipConnection, y: Tensor, mask: Tensor | None
    ) -> None:
        """Add the norm of y's gradient to the last pass that has none, when backward computes it.

        Backward visits passes last to first.
        """
        waiting = [each for each in self.passes[name] if "y_grad_norm" not in each]
        if not waiting:
            return
        measured = waiting[-1]

        def measure_gradient(gradient: Tensor) -> None:
            norm = example_norm(skip, gradient.detach(), mask, self.dtype)
            measured["y_grad_norm"] = norm

        self.hooks.callback(y.register_hook(measure_gradient).remove)

    @torch.no_grad()
    def _measure(
        self, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> dict[str, Tensor]:
        read, _ = skip.current(x)
        x_norm = example_norm(skip, read, padding_mask, self.dtype)
        f_norm = example_norm(skip, f_x, padding_mask, self.dtype)
        measured = {"f_over_x": f_norm / x_norm}
        if self.ratio:
            with contextlib.suppress(NoCoefficients):
                ratio = skip.ratio(x, f_x, padding_mask)
                measured["ratio"] = example_mean(skip, ratio, padding_mask)
            with contextlib.suppress(NoCoefficients):
                of_x, of_branch = (
                    example_norm(skip, part, padding_mask, self.dtype)
                    for part in skip.parts(x, f_x, padding_mask)
                )
                measured["bf_over_ax"] = of_branch / of_x
        return measured


def example_norm(
    skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """The Frobenius norm of each example of ``tensor``, in the layout of ``skip``: (examples,)."""
    values = without_padding(skip, tensor, padding_mask)
    dtype = dtype or at_least_float32(tensor.new_empty(0)).dtype
    axes = _all_but_examples(skip, values)
    if skip.channel_dim == -1 and values.dim() > 1:
        # norms of rows first: ten times as fast on a CPU
        values = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
        axes = axes[:-1]
    if axes:
        values = torch.linalg.vector_norm(values, dim=axes, dtype=dtype)
    return values.reshape(-1)


def example_mean(
    skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None = None
) -> Tensor:
    """The mean over each example's unpadded positions and features; NaN without any."""
    values = without_padding(skip, at_least_float32(tensor), padding_mask)
    axes = _all_but_examples(skip, values)
    if padding_mask is None:
        return values.mean(axes).reshape(-1)
    unpadded = padding_mask.logical_not().unsqueeze(skip.channel_dim).expand_as(values)
    return (values.sum(axes) / unpadded.sum(axes)).reshape(-1)


def without_padding(skip: SkipConnection, tensor: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``tensor``, zero where padded, whatever it holds there."""
    if padding_mask is None:
        return tensor
    return tensor.masked_fill(padding_mask.unsqueeze(skip.channel_dim), 0.0)


def _all_but_examples(skip: SkipConnection, tensor: Tensor) -> list[int]:
    """The dimensions of one example."""
    examples = skip.example_axis(tensor)
    return [axis for axis in range(tensor.dim()) if axis != examples]
