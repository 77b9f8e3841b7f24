"""Give parameters their own learning rate, Adam's epsilon and weight decay in fairseq-train.

fairseq gives its optimizer all parameters as one group, so this is done around the task's
``optimizer_step``.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from fairseq.distributed.utils import get_global_rank
from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.parameters import ParameterSettings, parameter_settings
from fairseq_rskip.residual import skips

logger = logging.getLogger(__name__)
RATES = ("lr", "lr_old")  # of a group; the second is NAG's: the rate of its last step
SHARDED = "--ddp-backend fully_sharded, --zero-sharding, --use-bmuf"


class ParameterGroups:
    """A task's ``optimizer_step`` in which parameters have their own settings.

    These are the :func:`~fairseq_rskip.parameters.parameter_settings` of ``model``. They form
    groups of their own only while the optimizer steps, so its state, and with it a checkpoint,
    stays that of stock fairseq, and the rate is that of any schedule. --fp16 copies all parameters
    into one flat fp32 tensor, which no group can divide: see :func:`step_flat_views`. Does nothing
    where all parameters have the same settings.

    Where an optimizer does not hold the parameters themselves, ``lr_scale`` is refused with
    :class:`~fairseq_rskip.errors.UserError`; what the rules ask for is left out, with one warning.
    """

    def __init__(self, optimizer_step: Any, model: Any, lr_scale: float = 1.0):
        self.optimizer_step, self.model, self.lr_scale = optimizer_step, model, lr_scale
        self.by_parameter: dict[int, ParameterSettings] | None = None
        self.warned = False

    def __call__(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if self.by_parameter is None:
            self.by_parameter = parameter_settings(self.model, self.lr_scale)
        with self.in_effect(optimizer):
            return self.optimizer_step(optimizer, *arguments, **options)

    @contextlib.contextmanager
    def in_effect(self, optimizer: Any) -> Iterator[None]:
        """A block in which ``optimizer``, one of fairseq's, steps with the parameters' settings."""
        steps = torch_optimizers(optimizer)
        groups = [group for step in steps for group in step.param_groups]
        decays = any(group.get("weight_decay") for group in groups)
        by_parameter = self.applicable(groups, decays)
        views = flat_views(optimizer, set(by_parameter))
        if views:
            with step_flat_views(views, by_parameter, decays):
                yield
            return

        copies = fp32_copies(optimizer, set(by_parameter))
        if copies:
            by_tensor = {id(copy): by_parameter[parameter] for parameter, copy in copies.items()}
        else:  # the optimizer updates the parameters themselves
            by_tensor = by_parameter
        with contextlib.ExitStack() as blocks:
            if by_tensor and self.are_optimised(set(by_tensor), steps, groups):
                for step in steps:
                    blocks.enter_context(split_groups(step, by_tensor))
            yield

    def applicable(
        self, groups: list[dict[str, Any]], decays: bool
    ) -> dict[int, ParameterSettings]:
        """The settings that make a difference to an optimizer with ``groups``."""
        is_adam = all("betas" in group and "eps" in group for group in groups)
        by_parameter: dict[int, ParameterSettings] = {}
        for key, settings in (self.by_parameter or {}).items():
            if not is_adam:
                settings = settings._replace(eps=1.0)
            if not decays:
                settings = settings._replace(decays=True)
            if settings != ParameterSettings():
                by_parameter[key] = settings
        if any(settings.lr != 1.0 for settings in by_parameter.values()):
            self.check_rates(groups)
        return by_parameter

    def check_rates(self, groups: list[dict[str, Any]]) -> None:
        """Raise ``UserError`` where the optimizer computes its own rate."""
        if any(group.get("relative_step") for group in groups):
            raise UserError(
                f"--skip-lr-scale {self.lr_scale:g} with --optimizer adafactor --relative-step, "
                "which has no learning rate: expected another optimizer"
            )

    def are_optimised(self, ids: set[int], steps: list[Any], groups: list[dict[str, Any]]) -> bool:
        """Whether ``groups`` hold the parameters with these ``ids``.

        Raises ``UserError`` where they do not and a rate was asked for; otherwise one line, once,
        warns.
        """
        optimised = {id(parameter) for group in groups for parameter in group["params"]}
        sharded = any(hasattr(step, "broadcast_global_state_dict") for step in steps)
        if ids <= optimised and not sharded:
            return True
        refuse_scale(self.lr_scale)
        if not self.warned:
            warn_of_sharding()
        self.warned = True
        return False


def torch_optimizers(optimizer: Any) -> list[Any]:
    """Those of torch in ``optimizer``, one of fairseq's: several in ``--optimizer composite``."""
    parts = getattr(optimizer.optimizer, "optimizers", {})
    return [part.optimizer for part in parts.values()] or [optimizer.optimizer]


def check_fully_sharded(model: nn.Module, lr_scale: float) -> None:
    """Raise ``UserError`` for a ``lr_scale``, and warn if rules have settings of their own.

    The parameters of a fully sharded ``model`` are parts of flat ones, which cannot have them.
    """
    refuse_scale(lr_scale)
    layers = [module for module in model.modules() if getattr(module, "learns", False)]
    factors = {skip.layer_factors() for skip in skips(model).values()}
    if layers or factors - {(1.0, 1.0)}:
        warn_of_sharding()


def refuse_scale(lr_scale: float) -> None:
    """Raise ``UserError`` for a ``--skip-lr-scale`` where parameters are sharded."""
    if lr_scale != 1.0:
        raise UserError(
            f"--skip-lr-scale {lr_scale:g} does not work where parameters are sharded: "
            f"expected none of {SHARDED}"
        )


def warn_of_sharding() -> None:
    """Say, on the first process, what is left out where parameters are sharded."""
    if get_global_rank() == 0:
        logger.warning(
            "--weight-decay also shrinks the learned coefficients of the skip connections, "
            "and rates and epsilon of completep are left out, "
            f"because parameters are sharded ({SHARDED})"
        )


@contextlib.contextmanager
def split_groups(
    optimizer: torch.optim.Optimizer, by_parameter: dict[int, ParameterSettings]
) -> Iterator[None]:
    """Divide each group of ``optimizer`` by the settings of its parameters, by their id."""
    groups = optimizer.param_groups
    divided = [by_settings(group, by_parameter) for group in groups]
    optimizer.param_groups = [part for parts in divided for part in parts.values()]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, divided):
            group.update(merged_counters(parts, group))


def by_settings(
    group: dict[str, Any], by_parameter: dict[int, ParameterSettings]
) -> dict[ParameterSettings, dict[str, Any]]:
    """A group for each of the settings of the parameters in ``group``."""
    parts: dict[ParameterSettings, dict[str, Any]] = {}
    for parameter in group["params"]:
        settings = by_parameter.get(id(parameter), ParameterSettings())
        if settings not in parts:
            parts[settings] = {**group, "params": [], **changes(group, settings)}
        parts[settings]["params"].append(parameter)
    return parts


def changes(group: dict[str, Any], settings: ParameterSettings) -> dict[str, Any]:
    """The entries of ``group`` that ``settings`` change."""
    changed = {name: settings.lr * group[name] for name in RATES if name in group}
    if settings.eps != 1.0:
        changed["eps"] = settings.eps * group["eps"]
    if not settings.decays and "weight_decay" in group:
        changed["weight_decay"] = 0.0
    return changed


def merged_counters(
    parts: dict[ParameterSettings, dict[str, Any]], group: dict[str, Any]
) -> dict[str, Any]:
    """What the optimizer wrote in the ``parts`` of ``group``, as the whole group has it."""
    plain = parts.get(ParameterSettings())
    if plain is not None:
        return {name: value for name, value in plain.items() if name != "params"}
    part = next(iter(parts.values()), {})
    ours = ("params", "eps", "weight_decay", *RATES)
    values = {name: value for name, value in part.items() if name not in ours}
    if "lr_old" in part:
        values["lr_old"] = group["lr"]
    return values


class FlatView(NamedTuple):
    """A parameter's part of the flat tensor of fairseq's fp16 optimizer, and of its gradient."""

    parameter: nn.Parameter
    value: Tensor
    gradient: Tensor


def flat_views(optimizer: Any, ids: set[int]) -> list[FlatView]:
    """Where fairseq's fp16 optimizer has the parameters with these ``ids``.

    Empty where it has no flat tensor. The order is fairseq's: that of the parameters on each
    device.
    """
    if not getattr(optimizer, "has_flat_params", False):
        return []
    offsets: dict[Any, int] = dict.fromkeys(optimizer.fp32_params, 0)
    views = []
    for parameter in optimizer.fp16_params:
        device, size = parameter.device.index, parameter.numel()
        if id(parameter) in ids:
            whole = optimizer.fp32_params[device]
            value = whole.data.narrow(0, offsets[device], size)
            gradient = whole.grad.narrow(0, offsets[device], size)
            views.append(FlatView(parameter, value, gradient))
        offsets[device] += size
    return views


def fp32_copies(optimizer: Any, ids: set[int]) -> dict[int, Tensor]:
    """Id of a parameter in ``ids`` -> the tensor that the optimizer updates in its place.

    {} where it updates the parameters themselves.
    """
    if not hasattr(optimizer, "fp32_params"):
        return {}
    copies = {}
    if getattr(optimizer, "has_flat_params", False):
        for view in flat_views(optimizer, ids):
            copies[id(view.parameter)] = view.value.view_as(view.parameter)
        return copies
    for parameter, copy in zip(optimizer.fp16_params, optimizer.fp32_params):
        if id(parameter) in ids:
            copies[id(parameter)] = copy
    return copies


@contextlib.contextmanager
def step_flat_views(
    views: list[FlatView], by_parameter: dict[int, ParameterSettings], decays: bool
) -> Iterator[None]:
    """Give ``views`` their settings in the step inside the block.

    ``decays`` says whether the step has weight decay.

    A parameter without weight decay is 0 in the block; what it becomes there, times the factor of
    its rate, is added to its old value. One with weight decay moves by that factor of its step. The
    gradient divided by a factor is Adam with epsilon times that factor. This is correct because,
    with any optimizer that takes flat parameters, a step is proportional to the learning rate, and
    only weight decay makes it depend on a parameter's value.
    """
    moved = []
    for view in views:
        settings = by_parameter[id(view.parameter)]
        if settings.eps != 1.0:
            view.gradient.div_(settings.eps)
        shrinks_wrongly = decays and not settings.decays
        if settings.lr == 1.0 and not shrinks_wrongly:
            continue  # the plain step is right
        before = view.value.clone()
        if shrinks_wrongly or not decays:
            view.value.zero_()  # its weight decay is 0, and its step not rounded to its value
        moved.append((view, settings.lr, before, view.value.clone()))
    try:
        yield
    finally:
        for view, factor, before, start in moved:
            step = view.value - start
            view.value.copy_(before + factor * step)
            view.parameter.data.copy_(view.value.view_as(view.parameter))
