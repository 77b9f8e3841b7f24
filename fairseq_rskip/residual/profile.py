"""Starts that are read off one batch: each skip connection that wants it sees what its block computes, in order."""

import contextlib
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch import nn

from .base import SkipConnection


def profile(model: nn.Module, forward: Callable[[], Any]) -> Dict[str, float]:
    """Set the start of every skip connection of ``model`` that wants a profile from one call of ``forward``.

    ``forward`` runs ``model`` on a batch, in training mode as it is, without gradients and on a copy of the random
    state. The sides (encoder, decoder) are separate chains. Returns module name -> what the block handed on.
    """
    handed_on: Dict[str, float] = {}
    chains: Dict[str, float] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(skip: SkipConnection, args: Tuple[Any, ...]) -> None:
            before = chains.get(skip.place.side, 1.0)
            padding_mask = args[2] if len(args) > 2 else None
            handed_on[name] = chains[skip.place.side] = skip.profile(*args[:2], padding_mask, before)

        return see

    with _quietly(), contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, SkipConnection) and module.wants_profile():
                hooks.callback(module.register_forward_pre_hook(hook(name)).remove)
        forward()
    return handed_on


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng():
        yield
