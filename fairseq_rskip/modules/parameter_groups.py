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
from fairseq_rskip.modules.profiling import is_fully_sharded
from fairseq_rskip.training import Share, shares

logger = logging.getLogger(__name__)
RATES = ("lr", "lr_old")  # of a group; the second is NAG's: the rate of its last step
SHARDED = "--ddp-backend fully_sharded, --zero-sharding, --use-bmuf"


class ParameterGroups:
    """A task's ``optimizer_step`` in which parameters have their own settings.

    These are the :func:`~fairseq_rskip.training.shares` of ``model``. They form groups of their own
    only while the optimizer steps, so its state, and with it a checkpoint, stays that of stock
    fairseq, and the rate is that of any schedule. --fp16 copies all parameters into one flat fp32
    tensor, which no group can divide: see :func:`apart`. Does nothing where all shares are alike.

    Where an optimizer does not hold the parameters themselves, ``lr_scale`` is refused with
    :class:`~fairseq_rskip.errors.UserError`; what the rules ask for is left out, with one warning.
    """

    def __init__(self, optimizer_step: Any, model: Any, lr_scale: float = 1.0):
        self.optimizer_step, self.model, self.lr_scale = optimizer_step, model, lr_scale
        self.own_shares: dict[int, Share] | None = None
        self.warned = False

    def __call__(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if self.own_shares is None:
            self.own_shares = shares(self.model, self.lr_scale)
        with self.own_settings(optimizer):
            return self.optimizer_step(optimizer, *arguments, **options)

    @contextlib.contextmanager
    def own_settings(self, optimizer: Any) -> Iterator[None]:
        """Have ``optimizer``, one of fairseq's, step in the block with the parameters' shares."""
        parts = getattr(optimizer.optimizer, "optimizers", {})  # of --optimizer composite
        steps = [part.optimizer for part in parts.values()] or [optimizer.optimizer]
        groups = [group for step in steps for group in step.param_groups]
        decays = any(group.get("weight_decay") for group in groups)
        own_shares = self.applicable(groups, decays)
        if not own_shares:
            yield
            return
        flat = flat_views(optimizer, set(own_shares))
        if flat:
            with apart(flat, own_shares, decays):
                yield
            return

        copies = fp32_copies(optimizer, set(own_shares))
        by_tensor = own_shares
        if copies:
            by_tensor = {id(copy): own_shares[parameter] for parameter, copy in copies.items()}
        with contextlib.ExitStack() as stack:
            if self.holds(steps, groups, set(by_tensor)):
                for step in steps:
                    stack.enter_context(own_groups(step, by_tensor))
            yield

    def applicable(self, groups: list[dict[str, Any]], decays: bool) -> dict[int, Share]:
        """The shares that make a difference to an optimizer with ``groups``."""
        is_adam = all("betas" in group and "eps" in group for group in groups)
        own_shares: dict[int, Share] = {}
        for key, share in (self.own_shares or {}).items():
            if not is_adam:
                share = share._replace(eps=1.0)
            if not decays:
                share = share._replace(decays=True)
            if share != Share():
                own_shares[key] = share
        if any(share.lr != 1.0 for share in own_shares.values()):
            self.check_rates(groups)
        return own_shares

    def check_rates(self, groups: list[dict[str, Any]]) -> None:
        """Raise ``UserError`` where the optimizer computes its own rate."""
        if any(group.get("relative_step") for group in groups):
            raise UserError(
                f"--skip-lr-scale {self.lr_scale:g} with --optimizer adafactor --relative-step, "
                "which has no learning rate: expected another optimizer"
            )

    def holds(self, steps: list[Any], groups: list[dict[str, Any]], kept: set[int]) -> bool:
        """Whether ``groups`` hold the parameters whose id is in ``kept``.

        Raises ``UserError`` where they do not and a rate was asked for; otherwise one line, once,
        warns.
        """
        optimised = {id(parameter) for group in groups for parameter in group["params"]}
        sharded = is_fully_sharded(self.model) or any(
            hasattr(step, "broadcast_global_state_dict") for step in steps
        )
        if kept <= optimised and not sharded:
            return True
        if self.lr_scale != 1.0:
            raise UserError(
                f"--skip-lr-scale {self.lr_scale:g}: among sharded parameters ({SHARDED}) "
                "the learned coefficients cannot be told apart: expected none of these options"
            )
        if not self.warned and get_global_rank() == 0:
            logger.warning(
                "--weight-decay also shrinks the learned coefficients of the skip connections, "
                "and rates and epsilon of completep are left out: "
                f"among sharded parameters ({SHARDED}) they cannot be told apart"
            )
        self.warned = True
        return False


@contextlib.contextmanager
def own_groups(optimizer: torch.optim.Optimizer, own_shares: dict[int, Share]) -> Iterator[None]:
    """Divide each group of ``optimizer`` by the shares of its parameters, ``own_shares`` by id."""
    groups = optimizer.param_groups
    divided = [by_share(group, own_shares) for group in groups]
    optimizer.param_groups = [part for parts in divided for part in parts.values()]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, divided):
            group.update(merged_counters(parts, group))


def by_share(group: dict[str, Any], own_shares: dict[int, Share]) -> dict[Share, dict[str, Any]]:
    """The group of each share, with the settings that it gives."""
    parts: dict[Share, dict[str, Any]] = {}
    for parameter in group["params"]:
        share = own_shares.get(id(parameter), Share())
        if share not in parts:
            parts[share] = {**group, "params": [], **settings_of(group, share)}
        parts[share]["params"].append(parameter)
    return parts


def settings_of(group: dict[str, Any], share: Share) -> dict[str, Any]:
    """The settings of ``group`` that ``share`` changes."""
    settings = {name: share.lr * group[name] for name in RATES if name in group}
    if share.eps != 1.0:
        settings["eps"] = share.eps * group["eps"]
    if not share.decays and "weight_decay" in group:
        settings["weight_decay"] = 0.0
    return settings


def merged_counters(parts: dict[Share, dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    """What the optimizer wrote in the ``parts`` of ``group``, as the whole group has it."""
    plain = parts.get(Share())
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


def flat_views(optimizer: Any, kept: set[int]) -> list[FlatView]:
    """Where fairseq's fp16 optimizer has the parameters whose id is in ``kept``.

    Empty where it has no flat tensor. The order is fairseq's: that of the parameters on each
    device.
    """
    if not getattr(optimizer, "has_flat_params", False):
        return []
    offsets: dict[Any, int] = dict.fromkeys(optimizer.fp32_params, 0)
    views = []
    for parameter in optimizer.fp16_params:
        device, size = parameter.device.index, parameter.numel()
        if id(parameter) in kept:
            whole = optimizer.fp32_params[device]
            value = whole.data.narrow(0, offsets[device], size)
            gradient = whole.grad.narrow(0, offsets[device], size)
            views.append(FlatView(parameter, value, gradient))
        offsets[device] += size
    return views


def fp32_copies(optimizer: Any, kept: set[int]) -> dict[int, Tensor]:
    """Id of a parameter in ``kept`` -> the tensor that the optimizer updates in its place.

    {} where it updates the parameters themselves.
    """
    if not hasattr(optimizer, "fp32_params"):
        return {}
    copies = {}
    if getattr(optimizer, "has_flat_params", False):
        for view in flat_views(optimizer, kept):
            copies[id(view.parameter)] = view.value.view_as(view.parameter)
        return copies
    for parameter, copy in zip(optimizer.fp16_params, optimizer.fp32_params):
        if id(parameter) in kept:
            copies[id(parameter)] = copy
    return copies


@contextlib.contextmanager
def apart(views: list[FlatView], own_shares: dict[int, Share], decays: bool) -> Iterator[None]:
    """Give ``views`` their shares in the step inside the block.

    ``decays`` says whether the step has weight decay.

    A parameter without weight decay is 0 in the block; what it becomes there, times the factor of
    its rate, is added to its old value. One with weight decay moves by that factor of its step. The
    gradient divided by a factor is Adam with epsilon times that factor. This is correct because,
    with any optimizer that takes flat parameters, a step is proportional to the learning rate, and
    only weight decay makes it depend on a parameter's value.
    """
    moved = []
    for view in views:
        share = own_shares[id(view.parameter)]
        if share.eps != 1.0:
            view.gradient.div_(share.eps)
        from_zero = not (decays and share.decays)
        if share.lr != 1.0 or (decays and not share.decays):
            moved.append((view, share.lr, view.value.clone(), from_zero))
            if from_zero:
                view.value.zero_()
    try:
        yield
    finally:
        for view, factor, value, from_zero in moved:
            step = view.value if from_zero else view.value - value
            view.value.copy_(value + factor * step)
            view.parameter.data.copy_(view.value.view_as(view.parameter))
