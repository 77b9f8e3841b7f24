"""Data-dependent initialisation from one batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .base import skips
from .hooks import hooked
from .training_setup import TrainingSetup


class Profiled(nn.Module):
    """A mixin for kinds whose initial values come from one batch, if ``wants_profile`` is true."""

    wants_profile = True
    is_profiled = False
    setup: TrainingSetup

    def missing_setup(self) -> str:
        if not self.wants_profile or self.is_profiled or self.setup.state_was_loaded:
            return ""
        return (
            "no profile yet; call residual.initialise_from_batch(model, loss) once, before training"
        )

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

    If there is anything to initialise, gradients are cleared; the random state and the buffers are
    restored. Returns module name -> the value that it got: Admin's omega, askip's lambda. A skip
    connection that ``loss`` does not run stays as it was, and warns when it is trained. Raises
    ``ValueError`` if ``loss`` runs none of a kind, and for a model that is already in
    DistributedDataParallel, whose processes would get values of their own.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "initialise_from_batch: the model is in DistributedDataParallel, which copies the "
            "parameters when it is made: expected the model before it is wrapped"
        )
    groups: dict[type[Profiled], dict[str, Profiled]] = {}
    for name, skip in wanting_profile(model).items():
        groups.setdefault(type(skip), {})[name] = skip

    values: dict[str, float] = {}
    for kind, group in groups.items():
        values |= _profile_group(kind, group, model, loss, shortcuts or {})
    if groups:
        model.zero_grad(set_to_none=True)
    return values


def _profile_group(
    kind: type[Profiled],
    group: dict[str, Profiled],
    model: nn.Module,
    loss: Callable[[], Tensor],
    shortcuts: dict[str, nn.Module],
) -> dict[str, float]:
    """Initialise ``group``, all skip connections of one ``kind``; those that ``loss`` runs count
    as profiled. Raises ``ValueError`` if it runs none.
    """

    def see(name: str, skip: Profiled, *_: Any) -> None:
        skip.is_profiled = True  # before its forward pass asks

    for skip in group.values():
        skip.is_profiled = False
    with hooked(group, nn.Module.register_forward_pre_hook, see):
        values = kind.profile(group, model, loss, shortcuts)
    if not any(skip.is_profiled for skip in group.values()):
        raise ValueError(
            f"initialise_from_batch: loss() ran none of the {len(group)} skip connections of "
            f"{kind.__name__}: expected a function that runs the model"
        )
    return values
