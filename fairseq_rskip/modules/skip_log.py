"""``fairseq-train --skip-log-interval N``: measures of the skip connections at every N-th update.

They are those of :mod:`fairseq_rskip.analysis.live`, in a folder ``skip`` beside fairseq's
``train_inner`` and ``valid`` of TensorBoard, as JSON lines (``skips.jsonl``, which rskip analyze
course reads) and TensorBoard events, and in Weights & Biases.

The forward and backward pass of one batch is ``task.train_step``. Where N > 0, and nowhere else,
the task of the model gets its own ``train_step``, under a
:class:`~fairseq_rskip.analysis.probe.SkipProbe` at every N-th update.
"""

import atexit
import contextlib
import functools
import inspect
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from fairseq.distributed.utils import get_global_rank
from fairseq.logging import progress_bar

from fairseq_rskip.analysis.depth_check import GradientWarning
from fairseq_rskip.analysis.live import summarise
from fairseq_rskip.analysis.paths import PathProbe
from fairseq_rskip.analysis.probe import SkipProbe
from fairseq_rskip.analysis.skip_log import SkipLines
from fairseq_rskip.analysis.streams import StreamProbe, StreamWarning

logger = logging.getLogger(__name__)


class Folder:
    """The --tensorboard-logdir of this process's training.

    None without one, and in all processes but the first.

    The task cannot see it: a wrapper of ``fairseq.logging.progress_bar.progress_bar`` records it
    here.
    """

    path: str | None = None

    @classmethod
    def watch(cls) -> None:
        build = progress_bar.progress_bar
        if hasattr(build, "notes_folder"):
            return
        signature = inspect.signature(build)

        @functools.wraps(build)
        def build_and_note(*args, **kwargs):
            cls.path = signature.bind(*args, **kwargs).arguments.get("tensorboard_logdir")
            return build(*args, **kwargs)

        build_and_note.notes_folder = True
        progress_bar.progress_bar = build_and_note


class SkipLog:
    """A task's ``train_step`` that also logs ``model``'s skip connections.

    It has the same arguments and results.

    It measures only an update's first batch in the first process (``--update-freq``, several GPUs).
    If fp16 drops an update for its overflow, the next one gets the same number, as in fairseq. The
    first update is number 1.
    """

    def __init__(self, train_step: Any, model: Any, interval: int):
        self.train_step, self.model, self.interval = train_step, model, interval
        self.first = 0  # the update that this process began with
        self.last = 0  # the update that it logged last
        self.writer: Any = None
        self.rate = 0.0  # the learning rate of the update before
        self.gradient, self.streams = GradientWarning(), StreamWarning()

    def __call__(
        self, sample, model, criterion, optimizer, update_num, ignore_grad=False, **options
    ):
        step = update_num + 1
        rate = optimizer.get_lr() if hasattr(optimizer, "get_lr") else 0.0
        warms_up = 0.0 < self.rate < rate
        self.rate = rate
        due = step % self.interval == 0 and step != self.last and not ignore_grad
        arguments = (sample, model, criterion, optimizer, update_num, ignore_grad)
        writes = has_folder() or wandb_run() is not None
        if not self.first:
            self.first = step
            if not writes:
                self.warn_that_nothing_is_logged()
        if not (due and writes):
            return self.train_step(*arguments, **options)
        return self.measured_step(step, warms_up, arguments, options)

    def warn_that_nothing_is_logged(self) -> None:
        if get_global_rank() != 0:
            return
        package = "tensorboardX (pip install tensorboardX)"
        needs = package if Folder.path else "--tensorboard-logdir or --wandb-project"
        logger.warning(
            f"--skip-log-interval {self.interval} needs {needs}: the skip connections are not "
            "logged"
        )

    def measured_step(
        self, step: int, warms_up: bool, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """One ``train_step``, whose skip connections are measured, logged and warned of.

        ``warms_up`` says whether the learning rate grows.
        """
        optimizer = arguments[3]
        with contextlib.ExitStack() as probes:
            probe = probes.enter_context(SkipProbe(self.model))
            paths = probes.enter_context(PathProbe(self.model))
            streams = probes.enter_context(StreamProbe(self.model))
            loss, sample_size, output = self.train_step(*arguments, **options)
        scale = float(sample_size or 1) * loss_scale(optimizer)
        values = summarise(probe, scale, paths)
        if values:
            self.write(step, values)
            of_streams = self.streams.line(step, streams, warms_up)
            for warning in (self.gradient.line(step, values), of_streams):
                if warning:
                    logger.warning(warning)
        return loss, sample_size, output

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand ``values``, by their tags, to all that log."""
        self.last = step
        if wandb_run() is not None:
            wandb_run().log({f"skip/{tag}": value for tag, value in values.items()}, step=step)
        if has_folder():
            self.write_events(step, values)

    def write_events(self, step: int, values: dict[str, float]) -> None:
        """Write the values (on disk within seconds).

        An earlier process's values of repeated updates are dropped.
        """
        if self.writer is None:
            folder = os.path.join(Folder.path, "skip")
            # tensorboardX names files by the second, so another writer could truncate one; they are
            # read in name order
            suffix = f".{time.time_ns()}"
            options = {
                "purge_step": self.first,
                "filename_suffix": suffix,
                "flush_secs": 5,
                "max_queue": 1000,
            }
            self.writer = progress_bar.SummaryWriter(folder, **options)
            self.lines = SkipLines(Path(folder), self.first)
            atexit.register(self.writer.close)
        self.lines.write(step, values)
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)


def has_folder() -> bool:
    """Whether this process writes TensorBoard events."""
    return bool(Folder.path) and progress_bar.SummaryWriter is not None


def wandb_run() -> Any:
    """The run that fairseq began for --wandb-project, in the first process only; or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def loss_scale(optimizer: Any) -> float:
    """The factor of the loss before backward in a fairseq optimizer: 1 but for --fp16 and --amp."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is None:
        return 1.0
    return float(scaler.get_scale() if hasattr(scaler, "get_scale") else scaler.loss_scale)
