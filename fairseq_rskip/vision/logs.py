"""What a run reports: a progress bar or lines, JSON lines, TensorBoard events, Weights & Biases, the final JSON."""

import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..analysis.live import WRITING
from ..console import print_line
from ..errors import UserError
from ..files import write_text
from .config import Config

LOG = "log.jsonl"
LINES_EVERY = 30.0  # seconds between lines within an epoch, where there is no terminal
FIGURES_EVERY = 1.0  # seconds between figures beside the progress bar; the loss waits for the device


class RunLog:
    """The log of one run in ``folder``, of the first process; ``active=False`` makes it print and write nothing.

    ``history`` is what an earlier part of the run logged: the log is written anew from it, so that a run which was
    killed and resumed has every epoch once. ``done`` is the iteration after which this part begins; TensorBoard forgets
    what was logged after it.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]], config: Config, active: bool, done: int = 0):
        self.path = folder / LOG
        self.active = active
        self.config = config
        self.last_shown = time.monotonic()
        self.errors = [record["test_error"] for record in history if "test_error" in record]
        self.bar: Any = None
        self.events: Any = None
        self.wandb: Any = None
        if not active:
            return
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in history))
        if config.tensorboard or config.skip_log_interval:
            from tensorboardX import SummaryWriter

            options = {"purge_step": done + 1, "filename_suffix": f".{time.time_ns()}", **WRITING}
            self.events = SummaryWriter(str(folder), **options)
        if config.wandb_project:
            self.wandb = _wandb_run(folder, config)
        if sys.stderr.isatty():
            self.bar = _bar(config.iterations, done)

    def iteration(self, number: int, loss: Any) -> None:
        """Show that ``number`` iterations are done; ``loss`` is a tensor that is read only when shown."""
        now = time.monotonic()
        if self.bar is not None:
            if now - self.last_shown > FIGURES_EVERY:
                self.last_shown = now
                figures = {"loss": f"{float(loss):.4f}", "lr": f"{self.config.learning_rate(number - 1):g}"}
                if self.errors:
                    figures["test error"] = f"{self.errors[-1]:.2f} %"
                self.bar.set_postfix(figures, refresh=False)
            self.bar.update(number - self.bar.n)
        elif self.active and now - self.last_shown > LINES_EVERY:
            self.print(f"iteration {number}/{self.config.iterations}  loss {float(loss):.4f}")

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` to the log, its numbers to the events, too."""
        if not self.active:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        self.scalars({k: v for k, v in numbers.items() if k not in ("epoch", "iteration")}, record["iteration"])
        if self.events is not None:
            self.events.flush()

    def epoch(self, record: dict[str, Any]) -> None:
        """Write the record of an epoch and print a line."""
        self.write(record)
        parts = [f"epoch {record['epoch']}", f"iteration {record['iteration']}/{self.config.iterations}"]
        parts += [f"lr {record['lr']:g}", f"train loss {record['train_loss']:.4f}"]
        if "test_error" in record:
            self.errors.append(record["test_error"])
            parts.append(f"test error {record['test_error']:.2f} % (best {record['best_error']:.2f} %)")
        if "valid_error" in record:
            parts.append(f"validation error {record['valid_error']:.2f} %")
        parts.append(f"{record['images_per_second']:.0f} images/s")
        self.print("  ".join(parts))

    def scalars(self, values: dict[str, Any], number: int) -> None:
        """``values`` of iteration ``number``, by name, to TensorBoard and Weights & Biases where they are asked for."""
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, number)
        if self.wandb is not None and values:
            self.wandb.log(values, step=number)

    def print(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self.active:
            return
        self.last_shown = time.monotonic()
        print_line(line, bar=self.bar)

    def close(self) -> None:
        for output in (self.bar, self.events):
            if output is not None:
                output.close()
        if self.wandb is not None:
            self.wandb.finish()


def _bar(total: int, done: int) -> Any | None:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=done, unit="it", dynamic_ncols=True)


def _wandb_run(folder: Path, config: Config) -> Any:
    """A run of its own, named for the folder, where its files go, too. Raises ``UserError``."""
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb-project needs wandb: pip install wandb") from None
    name = "/".join(folder.absolute().parts[-2:])
    try:
        return wandb.init(
            project=config.wandb_project, name=name, dir=str(folder), config=dataclasses.asdict(config), reinit=True
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--wandb-project: {reason} (WANDB_MODE=offline needs no account)") from None


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"fairseq_rskip": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def machine(device: torch.device, world: int) -> dict[str, Any]:
    """What a speed depends on."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "processes": world}
    return {
        "device": f"CPU {platform.machine()}",
        "processes": world,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
