"""The settings of a training run, with those of its skip connection."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ..errors import UserError
from ..flags import flag as skip_flag
from ..flags import in_terms_of_flags, label, select, settings
from ..residual import KINDS, Place, SkipConnection
from .options import DATA_SETS, FOLDER, Settings, make_parser

IMAGE_KINDS = {name: kind for name, kind in KINDS.items() if kind.for_images}
SKIP_SETTINGS = {skip_flag(setting.name): setting for setting in settings(IMAGE_KINDS)}
_fields = [(name, Optional[setting.type], None) for name, setting in SKIP_SETTINGS.items()]
_SkipOptions = dataclasses.make_dataclass("_SkipOptions", _fields, frozen=True)


@dataclasses.dataclass(frozen=True)
class Config(_SkipOptions, Settings):
    """All settings of a run. Raises ``UserError`` for a value that is not accepted."""

    skip_kind: str = "rskip"
    skip_norm_axes: str = "c"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip_kind not in IMAGE_KINDS:
            raise UserError(f"--skip-kind {self.skip_kind!r}: expected one of {', '.join(IMAGE_KINDS)}")
        try:
            place = Place("resnet", "block", depth=(self.depth - 2) // 2)  # blocks; each has two convolutions
            skip = SkipConnection(self.width, channel_dim=1, place=place, **self.skip_options())
        except ValueError as error:
            raise UserError(in_terms_of_flags(str(error))) from None
        for name, setting in SKIP_SETTINGS.items():  # what was not given is the kind's default
            value = getattr(skip.options, setting.name, None)
            object.__setattr__(self, name, setting.type(value) if value is not None else None)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Config":
        """Read the settings of a checkpoint or a result; settings that it does not know have their defaults."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in known})

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
        parts += [f"width{self.width}"] if self.width != Settings.width else []
        return "-".join(parts + (["B"] if self.shortcut == "B" else []))

    def folder(self) -> Path:
        """The folder of the runs, which holds one folder for each seed."""
        return Path(self.output).expanduser() if self.output else Path("runs") / self.name()


def parse(argv: Sequence[str]) -> Config:
    """Parse a command line.

    Raises ``UserError`` for a value that is not accepted; ends the program, with one line, for an unknown option.
    """
    parser, group = make_parser()
    group.add_argument("--skip-norm-axes", help=argparse.SUPPRESS)
    for name, setting in SKIP_SETTINGS.items():
        if name not in ("skip_lambda", "skip_norm"):
            group.add_argument(f"--{name.replace('_', '-')}", type=setting.type, help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    return Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def skip_help() -> str:
    """Every option of the skip connections, in two lines each."""
    kinds = f"one of {', '.join(IMAGE_KINDS)} (default rskip; xskip with lambda 1 and norm none is plain)"
    axes = "c, a position's channels, or chw, a whole image: what layer norm averages over (default c)"
    texts = {"skip_kind": kinds, **{name: s.help for name, s in SKIP_SETTINGS.items()}, "skip_norm_axes": axes}
    return "\n".join(f"--{name.replace('_', '-')}\n    {text}" for name, text in texts.items())


def check_same(path: Path, saved: dict[str, Any], config: Config, identity: dict[str, Any]) -> None:
    """Raise ``UserError`` if the checkpoint or result ``saved`` in ``path`` is of other settings, seed or images.

    ``identity`` describes the images themselves, so the path of an image folder may differ.
    """
    was, now = Config.of(saved["config"]).fixed(), config.fixed()
    if was["data"].startswith(FOLDER) and now["data"].startswith(FOLDER):
        was["data"] = now["data"]
    pairs = [(f"--{name.replace('_', '-')}", was[name], now[name]) for name in now]
    pairs += [(name, saved["identity"].get(name), value) for name, value in identity.items()]
    differs = [f"{name}: {old} there, {new} here" for name, old, new in pairs if old != new]
    if differs:
        raise UserError(f"{path} is of another run: {'; '.join(differs)}; choose another --output")
