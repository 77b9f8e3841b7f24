"""One run from its first or its last saved iteration to the end: epochs, tests, checkpoints, the result."""

import contextlib
import io
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
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
from .main import RESULT
from .trainer import Trainer

CHECKPOINT = "checkpoint.pt"
FORMAT = "fairseq_rskip.vision 1"
CONTENT = {  # of a checkpoint, besides its format
    **dict.fromkeys(("config", "identity", "model", "optimizer", "scaler", "sampler"), dict),
    **{"iteration": int, "history": list, "meter": list, "epoch_seconds": (int, float)},
}
CHECK_EVERY = 50  # iterations between checks of the loss, which wait for the device
SMALLEST_SCALE = 1e-4  # fp16's scaler halves its scale at every overflow; this one means gradients of 1e8
WAY_OUT = "try a lower --lr, a longer --warmup-iterations, --amp off or another --skip-norm"


class Interrupted(Exception):
    """A signal stopped the run after it had saved its state; the message is for the user."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.status = 128 + number


class Run:
    """A training run from ``seed`` on ``images`` that keeps its checkpoint, log and result in ``folder``.

    The caller holds the folder's lock. Raises ``UserError`` if ``folder`` has a checkpoint of another run, or any
    without ``config.resume``.
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
            self._restore(read(self.path))
        elif config.finetune_from:
            start = Path(config.finetune_from).expanduser()
            self.trainer.load_weights(read(start)["model"], f"--finetune-from {start}")
        if group.first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_parts(folder)

    def run(self) -> dict[str, Any]:
        """Train to the last iteration; returns the result.

        Raises ``UserError`` if a loss is not finite or a file cannot be written, and ``Interrupted`` after Ctrl-C or
        SIGTERM, with the state saved.
        """
        trainer, config = self.trainer, self.config
        done = trainer.iteration
        log = RunLog(self.folder, self.history, config, active=self.group.first, done=done)
        if done < config.iterations:
            start = f"resuming from iteration {done} of {self.path}" if done else f"training in {self.folder}"
            log.print(f"{start}; the first iteration takes longer")
        try:
            with _signals(active=self.group.world == 1) as arrived:
                while trainer.iteration < config.iterations:
                    self.iterate(log)
                    if arrived:
                        self.save()
                        stopped = f"stopped at iteration {trainer.iteration}; --resume continues from {self.path}"
                        raise Interrupted(stopped, arrived[0])
        finally:
            log.close()
        return self._finish()

    def iterate(self, log: RunLog) -> None:
        """One iteration, and what is due after it."""
        trainer, config, start = self.trainer, self.config, time.perf_counter()
        loss = trainer.train_step()
        now = trainer.iteration
        ends_epoch = self._passes(now) > self._passes(now - 1) or now == config.iterations
        logs = not ends_epoch and config.log_interval and now % config.log_interval == 0
        costs_nothing = self.group.device.type == "cpu" and self.group.world == 1
        if ends_epoch or logs or costs_nothing or now % CHECK_EVERY == 0:
            self._check_loss()
        self.epoch_seconds += time.perf_counter() - start
        log.iteration(now, loss)
        log.skips(trainer.skips, now)
        if logs:
            record = {"iteration": now, "lr": config.learning_rate(now - 1), "train_loss_so_far": trainer.means()[0]}
            self.history.append(record)
            log.write(record)
        if ends_epoch:
            self._end_epoch(log)
        if ends_epoch or (config.save_interval and now % config.save_interval == 0):
            self.save()

    def _passes(self, iteration: int) -> int:
        """How many passes over the training images ``iteration`` updates complete."""
        return iteration * self.config.batch_size // len(self.images.train_labels)

    def _check_loss(self) -> None:
        kept = f"the last good checkpoint stays, {self.path}" if self.path.exists() else "there is no checkpoint yet"
        what = f"stopped, {kept}; {WAY_OUT}"
        if not self.group.least(int(self.trainer.meter[0].isfinite())):
            raise UserError(f"the loss is not finite at iteration {self.trainer.iteration}: {what}")
        now, scale = self.trainer.iteration, self.trainer.scaler.get_scale()  # the same in every process
        if scale < SMALLEST_SCALE:
            raise UserError(f"gradients overflow at iteration {now}, loss scale {scale:.0e}: {what}, or --amp bf16")

    def _end_epoch(self, log: RunLog) -> None:
        trainer, now = self.trainer, self.trainer.iteration
        loss, error, count = trainer.means()
        trainer.reset_meter()
        epoch = self._passes(now) + (self._passes(now) == self._passes(now - 1))  # the last one may be incomplete
        record: dict[str, Any] = {"epoch": epoch, "iteration": now, "lr": self.config.learning_rate(now - 1)}
        record.update(train_loss=loss, train_error=error)
        if epoch % self.config.test_interval == 0 or now == self.config.iterations:
            record.update(trainer.test())
            past = [past["test_error"] for past in self.history if "test_error" in past]
            record["best_error"] = min([record["test_error"], *past])
        record["images_per_second"] = round(count / self.epoch_seconds, 1)
        record["seconds"] = round(self.epoch_seconds, 3)
        self.history.append(record)
        log.epoch(record)
        self.epoch_seconds = 0.0

    def save(self) -> None:
        """Write the checkpoint. Raises ``UserError`` if its weights are not finite, or it cannot be written."""
        self._check_loss()
        if not self.trainer.weights_are_finite():
            raise UserError(f"weights are not finite after iteration {self.trainer.iteration}: stopped; {WAY_OUT}")
        state = {"format": FORMAT, "config": self.config.as_dict(), "identity": self.identity}
        state.update(history=self.history, epoch_seconds=self.epoch_seconds, **self.trainer.state_dict())
        if self.group.first:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_atomically(self.path, lambda file: file.write(buffer.getbuffer()))

    def _restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ``CheckpointError`` unless it is of this run."""
        differs = difference(state["config"], self.config, state["identity"], self.identity)
        if differs:
            raise CheckpointError(f"{self.path} is of another run: {'; '.join(differs)}")
        done, last = state["iteration"], self.config.iterations
        if not 0 <= done <= last:
            raise CheckpointError(f"{self.path} is damaged: iteration {done}, expected 0 to {last}")
        self.trainer.load_state_dict(state, str(self.path))
        self.history = list(state["history"])
        self.epoch_seconds = float(state["epoch_seconds"])

    def _finish(self) -> dict[str, Any]:
        """Write and return the result."""
        trainer = self.trainer
        epochs = [record for record in self.history if "epoch" in record]
        tested = [record for record in epochs if "test_error" in record]
        last, best = epochs[-1], min(tested, key=lambda record: record["test_error"])
        speeds = [record["images_per_second"] for record in epochs]
        adapted = lambdas(trainer.module)
        result = {"error": last["test_error"], "best_error": best["test_error"], "best_epoch": best["epoch"]}
        result.update(
            (key, last[key]) for key in ("test_loss", "valid_error", "valid_loss", "train_loss") if key in last
        )
        result.update({"lambda": adapted} if adapted else {})
        result.update(seed=self.seed, iterations=trainer.iteration, epochs=last["epoch"])
        result.update(
            parameters=sum(parameter.numel() for parameter in trainer.module.parameters()),
            classes=len(self.images.classes),
            train_images=len(self.images.train_labels),
            test_images=len(self.images.test_labels),
            mean=trainer.mean.tolist(),
            std=trainer.std.tolist(),
            images_per_second=statistics.median(speeds[1:] or speeds),  # the first epoch warms up
            train_seconds=round(sum(record["seconds"] for record in epochs), 1),
            identity=self.identity,
            config=self.config.as_dict(),
            versions=versions(),
            machine=machine(self.group.device, self.group.world),
        )
        if self.group.first:
            write_json(self.folder / RESULT, result)
            if adapted:
                print_line("adaptive λ: " + ", ".join(f"{block} {value:.3f}" for block, value in adapted.items()))
            if warning := trainer.movement.warning():
                print_line(f"warning: {warning}", "stderr")
        return result


def read(path: Path) -> dict[str, Any]:
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
    """The numbers of Ctrl-C and SIGTERM that arrive in the block, for a loop that looks between two iterations; a
    second signal ends the program. Empty unless ``active``."""
    arrived: list[int] = []

    def note(number: int, _frame: Any) -> None:
        arrived.append(number)
        signal.signal(number, previous[number])

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)} if active else {}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
