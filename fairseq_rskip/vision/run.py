"""One run from its first or its last saved iteration to the end: epochs, tests, checkpoints, the result."""

import contextlib
import io
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..console import print_line
from ..errors import UserError
from ..files import remove_parts, write_atomically, write_json
from ..residual.adaptive import lambdas
from ..safe_load import CheckpointError, load_checkpoint
from .config import Config, difference
from .data import ImageSet
from .distributed import Group
from .logs import RunLog, machine, versions
from .trainer import NEVER, Trainer

CHECKPOINT = "checkpoint.pt"
RESULT = "result.json"
FORMAT = "fairseq_rskip.vision 1"
# what a checkpoint holds besides its format
CONTENT = {
    **dict.fromkeys(("config", "identity", "model", "optimizer", "scaler", "sampler", "random"), dict),
    **{"iteration": int, "history": list, "meter": list, "epoch_seconds": (int, float)},
}
RECORDED = {"epoch", "iteration", "train_loss", "images_per_second", "seconds"}  # of every epoch
CHECK_EVERY = 50  # iterations between checks of the loss, which wait for the device
SMALLEST_SCALE = 1e-4  # fp16's scaler halves its scale at every overflow; one this small stands for gradients of 1e8


class Interrupted(Exception):
    """The run was stopped by a signal and has saved its state; the message is one line for the user."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number


class Run:
    """A training run from ``seed`` on ``images`` that keeps its checkpoint, log and result in ``folder``.

    The caller holds the folder's lock. Raises ``UserError`` for a checkpoint in ``folder`` that is not of this run, or
    is there without ``config.resume``.
    """

    def __init__(self, config: Config, seed: int, images: ImageSet, group: Group, folder: Path):
        self.config, self.seed, self.images, self.group, self.folder = config, seed, images, group, folder
        self.path = folder / CHECKPOINT
        self.trainer = Trainer(config, seed, images, group)
        self.history: list[dict[str, Any]] = []
        self.epoch_seconds = 0.0
        self.identity = {"seed": seed, **images.identity()}
        if self.path.exists():
            if not config.resume:
                raise UserError(f"{self.path} is of an earlier run: --resume continues it, --output starts elsewhere")
            self._restore(self._load())
        elif config.finetune_from:
            self._start_from(Path(config.finetune_from).expanduser())
        if group.first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_parts(folder)

    def run(self) -> dict[str, Any]:
        """Train to the last iteration; returns the result.

        Raises ``UserError`` if a loss is not finite or a file cannot be written, and ``Interrupted`` after Ctrl-C or
        SIGTERM, with the state saved.
        """
        done = self.trainer.iteration
        log = RunLog(self.folder, self.history, self.config, active=self.group.first, done=done)
        if done:
            log.print(f"resuming from iteration {done} of {self.path}")
        try:
            with _signals(active=self.group.world == 1) as arrived:
                while self.trainer.iteration < self.config.iterations:
                    self.iterate(log)
                    if arrived:
                        self.save()
                        stopped = f"stopped at iteration {self.trainer.iteration}"
                        raise Interrupted(f"{stopped}; --resume continues from {self.path}", arrived[0])
        finally:
            log.close()
        return self._finish()

    def iterate(self, log: RunLog) -> None:
        """One iteration, and what is due after it."""
        trainer, start = self.trainer, time.perf_counter()
        loss = trainer.train_step()
        now = trainer.iteration
        ends_epoch = self._ends_epoch(now)
        saves = ends_epoch or (self.config.save_interval and now % self.config.save_interval == 0)
        logs = not ends_epoch and self.config.log_interval and now % self.config.log_interval == 0
        costs_nothing = self.group.device.type == "cpu" and self.group.world == 1
        if ends_epoch or logs or costs_nothing or now % CHECK_EVERY == 0:
            self._check_loss()
        self.epoch_seconds += time.perf_counter() - start
        log.iteration(now, loss)
        log.scalars(trainer.skips, now)
        if logs:
            self._log_progress(log)
        if ends_epoch:
            self._end_epoch(log)
        if saves:
            self.save()

    def _passes(self, iteration: int) -> int:
        """How many passes over the training images ``iteration`` updates complete."""
        return iteration * self.config.batch_size // len(self.images.train_labels)

    def _ends_epoch(self, iteration: int) -> bool:
        return self._passes(iteration) > self._passes(iteration - 1) or iteration == self.config.iterations

    def _check_loss(self) -> None:
        bad = self.group.least(self.trainer.settle())
        if bad < NEVER:
            raise UserError(f"the loss is not finite at iteration {bad}: {self._what_to_try()}")
        scale = self.trainer.scaler.get_scale()  # the same in every process: gradients are summed before the check
        if scale < SMALLEST_SCALE:
            raise UserError(
                f"gradients overflow at iteration {self.trainer.iteration}, the loss scale is down to {scale:.0e}: "
                f"{self._what_to_try()}, or --amp bf16"
            )

    def _what_to_try(self) -> str:
        kept = f"the last good checkpoint stays, {self.path}" if self.path.exists() else "there is no checkpoint yet"
        return f"stopped, {kept}; try a lower --lr, a longer --warmup-iterations, --amp off or another --skip-norm"

    def _log_progress(self, log: RunLog) -> None:
        """Record the mean loss of the epoch's images so far."""
        now, (loss, _, _) = self.trainer.iteration, self.trainer.means()
        record = {"iteration": now, "lr": self.config.learning_rate(now - 1), "train_loss_so_far": loss}
        self.history.append(record)
        log.write(record)

    def _end_epoch(self, log: RunLog) -> None:
        trainer, now = self.trainer, self.trainer.iteration
        loss, error, count = trainer.means()
        trainer.reset_meter()
        epoch = self._passes(now) + (self._passes(now) == self._passes(now - 1))  # one that the run's end cuts counts
        record: dict[str, Any] = {
            "epoch": epoch,
            "iteration": now,
            "lr": self.config.learning_rate(now - 1),
            "train_loss": loss,
            "train_error": error,
        }
        if epoch % self.config.test_interval == 0 or now == self.config.iterations:
            record.update(trainer.test())
            record["best_error"] = min([record["test_error"]] + [past["test_error"] for past in self._tested()])
        record["images_per_second"] = round(count / self.epoch_seconds, 1)
        record["seconds"] = round(self.epoch_seconds, 3)
        self.history.append(record)
        log.epoch(record)
        self.epoch_seconds = 0.0

    def _tested(self) -> list[dict[str, Any]]:
        return [record for record in self.history if "test_error" in record]

    def save(self) -> None:
        """Write the checkpoint. Raises ``UserError`` if its weights are not finite, or it cannot be written."""
        self._check_loss()
        if not self.trainer.weights_are_finite():
            raise UserError(f"weights are not finite after iteration {self.trainer.iteration}: {self._what_to_try()}")
        state = {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "identity": self.identity,
            "history": self.history,
            "epoch_seconds": self.epoch_seconds,
            **self.trainer.state_dict(),
        }
        if self.group.first:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_atomically(self.path, lambda file: file.write(buffer.getbuffer()))

    def _load(self) -> dict[str, Any]:
        """The state in the checkpoint, on the CPU. Raises ``CheckpointError`` unless it is a whole one of this run."""
        state = _read(self.path)
        differs = difference(state["config"], self.config, state["identity"], self.identity)
        if differs:
            raise CheckpointError(f"{self.path} is of another run: {'; '.join(differs)}")
        done, last = state["iteration"], self.config.iterations
        if not 0 <= done <= last:
            raise CheckpointError(f"{self.path} is damaged: iteration {done}, expected 0 to {last}")
        ends = [now for now in range(1, done + 1) if self._ends_epoch(now)]
        try:
            epochs = [record for record in state["history"] if "epoch" in record]
            whole = [record["iteration"] for record in epochs] == ends and all(set(r) >= RECORDED for r in epochs)
            whole = whole and (done < last or "test_error" in epochs[-1])
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise CheckpointError(f"{self.path} is damaged: its history is not that of {done} iterations")
        return state

    def _start_from(self, path: Path) -> None:
        try:
            self.trainer.load_weights(_read(path)["model"])
        except CheckpointError as error:
            raise CheckpointError(f"--finetune-from {path}: {error}") from None

    def _restore(self, state: dict[str, Any]) -> None:
        try:
            self.trainer.load_state_dict(state)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        self.history = list(state["history"])
        self.epoch_seconds = float(state["epoch_seconds"])

    def _finish(self) -> dict[str, Any]:
        epochs = [record for record in self.history if "epoch" in record]
        last, tested, trainer = epochs[-1], self._tested(), self.trainer
        best = min(tested, key=lambda record: record["test_error"])
        speeds = [record["images_per_second"] for record in epochs]
        adapted = lambdas(trainer.module)
        result = {
            "error": last["test_error"],
            "best_error": best["test_error"],
            "best_epoch": best["epoch"],
            "test_loss": last["test_loss"],
            **{name: last[name] for name in ("valid_error", "valid_loss") if name in last},
            "train_loss": last["train_loss"],
            **({"lambda": adapted} if adapted else {}),
            "seed": self.seed,
            "iterations": trainer.iteration,
            "epochs": last["epoch"],
            "parameters": sum(parameter.numel() for parameter in trainer.module.parameters()),
            "classes": len(self.images.classes),
            "train_images": len(self.images.train_labels),
            "test_images": len(self.images.test_labels),
            "mean": trainer.mean.tolist(),
            "std": trainer.std.tolist(),
            "images_per_second": statistics.median(speeds[1:] or speeds),  # the first epoch warms up
            "train_seconds": round(sum(record["seconds"] for record in epochs), 1),
            "identity": self.identity,
            "config": self.config.as_dict(),
            "versions": versions(),
            "machine": machine(self.group.device, self.group.world),
        }
        if self.group.first:
            write_json(self.folder / RESULT, result)
            if adapted:
                print_line("adaptive λ: " + ", ".join(f"{block} {value:.3f}" for block, value in adapted.items()))
            if warning := trainer.movement.warning():
                print_line(f"warning: {warning}", "stderr")
        return result


def _read(path: Path) -> dict[str, Any]:
    """A run's state, on the CPU. Raises ``CheckpointError`` unless the file is a whole one."""
    state = load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of train_cifar.py")
    lacks = [name for name, kind in CONTENT.items() if not isinstance(state.get(name), kind)]
    if lacks:
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(lacks)}")
    return state


@contextlib.contextmanager
def _signals(active: bool) -> Iterator[list[int]]:
    """The numbers of the signals Ctrl-C and SIGTERM that came while the block runs, for a loop that asks between two
    iterations, so that what it saves is whole; a second one acts as it always does. Empty unless ``active``."""
    arrived: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)} if active else {}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
