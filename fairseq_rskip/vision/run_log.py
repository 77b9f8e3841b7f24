"""The log of one run: a file of records, the terminal, TensorBoard and Weights & Biases."""

import time
from pathlib import Path
from typing import Any

from ..analysis.skip_log import SkipLines
from ..console import Progress
from ..files import append_json, write_json_lines
from .config import Config

LOG = "log.jsonl"
EPOCH_FORMATS = {  # what is printed of an epoch
    "lr": "{:g}",
    "train_loss": "{:.4f}",
    "test_error": "{:.2f} %",
    "best_error": "{:.2f} %",
    "valid_error": "{:.2f} %",
    "images_per_second": "{:.0f}",
}


class RunLog:
    """The log of one run in ``folder``; ``active=False`` makes it print and write nothing.

    It is active in the first process. ``history`` has the records of an earlier part of the run and
    gets those of this part, which begins after iteration ``done``. The file starts with that
    history, so that a run which was killed and resumed has every epoch once.
    """

    def __init__(
        self,
        folder: Path,
        history: list[dict[str, Any]],
        config: Config,
        active: bool,
        done: int = 0,
    ):
        self.path = folder / LOG
        self.history = history
        self.config = config
        self.active = active
        self.progress: Progress | None = None
        self.events: Any = None
        self.wandb: Any = None
        if not active:
            return

        write_json_lines(self.path, history)
        self.skip_lines = SkipLines(folder, done + 1)
        if config.tensorboard:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(
                str(folder), purge_step=done + 1, filename_suffix=f".{time.time_ns()}"
            )
        if config.wandb_project:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb_project,
                name="/".join(folder.absolute().parts[-2:]),
                dir=folder,
                config=config.as_dict(),
                reinit=True,
            )

    def iteration(self, number: int, loss: Any) -> None:
        """Show that ``number`` iterations are done.

        ``loss`` is a tensor that is read only when it is shown.
        """
        if not self.active:
            return

        def figures() -> dict[str, str]:
            return self._figures(number, loss)

        if self.progress is None:
            self.progress = Progress(
                self.config.iterations, "iteration", done=number - 1, stream="stdout"
            )
            self.progress.advance()
            self.progress.show(figures())
        else:
            self.progress.advance(figures)

    def _figures(self, number: int, loss: Any) -> dict[str, str]:
        """Return what the line of progress shows after iteration ``number``."""
        figures = {
            "loss": f"{float(loss):.4f}",
            "lr": f"{self.config.learning_rate(number - 1):g}",
        }
        errors = [record["test_error"] for record in self.history if "test_error" in record]
        if errors:
            figures["test error"] = f"{errors[-1]:.2f} %"
        return figures

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record`` to the log; its numbers go to TensorBoard and W&B, too.

        The record of an epoch is printed.
        """
        self.history.append(record)
        if not self.active:
            return

        append_json(self.path, record)
        numbers = {}
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in ("epoch", "iteration"):
                numbers[name] = value
        self._write_scalars(numbers, record["iteration"])
        if "epoch" in record:
            self._print_epoch(record)

    def _print_epoch(self, record: dict[str, Any]) -> None:
        parts = [
            f"epoch {record['epoch']}",
            f"iteration {record['iteration']}/{self.config.iterations}",
        ]
        for name, template in EPOCH_FORMATS.items():
            if name in record:
                parts.append(f"{name.replace('_', ' ')} {template.format(record[name])}")
        self.progress.print("  ".join(parts))

    def skips(self, values: dict[str, float], number: int) -> None:
        """Write what iteration ``number`` measured of the skip connections, if anything."""
        if self.active and values:
            self.skip_lines.write(number, values)
            self._write_scalars(values, number)

    def _write_scalars(self, values: dict[str, Any], number: int) -> None:
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
