"""What has to be called before a skip connection trains, and whether it was."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops.compiling import constant_while_compiling

if TYPE_CHECKING:
    from .base import SkipConnection
    from .branch_weights import BranchWeights


@dataclass
class TrainingSetup:
    """What has happened to a skip connection so far."""

    state_was_loaded: bool = False
    roles_started: set[str] = field(default_factory=set)  # which initialise has rescaled
    was_prepared: bool = False  # whether prepare was called
    was_checked: bool = False  # whether missing_setup was asked


def warn_of_missing_setup(skip: SkipConnection, x: Tensor) -> None:
    """Warn, once for a skip connection, of what should have been called before its first training
    pass, whose input is ``x``. A compiled model warns while it is compiled.
    """
    missing = skip.missing_setup()
    if torch.compiler.is_compiling():
        if missing:
            _warn_while_compiling(f"kind {skip.kind}: {missing}")
        return
    skip.setup.was_checked = True
    if not missing and not skip.setup.was_prepared and _changes_branch_input(skip, x):
        missing = (
            "the branch reads x as it is, without what the rule does to its input; call "
            "h, carried = skip.prepare(x), then skip(x, F(h), carried)"
        )
    if missing:
        warnings.warn(
            f"kind {skip.kind}: {missing}",
            RuntimeWarning,
            stacklevel=5,  # past torch's two frames, to the caller
        )


@torch.no_grad()
def _changes_branch_input(skip: SkipConnection, x: Tensor) -> bool:
    """Whether the branch reads anything else than x."""
    h, _ = skip.prepare(x)
    return h is not x


@constant_while_compiling
def _warn_while_compiling(message: str) -> None:
    warnings.warn(message, RuntimeWarning)  # noqa: B028 (the caller is inside torch's compiler)


def refuse_second_start(skip: SkipConnection, weights: BranchWeights) -> None:
    """Raise ``ValueError`` where ``skip.initialise`` would rescale weights again.

    Warn where they may have been loaded: a state that is loaded without the branch is seen, too.
    """
    if skip.setup.state_was_loaded:
        warnings.warn(
            f"kind {skip.kind}: initialise after load_state_dict rescales the weights; call it "
            "before, unless the branch's weights were not loaded",
            RuntimeWarning,
            stacklevel=4,  # past the rule's and the base class's initialise, to the caller
        )
    again = sorted(skip.setup.roles_started & weights.keys())
    if again:
        raise ValueError(
            f"kind {skip.kind}: initialise has already rescaled {', '.join(again)}: expected one "
            "call for each weight"
        )
