"""fairseq-train's options: values that make no sense, and the model that they describe as fairseq reads them."""

import argparse
import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq_rskip
from fairseq_rskip.console import between, whole_number
from fairseq_rskip.errors import UserError

PLUGIN = Path(fairseq_rskip.__file__).resolve().parent
SIDES = ("encoder", "decoder")
OPTIONS = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")


def fail(message: str) -> None:
    """In place of argparse's usage and exit."""
    raise UserError(message)


def each(convert: Callable[[str], Any]) -> Callable[[str], list]:
    """A type for argparse: such values, separated by commas: one an epoch."""
    return lambda text: [convert(part) for part in text.strip("[]").split(",")]


def not_empty(text: str) -> str:
    """A type for argparse: any text but none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("needs a value: it is empty")
    return text


COUNT, WHOLE, SHARE = whole_number(1), whole_number(0), between(0, 1)
SIZES = ("layers", "embed-dim", "ffn-embed-dim", "attention-heads")
RANGES: dict[str, Callable[[str], Any]] = {
    "save-dir": not_empty,
    "lr": each(between(0, math.inf, open_below=True)),
    "update-freq": each(COUNT),
    **dict.fromkeys("max-tokens max-tokens-valid batch-size log-interval save-interval".split(), COUNT),
    **dict.fromkeys([f"{side}-{size}" for side in SIDES for size in SIZES], COUNT),
    **dict.fromkeys(["max-source-positions", "max-target-positions"], COUNT),
    **dict.fromkeys("max-epoch max-update warmup-updates save-interval-updates seed".split(), WHOLE),
    **dict.fromkeys("dropout attention-dropout activation-dropout relu-dropout label-smoothing".split(), SHARE),
    **dict.fromkeys(["encoder-layerdrop", "decoder-layerdrop"], SHARE),
    **dict.fromkeys(["weight-decay", "clip-norm"], between(0, math.inf)),
    **dict.fromkeys(["validate-interval", "required-batch-size-multiple"], COUNT),
    "num-workers": WHOLE,
    "adam-eps": between(0, math.inf, open_below=True),
    **dict.fromkeys(["warmup-init-lr", "stop-min-lr"], between(-1, math.inf)),  # -1: none
}


def check_ranges(words: list[str]) -> None:
    """Raises ``UserError`` for a value among fairseq-train's options ``words`` that is outside its range."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, convert in RANGES.items():
        parser.add_argument(f"--{name}", type=convert)
    parser.error = lambda message: fail(message.replace("argument ", "", 1))
    parser.parse_known_args(words)


def find_user_dir(words: list[str]) -> Path:
    """The user's --user-dir, or ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--user-dir", type=Path, default=PLUGIN)
    return parser.parse_known_args(words)[0].user_dir


def list_archs(user_dir: Path) -> list[str]:
    """Every architecture of this plugin, then those of fairseq and of ``user_dir``. Raises ``UserError``."""
    import fairseq.models
    from fairseq import utils

    try:
        if user_dir.resolve() == PLUGIN:  # half imported already, which fairseq takes for whole
            import fairseq_rskip.models  # noqa: F401
        else:
            utils.import_user_module(argparse.Namespace(user_dir=str(user_dir)))
    except (OSError, ImportError) as error:
        raise UserError(f"cannot load --user-dir {user_dir}: {error}") from None
    registered = fairseq.models.ARCH_MODEL_REGISTRY
    return sorted(registered, key=lambda arch: (not registered[arch].__module__.startswith("fairseq_rskip."), arch))


def check_arch(arch: str, user_dir: Path) -> None:
    """Raises ``UserError`` with what is near if neither fairseq nor the plugin in ``user_dir`` has ``arch``."""
    known = list_archs(user_dir)
    if arch not in known:
        fail(f"no architecture named {arch!r}; {near(arch, known)}scripts/train.sh --archs lists all")


def near(arch: str, known: list[str]) -> str:
    """``near: a, b; `` for the architectures of ``known`` that ``arch`` may stand for, "" without any."""
    found = difflib.get_close_matches(arch, known, 3)
    return f"near: {', '.join(found)}; " if found else ""


class Options:
    """fairseq-train's options ``words`` beside the ``recipe``'s, read by fairseq's own parser.

    given: what the user gave, by fairseq's names
    unknown: options of the recipe that do not go with it (--adam-betas with --optimizer sgd)
    dim: the encoder's dimension
    settings: what tells models of different skip connections or shapes apart

    Raises ``UserError`` for what fairseq-train would not take, or could not build a model of.
    """

    def __init__(self, arch: str, recipe: dict[str, Any], words: list[str]):
        from fairseq import options
        from fairseq.models import MODEL_DATACLASS_REGISTRY

        ours = {f"--{name}" if value is True else f"--{name}={value}": name for name, value in recipe.items()}
        parser = options.get_training_parser()
        parser.error = fail
        args, extra = options.parse_args_and_arch(parser, ["data", f"--arch={arch}", *ours, *words], parse_known=True)
        refuse_unknown([word for word in extra if word not in ours], arch, parser)
        self.unknown = {ours[word] for word in extra}
        only = argparse.ArgumentParser(add_help=False, allow_abbrev=False, parents=[parser])
        only.set_defaults(**dict.fromkeys(vars(args)))
        given = vars(only.parse_args(["data", *words]))
        self.given = {name: value for name, value in given.items() if value is not None and name != "data"}
        if "arch" in self.given:
            fail("--arch is given twice: ARCH is the second argument")
        kind = MODEL_DATACLASS_REGISTRY.get(arch)
        config = kind() if kind else None
        defaults = dict(vars(config)) if config else {}  # they are not in args
        shape = find_shape(args, defaults)
        self.dim = getattr(args, "encoder_embed_dim", None) or defaults.get("encoder_embed_dim") or 512
        check_heads(shape)
        self.settings = {"arch": arch, **find_skip(arch, config, self.given, shape), **shape}

    def leaves(self, name: str) -> bool:
        """Whether the recipe's option applies: it is known, and the user did not give it (or another end)."""
        ends = ["max-update", "max-epoch"]
        same = ends if name in ends else [name]
        return name not in self.unknown and not any(n.replace("-", "_") in self.given for n in same)


def refuse_unknown(words: list[str], arch: str, parser: argparse.ArgumentParser) -> None:
    """Raises ``UserError`` if there are any, with the nearest option that is known."""
    if words:
        known = re.findall(r"--[a-z][\w-]+", parser.format_usage())
        meant = difflib.get_close_matches(words[0].partition("=")[0], known, 1)
        fail(f"fairseq-train takes no {' '.join(words)} with {arch}" + (f"; did you mean {meant[0]}?" if meant else ""))


def find_shape(args, defaults: dict[str, Any]) -> dict[str, Any]:
    """Layers, dimensions, heads and the like, by fairseq's names, as far as the architecture has them.

    ``args`` are fairseq's; the architecture's ``defaults`` hold where those are silent. The decoder's dimensions follow
    the encoder's.
    """
    shape = {}
    for side in SIDES:
        for option in OPTIONS:
            value = getattr(args, f"{side}_{option}", None)
            value = defaults.get(f"{side}_{option}") if value is None else value
            value = shape.get(f"encoder_{option}") if value is None else value
            if value is not None:
                shape[f"{side}_{option}"] = value
    return shape


def check_heads(shape: dict[str, Any]) -> None:
    """Raises ``UserError`` for attention heads that do not divide a dimension."""
    from fairseq_rskip.modules import skip_config

    for side in SIDES:
        dim, heads = shape.get(f"{side}_embed_dim"), shape.get(f"{side}_attention_heads")
        if isinstance(dim, int) and isinstance(heads, int):
            skip_config.check_heads(side, dim, heads)


def find_skip(arch: str, config: Any, given: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The kind of skip connection and all of its options, by fairseq's names; none where the model is not ours.

    ``config`` is the architecture's dataclass with its defaults, or None. Raises ``UserError`` for options that
    contradict each other.
    """
    from fairseq_rskip.modules.skip_config import SkipConfig
    from fairseq_rskip.residual.options import flag

    if not isinstance(config, SkipConfig):
        return {}
    for name in vars(config):
        setattr(config, name, given.get(name, getattr(config, name)))
    skip = config.check(arch, pre_norm=any(shape.get(f"{side}_normalize_before") for side in SIDES))
    return {"skip_kind": str(config.skip_kind), **{flag(name): value for name, value in vars(skip.options).items()}}
