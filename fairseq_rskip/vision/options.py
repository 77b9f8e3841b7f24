"""The settings of a training run and their command line, without torch: ``--help`` answers at once.

The options of the skip connection are generated from its kinds; :mod:`.config` adds them.
"""

import argparse
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from ..console import Parser, between, number_or_auto, whole_number
from ..option_error import refused

ABOUT = (
    "Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, "
    "with any skip connection."
)
MORE = "docs/cifar.md has the commands of the paper's rows, and those for several GPUs.\n"
DATA_SETS = ("cifar10", "cifar100", "digits")
FOLDER = "imagefolder:"
WHOLE = 64_000  # updates of the paper's schedule
WARM_UP = 400  # updates of its warm-up


def _option(group: str, default: Any, text: str, **extra: Any) -> Any:
    """Return a field with its help.

    ``free`` marks one that may differ between a checkpoint and the run that resumes it. ``type``
    converts and checks what the command line gives; by default numbers are from 0.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **extra})


_data = functools.partial(_option, "data")
_network = functools.partial(_option, "network")
_training = functools.partial(_option, "training")
_running = functools.partial(_option, "running")
_positive = between(0, math.inf, open_below=True)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings but those of the skip connection, with the paper's values as defaults.

    Raises ``UserError`` for a value that is not accepted.
    """

    data: str = _data("cifar10", "cifar10, cifar100, digits or imagefolder:PATH")
    data_dir: str = _data("data", "folder that CIFAR is downloaded to", free=True)
    cache: str = _data("", "folder of decoded image folders (~/.cache/fairseq_rskip)", free=True)
    train_images: int = _data(0, "train on N images, balanced over classes; 0: all")
    valid_images: int = _data(0, "hold out N training images for validation")
    crop: int = _data(4, "padding of the random crop in pixels; 0: no crop")
    flip: bool = _data(True, "do not flip images (digits are never flipped)")

    depth: int = _network(110, "layers, 6n+2: 20, 32, 44, 56, 110, ...")
    width: int = _network(16, "channels of the first of three stages", type=whole_number(1))
    shortcut: str = _network(
        "A", "where widths change: pad (A) or convolve (B)", choices=("A", "B")
    )
    finetune_from: str = _network("", "start from this checkpoint's weights")

    iterations: int = _training(WHOLE, "number of updates", type=whole_number(1))
    batch_size: int = _training(128, "images per update, over all processes", type=whole_number(1))
    lr: float = _training(0.1, "learning rate after the warm-up", type=_positive)
    warmup_lr: float = _training(0.01, "learning rate during the warm-up", type=_positive)
    warmup_iterations: int | None = _training(
        None, "updates of the warm-up (400 of 64000; fewer of a shorter run)"
    )
    milestones: tuple[int, ...] | None = _training(
        None, "updates that lower the rate (default: 1/2 and 3/4 of all)"
    )
    lr_factor: float = _training(0.1, "factor of the rate at a milestone", type=_positive)
    momentum: float = _training(0.9, "momentum of SGD", type=between(0, 1))
    weight_decay: float = _training(2e-4, "weight decay; skip weights have none, except wskip's")
    skip_lr_scale: float = _training(
        1.0, "multiplies the learning rate of what the skip connections learn", type=_positive
    )
    amp: str = _training(
        "off", "mixed precision; fp16 needs a GPU", choices=("off", "bf16", "fp16")
    )
    seeds: tuple[int, ...] = _training((1,), "train once with each seed", free=True)

    output: str = _running(
        "", "output folder (default: runs/<data>-resnet<depth>-<skip>)", free=True
    )
    resume: bool = _running(False, "resume from the checkpoints in --output", free=True)
    save_interval: int = _running(0, "save every N updates, too; 0: after each epoch", free=True)
    log_interval: int = _running(100, "updates between records of the log; 0: none", free=True)
    skip_log_interval: int = _running(
        0, "log the skip connections every N updates; 0: never", free=True
    )
    wandb_project: str = _running("", "log to this project of Weights & Biases, too", free=True)
    tensorboard: bool = _running(False, "write TensorBoard events, too", free=True)
    device: str = _running(
        "auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"), free=True
    )
    compile: bool = _running(False, "compile the network with torch.compile", free=True)

    def __post_init__(self) -> None:
        self._check_data()
        self._check_depth()
        self._check_seeds()
        if self.warmup_iterations is None:
            warm_up = min(WARM_UP, round(WARM_UP * self.iterations / WHOLE))
            object.__setattr__(self, "warmup_iterations", warm_up)  # the dataclass is frozen
        self._check_schedule()

    def _check_data(self) -> None:
        names_folder = self.data.startswith(FOLDER) and self.data != FOLDER
        if self.data in DATA_SETS or names_folder:
            return
        expected = f"one of {', '.join(DATA_SETS)} or {FOLDER}PATH"
        if self.data and Path(self.data).is_dir():
            expected = f"{FOLDER}{self.data} for the images in that folder, or {expected}"
        raise refused("data", self.data, expected)

    def _check_depth(self) -> None:
        if self.depth % 6 != 2 or not 8 <= self.depth < 10_000:
            raise refused("depth", self.depth, "6n+2, for example 20, 32, 44, 56, 110")

    def _check_seeds(self) -> None:
        are_different = len(set(self.seeds)) == len(self.seeds)
        are_in_range = all(0 <= seed < 2**63 for seed in self.seeds)
        if not self.seeds or not are_different or not are_in_range:
            raise refused("seeds", self.seeds, "different integers from 0 to 2^63 - 1")

    def _check_schedule(self) -> None:
        steps = self.all_milestones()
        are_increasing = list(steps) == sorted(set(steps))
        if not are_increasing or any(step < 1 for step in steps):
            raise refused("milestones", steps, "increasing iterations >= 1")
        if steps and self.warmup_iterations >= steps[0]:
            fewer = f"fewer than the first milestone's {steps[0]}"
            raise refused("warmup-iterations", self.warmup_iterations, fewer)

    def all_milestones(self) -> tuple[int, ...]:
        """Return the updates that lower the rate, ascending."""
        if self.milestones is not None:
            return self.milestones
        half = max(1, self.iterations // 2)
        three_quarters = max(1, self.iterations * 3 // 4)
        return (half,) if half == three_quarters else (half, three_quarters)

    def learning_rate(self, iteration: int) -> float:
        """Return the rate of update number ``iteration``, counted from 0.

        By default it is 0.01, 0.1, 0.01, 0.001 (He et al. 2016b).
        """
        if iteration < self.warmup_iterations:
            return self.warmup_lr
        passed = sum(iteration >= milestone for milestone in self.all_milestones())
        rate = self.lr * self.lr_factor**passed
        return float(f"{rate:.12g}")  # 0.1 * 0.1 is 0.01, not 0.010000000000000002

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a checkpoint and the run that resumes it must share."""
        values = {}
        for field in dataclasses.fields(self):
            if not field.metadata.get("free"):
                values[field.name] = getattr(self, field.name)
        return values

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, tuples as lists."""
        values = dataclasses.asdict(self)
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
        return values


def flag(field: "dataclasses.Field[Any]") -> str:
    """Return the option that sets a field: ``--no-...`` for one that is on by default."""
    prefix = "--no-" if field.default is True else "--"
    return prefix + field.name.replace("_", "-")


def make_parser() -> tuple[Parser, Any]:
    """Return the parser of all ``Settings`` and of the main options of the skip connection.

    The second value is the parser's group of the latter, for further options.
    """
    parser = Parser(
        usage="%(prog)s [options]",
        description=ABOUT,
        epilog=MORE,
        argument_default=argparse.SUPPRESS,
    )
    names = ("data", "network", "skip connection", "training", "running")
    groups = {name: parser.add_argument_group(name) for name in names}
    for field in dataclasses.fields(Settings):
        _add_option(groups[field.metadata["group"]], field)

    skip = groups["skip connection"]
    skip.add_argument("--skip-kind", metavar="KIND", help="kind of skip connection (rskip)")
    skip.add_argument(
        "--skip-lambda",
        type=number_or_auto,
        metavar="N",
        help="steps of rskip, weight of x in xskip, or auto",
    )
    skip.add_argument(
        "--skip-norm", metavar="NORM", help="normalisation: layer, rms, batch, none, ..."
    )
    skip.add_argument(
        "--help-skips", action="store_true", help="list all kinds and their further options"
    )
    return parser, skip


_CHECKS = {int: whole_number(0), float: between(0, math.inf), str: str}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _add_option(group: Any, field: "dataclasses.Field[Any]") -> None:
    """Add the option that sets ``field`` to a parser's group."""
    default = field.default
    text = field.metadata["help"].replace("%", "%%")
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        group.add_argument(flag(field), dest=field.name, action=action, help=text)
        return

    takes_several = "tuple" in str(field.type)
    kind = int if takes_several or default is None else type(default)
    choices = field.metadata.get("choices")
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    if shown not in ("", None):
        text += f" ({shown})"
    group.add_argument(
        flag(field),
        type=field.metadata.get("type", _CHECKS[kind]),
        choices=choices,
        nargs="+" if takes_several else None,
        metavar=None if choices else _METAVARS[kind],
        help=text,
    )
