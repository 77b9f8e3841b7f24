"""What a run reports: a progress bar or lines, JSON lines, TensorBoard events, Weights & Biases."""

import io
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..analysis.live import SkipLines
from ..console import print_line
from ..errors import UserError
from ..files import write_text
from .config import Config

LOG = "log.jsonl"
FIGURES_EVERY, LINES_EVERY = 1.0, 30.0  # seconds between figures, on a terminal and elsewhere: they wait for the device
FIRST = "iteration {n}/{total}{postfix}"
LINE = "iteration {n}/{total}  {rate_fmt}  {remaining} left{postfix}"


class RunLog:
    """The log of one run in ``folder``, of the first process; ``active=False`` makes it print and write nothing.

    ``history`` is what an earlier part of the run logged, ``done`` the iteration after which this part begins. The log
    starts with that history, so that a run which was killed and resumed has every epoch once.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]], config: Config, active: bool, done: int = 0):
        from tqdm import tqdm

        self.path, self.active, self.last_shown, self.first = folder / LOG, active, -math.inf, active
        self.rate = config.learning_rate
        self.errors = [record["test_error"] for record in history if "test_error" in record]
        self.terminal, self.events, self.wandb = sys.stderr.isatty(), None, None
        # the same figures as a bar on a terminal, and in lines elsewhere
        where = (
            {"dynamic_ncols": True}
            if self.terminal
            else {"bar_format": FIRST, "file": io.StringIO(), "mininterval": LINES_EVERY}
        )
        self.bar = tqdm(total=config.iterations, initial=done, unit="it", smoothing=0, disable=not active, **where)
        if not active:
            return
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in history))
        self.skip_lines = SkipLines(folder, done + 1)
        if config.tensorboard:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(folder), purge_step=done + 1, filename_suffix=f".{time.time_ns()}")
        if config.wandb_project:
            self.wandb = _wandb_run(folder, config)

    def iteration(self, number: int, loss: Any) -> None:
        """Show that ``number`` iterations are done; ``loss`` is a tensor that is read only when shown."""
        self.bar.update(number - self.bar.n)
        now = time.monotonic()
        if self.active and now - self.last_shown > (FIGURES_EVERY if self.terminal else LINES_EVERY):
            self.last_shown = now
            figures = {"loss": f"{float(loss):.4f}", "lr": f"{self.rate(number - 1):g}"}
            if self.errors:
                figures["test error"] = f"{self.errors[-1]:.2f} %"
            self.bar.set_postfix(figures, refresh=False)
            if not self.terminal:
                print_line(str(self.bar))
                self.bar.bar_format = LINE
        if self.first:  # it prepares much, and says little about speed
            self.first, self.bar.initial, self.bar.start_t = False, number, time.time()

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` to the log; its numbers go to TensorBoard and Weights & Biases, too."""
        if not self.active:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        self._scalars({k: v for k, v in numbers.items() if k not in ("epoch", "iteration")}, record["iteration"])

    def epoch(self, record: dict[str, Any]) -> None:
        """Write the record of an epoch and print a line."""
        self.write(record)
        parts = [f"epoch {record['epoch']}", f"iteration {record['iteration']}/{self.bar.total}"]
        parts += [f"lr {record['lr']:g}", f"train loss {record['train_loss']:.4f}"]
        if "test_error" in record:
            self.errors.append(record["test_error"])
            parts.append(f"test error {record['test_error']:.2f} % (best {record['best_error']:.2f} %)")
        if "valid_error" in record:
            parts.append(f"validation error {record['valid_error']:.2f} %")
        parts.append(f"{record['images_per_second']:.0f} images/s")
        self.print("  ".join(parts))

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

    def print(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.active:
            print_line(line, bar=self.bar if self.terminal else None)

    def close(self) -> None:
        self.bar.close()
        if self.events is not None:
            self.events.close()
        if self.wandb is not None:
            self.wandb.finish()


def _wandb_run(folder: Path, config: Config) -> Any:
    """A new run, named after the folder, where its files go, too. Raises ``UserError``."""
    try:
        import wandb
    except ImportError:
        raise UserError("--wandb-project needs wandb: pip install wandb") from None
    name = "/".join(folder.absolute().parts[-2:])
    try:
        return wandb.init(
            project=config.wandb_project, name=name, dir=str(folder), config=config.as_dict(), reinit=True
        )
    except wandb.Error as error:
        raise UserError(f"--wandb-project: {' '.join(str(error).split())[:200]}") from None


def versions() -> dict[str, str]:
    """Versions of what computes."""
    found = {"fairseq_rskip": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, "cuda": torch.version.cuda} if torch.version.cuda else found


def machine(device: torch.device, world: int) -> dict[str, Any]:
    """What a speed depends on."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "processes": world}
    found = {"device": f"CPU {platform.machine()}", "processes": world}
    return {**found, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
