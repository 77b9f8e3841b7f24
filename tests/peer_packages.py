"""Packages of other authors, with weights and inputs for a comparison in float64."""

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def peer(name: str) -> Any:
    """The module ``name``, or a skip that says what to install.

    With ``RSKIP_PEERS=required``, as in ``make test-peers``, a module that is missing is a failure.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("RSKIP_PEERS") == "required":
            raise
        pytest.skip(
            f"{name} is not installed ({error}): "
            "make test-peers installs tests/peers/requirements.txt"
        )


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def randomised(module: nn.Module) -> nn.Module:
    module = module.double()
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(
                0.5 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(k))
            )
    return module


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Each second tensor becomes the first."""
    with torch.no_grad():
        for source, target in pairs:
            target.copy_(source.reshape(target.shape))
