"""One batch through a rule of your own, so that a mistake in it ends before a training begins."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .own_rules import VARIABLE, file_of, where
from .registry import KINDS


def try_forward(kind: str, build: Callable[[], Any]) -> None:
    """Compute the skip connection of ``kind``, of your own, that ``build`` returns, on one batch.

    ``build`` gives it a place. A rule of this package is not tried.
    Raises ``UserError`` with the line of the file, where a training would fail later.
    """
    path = file_of(kind) if kind in KINDS else None
    if path is None:
        return
    try:
        skip = build()
    except ValueError:  # the rule does not take so few features
        return
    except Exception as error:
        raise UserError(
            f"{where(error, path)}: kind {kind} cannot be built: {type(error).__name__}: {error}; "
            "expected __init__(self, dim, *, options with defaults, **common), which calls "
            "super().__init__(dim, options, **common) first"
        ) from error
    if not skip.has_place:
        raise UserError(
            f"{VARIABLE}: {path}: kind {kind} does not hand **common to super().__init__, so that "
            "norm, stochastic depth and its place would be the defaults"
        )
    _check_attributes(skip, path)

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not start as a training does
        torch.manual_seed(1)
        x = torch.randn(2, 3, skip.widths[0] * skip.dim)
        try:
            h, carried = skip.prepare(x)
            y = skip(x, torch.randn_like(h), carried)
        except Exception as error:
            raise UserError(
                f"{where(error, path)}: kind {kind} on x of shape {list(x.shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error
    expected = [2, 3, skip.widths[1] * skip.dim]
    if list(y.shape) != expected:
        raise UserError(
            f"{VARIABLE}: {path}: kind {kind} returns shape {list(y.shape)} for x of shape "
            f"{list(x.shape)}: expected {expected}"
        )
    if not y.isfinite().all():
        raise UserError(
            f"{VARIABLE}: {path}: kind {kind} returns values that are not finite for x and F "
            "from a normal distribution"
        )


def _check_attributes(skip: Any, path: Path) -> None:
    """Raise ``UserError`` for parameters that torch does not see, which would never be learned."""
    for name, value in vars(skip).items():
        if name in ("_parameters", "_modules", "_buffers"):
            continue
        parts = [value]
        if isinstance(value, (list, tuple)):
            parts = list(value)
        elif isinstance(value, dict):
            parts = list(value.values())
        for part in parts:
            is_tensor = isinstance(part, torch.Tensor) and part.requires_grad
            if is_tensor or isinstance(part, torch.nn.Module):
                raise UserError(
                    f"{VARIABLE}: {path}: kind {skip.kind}: self.{name} would not be learned: "
                    "expected self.new_parameter(tensor), and several in a "
                    "torch.nn.ParameterList or ModuleList"
                )
