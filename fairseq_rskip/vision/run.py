"""Train one run to its end: epochs, tests, checkpoints, the result."""

import contextlib
import hashlib
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..console import print_line
from ..errors import UserError
from ..files import make_folder, remove_parts, write_json, writing
from ..machine import surroundings
from ..residual import own_rules
from ..residual.adaptive import lambdas
from ..safe_load import CheckpointError, load_checkpoint
from .config import PARENT, RULE, Config, check_same
from .data import ImageSet
from .run_log import RunLog
from .trainer import Group, Trainer

CHECKPOINT = "checkpoint.pt"
RESULT = "result.json"
FORMAT = "fairseq_rskip.vision 1"
CHECK_EVERY = 50  # iterations between checks of the loss, which wait for the device
# fp16's scaler halves its scale at every overflow; this one means gradients of 1e8
SMALLEST_SCALE = 1e-4
ADVICE = "try a lower --lr, a longer --warmup-iterations, --amp off or bf16, or another --skip-norm"


def identity_of(config: Config, images: ImageSet) -> dict[str, Any]:
    """What must be equal, besides settings and seed, for two runs to be of one training."""
    identity = images.identity()
    parent = Path(config.finetune_from).expanduser()
    if config.finetune_from and parent.is_file():  # a resumed training does not need it
        identity[PARENT] = hashlib.sha256(parent.read_bytes()).hexdigest()
    checksum = own_rules.checksum(config.skip_kind)
    if checksum:
        identity[RULE] = checksum
    return identity


class Run:
    """A training run from ``seed`` on ``images``; its checkpoint, log and result are in ``folder``.

    ``identity`` is :func:`identity_of` the training. The caller holds the folder's lock. Raises
    ``UserError`` if ``folder`` has a checkpoint of another run, or any checkpoint without
    ``config.resume``.
    """

    def __init__(
        self,
        config: Config,
        seed: int,
        images: ImageSet,
        identity: dict[str, Any],
        group: Group,
        folder: Path,
    ):
        self.config = config
        self.seed = seed
        self.images = images
        self.group = group
        self.folder = folder
        self.path = folder / CHECKPOINT
        self.trainer = Trainer(config, seed, images, group)
        self.history: list[dict[str, Any]] = []
        self.epoch_seconds = 0.0
        self.identity = {"seed": seed, **identity}

        if self.path.exists():
            if not config.resume:
                raise UserError(
                    f"{self.path} is of an earlier run: "
                    "--resume continues it, --output starts elsewhere"
                )
            self._load(self.path, resume=True)
        elif config.finetune_from:
            self._load(Path(config.finetune_from).expanduser(), resume=False)

        if group.first:
            make_folder(folder)
            remove_parts(folder)

    def _load(self, path: Path, resume: bool) -> None:
        """Resume from a checkpoint, or load its weights only.

        Raises ``UserError`` if it is damaged or does not fit.
        """
        state = load_checkpoint(path, map_location="cpu")
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint of train_cifar.py")
        try:
            if resume:
                check_same(path, state, self.config, self.identity)
                # a parent whose file is gone is still what this run began with
                self.identity = {**state["identity"], **self.identity}
                self.trainer.load_state_dict(state)
                self.history = list(state["history"])
                self.epoch_seconds = float(state["epoch_seconds"])
            else:
                self.trainer.start_from(state["model"])
        except UserError:
            raise
        except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(
                f"{path} is damaged, or does not fit this network: {reason}"
            ) from None

    def run(self) -> dict[str, Any]:
        """Train to the last iteration; return the result.

        Ctrl-C and SIGTERM save the state and exit. Raises ``UserError`` if a loss is not finite or
        a file cannot be written.
        """
        trainer = self.trainer
        done = trainer.iteration
        log = RunLog(self.folder, self.history, self.config, active=self.group.first, done=done)
        if done < self.config.iterations and self.group.first:
            if done:
                start = f"resuming from iteration {done} of {self.path}"
            else:
                start = f"training in {self.folder}"
            print_line(f"{start}; the first iteration takes longer")

        with contextlib.closing(log), _signals(active=self.group.world == 1) as arrived:
            while trainer.iteration < self.config.iterations and not arrived:
                self.iterate(log)
            if arrived:
                self.save()
        if arrived:
            print_line(
                f"stopped at iteration {trainer.iteration}; --resume continues from {self.path}",
                "stderr",
            )
            sys.exit(128 + arrived[0])
        return self._finish()

    def iterate(self, log: RunLog) -> None:
        """Train one iteration; log and save if it is time to, test at the end of an epoch."""
        config = self.config
        start = time.perf_counter()
        loss = self.trainer.train_step()
        now = self.trainer.iteration

        ends_epoch = self._passes(now) > self._passes(now - 1) or now == config.iterations
        logs = not ends_epoch and _is_due(now, config.log_interval)
        saves = ends_epoch or _is_due(now, config.save_interval)
        checking_is_free = self.group.device.type == "cpu" and self.group.world == 1
        if ends_epoch or logs or checking_is_free or _is_due(now, CHECK_EVERY):
            self._check_loss()
        self.epoch_seconds += time.perf_counter() - start

        log.iteration(now, loss)
        log.skips(self.trainer.skips, now)
        if logs:
            rate = config.learning_rate(now - 1)
            mean_loss, _, _ = self.trainer.means()
            log.write({"iteration": now, "lr": rate, "train_loss_so_far": mean_loss})
        if ends_epoch:
            log.write(self._epoch())
        if saves:
            self.save()

    def _passes(self, iteration: int) -> int:
        """Return how many passes over the training images ``iteration`` updates complete."""
        return iteration * self.config.batch_size // len(self.images.train_labels)

    def _check_loss(self) -> None:
        """Raise ``UserError`` if the loss is not finite or fp16 gradients overflow repeatedly."""
        scale = self.trainer.scaler.get_scale()  # the same in every process
        loss_sum = self.trainer.meter[0]
        is_finite = self.group.least(int(loss_sum.isfinite()))
        if is_finite and scale >= SMALLEST_SCALE:
            return

        if is_finite:
            reason = f"gradients overflow (loss scale {scale:.0e})"
        else:
            reason = "the loss is not finite"
        if self.path.exists():
            checkpoint = f"the last good checkpoint is {self.path}"
        else:
            checkpoint = "there is no checkpoint yet"
        raise UserError(
            f"stopped at iteration {self.trainer.iteration}, {reason}; {checkpoint}; {ADVICE}"
        )

    def _epoch(self) -> dict[str, Any]:
        """Test; return the record of the epoch that ends here."""
        trainer = self.trainer
        now = trainer.iteration
        loss, error, count = trainer.means()
        trainer.reset_meter()
        epoch = self._passes(now)
        if epoch == self._passes(now - 1):  # the last epoch may be incomplete
            epoch += 1

        record: dict[str, Any] = {
            "epoch": epoch,
            "iteration": now,
            "lr": self.config.learning_rate(now - 1),
            "train_loss": loss,
            "train_error": error,
            **trainer.test(),
        }
        earlier = [past["test_error"] for past in self.history if "test_error" in past]
        record["best_error"] = min([*earlier, record["test_error"]])
        record["images_per_second"] = round(count / self.epoch_seconds, 1)
        record["seconds"] = round(self.epoch_seconds, 3)
        self.epoch_seconds = 0.0
        return record

    def save(self) -> None:
        """Write the checkpoint.

        Raises ``UserError`` if its weights are not finite, or it cannot be written.
        """
        self._check_loss()
        if not self.trainer.weights_are_finite():
            raise UserError(
                f"stopped at iteration {self.trainer.iteration}, weights are not finite; {ADVICE}"
            )
        state = {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "identity": self.identity,
            "history": self.history,
            "epoch_seconds": self.epoch_seconds,
            **self.trainer.state_dict(),
        }
        if self.group.first:
            with writing(self.path) as file:
                torch.save(state, file)

    def _finish(self) -> dict[str, Any]:
        """Write and return the result."""
        adapted = lambdas(self.trainer.module)
        result = self._result(adapted)
        if not self.group.first:
            return result

        write_json(self.folder / RESULT, result)
        if adapted:
            values = ", ".join(f"{block} {value:.3f}" for block, value in adapted.items())
            print_line(f"adaptive λ: {values}")
        warning = self.trainer.unmoved.warning()
        if warning:
            print_line(f"warning: {warning}", "stderr")
        return result

    def _result(self, adapted: dict[str, float]) -> dict[str, Any]:
        """Return the content of result.json; ``adapted`` has the λ of each adaptive skip."""
        trainer = self.trainer
        images = self.images
        epochs = [record for record in self.history if "epoch" in record]
        last = epochs[-1]
        best = min(epochs, key=lambda record: record["test_error"])

        result = {
            "error": last["test_error"],
            "best_error": best["test_error"],
            "best_epoch": best["epoch"],
        }
        for name in ("test_loss", "valid_error", "valid_loss", "train_loss"):
            if name in last:
                result[name] = last[name]
        if adapted:
            result["lambda"] = adapted

        speeds = [record["images_per_second"] for record in epochs]
        after_warm_up = speeds[1:] or speeds
        result |= {
            "seed": self.seed,
            "iterations": trainer.iteration,
            "epochs": last["epoch"],
            "class_names": list(images.classes),
            "parameters": sum(parameter.numel() for parameter in trainer.module.parameters()),
            "classes": len(images.classes),
            "train_images": len(images.train_labels),
            "test_images": len(images.test_labels),
            "mean": trainer.mean.tolist(),
            "std": trainer.std.tolist(),
            "images_per_second": statistics.median(after_warm_up),
            "train_seconds": round(sum(record["seconds"] for record in epochs), 1),
            "identity": self.identity,
            "config": self.config.as_dict(),
        }
        return result | surroundings(self.group.device, self.group.world)


def _is_due(iteration: int, interval: int) -> bool:
    """Return whether ``iteration`` is one of every ``interval`` iterations; 0 means none."""
    return interval > 0 and iteration % interval == 0


@contextlib.contextmanager
def _signals(active: bool) -> Iterator[list[int]]:
    """Collect the numbers of Ctrl-C and SIGTERM while the block runs; none unless ``active``.

    The block's loop looks at them between two iterations. A second signal ends the program.
    """
    arrived: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, _frame: Any) -> None:
        arrived.append(number)
        signal.signal(number, previous[number])

    if active:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
