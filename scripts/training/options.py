"""What the user asked for: train.sh's own arguments, and fairseq-train's options as fairseq itself reads them."""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

from fairseq_rskip.errors import UserError
from training.shape import check_model, find_positions, find_shape

PLUGIN = Path(__file__).resolve().parent.parent.parent / "fairseq_rskip"


def fail(message: str) -> None:
    """In place of argparse's usage and exit."""
    raise UserError(message)


def parse(argv: List[str]) -> Tuple[str, str, List[str], argparse.Namespace]:
    """CORPUS, ARCH, fairseq-train's options and train.sh's own. Raises ``UserError``."""
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("-"):
        fail("CORPUS and ARCH are needed, in this order, before any option; -h shows the usage")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-fp16", action="store_true")
    parser.add_argument("--gpus", type=int)
    parser.error = fail
    own, words = parser.parse_known_args(argv[2:])
    if own.gpus is not None and (not own.dry_run or own.gpus < 0):
        fail("--gpus N plans for another machine, with --dry-run; CUDA_VISIBLE_DEVICES chooses among the GPUs here")
    return argv[0], argv[1], words, own


def find_user_dir(words: List[str]) -> Path:
    """The user's --user-dir, or ours."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--user-dir", type=Path, default=PLUGIN)
    return parser.parse_known_args(words)[0].user_dir


def list_archs(user_dir: Path) -> List[str]:
    """Every architecture of fairseq and of the plugin in ``user_dir``. Raises ``UserError``."""
    import fairseq.models
    from fairseq import utils

    try:
        if user_dir.resolve() == PLUGIN:  # half imported already, which fairseq takes for whole
            import fairseq_rskip.models  # noqa: F401
        else:
            utils.import_user_module(argparse.Namespace(user_dir=str(user_dir)))
    except (OSError, ImportError) as error:
        raise UserError(f"cannot load --user-dir {user_dir}: {error}") from None
    return sorted(fairseq.models.ARCH_MODEL_REGISTRY)


def check_arch(arch: str, user_dir: Path) -> None:
    """Raises ``UserError`` with what is near if neither fairseq nor the plugin in ``user_dir`` has ``arch``."""
    known = list_archs(user_dir)
    if arch not in known:
        near = difflib.get_close_matches(arch, known, 3)
        hint = f"near: {', '.join(near)}; " if near else ""
        fail(f"no architecture named {arch!r}; {hint}scripts/train.sh --archs lists all")


class Options:
    """fairseq-train's options ``words`` beside the ``recipe``'s, read by fairseq's own parser.

    given: what the user gave, by fairseq's names
    unknown: options of the recipe that do not go with it (--adam-betas with --optimizer sgd)
    dim, shares: the encoder's dimension, and whether the embeddings are shared without the recipe
    settings: what tells models of different skip connections or shapes apart
    positions: the most tokens of a source and of a target sentence that the model takes

    Raises ``UserError`` for what fairseq-train would not take, or could not build a model of.
    """

    def __init__(self, arch: str, recipe: Dict[str, Any], words: List[str]):
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
        self.positions = find_positions(args, defaults, self.given)
        self.dim = getattr(args, "encoder_embed_dim", None) or defaults.get("encoder_embed_dim") or 512
        self.shares = self.given.get("share_all_embeddings") or defaults.get("share_all_embeddings", False)
        skips = (name for name in defaults if name.startswith("skip_") and name != "skip_log_interval")
        self.settings = {"arch": arch, **{name: self.given.get(name, defaults[name]) for name in skips}, **shape}
        check_model(arch, config, self.given, shape)

    def leaves(self, name: str) -> bool:
        """Whether the recipe's option applies: it is known, and the user did not give it (or another end)."""
        ends = ["max-update", "max-epoch"]
        same = ends if name in ends else [name]
        return name not in self.unknown and not any(n.replace("-", "_") in self.given for n in same)


def refuse_unknown(words: List[str], arch: str, parser: argparse.ArgumentParser) -> None:
    """Raises ``UserError`` if there are any, with the nearest option that is known."""
    if words:
        known = re.findall(r"--[a-z][\w-]+", parser.format_usage())
        near = difflib.get_close_matches(words[0].partition("=")[0], known, 1)
        fail(f"fairseq-train takes no {' '.join(words)} with {arch}" + (f"; did you mean {near[0]}?" if near else ""))
