"""fairseq-train's options: read by fairseq's own parser, and checked before anything starts.

fairseq's parser and the model's construction refuse most mistakes; ``RANGES`` has the values that
they wrongly accept.
"""

import argparse
import importlib.util
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, FairseqLanguageModel

from fairseq_rskip.errors import UserError, did_you_mean, missing_package

# the import registers the architectures
from fairseq_rskip.files import why_no_file
from fairseq_rskip.models import unknown_architecture_message, with_nearest_kind
from fairseq_rskip.models.architectures import ANY_RULE
from fairseq_rskip.option_error import refused
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.training_files import BEST, LAST


class Range(NamedTuple):
    """Values of fairseq's ``options`` (a regular expression) that can be trained with."""

    expected: str
    accepts: Callable[[Any], bool]
    options: str


def _is_below_1(value: float) -> bool:
    return 0 <= value < 1


def _are_betas(text: str) -> bool:
    return re.fullmatch(r"\W?(0|0?\.\d+),\s*(0|0?\.\d+)\W?", text) is not None


def _is_not_blank(text: str) -> bool:
    return text.strip() != ""


RANGES = (
    Range("a number above 0", lambda value: 0 < value < math.inf, "lr|adam-eps"),
    Range("a number of at least 0", lambda value: 0 <= value < math.inf, "weight-decay|clip-norm"),
    Range(
        "a number from 0 to below 1",
        _is_below_1,
        "(.*-)?dropout|label-smoothing|(en|de)coder-layerdrop",
    ),
    Range("two numbers from 0 to below 1", _are_betas, "adam-betas"),
    Range("an integer from 0 to 2^32 - 1", lambda value: 0 <= value < 2**32, "seed"),
    Range(
        "an integer of at least 0",
        lambda value: value >= 0,
        "max-(epoch|update)|(warmup|save-interval)-updates",
    ),
    Range(
        "an integer of at least 1",
        lambda value: value >= 1,
        "max-tokens|batch-size|update-freq|(en|de)coder-layers",
    ),
    Range("a folder", _is_not_blank, "save-dir"),
)


class Parsed(NamedTuple):
    """A training's options as fairseq reads them."""

    user_options: dict[str, Any]  # the user's, by name with dashes
    unused: set[str]  # the recipe's that do not apply: --adam-betas with --optimizer sgd
    model: argparse.Namespace  # the model's, with defaults


# what other trainers call an option -> fairseq's
ELSEWHERE = {
    "--learning-rate": "--lr",
    "--epochs": "--max-epoch",
    "--num-epochs": "--max-epoch",
    "--num-train-epochs": "--max-epoch",
    "--steps": "--max-update",
    "--max-steps": "--max-update",
    "--train-steps": "--max-update",
    "--warmup": "--warmup-updates",
    "--warmup-steps": "--warmup-updates",
    "--gradient-accumulation-steps": "--update-freq",
    "--output-dir": "--save-dir",
}


def parse(arch: str, recipe: dict[str, Any], words: list[str]) -> Parsed:
    """Parse the recipe's options, and the user's ``words``, which override them.

    fairseq's parser reads them. Raises ``UserError`` for what fairseq-train refuses.
    """
    recipe_words = {}  # word -> name of the option
    for name, value in recipe.items():
        word = f"--{name}" if value is True else f"--{name}={value}"
        recipe_words[word] = name

    parser = _training_parser(arch)
    try:
        args, extra = options.parse_args_and_arch(
            parser, ["data", f"--arch={arch}", *recipe_words, *words], parse_known=True
        )
    except (OSError, ImportError) as error:
        raise UserError(f"cannot load --user-dir: {error}") from None

    actions = parser._option_string_actions
    # the user may give an option of the recipe's that does not apply, too
    unknown = [word for word in extra if word not in recipe_words or word in words]
    if unknown:
        word = unknown[0].partition("=")[0]
        hint = did_you_mean(ELSEWHERE.get(word, word), actions)
        hint = hint or "fairseq-train --help lists them"
        raise UserError(f"{arch} takes no option {_first_option(unknown)}; {hint}")

    user_options = {}
    for word in words:
        action = actions.get(word.partition("=")[0])
        if action:
            user_options[action.dest.replace("_", "-")] = getattr(args, action.dest)
    check_ranges(user_options)
    model = _model_options(arch, args)
    check_names(arch, user_options)
    if user_options.get("wandb-project") and not importlib.util.find_spec("wandb"):
        raise UserError(missing_package("wandb"))
    unused = {recipe_words[word] for word in extra}
    return Parsed(user_options, unused, model)


def _first_option(words: list[str]) -> str:
    """The first option in ``words``, with its values."""
    option = words[:1]
    for word in words[1:]:
        if word.startswith("--"):
            break
        option.append(word)
    return " ".join(option)


def _training_parser(arch: str) -> argparse.ArgumentParser:
    """fairseq-train's parser, which raises ``UserError`` instead of ending the program."""

    def refuse(message: str) -> None:
        raise _refusal(message, arch)

    parser = options.get_training_parser()
    parser.error = refuse
    return parser


def _refusal(message: str, arch: str) -> UserError:
    """argparse's ``message`` as an error, with what is accepted where we know it."""
    if "--arch/-a" in message:
        return UserError(unknown_architecture_message(arch))
    invalid = re.search(r"--([\w-]+): invalid .*value: '(.*)'", message)
    if invalid:
        name, value = invalid.groups()
        for limits in RANGES:
            if re.fullmatch(limits.options, name):
                return refused(name, value, limits.expected)
    message = with_nearest_kind(message).removeprefix("argument ")
    return UserError(message.replace("<lambda> ", ""))


def _model_options(arch: str, args: argparse.Namespace) -> argparse.Namespace:
    """``args`` with the architecture's defaults, which fairseq's parser lacks for a dataclass."""
    config_class = MODEL_DATACLASS_REGISTRY.get(arch)
    if config_class is None:
        return args
    values = {}
    for name, default in vars(config_class()).items():
        values[name] = None if str(default).startswith("${") else default
    values |= {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**values)


def check_names(arch: str, user_options: dict[str, Any]) -> None:
    """Raise ``UserError`` for --arch, and for a --skip-kind that is another architecture's.

    Folders, reports and figures are named after ``arch``.
    """
    if "arch" in user_options:
        raise UserError(f"--arch {user_options['arch']}: the architecture is {arch} already")
    kind = user_options.get("skip-kind")
    takes_any_kind = re.match(rf"transformer_(lm_)?{ANY_RULE}(_|$)", arch)
    if kind is None or takes_any_kind:
        return
    own = MODEL_DATACLASS_REGISTRY[arch]().skip_kind
    if str(kind) != str(own):
        family = "transformer_lm" if arch.startswith("transformer_lm_") else "transformer"
        raise UserError(
            f"--skip-kind {kind}: {arch} is kind {own}; expected an architecture of {kind}, or "
            f"{family}_{ANY_RULE} with this option"
        )


def check_ranges(user_options: dict[str, Any]) -> None:
    """Raise ``UserError`` for a value that fairseq-train accepts but cannot train with."""
    for limits in RANGES:
        for name, value in user_options.items():
            if not re.fullmatch(limits.options, name):
                continue
            values = value if isinstance(value, list) else [value]
            if not all(map(limits.accepts, values)):
                shown = ",".join(map(str, values)) if len(values) > 1 else values[0]
                raise refused(name, shown, limits.expected)


def check_checkpoint(option: str, name: str, save: Path) -> None:
    """Raise ``UserError`` unless the checkpoint ``name`` of ``--option`` is a file.

    fairseq would train from the first update, without a word on the screen.
    """
    path = Path(name)
    problem = why_no_file(path)
    if not problem or "://" in name:
        return
    for other in (path / BEST, path / LAST, save / name):
        if other.is_file():
            raise UserError(f"--{option} {name} {problem}; did you mean {other}?")
    raise UserError(f"--{option} {name} {problem}; expected a checkpoint, a file")


def check_task(arch: str, corpus: Corpus) -> None:
    """Raise ``UserError`` for a language model on a corpus of two languages, or the reverse."""
    if issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel) != corpus.is_monolingual:
        expected = "has two languages: expected a translation"
        if corpus.is_monolingual:
            expected = "is a text: expected a language"
        raise UserError(f"{corpus.name} {expected} model, not {arch}; --archs lists them")


def check_model(arch: str, model: argparse.Namespace, joined: bool, share: bool) -> None:
    """Build the model as fairseq-train will, with one layer on each side.

    Raises ``UserError`` where that fails.
    """
    values = {**vars(model), "_name": arch, "share_all_embeddings": share}
    small = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "adaptive_input_cutoff": "2,4",  # of the few words below
        "adaptive_softmax_cutoff": "2,4",
    }
    values |= {name: value for name, value in small.items() if values.get(name)}
    source, target = Dictionary(), Dictionary()
    source.pad_to_multiple_(8)
    target.pad_to_multiple_(8 if joined else 16)
    # a model uses nothing else of the task; without data, nothing is profiled
    task = argparse.Namespace(source_dictionary=source, target_dictionary=target)
    logging.disable()  # fairseq-train repeats it, about the whole model
    try:
        # without memory, three times as fast; stock models may need their values
        with torch.device("meta" if hasattr(model, "skip_kind") else "cpu"):
            models.build_model(argparse.Namespace(**values), task)
    except UserError:
        raise
    except Exception as error:  # fairseq checks with assert
        raise UserError(
            f"fairseq cannot build {arch} with these options: {error or type(error).__name__}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
