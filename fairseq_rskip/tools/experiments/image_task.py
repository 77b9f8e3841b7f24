"""Image classification as a task of ``rskip run``: checks, commands and files of train_cifar.py."""

import functools
import json
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.files import read_json_lines
from fairseq_rskip.vision.options import DATA_SETS, FOLDER

from .records import Cell, Experiment, Run, dashed
from .task import RSKIP, Task, own_rule

HELD_OUT = ("valid_error", "valid_loss")


class Images(Task):
    """Training by train_cifar.py."""

    names = DATA_SETS
    prefix = FOLDER
    metric = "error"
    held_out = "valid_error"
    has_architectures = False
    metrics = dict.fromkeys(
        ("error", "best_error", "test_loss", "train_loss", "valid_error", "valid_loss"), True
    )
    over_seeds = tuple(metrics)
    weights = ("checkpoint.pt",)
    parent = "finetune-from"
    reserved = ("data", "seeds", "output", "resume")

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """train_cifar.py's options; those with "free" in their metadata do not change results."""
        from fairseq_rskip.vision.config import Config

        fields = Config.__dataclass_fields__.items()
        return {name.replace("_", "-"): field for name, field in fields}

    @property
    def free(self) -> list[str]:
        return [name for name, field in self.fields.items() if field.metadata.get("free")]

    def data_name(self, data: str) -> str:
        name = Path(data.removeprefix(FOLDER)).name
        if data.startswith(FOLDER) and name in DATA_SETS:
            return f"folder {name}"
        return name

    def make_run(self, data: str, cell: Cell, experiment: Experiment) -> tuple[Run, list[str]]:
        from fairseq_rskip.vision.config import parse

        config = parse(self._words(data, cell.options))
        for metric in (experiment.metric, *experiment.table.also):
            if metric in HELD_OUT and not config.valid_images:
                raise UserError(f"{metric} is of held-out images; set valid-images")

        run = Run(
            task="images",
            data=data,
            options=cell.options,
            identity={**self._identity(data, config), **own_rule("", cell.options)},
            name=f"{config.name()}-{config.iterations}",
            length=config.iterations,
            unit="iterations",
        )
        return run, []

    def _identity(self, data: str, config: Any) -> dict[str, Any]:
        """The settings of ``config`` that change results and are not train_cifar.py's defaults."""
        defaults = default_config(data)
        settings = {}
        for name, value in dashed(config.fixed()).items():
            name = name.replace("-", "_")
            if name in ("data", "iterations") or value != getattr(defaults, name):
                settings[name] = value
        settings = json.loads(json.dumps(settings))  # tuples are lists
        return {**settings, "data": self.data_name(data)}

    def _words(self, data: str, options: dict[str, Any]) -> list[str]:
        """Options as train_cifar.py takes them. Raises ``UserError`` for an unknown one."""
        words = ["--data", data]
        for name, value in options.items():
            if name not in self.fields:
                raise UserError(
                    f"train_cifar.py has no option {name!r}; "
                    + did_you_mean(name, self.fields, "rskip train-cifar -h lists them")
                )
            default = self.fields[name].default
            if isinstance(value, bool) and isinstance(default, bool):
                if value != default:
                    words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is False and "off" in (self.fields[name].metadata.get("choices") or ()):
                words += [f"--{name}", "off"]  # YAML reads the word off as false
            else:
                words += [f"--{name}", str(value)]
        return words

    def commands(self, run: Run) -> list[list[str]]:
        """As in the base class; train_cifar.py names the folder after the seed."""
        command = [*RSKIP, "train-cifar", *self._words(run.data, run.options)]
        command += ["--seeds", str(run.seed), "--output", str(run.folder.parent), "--resume"]
        return [command]

    def progress(self, run: Run) -> tuple[float, str]:
        newest: dict[str, Any] = {}
        try:
            for record in read_json_lines(run.folder / "log.jsonl"):
                newest |= record
            losses = []
            for name in ("train_loss_so_far", "train_loss", "valid_error", "test_error"):
                if name in newest:
                    losses.append(f"{name} {newest[name]:.3f}")
            return newest["iteration"] / run.length, ", ".join(losses)
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0, ""

    def measure(self, run: Run) -> dict[str, Any] | None:
        try:
            result = json.loads((run.folder / "result.json").read_text("utf-8"))
            values = {}
            for name in self.metrics:
                if result.get(name) is not None:
                    values[name] = float(result[name])
            return {
                "values": values,
                "parameters": result.get("parameters"),
                "versions": result.get("versions"),
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return None


@functools.cache  # the rows of a table share their data
def default_config(data: str) -> Any:
    """train_cifar.py's configuration for ``data`` without other options."""
    from fairseq_rskip.vision.config import parse

    return parse(["--data", data])
