"""Data-dependent initialisation from one batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import skips


class Profiled(nn.Module):
    """A mixin for kinds whose initial values come from one batch, if ``wants_profile`` is true."""

    wants_profile = True
    is_initialised: bool
    start_call = "residual.profile.initialise_from_batch(model, loss)"

    @classmethod
    def profile(
        cls,
        skips: dict[str, Any],
        model: nn.Module,
        loss: Callable[[], Tensor],
        shortcuts: dict[str, nn.Module],
    ) -> dict[str, float]:
        """Initialise ``skips``, all of this kind in ``model``, for :func:`initialise_from_batch`.

        Returns module name -> value.
        """
        raise NotImplementedError


def wanting_profile(model: nn.Module) -> dict[str, Profiled]:
    """Module name -> skip connection of ``model`` whose initial values come from a batch."""
    return {
        name: skip
        for name, skip in skips(model).items()
        if isinstance(skip, Profiled) and skip.wants_profile
    }


def initialise_from_batch(
    model: nn.Module, loss: Callable[[], Tensor], shortcuts: dict[str, nn.Module] | None = None
) -> dict[str, float]:
    """Set the initial values of every skip connection of ``model`` that wants a profile.

    Args:
        model: in the mode that it is in.
        loss: runs ``model`` on a batch and returns a scalar.
        shortcuts: name of a skip connection -> the module between the block's input and its x, if
            there is one.

    Gradients are cleared; the random state and the buffers are restored. Returns module name -> the
    value that it got: Admin's omega, askip's lambda.
    """
    groups: dict[type[Profiled], dict[str, Profiled]] = {}
    for name, skip in wanting_profile(model).items():
        groups.setdefault(type(skip), {})[name] = skip
        skip.is_initialised = True

    values: dict[str, float] = {}
    for kind, group in groups.items():
        values.update(kind.profile(group, model, loss, shortcuts or {}))
    return values


def arguments(
    x: Tensor, f_x: Tensor, _carried: Any = None, padding_mask: Tensor | None = None
) -> tuple[Any, ...]:
    """x, F and the padding mask of a call of ``SkipConnection.forward``, by position or by name."""
    return x, f_x, padding_mask


@contextlib.contextmanager
def hooked(modules: dict[str, Any], register: Any, see: Callable[..., None]) -> Iterator[None]:
    """Call ``see(name, module, args, kwargs[, y])`` in every forward pass of ``modules``.

    ``register`` is ``nn.Module.register_forward_hook`` or ``register_forward_pre_hook``.
    """
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(register(module, functools.partial(see, name), with_kwargs=True).remove)
        yield


def cuda_devices(model: nn.Module) -> list[int]:
    """The numbers of the GPUs that hold ``model``; torch would otherwise ask for those of all."""
    devices = {parameter.device for parameter in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda")


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Turn gradients off in the block; afterwards restore the random state and the buffers."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng(cuda_devices(model)):
        try:
            yield
        finally:
            for buffer, value in zip(model.buffers(), before):
                buffer.copy_(value)
