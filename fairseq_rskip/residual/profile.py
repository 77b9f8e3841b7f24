"""Starts that are read off one batch before training."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import skips


class Profiled(nn.Module):
    """A kind whose skip connections, if ``wants_profile`` is true, take their initial values from one batch. The class
    method ``profile(skips, model, loss, shortcuts)`` does what :func:`set_starts` says for all of them."""

    wants_profile = True


def wanting_profile(model: nn.Module) -> dict[str, Profiled]:
    """Module name -> skip connection of ``model`` whose start is to be read off a batch."""
    return {name: skip for name, skip in skips(model).items() if isinstance(skip, Profiled) and skip.wants_profile}


def set_starts(
    model: nn.Module, loss: Callable[[], Tensor], shortcuts: dict[str, nn.Module] | None = None
) -> dict[str, float]:
    """Set the start of every skip connection of ``model`` that wants a profile.

    ``loss`` runs ``model`` on a batch, in the mode that it is in, and returns a scalar. ``shortcuts`` maps the name of
    a skip connection to the module between the block's input and its x, if there is one. Gradients are cleared; the
    random state and the buffers are restored. Returns module name -> value: for Admin the start of the next block's
    omega, for askip its lambda.
    """
    kinds: dict[type, dict[str, Profiled]] = {}
    for name, skip in wanting_profile(model).items():
        kinds.setdefault(type(skip), {})[name] = skip
    return {k: v for kind, group in kinds.items() for k, v in kind.profile(group, model, loss, shortcuts or {}).items()}


def arguments(x: Tensor, f_x: Tensor, _carried: Any = None, padding_mask: Tensor | None = None) -> tuple[Any, ...]:
    """x, F and the padding mask of a call of ``SkipConnection.forward``, however they were passed."""
    return x, f_x, padding_mask


@contextlib.contextmanager
def hooked(modules: dict[str, nn.Module], register: Any, see: Callable[..., None]) -> Iterator[None]:
    """Call ``see(name, module, args, kwargs[, y])`` in every forward pass of ``modules``; ``register`` is
    ``nn.Module.register_forward_hook`` or ``register_forward_pre_hook``."""
    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(register(module, functools.partial(see, name), with_kwargs=True).remove)
        yield


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Turn gradients off in the block; afterwards restore the random state and the buffers (running statistics)."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            yield
        finally:
            for buffer, value in zip(model.buffers(), before):
                buffer.copy_(value)
