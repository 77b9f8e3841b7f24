"""The command line of ``rskip train``: its own options, and fairseq-train's as fairseq's own parser reads them."""

import argparse
import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq_rskip
from fairseq_rskip.console import Parser
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools.corpus import NAMES
from fairseq_rskip.tools.recipes import RECIPES

PLUGIN = Path(fairseq_rskip.__file__).resolve().parent
USAGE = """%(prog)s CORPUS ARCH [--dry-run [--gpus N]] [--recipe NAME] [--no-fp16] [fairseq-train option ...]
       %(prog)s --archs"""
DESCRIPTION = f"""Train ARCH on CORPUS with the paper's settings for it (docs/training.md), on all GPUs that torch sees,
or on the CPU. The same command again resumes from SAVE-DIR/checkpoint_last.pt.

  CORPUS               {", ".join(NAMES[:3])},
                       {", ".join(NAMES[3:])}, prepared in data/CORPUS;
                       or a folder: a data-bin of fairseq-preprocess, or the folder around it
  ARCH                 an architecture of this plugin or of fairseq; --archs lists them
  fairseq-train option any; your options override the recipe's; fairseq-train --help lists them.
                       --save-dir is checkpoints/CORPUS/ARCH by default
"""
EPILOG = """environment variables:
  MAX_TOKENS_PER_GPU=n the largest batch on one GPU, in tokens (default 4096); the tokens per step do not depend on it
  CUDA_VISIBLE_DEVICES selects GPUs
"""
# what fairseq-train accepts but cannot train with: accepted values in words, their test, options
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a number above 0", lambda v: 0 < v < math.inf, "lr adam_eps"),
    ("a number of at least 0", lambda v: 0 <= v < math.inf, "weight_decay clip_norm"),
    ("a number of at least -1", lambda v: -1 <= v < math.inf, "warmup_init_lr stop_min_lr"),
    ("a number from 0 to below 1", lambda v: 0 <= v < 1, "dropout attention_dropout activation_dropout relu_dropout"),
    ("a number from 0 to below 1", lambda v: 0 <= v < 1, "label_smoothing encoder_layerdrop decoder_layerdrop"),
    ("two numbers from 0 to below 1", lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v), "adam_betas"),
    ("an integer from 0 to 2^32 - 1", lambda v: 0 <= v < 2**32, "seed"),
    ("an integer of at least 0", lambda v: v >= 0, "max_epoch max_update warmup_updates save_interval_updates"),
    ("an integer of at least 1", lambda v: v >= 1, "max_tokens max_tokens_valid batch_size update_freq log_interval"),
    ("an integer of at least 1", lambda v: v >= 1, "save_interval validate_interval encoder_layers decoder_layers"),
    ("a folder", lambda v: bool(v.strip()), "save_dir"),
)


def read_own(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """CORPUS, ARCH and our own options; the other words are fairseq-train's. Raises ``UserError``."""
    parser = Parser(usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("corpus", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arch", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--archs", action="store_true", help="list the architectures")
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command and exit")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --dry-run: plan for a machine with N GPUs")
    parser.add_argument("--no-fp16", action="store_true", help="train in fp32 even if fp16 is supported")
    parser.add_argument("--user-dir", type=Path, default=PLUGIN, metavar="DIR", help="load this plugin instead")
    recipe = parser.add_argument("--recipe", choices=list(RECIPES), metavar="NAME")
    recipe.help = "use the settings of small, medium, large or a corpus (default: the corpus's, else by its size)"
    own, words = parser.parse_known_args(argv)
    if not own.archs and [own.corpus, own.arch] != argv[:2]:
        raise UserError("expected CORPUS and ARCH first, in this order, then options; -h shows the usage")
    if own.gpus is not None and (not own.dry_run or own.gpus < 0):
        raise UserError("--gpus N needs --dry-run; to train on some of the GPUs, set CUDA_VISIBLE_DEVICES")
    return own, words


def load_architectures(user_dir: Path) -> dict[str, Any]:
    """Architecture -> model class: those of fairseq, of this plugin and of ``user_dir``. Raises ``UserError``."""
    import fairseq.models
    from fairseq import utils

    try:
        import fairseq_rskip.models  # noqa: F401

        if user_dir.resolve() != PLUGIN:
            utils.import_user_module(argparse.Namespace(user_dir=str(user_dir)))
    except (OSError, ImportError) as error:
        raise UserError(f"cannot load --user-dir {user_dir}: {error}") from None
    return fairseq.models.ARCH_MODEL_REGISTRY


def is_language_model(arch: str) -> bool:
    """Whether an architecture, known or not, is one of fairseq's language models."""
    from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel

    return issubclass(ARCH_MODEL_REGISTRY.get(arch, object), FairseqLanguageModel)


class Options:
    """What fairseq's parser makes of the recipe's options and the user's ``words``, which override them.

    ``args``: the namespace; ``given``: the names of the options in ``words``; ``unused``: the recipe's options that do
    not exist here, such as --adam-betas with --optimizer sgd. Raises ``UserError`` for what fairseq-train refuses.
    """

    def __init__(self, arch: str, recipe: dict[str, Any], words: list[str], user_dir: Path):
        from fairseq import options

        known = load_architectures(user_dir)
        if arch not in known:
            raise UserError(f"no architecture named {arch!r}; {did_you_mean(arch, known)} --archs lists them")
        ours = {f"--{name}" if value is True else f"--{name}={value}": name for name, value in recipe.items()}
        parser = options.get_training_parser()
        parser.error = _refuse
        all_words = ["data", f"--arch={arch}", *ours, *words]
        self.args, extra = options.parse_args_and_arch(parser, all_words, parse_known=True)
        actions = parser._option_string_actions
        unknown = [word for word in extra if word not in ours]
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], actions)
            raise UserError(f"{arch} takes no option {' '.join(unknown)}; {hint or 'fairseq-train --help lists them'}")
        flags = (word.partition("=")[0] for word in words)
        self.given = {actions[flag].dest for flag in flags if flag in actions}
        self.unused = {ours[word] for word in extra}
        if "arch" in self.given:
            raise UserError("--arch is given twice: ARCH is the second argument")
        for expected, accepts, names in RANGES:
            for name in self.given & set(names.split()):
                _check(name, getattr(self.args, name), expected, accepts)

    def get(self, name: str) -> Any:
        """The value of an option that the user gave, else None."""
        return getattr(self.args, name) if name in self.given else None

    def of_model(self, name: str) -> Any:
        """The value of an option of the model: the user's, else the architecture's default; None without one."""
        from fairseq.models import MODEL_DATACLASS_REGISTRY

        value = getattr(self.args, name, None)
        return getattr(MODEL_DATACLASS_REGISTRY.get(self.args.arch, object)(), name, None) if value is None else value

    def keeps(self, name: str) -> bool:
        """Whether an option of the recipe applies: the user gave neither it nor, for a length, the other unit."""
        same = {"max_update", "max_epoch"} if name in ("max-update", "max-epoch") else {name.replace("-", "_")}
        return name not in self.unused and not same & self.given


def _refuse(message: str) -> None:
    raise UserError(message.replace("argument ", "", 1).replace("<lambda> ", ""))


def _check(name: str, value: Any, expected: str, accepts: Callable[[Any], bool]) -> None:
    try:
        read = ast.literal_eval if name in ("adam_betas", "max_tokens_valid") else lambda v: v  # fairseq leaves text
        values = value if isinstance(value, list) else [read(value)]
        accepted = all(map(accepts, values))
    except (ValueError, SyntaxError, TypeError):
        accepted = False
    if not accepted:
        raise UserError(f"--{name.replace('_', '-')} {value}: expected {expected}")
