"""Starts that are read off one batch before training."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import skips


class Profiled(nn.Module):
    """A kind whose skip connections, those with ``wants_profile``, take their start from one batch: its class method
    ``profile(skips, model, loss, shortcuts)`` does for all of the kind what :func:`set_starts` says."""

    wants_profile = True


def wanting_profile(model: nn.Module) -> dict[str, Profiled]:
    """Module name -> skip connection of ``model`` whose start is to be read off a batch."""
    return {name: skip for name, skip in skips(model).items() if isinstance(skip, Profiled) and skip.wants_profile}


def set_starts(
    model: nn.Module, loss: Callable[[], Tensor], shortcuts: dict[str, nn.Module] | None = None
) -> dict[str, float]:
    """Set the start of every skip connection of ``model`` that wants a profile.

    ``loss`` runs ``model`` on a batch, in training mode as it is, and returns a scalar. ``shortcuts``: by the name of a
    skip connection, the module through which its x has come from the block's input, where there is one. Gradients are
    cleared; the random state and buffers are as before. Returns module name -> the value: of Admin what the block hands
    on to the next, of askip its lambda.
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
    """Without gradients; the random state and the buffers (running statistics) are as before afterwards."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            yield
        finally:
            for buffer, value in zip(model.buffers(), before):
                buffer.copy_(value)
