"""Starts that are read off one batch: each skip connection that wants it sees what its block computes, in order."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import SkipConnection, skips


def profile(model: nn.Module, forward: Callable[[], Any]) -> dict[str, float]:
    """Set the start of every skip connection of ``model`` that wants a profile from one call of ``forward``.

    ``forward`` runs ``model`` on a batch, in training mode as it is, without gradients and on a copy of the random
    state. The sides (encoder, decoder) are separate chains. Returns module name -> what the block handed on.
    """
    handed_on: dict[str, float] = {}
    chains: dict[str, float] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(skip: SkipConnection, args: tuple[Any, ...]) -> None:
            before = chains.get(skip.place.side, 1.0)
            padding_mask = args[2] if len(args) > 2 else None
            handed_on[name] = chains[skip.place.side] = skip.profile(*args[:2], padding_mask, before)

        return see

    with _quietly(model), contextlib.ExitStack() as hooks:
        for name, skip in skips(model).items():
            if skip.wants_profile():
                hooks.callback(skip.register_forward_pre_hook(hook(name)).remove)
        forward()
    return handed_on


def choose_lambdas(
    model: nn.Module, loss: Callable[[], Tensor], shortcuts: dict[str, nn.Module] | None = None
) -> dict[str, float]:
    """Choose lambda for every skip connection of ``model`` that is to take it from the gradient, and freeze it.

    ``loss`` runs ``model`` on a batch and returns a scalar. It is called once for each lambda, all skip connections at
    that lambda; each then takes the one at which its block's ``|dL/dx| / |dL/dy|`` is nearest 1. ``shortcuts``: by the
    name of a skip connection, the module through which its x has come from the block's input, where there is one.
    Gradients are cleared, random state and buffers as before afterwards. Returns module name -> lambda.
    """
    adaptive = {name: skip for name, skip in skips(model).items() if skip.candidates()}
    ratios: dict[str, dict[int, float]] = {name: {} for name in adaptive}
    for k in range(1, max((skip.candidates() for skip in adaptive.values()), default=0) + 1):
        with _quietly(model), torch.enable_grad():
            for skip in adaptive.values():
                skip.freeze(min(k, skip.candidates()))
            for name, norms in _gradient_norms(adaptive, loss, shortcuts or {}).items():
                ratios[name][k] = norms["x"] / norms["y"] if norms["y"] else float("inf")
    model.zero_grad(set_to_none=True)
    for name, skip in adaptive.items():
        skip.choose({k: ratio for k, ratio in ratios[name].items() if k <= skip.candidates()})
    return {name: float(skip.start) for name, skip in adaptive.items()}


def _gradient_norms(
    watched: dict[str, SkipConnection], loss: Callable[[], Tensor], shortcuts: dict[str, nn.Module]
) -> dict[str, dict[str, float]]:
    """Module name -> the norms of the gradients at the block's input ``x`` and output ``y``."""
    norms: dict[str, dict[str, float]] = {name: {"x": 0.0, "y": 0.0} for name in watched}

    def watch(name: str, end: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: norms[name].update({end: float(gradient.norm())}))

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
            if module is shortcuts.get(name, module):
                watch(name, "x", args[0])
            if module is watched[name]:
                watch(name, "y", y)

        return see

    with contextlib.ExitStack() as hooks:
        for name, module in [*watched.items(), *shortcuts.items()]:
            hooks.callback(module.register_forward_hook(hook(name)).remove)
        loss().backward()
    return norms


@contextlib.contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Without gradients; the random state and the buffers (running statistics) are as before afterwards."""
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            yield
        finally:
            for buffer, value in zip(model.buffers(), before):
                buffer.copy_(value)
