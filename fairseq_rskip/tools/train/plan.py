"""From a corpus, an architecture, this machine and the user's options to a fairseq-train command.

fairseq's own parser and the model's construction refuse most mistakes; ``RANGES`` has the values
that they wrongly accept.
"""

import argparse
import filecmp
import importlib.util
import logging
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, FairseqLanguageModel

from fairseq_rskip.console import to_argv
from fairseq_rskip.errors import UserError, did_you_mean, missing_package
from fairseq_rskip.models import unknown_architecture  # the import registers the architectures
from fairseq_rskip.tools.corpus import CHECKPOINTS, POSITIONS, PREPARATION, Corpus
from fairseq_rskip.tools.log import LAST
from fairseq_rskip.tools.process import PLUGIN
from fairseq_rskip.tools.recipes import CPU, RECIPES, Recipe, peak_lr, recipe_for
from fairseq_rskip.tools.train import finished

MAX_TOKENS = 4096  # in a batch of one GPU, unless the user says otherwise
FP16 = {"fp16", "memory-efficient-fp16"}
PRECISIONS = {*FP16, "bf16", "memory-efficient-bf16", "amp", "tpu"}
# the length of a training: if the user gives one of them, both of the recipe's are dropped
LENGTHS = {"max-update", "max-epoch"}
CHECKPOINTS_ON_CPU = 5  # that are kept with --save-interval-updates: those that are averaged


class Range(NamedTuple):
    """Values of fairseq's ``options`` (a regular expression) that can be trained with."""

    expected: str
    accepts: Callable[[Any], Any]
    options: str


RANGES = (
    Range("a number above 0", lambda value: 0 < value < math.inf, "lr|adam-eps"),
    Range("a number of at least 0", lambda value: 0 <= value < math.inf, "weight-decay|clip-norm"),
    Range(
        "a number from 0 to below 1",
        lambda value: 0 <= value < 1,
        "(.*-)?dropout|label-smoothing|(en|de)coder-layerdrop",
    ),
    Range(
        "two numbers from 0 to below 1",
        re.compile(r"\W?(0|0?\.\d+),\s*(0|0?\.\d+)\W?").fullmatch,
        "adam-betas",
    ),
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
    Range("a folder", str.strip, "save-dir"),
)


class Plan(NamedTuple):
    """A training: its ``command``, its folder ``save``, and lines for the user.

    ``end`` is the last of ``unit`` ("updates" or "epochs"), 0 for none; ``patience`` is fairseq's,
    0 for none; ``resumes`` is false where --restore-file names another start than the folder's last
    checkpoint. ``settings`` are the options that the training is known by, the user's and those of
    its skip connections, by name with dashes.
    """

    command: list[str]
    save: Path
    corpus: Corpus
    end: int
    unit: str
    patience: int
    resumes: bool
    settings: dict[str, Any]
    notes: list[str]
    warnings: list[str]

    def why_finished(self) -> str:
        """Why there is nothing to train, where fairseq would train further; else "".

        Raises ``UserError`` if what has ended is a training with other settings,
        ``CheckpointError``.
        """
        if not self.resumes:
            return ""
        reason = finished.why_ended(self.save, self.end, self.unit, self.patience)
        if reason:
            finished.check_settings(self.save, self.settings)
        return reason

    def changes(self) -> list[str]:
        """A warning where the training that is resumed had other settings so far."""
        if not self.resumes:
            return []
        differing = finished.differences(self.save, self.settings)
        if not differing:
            return []
        listed = ", ".join(f"{name} {found}, now {asked}" for name, found, asked in differing)
        return [f"the training in {self.save} had {listed}; another --save-dir begins a new one"]


class Parsed(NamedTuple):
    """A training's options as fairseq reads them."""

    given: dict[str, Any]  # the user's, by name with dashes
    unused: set[str]  # the recipe's that do not apply: --adam-betas with --optimizer sgd
    model: argparse.Namespace  # the model's, with defaults


def make_plan(own: argparse.Namespace, words: list[str]) -> Plan:
    """The plan for what ``main.read`` returns. Writes nothing. Raises ``UserError``."""
    named_corpus = _find_corpus(own)
    recipe_name = own.recipe or named_corpus.known or _recipe_by_size(named_corpus)
    recipe = RECIPES[recipe_name]
    task = _task_options(named_corpus)
    tie = "share-decoder-input-output-embed" if named_corpus.is_text else "share-all-embeddings"
    parsed = parse(own.arch, {**task, **recipe.options, tie: True}, words)
    given = parsed.given
    corpus = _in_direction(named_corpus, given)

    joined = _has_one_dictionary(corpus)
    has_adaptive_softmax = bool(getattr(parsed.model, "adaptive_softmax_cutoff", None))
    share = joined and "share-decoder-input-output-embed" not in given and not has_adaptive_softmax
    if has_adaptive_softmax:
        task |= {"criterion": "adaptive_loss", "ddp-backend": "legacy_ddp"}
    check_task(own.arch, corpus)
    if not own.model_checked:
        check_model(own.arch, parsed.model, joined, share or "share-all-embeddings" in given)

    end, unit = find_end(recipe, given)
    patience = given.get("patience", recipe.options.get("patience", 0))
    if end == 0 and patience <= 0:
        raise UserError("the training has no end: expected --max-update or --max-epoch above 0")
    length = f": {end:,} {unit}" if end else ""
    notes = [f"recipe: {recipe_name}{_why(own, corpus)}{length}"]
    device, devices = device_options(own, given)
    warnings = _warnings_of_device(own, device)
    warm_up = warm_up_of(recipe, given)
    notes += _notes_on_warm_up(recipe, given, warm_up)
    warnings += _warnings_of_warm_up(recipe, given, warm_up)
    processes = given.get("distributed-world-size") or devices
    step = step_options(recipe.tokens, processes, given)
    if step:
        notes.append(_tokens_per_step(step, processes, recipe.tokens))
    save = Path(given.get("save-dir") or CHECKPOINTS / Path(corpus.name).name / own.arch)
    chosen = {
        "user-dir": PLUGIN,
        "arch": own.arch,
        "lr": f"{_default_lr(parsed.model):g}",
        **device,
        **recipe.options,
        **task,
        **step,
        "warmup-updates": warm_up,
        "skip-invalid-size-inputs-valid-test": True,
        tie: share,
        "save-dir": save,
        "log-format": "json",
        "tensorboard-logdir": save / "tensorboard",
    }
    command = _command(corpus, chosen, parsed, words)
    resumes = "restore-file" not in given
    if not resumes:
        check_restore_file(given["restore-file"], save)
    settings = _settings(own.arch, parsed)
    return Plan(
        command=command,
        save=save,
        corpus=corpus,
        end=end,
        unit=unit,
        patience=patience,
        resumes=resumes,
        settings=settings,
        notes=notes,
        warnings=warnings,
    )


def _settings(arch: str, parsed: Parsed) -> dict[str, Any]:
    """What the training is known by: the user's options, and those of its skip connections."""
    settings = {"arch": arch}
    for name, value in vars(parsed.model).items():
        if name.startswith("skip_"):
            settings[name.replace("_", "-")] = value
    settings |= parsed.given
    free = finished.FREE | PRECISIONS
    return {name: value for name, value in settings.items() if name not in free}


def _command(corpus: Corpus, chosen: dict[str, Any], parsed: Parsed, words: list[str]) -> list[str]:
    """fairseq-train with the options ``chosen``, less those that the user's ``words`` set."""
    left_out = {*parsed.given, *parsed.unused}
    if LENGTHS & parsed.given.keys():
        left_out |= LENGTHS
    options_left = {name: value for name, value in chosen.items() if name not in left_out}

    program = shutil.which("fairseq-train") or "fairseq-train"
    return [program, str(corpus.folder.absolute()), *to_argv(options_left), *words]


def check_restore_file(name: str, save: Path) -> None:
    """Raise ``UserError`` for a checkpoint that does not exist.

    fairseq would train from the first update, without a word on the screen.
    """
    if Path(name).exists() or "://" in name or name == LAST:
        return
    beside = save / name
    hint = f"; did you mean {beside}?" if beside.exists() else ""
    raise UserError(f"--restore-file {name} does not exist{hint}")


def _recipe_by_size(corpus: Corpus) -> str:
    """The name of the recipe for your own text."""
    return "text" if corpus.is_text else recipe_for(corpus.pairs)


def _find_corpus(own: argparse.Namespace) -> Corpus:
    """The corpus of the command line, which only a dry run may lack. Raises ``UserError``."""
    find = Corpus.find_or_plan if own.dry_run else Corpus.find
    corpus = find(own.corpus)
    model_class = ARCH_MODEL_REGISTRY.get(own.arch, object)
    if not (corpus.exists or corpus.known) and issubclass(model_class, FairseqLanguageModel):
        return replace(corpus, target="")  # a text that is not prepared yet
    return corpus


def _task_options(corpus: Corpus) -> dict[str, str]:
    """fairseq's task and languages for the corpus."""
    if corpus.is_text:
        return {"task": "language_modeling"}
    if corpus.source:
        return {"source-lang": corpus.source, "target-lang": str(corpus.target)}
    return {}


def _in_direction(corpus: Corpus, given: dict[str, Any]) -> Corpus:
    """``corpus`` from the user's --source-lang to --target-lang.

    Raises ``UserError`` where preparation.json, and so evaluation, has another direction.
    """
    source = given.get("source-lang") or corpus.source
    target = given.get("target-lang") or corpus.target
    if corpus.preparation and (source, target) != (corpus.source, corpus.target):
        raise UserError(
            f"{corpus.folder / PREPARATION} says {corpus.source}-{corpus.target}: "
            "expected that direction"
        )
    return replace(corpus, source=source, target=target)


def _has_one_dictionary(corpus: Corpus) -> bool:
    """Whether both languages have the same dictionary, so that embeddings can be shared.

    ``rskip prepare`` will make one dictionary where none is prepared yet.
    """
    if not corpus.exists or corpus.is_text:
        return True
    return filecmp.cmp(*corpus.dictionaries(), shallow=False)


def _default_lr(model: argparse.Namespace) -> float:
    """``peak_lr`` for the model's dimension; 512 where it has none of fairseq's names."""
    for name in ("encoder_embed_dim", "decoder_embed_dim"):
        dimension = getattr(model, name, None)
        if dimension:
            return peak_lr(dimension)
    return peak_lr(512)


def _why(own: argparse.Namespace, corpus: Corpus) -> str:
    """Why this recipe, where the size of your own corpus has decided; else ""."""
    if own.recipe or corpus.known or not corpus.pairs:
        return ""
    unit = "lines" if corpus.is_text else "pairs"
    return f" (for {corpus.pairs:,} {unit}; --recipe NAME selects another)"


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
    unknown = [word for word in extra if word not in recipe_words]
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], actions)
        hint = hint or "fairseq-train --help lists them"
        raise UserError(f"{arch} takes no option {_first_option(unknown)}; {hint}")

    given = {}
    for word in words:
        action = actions.get(word.partition("=")[0])
        if action:
            given[action.dest.replace("_", "-")] = getattr(args, action.dest)
    check_ranges(given)
    if given.get("wandb-project") and not importlib.util.find_spec("wandb"):
        raise UserError(missing_package("wandb"))
    unused = {recipe_words[word] for word in extra}
    return Parsed(given, unused, _model_options(arch, args))


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
        if "--arch/-a" in message:
            message = unknown_architecture(arch)
        raise UserError(message.replace("argument ", "", 1).replace("<lambda> ", ""))

    parser = options.get_training_parser()
    parser.error = refuse
    return parser


def check_ranges(given: dict[str, Any]) -> None:
    """Raise ``UserError`` for a value that fairseq-train accepts but cannot train with."""
    for limits in RANGES:
        for name, value in given.items():
            if not re.fullmatch(limits.options, name):
                continue
            values = value if isinstance(value, list) else [value]
            if not all(map(limits.accepts, values)):
                raise UserError(f"--{name} {value}: expected {limits.expected}")


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


def check_task(arch: str, corpus: Corpus) -> None:
    """Raise ``UserError`` for a language model on a corpus of two languages, or the reverse."""
    if issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel) != corpus.is_text:
        expected = "has two languages: expected a translation"
        if corpus.is_text:
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
        models.build_model(argparse.Namespace(**values), task)
    except UserError:
        raise
    except Exception as error:  # fairseq checks with assert
        raise UserError(
            f"fairseq cannot build {arch} with these options: {error or type(error).__name__}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def _gpus(own: argparse.Namespace) -> int:
    """The number of GPUs that --gpus allows, or that torch sees."""
    return torch.cuda.device_count() if own.gpus is None else own.gpus


def device_options(own: argparse.Namespace, given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """--fp16 or --cpu, and the number of processes. Raises ``UserError`` for fp16 without a GPU."""
    gpus = _gpus(own)
    if gpus and "cpu" not in given:
        return {"fp16": not (own.no_fp16 or PRECISIONS & given.keys())}, gpus

    if FP16 & given.keys():
        reason = "--cpu is given" if gpus else "torch sees none"
        raise UserError(f"--fp16 needs a GPU, and {reason}")
    chosen = {**CPU, "cpu": True, "distributed-world-size": 1}  # not one process for each GPU
    if given.get("save-interval-updates"):
        chosen["keep-interval-updates"] = CHECKPOINTS_ON_CPU
    return chosen, 1


def _warnings_of_device(own: argparse.Namespace, device: dict[str, Any]) -> list[str]:
    if "cpu" not in device:
        return []
    reason = "" if _gpus(own) else "torch sees no GPU: "
    return [f"{reason}training on the CPU, which is slow"]


def step_options(target: int, processes: int, given: dict[str, Any]) -> dict[str, int]:
    """--max-tokens and --update-freq, whose product with ``processes`` is ``target``.

    The user's values stay. If both are missing, a step has the fewest batches of at most
    ``MAX_TOKENS`` tokens. Returns --max-tokens-valid, too.
    """
    size = given.get("max-tokens")
    freq = given.get("update-freq", [0])[0]
    if given.get("batch-size") and not size:  # the user counts sentences
        return {}
    valid = max(size or MAX_TOKENS, POSITIONS)  # the longest held-out sentence fits into a batch
    if not freq and size:
        freq = max(1, round(target / (processes * size)))
    elif not freq:
        freq = math.ceil(target / (processes * MAX_TOKENS))
    size = size or max(1, target // (processes * freq))
    return {"max-tokens": size, "update-freq": freq, "max-tokens-valid": valid}


def _tokens_per_step(step: dict[str, int], processes: int, target: int) -> str:
    size, freq = step["max-tokens"], step["update-freq"]
    factors = f"{processes} (processes) x {size} (--max-tokens) x {freq} (--update-freq)"
    return f"tokens per step: {factors} = {processes * size * freq}; the recipe's: {target}"


def find_end(recipe: Recipe, given: dict[str, Any]) -> tuple[int, str]:
    """When a training ends, by the user's options, else by the recipe.

    Returns a number, 0 for never, and "updates" or "epochs".
    """
    ends = given if LENGTHS & given.keys() else recipe.options
    if ends.get("max-update"):
        return ends["max-update"], "updates"
    return ends.get("max-epoch") or 0, "epochs"


def warm_up_of(recipe: Recipe, given: dict[str, Any]) -> int:
    """The number of warm-up updates: the user's, else the recipe's.

    The recipe's shrinks in proportion to a shorter training. It is at most a fifth of the training
    if only the user counts in updates, and does not shrink if only the recipe does.
    """
    end, unit = find_end(recipe, given)
    whole, whole_unit = find_end(recipe, {})
    full = recipe.options["warmup-updates"]
    share = 1.0
    if end and unit == whole_unit:
        share = min(1.0, end / whole)
    elif end and unit == "updates":
        share = min(1.0, end / (5 * full))
    return given.get("warmup-updates", max(1, round(full * share)))


def _notes_on_warm_up(recipe: Recipe, given: dict[str, Any], warm_up: int) -> list[str]:
    """A line where the warm-up is not the recipe's, or is for a training of another unit."""
    _, unit = find_end(recipe, given)
    whole, whole_unit = find_end(recipe, {})
    full = recipe.options["warmup-updates"]
    if "warmup-updates" in given or (warm_up == full and unit == whole_unit):
        return []
    return [f"warm-up: {warm_up} updates; the recipe has {full} for {whole:,} {whole_unit}"]


def _warnings_of_warm_up(recipe: Recipe, given: dict[str, Any], warm_up: int) -> list[str]:
    """A line where the warm-up takes more than half of the training."""
    end, unit = find_end(recipe, given)
    if unit == "updates" and 0 < end < 2 * warm_up:
        return [f"the warm-up takes {warm_up} of {end} updates; --warmup-updates N changes it"]
    return []
