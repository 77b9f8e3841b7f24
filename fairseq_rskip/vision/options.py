"""The settings of a training run and their command line, without torch, so that ``--help`` answers at once.

The options of the skip connection are generated from its kinds; :mod:`.config` adds them.
"""

import argparse
import dataclasses
import functools
import math
from typing import Any

from ..console import Parser, between, number_or_auto, whole_number
from ..errors import UserError

ABOUT = "Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, with any skip connection."
MORE = "docs/cifar.md has the commands of the paper's rows, and those for several GPUs.\n"
DATA_SETS = ("cifar10", "cifar100", "digits")
FOLDER = "imagefolder:"
CACHE = "~/.cache/fairseq_rskip"
WHOLE, WARM_UP = 64_000, 400  # updates of the paper's schedule, and of its warm-up


def _option(group: str, default: Any, text: str, **extra: Any) -> Any:
    """A field with its help; ``free`` marks one that may differ between a checkpoint and the run that resumes it.

    ``type`` converts and checks what the command line gives; by default numbers are from 0.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **extra})


_positive = between(0, math.inf, open_below=True)
_data, _network, _training, _running = (
    functools.partial(_option, group) for group in ("data", "network", "training", "running")
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings but those of the skip connection, with the paper's values as defaults."""

    data: str = _data("cifar10", "cifar10, cifar100, digits or imagefolder:PATH")
    data_dir: str = _data(CACHE, "folder that CIFAR is downloaded to", free=True)
    cache: str = _data(CACHE, "folder of decoded image folders", free=True)
    train_images: int = _data(0, "train on N images, balanced over classes; 0: all")
    valid_images: int = _data(0, "hold out N training images for validation")
    crop: int = _data(4, "padding of the random crop in pixels; 0: no crop")
    flip: bool = _data(True, "do not flip images (digits are never flipped)")

    depth: int = _network(110, "layers, 6n+2: 20, 32, 44, 56, 110, ...")
    width: int = _network(16, "channels of the first of three stages", type=whole_number(1))
    shortcut: str = _network("A", "where widths change: pad (A) or convolve (B)", choices=("A", "B"))
    finetune_from: str = _network("", "start from this checkpoint's weights")

    iterations: int = _training(WHOLE, "number of updates", type=whole_number(1))
    batch_size: int = _training(128, "images per update, over all processes", type=whole_number(1))
    lr: float = _training(0.1, "learning rate after the warm-up", type=_positive)
    warmup_lr: float = _training(0.01, "learning rate during the warm-up", type=_positive)
    warmup_iterations: int | None = _training(None, "updates of the warm-up (400 of 64000; fewer of a shorter run)")
    milestones: tuple[int, ...] | None = _training(None, "updates that lower the rate (default: 1/2 and 3/4 of all)")
    lr_factor: float = _training(0.1, "factor of the rate at a milestone", type=_positive)
    momentum: float = _training(0.9, "momentum of SGD", type=between(0, 1))
    weight_decay: float = _training(2e-4, "weight decay; skip weights have none, except wskip's")
    amp: str = _training("off", "mixed precision; fp16 needs a GPU", choices=("off", "bf16", "fp16"))
    seeds: tuple[int, ...] = _training((1,), "train once with each seed", free=True)

    output: str = _running("", "output folder (default: runs/<data>-resnet<depth>-<skip>)", free=True)
    resume: bool = _running(False, "resume from the checkpoints in --output", free=True)
    save_interval: int = _running(0, "save every N updates, too; 0: after each epoch", free=True)
    log_interval: int = _running(100, "updates between records of the log; 0: none", free=True)
    skip_log_interval: int = _running(0, "log the skip connections every N updates; 0: never", free=True)
    wandb_project: str = _running("", "log to this project of Weights & Biases, too", free=True)
    tensorboard: bool = _running(False, "write TensorBoard events, too", free=True)
    device: str = _running("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"), free=True)
    compile: bool = _running(False, "compile the network with torch.compile", free=True)

    def __post_init__(self) -> None:
        """Raise ``UserError`` for a value that is not accepted."""
        if self.data not in DATA_SETS and not (self.data.startswith(FOLDER) and len(self.data) > len(FOLDER)):
            raise UserError(f"--data {self.data!r}: expected one of {', '.join(DATA_SETS)} or {FOLDER}PATH")
        if self.depth % 6 != 2 or not 8 <= self.depth < 10_000:
            raise UserError(f"--depth {self.depth}: expected 6n+2, for example 20, 32, 44, 56, 110")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not all(0 <= s < 2**63 for s in self.seeds):
            raise UserError(f"--seeds {' '.join(map(str, self.seeds))}: expected different integers from 0 to 2^63 - 1")
        steps = self.all_milestones()
        if self.warmup_iterations is None:
            object.__setattr__(self, "warmup_iterations", min(WARM_UP, round(WARM_UP * self.iterations / WHOLE)))
        if list(steps) != sorted(set(steps)) or any(step < 1 for step in steps):
            raise UserError(f"--milestones {' '.join(map(str, steps))}: expected increasing iterations >= 1")
        if steps and self.warmup_iterations >= steps[0]:
            given = f"--warmup-iterations {self.warmup_iterations}"
            raise UserError(f"{given}: expected fewer than the first milestone's {steps[0]}")

    def all_milestones(self) -> tuple[int, ...]:
        if self.milestones is None:
            return tuple(sorted({max(1, self.iterations // 2), max(1, self.iterations * 3 // 4)}))
        return self.milestones

    def learning_rate(self, iteration: int) -> float:
        """The rate for update number ``iteration``, counted from 0 (He et al. 2016b: 0.01, 0.1, 0.01, 0.001)."""
        if iteration < self.warmup_iterations:
            return self.warmup_lr
        rate = self.lr * self.lr_factor ** sum(iteration >= milestone for milestone in self.all_milestones())
        return float(f"{rate:.12g}")  # 0.1 * 0.1 is 0.01, not 0.010000000000000002

    def fixed(self) -> dict[str, Any]:
        """The settings that a checkpoint and the run that resumes it must share."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("free")}

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain values, tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def flag(field: "dataclasses.Field[Any]") -> str:
    """Return the option that sets a field: ``--no-...`` for one that is on by default."""
    return ("--no-" if field.default is True else "--") + field.name.replace("_", "-")


def make_parser() -> tuple[Parser, Any]:
    """The parser of all ``Settings`` and the main options of the skip connection, and the group of the latter."""
    parser = Parser(usage="%(prog)s [options]", description=ABOUT, epilog=MORE, argument_default=argparse.SUPPRESS)
    names = ("data", "network", "skip connection", "training", "running")
    groups = {name: parser.add_argument_group(name) for name in names}
    for field in dataclasses.fields(Settings):
        _add(groups[field.metadata["group"]], field)
    skip = groups["skip connection"]
    skip.add_argument("--skip-kind", metavar="KIND", help="kind of skip connection (rskip)")
    text = "steps of rskip, weight of x in xskip, or auto"
    skip.add_argument("--skip-lambda", type=number_or_auto, metavar="N", help=text)
    skip.add_argument("--skip-norm", metavar="NORM", help="normalisation: layer, rms, batch, none, ...")
    skip.add_argument("--help-skips", action=_HelpSkips, nargs=0, help="list all kinds and their further options")
    return parser, skip


class _HelpSkips(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_given: Any) -> None:
        from .config import skip_help

        parser.exit(print(skip_help()))


def _add(group: Any, field: "dataclasses.Field[Any]") -> None:
    text, default = field.metadata["help"].replace("%", "%%"), field.default
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        group.add_argument(flag(field), dest=field.name, action=action, help=text)
        return
    several, choices = "tuple" in str(field.type), field.metadata.get("choices")
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    text += f" ({shown})" if shown not in ("", None) else ""
    kind = int if several or default is None else type(default)
    check = field.metadata.get("type", {int: whole_number(0), float: between(0, math.inf), str: str}[kind])
    metavar = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    nargs = "+" if several else None
    group.add_argument(flag(field), type=check, choices=choices, nargs=nargs, metavar=metavar, help=text)
