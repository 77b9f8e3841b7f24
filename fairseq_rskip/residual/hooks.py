"""Forward hooks on skip connections, and forward passes that leave a model as it was."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def inputs_of_call(
    x: Tensor, f_x: Tensor, carried: Any = None, padding_mask: Tensor | None = None
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
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore the random state and the buffers of ``model`` after the block."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(cuda_devices(model)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), before):
                    buffer.copy_(value)
