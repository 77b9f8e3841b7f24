"""An optimizer's settings for each parameter: learning rate, Adam's epsilon, weight decay."""

from typing import NamedTuple

from torch import nn

from ..option_error import OptionError, RefusedOption, refused
from ..residual import SkipConnection, skips
from .coefficients import learned, without_decay


class ParameterSettings(NamedTuple):
    """Factors of the learning rate and of Adam's epsilon, and whether weight decay applies."""

    lr: float = 1.0
    eps: float = 1.0
    decays: bool = True


DEFAULT = ParameterSettings()


def parameter_settings(model: nn.Module, lr_scale: float = 1.0) -> dict[int, ParameterSettings]:
    """The id of each parameter of ``model`` whose settings are not the default -> its settings.

    ``lr_scale`` multiplies the learning rate of what the skip connections learn, norms left out. A
    rule's own factors, :meth:`.SkipConnection.layer_factors`, are for all parameters of the module
    that holds the skip connection: a Transformer's layer, a ResNet's block. Raises ``ValueError``
    where such a module holds nothing else, as one of :func:`.skip_stack` does: the factors would
    miss the branches.
    """
    by_parameter: dict[int, ParameterSettings] = {}
    for name, skip in skips(model).items():
        lr, eps = skip.layer_factors()
        if (lr, eps) != (1.0, 1.0):
            for parameter in _layer_of(model, name, skip).parameters():
                by_parameter[id(parameter)] = ParameterSettings(lr, eps)

    for parameter in learned(model).values():
        settings = by_parameter.get(id(parameter), DEFAULT)
        by_parameter[id(parameter)] = settings._replace(lr=lr_scale * settings.lr)
    for parameter in without_decay(model):
        by_parameter[id(parameter)] = by_parameter[id(parameter)]._replace(decays=False)
    return {key: settings for key, settings in by_parameter.items() if settings != DEFAULT}


def _layer_of(model: nn.Module, name: str, skip: SkipConnection) -> nn.Module:
    """The module of ``model`` that holds ``skip``, called ``name``, and its branch.

    Raises ``ValueError`` for one that holds skip connections only.
    """
    holder = name.rpartition(".")[0]
    layer = model.get_submodule(holder)
    has_own_parameters = bool(list(layer.parameters(recurse=False)))
    has_branch = not all(isinstance(child, SkipConnection) for child in layer.children())
    if not (has_own_parameters or has_branch):
        raise ValueError(
            f"kind {skip.kind} has factors for the parameters of its layer, and {holder} has skip "
            "connections only: expected them as attributes of the layer's module"
        )
    return layer


def check_lr_scale(model: nn.Module, lr_scale: float) -> None:
    """Raise ``UserError`` for a ``--skip-lr-scale`` that is not positive or has no effect."""
    if not 0.0 < lr_scale < float("inf"):
        raise refused("skip-lr-scale", lr_scale, "a finite number > 0")
    if lr_scale != 1.0 and not learned(model):
        kinds = ", ".join(sorted({skip.kind for skip in skips(model).values()}))
        reason = f"kind {kinds} learns no coefficients"
        raise RefusedOption(OptionError("skip-lr-scale", lr_scale, "1", reason=reason))
