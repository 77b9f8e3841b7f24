"""The settings of a training run, with those of its skip connection."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ..errors import UserError
from ..flags import flag as skip_flag
from ..flags import label, option_name, selected, settings
from ..option_error import OptionError, RefusedOption
from ..parameters import check_lr_scale
from ..residual import KINDS, Place, SkipConnection, create_skip, own_rules, trial
from ..residual.names import nearest_kind
from .options import DATA_SETS, FOLDER, Settings, flag, make_parser

# in the identity of a run
PARENT = "SHA-256 of --finetune-from"
RULE = "SHA-256 of the rule's own file"
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
            if self.skip_kind in KINDS:
                reason = "a rule of Transformers alone"
            else:
                reason = nearest_kind(self.skip_kind, IMAGE_KINDS)
            known = "a kind" if reason else f"one of {', '.join(IMAGE_KINDS)}"
            expected = f"{known} for images, which train-cifar --help-skips lists{own_rules.hint()}"
            error = OptionError("skip-kind", self.skip_kind, expected, reason=reason)
            raise RefusedOption(error)
        try:
            trial.try_forward(self.skip_kind, lambda: self._skip(8, channel_dim=-1))
            skip = self.first_skip()
        except OptionError as error:
            raise RefusedOption(error.renamed(option_name)) from None
        except ValueError as error:
            raise UserError(str(error)) from None

        check_lr_scale(skip, self.skip_lr_scale)
        for name, setting in SKIP_SETTINGS.items():  # fill in the defaults of the kind
            value = getattr(skip.options, setting.name, None)
            if value is not None:
                value = setting.type(value)
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Config":
        """Read the settings of a checkpoint or a result.

        Unknown settings are ignored; settings that are missing have their defaults.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in saved.items() if name in names}
        return cls(**_with_tuples(known))

    def first_skip(self) -> SkipConnection:
        """Return the skip connection of the first block.

        Raises ``ValueError`` if its options are invalid.
        """
        return self._skip(self.width, channel_dim=1)

    def _skip(self, dim: int, channel_dim: int) -> SkipConnection:
        """The first block's over ``dim`` features; ``channel_dim`` -1 is for sequences."""
        blocks = (self.depth - 2) // 2  # a block has two convolutions
        place = Place("resnet", "block", depth=blocks)
        return create_skip(dim=dim, channel_dim=channel_dim, place=place, **self.skip_options())

    def skip_options(self) -> dict[str, Any]:
        """Return the options of ``create_skip`` except ``dim``, ``place`` and ``channel_dim``."""
        values = {setting.name: getattr(self, name) for name, setting in SKIP_SETTINGS.items()}
        return {
            "kind": self.skip_kind,
            "norm_axes": self.skip_norm_axes,
            **selected(values),
        }

    def network(self) -> dict[str, Any]:
        """Return the options of ``PreActResNet`` except the number of classes."""
        return {
            "depth": self.depth,
            "skip": self.skip_options(),
            "shortcut": self.shortcut,
            "width": self.width,
        }

    def name(self) -> str:
        """Return a short name for the run, such as cifar10-resnet110-rskip2-layer."""
        if self.data in DATA_SETS:
            data = self.data
        else:
            data = Path(self.data.removeprefix(FOLDER)).resolve().name

        parts = [data, f"resnet{self.depth}", label(self.first_skip())]
        if self.skip_norm_axes != "c":
            parts.append(self.skip_norm_axes)
        if self.width != Settings.width:
            parts.append(f"width{self.width}")
        if self.shortcut == "B":
            parts.append("B")
        return "-".join(parts)

    def folder(self) -> Path:
        """Return the folder of the runs, which holds one folder for each seed."""
        if self.output:
            return Path(self.output).expanduser()
        return Path("runs") / self.name()


def parse(argv: Sequence[str]) -> Config:
    """Parse a command line.

    Raises ``UserError`` for a value that is not accepted, ``UsageError`` for an unknown option;
    ends the program after ``--help-skips``.
    """
    parser, group = make_parser()
    if "--help-skips" in argv:  # as with -h, the other options do not matter
        print(skip_help())
        parser.exit()

    group.add_argument("--skip-norm-axes", help=argparse.SUPPRESS)
    for name, setting in SKIP_SETTINGS.items():
        if name not in ("skip_lambda", "skip_norm"):  # make_parser adds these
            option = _as_option(name)
            group.add_argument(option, type=setting.type, help=argparse.SUPPRESS)

    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown, [flag(field) for field in dataclasses.fields(Config)])
    return Config(**_with_tuples(vars(namespace)))


def _as_option(name: str) -> str:
    """``--skip-kind`` of ``skip_kind``."""
    return f"--{name.replace('_', '-')}"


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with tuples in place of lists."""
    converted = {}
    for name, value in values.items():
        converted[name] = tuple(value) if isinstance(value, list) else value
    return converted


def skip_help() -> str:
    """Return the help of every option of the skip connections, in two lines each."""
    texts = {
        "skip_kind": (
            f"one of {', '.join(IMAGE_KINDS)} "
            "(default rskip; xskip with lambda 1 and norm none is plain)"
        )
    }
    for name, setting in SKIP_SETTINGS.items():
        texts[name] = setting.help
    texts["skip_norm_axes"] = (
        "c, a position's channels, or chw, a whole image: what layer norm averages over (default c)"
    )
    return "\n".join(f"{_as_option(name)}\n    {text}" for name, text in texts.items())


def check_same(path: Path, saved: dict[str, Any], config: Config, identity: dict[str, Any]) -> None:
    """Check that ``saved``, the checkpoint or result in ``path``, belongs to this run.

    Raises ``UserError`` if its settings, seed or images differ. ``identity`` describes the images
    themselves, so the path of an image folder may differ.
    """
    before = Config.of(saved["config"]).fixed()
    now = config.fixed()
    if before["data"].startswith(FOLDER) and now["data"].startswith(FOLDER):
        before["data"] = now["data"]

    pairs = [(_as_option(name), before[name], now[name]) for name in now]
    for name, value in identity.items():
        if name not in (PARENT, RULE) or name in saved["identity"]:  # older runs lack these
            pairs.append((name, saved["identity"].get(name), value))
    differences = [f"{name}: {old} there, {new} here" for name, old, new in pairs if old != new]
    if differences:
        raise UserError(
            f"{path} is of another run: {'; '.join(differences)}; choose another --output"
        )
