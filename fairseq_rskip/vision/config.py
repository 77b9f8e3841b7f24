"""Every setting of a training run, in one dataclass; the command line is generated from it."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, get_type_hints

from ..console import Parser
from ..errors import UserError
from ..norms import NORM_AXES
from ..residual import KINDS, SkipConnection, in_terms_of_flags, label, select, settings
from ..residual.options import flag as skip_flag
from .batches import PADDINGS
from .model import SHORTCUTS, WIDTH, check_depth

DATA_SETS = ("cifar10", "cifar100", "digits")
FOLDER = "imagefolder:"


def _option(default: Any, text: str, **extra: Any) -> Any:
    """A field with its help; ``free`` marks one that may differ between a checkpoint and the run that resumes it."""
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: default, metadata={"help": text, **extra})
    return dataclasses.field(default=default, metadata={"help": text, **extra})


IMAGE_KINDS = {name: kind for name, kind in KINDS.items() if kind.for_images}
SKIP_SETTINGS = {skip_flag(setting.name): setting for setting in settings(IMAGE_KINDS)}
_SkipOptions = dataclasses.make_dataclass(
    "_SkipOptions",
    [
        (name, Optional[s.type], _option(None, s.help, **({"choices": s.choices} if s.choices else {})))
        for name, s in SKIP_SETTINGS.items()
    ],
    frozen=True,
)


@dataclasses.dataclass(frozen=True)
class Config(_SkipOptions):
    """The settings, with the paper's values as defaults. Raises ``UserError`` for a value that is not accepted."""

    data: str = _option("cifar10", "cifar10, cifar100, digits, or imagefolder:PATH")
    data_dir: str = _option("~/.cache/fairseq_rskip", "where cifar10 and cifar100 are downloaded to", free=True)
    cache: str = _option("~/.cache/fairseq_rskip", "where decoded image folders are kept", free=True)
    train_images: int = _option(0, "train on this many images only, as many of each class; 0 means all")
    valid_images: int = _option(
        0, "hold this many training images out, as many of each class, the same for every seed, to choose settings by"
    )

    depth: int = _option(110, "layers of the PreAct-ResNet, 6n+2: 20, 32, 44, 56, 110, ...")
    width: int = _option(WIDTH, "channels of the first of three stages, each twice as wide as the one before")
    shortcut: str = _option(
        "A", "where the width changes: A pads channels with zeros, B is a 1x1 convolution", choices=SHORTCUTS
    )
    skip_kind: str = _option(
        "rskip", "the skip connection; xskip with lambda 1, norm none is plain", choices=IMAGE_KINDS
    )
    skip_norm_axes: str = _option(
        "c", "layer norm over the channels of each position (c) or over a whole image (chw)", choices=NORM_AXES
    )

    finetune_from: str = _option("", "start with the weights of this checkpoint; askip takes an rskip's")
    iterations: int = _option(64000, "updates in all")
    batch_size: int = _option(128, "images per update, over all processes")
    lr: float = _option(0.1, "learning rate after the warm-up")
    warmup_lr: float = _option(0.01, "learning rate during the warm-up")
    warmup_iterations: int = _option(400, "length of the warm-up")
    milestones: tuple[int, ...] | None = _option(
        None, "iterations at which the rate is multiplied by --lr-factor (default: 1/2 and 3/4 of --iterations)"
    )
    lr_factor: float = _option(0.1, "what a milestone multiplies the rate by")
    momentum: float = _option(0.9, "of SGD")
    weight_decay: float = _option(2e-4, "of all but what a skip connection learns; wSkip's w is shrunk, too")
    crop: int = _option(4, "padded pixels on each side of the random crop; 0 turns it off")
    padding: str = _option(
        "mean",
        "what the crop pads with: mean (normalise first, as He et al.) or black (torchvision's usual order)",
        choices=PADDINGS,
    )
    flip: bool = _option(True, "do not flip half of the images (digits never are: mirrored, they would be others)")

    seeds: tuple[int, ...] = _option((1,), "train once for each of these, one after another", free=True)
    output: str = _option("", "where runs are written (default: runs/<data>-resnet<depth>-<skip>)", free=True)
    resume: bool = _option(False, "resume from the checkpoints in --output, where there are any", free=True)
    save_interval: int = _option(0, "also save a checkpoint every so many iterations; 0: after each epoch", free=True)
    test_interval: int = _option(1, "epochs between tests; the last iteration is always tested")
    log_interval: int = _option(100, "iterations between the log's records within an epoch; 0: none", free=True)
    tensorboard: bool = _option(False, "write TensorBoard events, too", free=True)
    wandb_project: str = _option("", "log to this project of Weights & Biases, too (needs wandb)", free=True)
    skip_log_interval: int = _option(
        0,
        "write each block's x:F, norm of F(x) over norm of x, and gradient norm to TensorBoard every so many "
        "iterations; 0: never",
        free=True,
    )

    device: str = _option("auto", "auto takes a GPU if there is one", choices=("auto", "cpu", "cuda"), free=True)
    amp: str = _option("off", "mixed precision; fp16 needs a GPU", choices=("off", "bf16", "fp16"))
    memory_format: str = _option(
        "channels_last", "layout of image maps in memory", choices=("channels_last", "contiguous"), free=True
    )
    compile: bool = _option(False, "compile the model with torch.compile", free=True)
    sync_bn: bool = _option(False, "batch statistics over all GPUs (several GPUs only)")

    def __post_init__(self) -> None:
        if self.data not in DATA_SETS and not (self.data.startswith(FOLDER) and len(self.data) > len(FOLDER)):
            raise UserError(f"--data {self.data!r}: expected one of {', '.join(DATA_SETS)} or {FOLDER}PATH")
        for field in dataclasses.fields(self):
            choices, value = field.metadata.get("choices"), getattr(self, field.name)
            if choices and value not in choices and not (value is None and field.name in SKIP_SETTINGS):
                raise UserError(f"{flag(field)} {getattr(self, field.name)!r}: expected one of {', '.join(choices)}")
        self._check_numbers()
        self._check_schedule()
        try:
            check_depth(self.depth)
        except ValueError as error:
            raise UserError(f"--{error}".replace("=", " ", 1)) from None
        skip = self._check_skip()
        if self.skip_log_interval and self.sync_bn and len(skip.post) > 1 and skip.post[0].uses_padding_mask:
            raise UserError("--skip-log-interval: x:F of rskip with --skip-norm batch cannot be had under --sync-bn")

    def _check_skip(self) -> SkipConnection:
        """Refuse what the kind refuses, and set each of its options that was not given to the kind's default."""
        try:
            skip = SkipConnection(self.width, channel_dim=1, **self.skip_options())
        except ValueError as error:
            raise UserError(in_terms_of_flags(str(error))) from None
        for name in SKIP_SETTINGS:
            value = getattr(skip.options, SKIP_SETTINGS[name].name, None)
            object.__setattr__(self, name, SKIP_SETTINGS[name].type(value) if value is not None else None)
        return skip

    def _check_numbers(self) -> None:
        for names, accepted, holds in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                if not (math.isfinite(value) and holds(value)):
                    raise UserError(f"--{name.replace('_', '-')} {value!r}: expected {accepted}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not all(0 <= s < 2**63 for s in self.seeds):
            raise UserError(f"--seeds {' '.join(map(str, self.seeds))}: expected different integers >= 0")

    def _check_schedule(self) -> None:
        steps = self.all_milestones()
        if list(steps) != sorted(set(steps)) or any(step < 1 for step in steps):
            raise UserError(f"--milestones {' '.join(map(str, steps))}: expected increasing iterations >= 1")
        if steps and self.warmup_iterations >= steps[0]:
            raise UserError(
                f"--warmup-iterations {self.warmup_iterations}: expected fewer than the first milestone's {steps[0]} "
                f"(the default is {Config.warmup_iterations}, the paper's)"
            )

    def all_milestones(self) -> tuple[int, ...]:
        if self.milestones is None:
            return tuple(sorted({max(1, self.iterations // 2), max(1, self.iterations * 3 // 4)}))
        return self.milestones

    def learning_rate(self, iteration: int) -> float:
        """The rate for update number ``iteration``, counted from 0 (He et al. 2016b: 0.01, 0.1, 0.01, 0.001).

        ``warmup_lr`` for the first ``warmup_iterations``, then ``lr``, multiplied by ``lr_factor`` at each milestone.
        """
        if iteration < self.warmup_iterations:
            return self.warmup_lr
        rate = self.lr * self.lr_factor ** sum(iteration >= milestone for milestone in self.all_milestones())
        return float(f"{rate:.12g}")  # 0.1 * 0.1 is 0.01, not 0.010000000000000002

    def skip_options(self) -> dict[str, Any]:
        """What ``SkipConnection`` takes beside ``dim``, ``place`` and ``channel_dim``."""
        given = {setting.name: getattr(self, name) for name, setting in SKIP_SETTINGS.items()}
        return {"kind": self.skip_kind, "norm_axes": self.skip_norm_axes, **select(KINDS[self.skip_kind], given)}

    def network(self) -> dict[str, Any]:
        """What ``preact_resnet`` takes beside the number of classes."""
        return {"depth": self.depth, "skip": self.skip_options(), "shortcut": self.shortcut, "width": self.width}

    def name(self) -> str:
        """A short name for the run, such as cifar10-resnet110-rskip2-layer."""
        data = self.data if self.data in DATA_SETS else Path(self.data[len(FOLDER) :]).resolve().name
        parts = [data, f"resnet{self.depth}", label(SkipConnection(1, channel_dim=1, **self.skip_options()))]
        parts += [self.skip_norm_axes] if self.skip_norm_axes != "c" else []
        parts += [f"width{self.width}"] if self.width != WIDTH else []
        return "-".join(parts + (["B"] if self.shortcut == "B" else []))

    def folder(self) -> Path:
        """Where the runs are written, one folder a seed."""
        return Path(self.output).expanduser() if self.output else Path("runs") / self.name()

    def fixed(self) -> dict[str, Any]:
        """The settings that make a run what it is: those that a checkpoint and what resumes it must share."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("free")}

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain values, tuples as lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


_RANGES: Sequence[tuple[str, str, Callable[[float], bool]]] = (
    ("width iterations batch_size test_interval", "an integer >= 1", lambda v: v >= 1),
    (
        "train_images valid_images warmup_iterations save_interval log_interval skip_log_interval crop",
        "an integer >= 0",
        lambda v: v >= 0,
    ),
    ("lr warmup_lr lr_factor", "a number > 0", lambda v: v > 0),
    ("weight_decay", "a number >= 0", lambda v: v >= 0),
    ("momentum", "a number from 0 to below 1", lambda v: 0 <= v < 1),
)


def flag(field: "dataclasses.Field[Any]") -> str:
    """The option that sets a field; one that is on by default is turned off by ``--no-...``."""
    return ("--no-" if field.default is True else "--") + field.name.replace("_", "-")


def parse(argv: Sequence[str] | None, description: str, epilog: str = "") -> Config:
    """The settings that a command line asks for.

    Raises ``UserError`` for a value that is not accepted; ends the program, with one line, for an unknown option.
    """
    parser = Parser(description=description, epilog=epilog, argument_default=argparse.SUPPRESS)
    hints = get_type_hints(Config)
    for field in dataclasses.fields(Config):
        text, hint = field.metadata["help"], hints[field.name]
        if bool in (hint, *getattr(hint, "__args__", ())):
            parser.add_argument(flag(field), dest=field.name, action=f"store_{not field.default}".lower(), help=text)
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text += "" if default in ("", None) else f" (default: {shown})"
        if field.name in SKIP_SETTINGS:
            hint = SKIP_SETTINGS[field.name].type
        several = hint not in (str, int, float)
        options = {"nargs": "+", "type": int, "metavar": "N"} if several else {"type": hint}
        if "choices" in field.metadata:
            options["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
        parser.add_argument(flag(field), help=text.replace("%", "%%"), **options)
    given = vars(parser.parse_args(argv))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def difference(saved: dict[str, Any], config: Config, there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What a checkpoint or result disagrees in with a run: settings, in terms of options, and identity.

    The identities, ``there`` and ``here``, are a description -> its value; since they cover the images themselves, the
    path of an image folder is free. An option that is newer than ``saved`` had its default there.
    """
    saved = {**Config().as_dict(), **saved, **_skip_options_of(saved)}
    pairs = [
        (f"--{name.replace('_', '-')}", saved[name], list(value) if isinstance(value, tuple) else value)
        for name, value in config.fixed().items()
    ]
    pairs += [(name, there.get(name), value) for name, value in here.items()]
    both_folders = str(saved.get("data")).startswith(FOLDER) and config.data.startswith(FOLDER)
    return [
        f"{name}: {old} there, {new} here"
        for name, old, new in pairs
        if old != new and not (name == "--data" and both_folders)
    ]


def _skip_options_of(saved: dict[str, Any]) -> dict[str, Any]:
    """The skip options of a run as they would be saved now: earlier versions had fewer, and stored idle ones as 1."""
    known = {field.name for field in dataclasses.fields(Config)}
    try:
        config = Config(**{k: v for k, v in saved.items() if k in {"skip_kind", *SKIP_SETTINGS} & known})
    except UserError:
        return {}
    return {name: getattr(config, name) for name in SKIP_SETTINGS}
