"""Train one run to its end: epochs, tests, the log, checkpoints, the result."""

import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..analysis.live import SkipLines
from ..console import Progress, print_line
from ..errors import UserError
from ..files import append_json, remove_parts, write_json, write_json_lines, writing
from ..machine import surroundings
from ..residual.adaptive import lambdas
from ..safe_load import CheckpointError, load_checkpoint
from .config import Config, check_same
from .data import ImageSet
from .main import RESULT
from .trainer import Group, Trainer

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
FORMAT = "fairseq_rskip.vision 1"
CHECK_EVERY = 50  # iterations between checks of the loss, which wait for the device
SMALLEST_SCALE = 1e-4  # fp16's scaler halves its scale at every overflow; this one means gradients of 1e8
WAY_OUT = "try a lower --lr, a longer --warmup-iterations, --amp off or bf16, or another --skip-norm"
_errors = dict.fromkeys(("test_error", "best_error", "valid_error"), "{:.2f} %")
OF_AN_EPOCH = {"lr": "{:g}", "train_loss": "{:.4f}", **_errors, "images_per_second": "{:.0f}"}  # what is printed


class RunLog:
    """The log of one run in ``folder``, of the first process; ``active=False`` makes it print and write nothing.

    ``history`` has the records of an earlier part of the run, and gets those of this one, which begins after iteration
    ``done``. The file starts with that history, so that a run which was killed and resumed has every epoch once.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]], config: Config, active: bool, done: int = 0):
        self.path, self.history, self.config, self.active = folder / LOG, history, config, active
        self.progress, self.events, self.wandb = None, None, None
        if not active:
            return
        write_json_lines(self.path, history)
        self.skip_lines = SkipLines(folder, done + 1)
        if config.tensorboard:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(folder), purge_step=done + 1, filename_suffix=f".{time.time_ns()}")
        if config.wandb_project:
            import wandb

            name, about = "/".join(folder.absolute().parts[-2:]), config.as_dict()
            self.wandb = wandb.init(project=config.wandb_project, name=name, dir=folder, config=about, reinit=True)

    def iteration(self, number: int, loss: Any) -> None:
        """Show that ``number`` iterations are done; ``loss`` is a tensor that is read only when shown."""

        def figures() -> dict[str, str]:
            shown = {"loss": f"{float(loss):.4f}", "lr": f"{self.config.learning_rate(number - 1):g}"}
            errors = [record["test_error"] for record in self.history if "test_error" in record]
            return {**shown, "test error": f"{errors[-1]:.2f} %"} if errors else shown

        if self.active and self.progress is None:  # the first iteration prepares much, and says little about speed
            self.progress = Progress(self.config.iterations, "iteration", done=number, stream="stdout")
            self.progress.show(figures())
        elif self.active:
            self.progress.advance(figures)

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` to the log, and print that of an epoch; numbers go to TensorBoard and W&B, too."""
        self.history.append(record)
        if not self.active:
            return
        append_json(self.path, record)
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        self._scalars({k: v for k, v in numbers.items() if k not in ("epoch", "iteration")}, record["iteration"])
        if "epoch" in record:
            parts = [f"epoch {record['epoch']}", f"iteration {record['iteration']}/{self.config.iterations}"]
            parts += [f"{k.replace('_', ' ')} {how.format(record[k])}" for k, how in OF_AN_EPOCH.items() if k in record]
            self.progress.print("  ".join(parts))

    def skips(self, values: dict[str, float], number: int) -> None:
        """Write what iteration ``number`` measured of the skip connections, if anything."""
        if self.active and values:
            self.skip_lines.write(number, values)
            self._scalars(values, number)

    def _scalars(self, values: dict[str, Any], number: int) -> None:
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, number)
        if self.wandb is not None:
            self.wandb.log(values, step=number)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.bar.close()
        if self.events is not None:
            self.events.close()
        if self.wandb is not None:
            self.wandb.finish()


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
            self._load(self.path, resume=True)
        elif config.finetune_from:
            self._load(Path(config.finetune_from).expanduser(), resume=False)
        if group.first:
            folder.mkdir(parents=True, exist_ok=True)
            remove_parts(folder)

    def _load(self, path: Path, resume: bool) -> None:
        """Resume from a checkpoint, or take its weights only. Raises ``UserError`` if it is damaged or does not fit."""
        state = load_checkpoint(path, map_location="cpu")
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint of train_cifar.py")
        try:
            if not resume:
                return self.trainer.load_weights(state["model"])
            check_same(path, state, self.config, self.identity)
            self.trainer.load_state_dict(state)
            self.history, self.epoch_seconds = list(state["history"]), float(state["epoch_seconds"])
        except UserError:
            raise
        except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path} is damaged, or does not fit this network: {reason}") from None

    def run(self) -> dict[str, Any]:
        """Train to the last iteration; returns the result.

        Ctrl-C and SIGTERM save the state and exit. Raises ``UserError`` if a loss is not finite or a file cannot be
        written.
        """
        trainer, config = self.trainer, self.config
        done = trainer.iteration
        log = RunLog(self.folder, self.history, config, active=self.group.first, done=done)
        if done < config.iterations and self.group.first:
            start = f"resuming from iteration {done} of {self.path}" if done else f"training in {self.folder}"
            print_line(f"{start}; the first iteration takes longer")
        with contextlib.closing(log), _signals(active=self.group.world == 1) as arrived:
            while trainer.iteration < config.iterations and not arrived:
                self.iterate(log)
            if arrived:
                self.save()
        if arrived:
            print_line(f"stopped at iteration {trainer.iteration}; --resume continues from {self.path}", "stderr")
            sys.exit(128 + arrived[0])
        return self._finish()

    def iterate(self, log: RunLog) -> None:
        """Train one iteration; log and save if it is time to, test at the end of an epoch."""
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
            rate = config.learning_rate(now - 1)
            log.write({"iteration": now, "lr": rate, "train_loss_so_far": trainer.means()[0]})
        if ends_epoch:
            log.write(self._epoch())
        if ends_epoch or (config.save_interval and now % config.save_interval == 0):
            self.save()

    def _passes(self, iteration: int) -> int:
        """Return how many passes over the training images ``iteration`` updates complete."""
        return iteration * self.config.batch_size // len(self.images.train_labels)

    def _check_loss(self) -> None:
        now, scale = self.trainer.iteration, self.trainer.scaler.get_scale()  # the same in every process
        finite = self.group.least(int(self.trainer.meter[0].isfinite()))
        if not finite or scale < SMALLEST_SCALE:
            what = f"gradients overflow (loss scale {scale:.0e})" if finite else "the loss is not finite"
            kept = f"the last good checkpoint is {self.path}" if self.path.exists() else "there is no checkpoint yet"
            raise UserError(f"stopped at iteration {now}, {what}; {kept}; {WAY_OUT}")

    def _epoch(self) -> dict[str, Any]:
        """Test; return the record of the epoch that ends here."""
        trainer, now = self.trainer, self.trainer.iteration
        loss, error, count = trainer.means()
        trainer.reset_meter()
        epoch = self._passes(now) + (self._passes(now) == self._passes(now - 1))  # the last one may be incomplete
        record: dict[str, Any] = {"epoch": epoch, "iteration": now, "lr": self.config.learning_rate(now - 1)}
        record.update(train_loss=loss, train_error=error, **trainer.test())
        record["best_error"] = min(past["test_error"] for past in [*self.history, record] if "test_error" in past)
        record["images_per_second"] = round(count / self.epoch_seconds, 1)
        record["seconds"] = round(self.epoch_seconds, 3)
        self.epoch_seconds = 0.0
        return record

    def save(self) -> None:
        """Write the checkpoint. Raises ``UserError`` if its weights are not finite, or it cannot be written."""
        self._check_loss()
        if not self.trainer.weights_are_finite():
            raise UserError(f"stopped at iteration {self.trainer.iteration}, weights are not finite; {WAY_OUT}")
        state = {"format": FORMAT, "config": self.config.as_dict(), "identity": self.identity}
        state.update(history=self.history, epoch_seconds=self.epoch_seconds, **self.trainer.state_dict())
        if self.group.first:
            with writing(self.path) as file:
                torch.save(state, file)

    def _finish(self) -> dict[str, Any]:
        """Write and return the result."""
        trainer = self.trainer
        epochs = [record for record in self.history if "epoch" in record]
        last, best = epochs[-1], min(epochs, key=lambda record: record["test_error"])
        speeds = [record["images_per_second"] for record in epochs]
        adapted, images, parameters = lambdas(trainer.module), self.images, trainer.module.parameters()
        also = ("test_loss", "valid_error", "valid_loss", "train_loss")
        result = {"error": last["test_error"], "best_error": best["test_error"], "best_epoch": best["epoch"]}
        result |= {name: last[name] for name in also if name in last} | ({"lambda": adapted} if adapted else {})
        result |= {"seed": self.seed, "iterations": trainer.iteration, "epochs": last["epoch"]}
        result |= {"parameters": sum(parameter.numel() for parameter in parameters), "classes": len(images.classes)}
        result |= {"train_images": len(images.train_labels), "test_images": len(images.test_labels)}
        result |= {"mean": trainer.mean.tolist(), "std": trainer.std.tolist()}
        result["images_per_second"] = statistics.median(speeds[1:] or speeds)  # the first epoch warms up
        result["train_seconds"] = round(sum(record["seconds"] for record in epochs), 1)
        result |= {"identity": self.identity, "config": self.config.as_dict()}
        result |= surroundings(self.group.device, self.group.world)
        if self.group.first:
            write_json(self.folder / RESULT, result)
            if adapted:
                print_line("adaptive λ: " + ", ".join(f"{block} {value:.3f}" for block, value in adapted.items()))
            if warning := trainer.movement.warning():
                print_line(f"warning: {warning}", "stderr")
        return result


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
