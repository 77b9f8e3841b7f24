"""The work for skip connections in a training with fairseq, around the task's ``train_step``.

It logs, adds the cost of halting to the loss, names the block that leaves fp16's range, and says at
the end what was learned.
"""

import atexit
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import get_global_rank

from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import load_operator
from fairseq_rskip.modules.fp16_range import OverflowWatch
from fairseq_rskip.modules.parameter_groups import (
    ParameterGroups,
    check_fully_sharded,
    fp32_copies,
    torch_optimizers,
)
from fairseq_rskip.modules.profiling import is_fully_sharded, is_training_process
from fairseq_rskip.modules.skip_log import Folder, SkipLog
from fairseq_rskip.parameters import UnmovedCoefficients, learned
from fairseq_rskip.residual import skips
from fairseq_rskip.residual.adaptive import lambdas
from fairseq_rskip.residual.halting import halting_cost, halting_modules

logger = logging.getLogger(__name__)


@dataclass
class TrainingConfig(FairseqDataclass):
    """Options of a training that the trained model does not need."""

    skip_lr_scale: float = field(
        default=1.0,
        metadata={
            "help": "multiplies the learning rate of what the skip connections learn, "
            "their norms left out"
        },
    )
    skip_log_interval: int = field(
        default=0,
        metadata={
            "help": "write per-block x:F, norm of F(x) over norm of x, and gradient norm to "
            "TensorBoard (--tensorboard-logdir) and Weights & Biases (--wandb-project) "
            "at every N-th update; 0: never"
        },
    )


def attach(task: Any, model: Any, interval: int, lr_scale: float = 1.0) -> None:
    """Wrap ``task``'s ``train_step`` and ``optimizer_step`` as ``model``'s skip connections need
    it.

    The log is written at every ``interval``-th update; ``lr_scale`` multiplies the rate of what is
    learned. Nothing happens where no training can follow.
    """
    if not is_training_process(task):
        return
    if not torch.cuda.is_available():
        load_operator()
    if interval:
        Folder.watch()
        task.train_step = SkipLog(task.train_step, model, interval)
    if halting_modules(model):
        task.train_step = HaltCost(task.train_step, model)
    task.train_step = OverflowWatch(task.train_step, model)
    if is_fully_sharded(model):
        check_fully_sharded(model, lr_scale)
    else:
        if any(has_settings(skip) for skip in skips(model).values()):
            task.optimizer_step = ParameterGroups(task.optimizer_step, model, lr_scale)
        task.optimizer_step = StockState(task.optimizer_step, model)
    on_sphere = [skip for skip in skips(model).values() if skip.has_unit_length]
    if on_sphere:
        if is_fully_sharded(model):
            raise UserError(
                f"--skip-kind {on_sphere[0].kind} under --ddp-backend fully_sharded: "
                "expected another backend"
            )
        task.optimizer_step = UnitLength(task.optimizer_step, on_sphere)
    if learned(model) or lambdas(model):
        task.train_step = Report(task.train_step, model)


def has_settings(skip: Any) -> bool:
    """Whether parameters of ``skip`` or beside it may have their own settings in the optimizer."""
    return bool(skip.learned()) or skip.layer_factors() != (1.0, 1.0)


class Report:
    """A task's ``train_step`` that reports what was learned when the training ends.

    Only the first process does.
    """

    def __init__(self, train_step: Any, model: Any):
        self.train_step, self.begun = train_step, False
        self.model, self.unmoved = model, UnmovedCoefficients(model)

    def __call__(self, sample, model, criterion, optimizer, update_num, *arguments, **options):
        if not self.begun and update_num == 0:  # after --finetune-from-model has loaded its weights
            self.unmoved = UnmovedCoefficients(self.model)
        result = self.train_step(
            sample, model, criterion, optimizer, update_num, *arguments, **options
        )
        if not self.begun:  # a training that fails before its first update has learned nothing
            self.begun = True
            atexit.register(self.say)
        return result

    def say(self) -> None:
        if get_global_rank() != 0:
            return
        adapted = lambdas(self.model)
        if adapted:
            listed = ", ".join(f"{block} {value:.3f}" for block, value in adapted.items())
            logger.info(f"adaptive λ: {listed}")
        warning = self.unmoved.warning()
        if warning:
            logger.warning(warning)


class HaltCost:
    """A task's ``train_step`` whose loss has the cost of halting.

    It is τ times E[k], summed over tokens as fairseq sums the loss, the mean over the skip
    connections (:class:`~fairseq_rskip.residual.halting.Halting`).
    """

    def __init__(self, train_step: Any, model: Any):
        self.train_step, self.halting = train_step, halting_modules(model)

    def __call__(self, sample, model, criterion, *arguments, **options):
        def with_cost(model, sample):
            loss, sample_size, output = criterion(model, sample)
            cost = halting_cost(self.halting, "sum")
            if cost is not None:
                loss = loss + cost.to(loss.dtype)
            return loss, sample_size, output

        return self.train_step(sample, model, with_cost, *arguments, **options)


class UnitLength:
    """A task's ``optimizer_step`` after which the vectors of nGPT's matrices have length 1.

    So have the fp32 copies that --fp16 and --bf16 update.
    """

    def __init__(self, optimizer_step: Any, skips: list[Any]):
        self.optimizer_step, self.skips = optimizer_step, skips

    def __call__(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        stepped = self.optimizer_step(optimizer, *arguments, **options)
        copies = fp32_copies(
            optimizer,
            {id(matrix.parameter) for skip in self.skips for matrix, _ in skip.matrices},
        )
        for skip in self.skips:
            skip.to_unit_length(copies)
        return stepped


class StockState:
    """A task's ``optimizer_step`` that refuses the state of stock fairseq's optimizer.

    It has no names, only stock's order of parameters: there a layer's norms stand beside their
    sublayers, here they come last. In one flat tensor, as under --fp16, it would fit without an
    error. Raises :class:`~fairseq_rskip.errors.UserError` at the first step. That of sharded
    parameters is not looked at.
    """

    def __init__(self, optimizer_step: Any, model: Any):
        self.optimizer_step, self.model, self.checked = optimizer_step, model, False

    def __call__(self, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if not self.checked:
            self.check(optimizer)
            self.checked = True
        return self.optimizer_step(optimizer, *arguments, **options)

    def check(self, optimizer: Any) -> None:
        layers = self.model.modules()
        from_stock = any(getattr(layer, "loaded_from_stock", False) for layer in layers)
        was_loaded = any(step.state for step in torch_optimizers(optimizer))
        if from_stock and was_loaded:
            raise UserError(
                "the checkpoint's optimizer state is in the order of stock fairseq's parameters: "
                "expected --reset-optimizer --reset-lr-scheduler --reset-meters "
                "--reset-dataloader, or --finetune-from-model instead of --restore-file"
            )
