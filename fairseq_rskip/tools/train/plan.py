"""From a corpus, an architecture, this machine and the user's options to a fairseq-train command.

fairseq's own parser and the model's construction refuse what they cannot take; ``RANGES`` has what they wrongly take.
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

from fairseq_rskip.console import as_words
from fairseq_rskip.errors import UserError, did_you_mean, missing_package
from fairseq_rskip.models import unknown_architecture  # the import registers the architectures
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools.corpus import POSITIONS, PREPARATION, ROOT, Corpus
from fairseq_rskip.tools.process import PLUGIN
from fairseq_rskip.tools.recipes import CPU, RECIPES, Recipe, peak_lr, recipe_for
from fairseq_rskip.tools.train.main import LAST

MAX_TOKENS = 4096  # in a batch of one GPU, unless the user says otherwise
FP16 = {"fp16", "memory-efficient-fp16"}
PRECISIONS = {*FP16, "bf16", "memory-efficient-bf16", "amp", "tpu"}
LENGTHS = {"max-update", "max-epoch"}  # of a training: if the user gives one, both of the recipe's are dropped
RANGES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (  # accepted values in words, their test, options
    ("a number above 0", lambda v: 0 < v < math.inf, "lr|adam-eps"),
    ("a number of at least 0", lambda v: 0 <= v < math.inf, "weight-decay|clip-norm"),
    ("a number from 0 to below 1", lambda v: 0 <= v < 1, "(.*-)?dropout|label-smoothing|(en|de)coder-layerdrop"),
    ("two numbers from 0 to below 1", re.compile(r"\W?(0|0?\.\d+),\s*(0|0?\.\d+)\W?").fullmatch, "adam-betas"),
    ("an integer from 0 to 2^32 - 1", lambda v: 0 <= v < 2**32, "seed"),
    ("an integer of at least 0", lambda v: v >= 0, "max-(epoch|update)|(warmup|save-interval)-updates"),
    ("an integer of at least 1", lambda v: v >= 1, "max-tokens|batch-size|update-freq|(en|de)coder-layers"),
    ("a folder", str.strip, "save-dir"),
)


class Plan(NamedTuple):
    """A training: its ``command``, its folder ``save``, and ``notes`` and ``warnings``, lines for the user. ``end`` is
    the last of ``unit`` ("updates" or "epochs"), 0 for none."""

    command: list[str]
    save: Path
    corpus: Corpus
    end: int
    unit: str
    notes: list[str]
    warnings: list[str]

    @property
    def finished(self) -> bool:
        """Whether checkpoint_last.pt has all updates; fairseq would do one more. Raises ``CheckpointError``."""
        if self.unit == "epochs" or not (self.end and (self.save / LAST).exists()):
            return False
        history = load_checkpoint(self.save / LAST, map_location="cpu").get("optimizer_history") or [{}]
        return history[-1].get("num_updates", 0) >= self.end


def make_plan(own: argparse.Namespace, words: list[str]) -> Plan:
    """The plan for what ``main.read`` returns. Writes nothing. Raises ``UserError``."""
    corpus = Corpus.find(own.corpus, must_exist=not own.dry_run)
    kind = ARCH_MODEL_REGISTRY.get(own.arch, object)
    if not (corpus.exists or corpus.known) and issubclass(kind, FairseqLanguageModel):
        corpus = replace(corpus, target="")  # a text that is not prepared yet
    name = own.recipe or corpus.known or ("text" if corpus.is_text else recipe_for(corpus.pairs))
    recipe = RECIPES[name]
    task = {"source-lang": corpus.source, "target-lang": corpus.target} if corpus.source else {}
    task = {"task": "language_modeling"} if corpus.is_text else task
    shares = "share-decoder-input-output-embed" if corpus.is_text else "share-all-embeddings"
    given, unused, model = parse(own.arch, {**task, **recipe.options, shares: True}, words)
    sides = {side: given.get(f"{side}-lang") or getattr(corpus, side) for side in ("source", "target")}
    if corpus.preparation and replace(corpus, **sides) != corpus:  # evaluation would take the corpus's direction
        raise UserError(f"{corpus.folder / PREPARATION} says {corpus.source}-{corpus.target}: expected that direction")
    corpus = replace(corpus, **sides)
    joined = not corpus.exists or corpus.is_text or filecmp.cmp(*corpus.dictionaries(), shallow=False)
    share = joined and "share-decoder-input-output-embed" not in given
    if getattr(model, "adaptive_softmax_cutoff", None):
        share, task = False, {**task, "criterion": "adaptive_loss", "ddp-backend": "legacy_ddp"}
    check_model(own.arch, model, corpus, joined, share or "share-all-embeddings" in given)

    dimensions = (getattr(model, f"{side}_embed_dim", None) for side in ("encoder", "decoder"))
    rate = f"{peak_lr(next(filter(None, dimensions), 512)):g}"
    what = f"{corpus.pairs:,} {'lines' if corpus.is_text else 'pairs'}"
    why = f" (for {what}; --recipe NAME selects another)" if corpus.pairs and not (own.recipe or corpus.known) else ""
    notes, warnings = [f"recipe: {name}{why}"], []
    device, processes = device_options(own, given, warnings)
    warm_up = warm_up_of(recipe, given, notes, warnings)
    step = step_options(recipe.tokens, given.get("distributed-world-size") or processes, given, notes)
    save = Path(given.get("save-dir") or ROOT / "checkpoints" / Path(corpus.name).name / own.arch)
    chosen = {"user-dir": PLUGIN, "arch": own.arch, "lr": rate, **device, **recipe.options, **task, **step}
    chosen |= {"warmup-updates": warm_up, "skip-invalid-size-inputs-valid-test": True, shares: share, "save-dir": save}
    chosen |= {"log-format": "json", "tensorboard-logdir": save / "tensorboard"}
    replaced = {*given, *unused, *(LENGTHS if LENGTHS & given.keys() else ())}
    chosen = {option: value for option, value in chosen.items() if option not in replaced}
    command = [shutil.which("fairseq-train") or "fairseq-train", str(corpus.folder.absolute())]
    return Plan([*command, *as_words(chosen), *words], save, corpus, *find_end(recipe, given), notes, warnings)


def parse(arch: str, recipe: dict[str, Any], words: list[str]) -> tuple[dict[str, Any], set[str], argparse.Namespace]:
    """Parse the recipe's options, and the user's ``words``, which override them, with fairseq's parser.

    Returns the values that the user gave, by option; the recipe's options that do not exist here, such as --adam-betas
    with --optimizer sgd; the model's settings with defaults. Raises ``UserError`` for what fairseq-train refuses.
    """

    def refuse(message: str) -> None:
        if "--arch/-a" in message:
            message = unknown_architecture(arch)
        raise UserError(message.replace("argument ", "", 1).replace("<lambda> ", ""))

    ours = {f"--{name}" if value is True else f"--{name}={value}": name for name, value in recipe.items()}
    try:
        parser = options.get_training_parser()
        parser.error = refuse
        args, extra = options.parse_args_and_arch(parser, ["data", f"--arch={arch}", *ours, *words], parse_known=True)
    except (OSError, ImportError) as error:
        raise UserError(f"cannot load --user-dir: {error}") from None
    actions = parser._option_string_actions
    if unknown := [word for word in extra if word not in ours]:
        hint = did_you_mean(unknown[0].partition("=")[0], actions)
        raise UserError(f"{arch} takes no option {' '.join(unknown)}; {hint or 'fairseq-train --help lists them'}")
    names = [actions[flag].dest for flag in (word.partition("=")[0] for word in words) if flag in actions]
    given = {name.replace("_", "-"): getattr(args, name) for name in names}
    for expected, accepts, limited in RANGES:
        for name in filter(re.compile(limited).fullmatch, given):
            if not all(map(accepts, given[name] if isinstance(given[name], list) else [given[name]])):
                raise UserError(f"--{name} {given[name]}: expected {expected}")
    if given.get("wandb-project") and not importlib.util.find_spec("wandb"):
        raise UserError(missing_package("wandb"))
    kind = MODEL_DATACLASS_REGISTRY.get(arch)  # of which fairseq's parser leaves the defaults out
    values = {name: value for name, value in vars(args).items() if value is not None or not kind}
    defaults = {k: None if str(v).startswith("${") else v for k, v in (vars(kind()) if kind else {}).items()}
    return given, {ours[word] for word in extra}, argparse.Namespace(**{**defaults, **values})


def check_model(arch: str, model: argparse.Namespace, corpus: Corpus, joined: bool, share: bool) -> None:
    """Build the model as fairseq-train will, with one layer on each side. Raises ``UserError`` where that fails, and
    where it is not of the corpus's kind."""
    if issubclass(ARCH_MODEL_REGISTRY[arch], FairseqLanguageModel) != corpus.is_text:
        two, text = "has two languages: expected a translation", "is a text: expected a language"
        raise UserError(f"{corpus.name} {text if corpus.is_text else two} model, not {arch}; --archs lists them")
    values = {**vars(model), "_name": arch, "share_all_embeddings": share}
    small = {"encoder_layers": 1, "decoder_layers": 1, "adaptive_input_cutoff": "2,4", "adaptive_softmax_cutoff": "2,4"}
    values |= {name: value for name, value in small.items() if values.get(name)}  # of the few words below
    source, target = Dictionary(), Dictionary()
    source.pad_to_multiple_(8)
    target.pad_to_multiple_(8 if joined else 16)
    logging.disable()  # fairseq-train repeats it, about the whole model
    try:  # a model wants no more of the task; without data, nothing is profiled
        task = argparse.Namespace(source_dictionary=source, target_dictionary=target)
        models.build_model(argparse.Namespace(**values), task)
    except UserError:
        raise
    except Exception as error:  # fairseq checks with assert
        raise UserError(f"fairseq cannot build {arch} with these options: {error or type(error).__name__}") from None
    finally:
        logging.disable(logging.NOTSET)


def device_options(own: argparse.Namespace, given: dict[str, Any], warnings: list[str]) -> tuple[dict[str, Any], int]:
    """--fp16 or --cpu, and the number of processes. Raises ``UserError`` for fp16 without a GPU."""
    gpus = torch.cuda.device_count() if own.gpus is None else own.gpus
    if gpus and "cpu" not in given:
        return {"fp16": not (own.no_fp16 or PRECISIONS & given.keys())}, gpus
    if FP16 & given.keys():
        raise UserError("--fp16 needs a GPU, and " + ("--cpu is given" if gpus else "torch sees none"))
    kept = {"keep-interval-updates": 5} if given.get("save-interval-updates") else {}  # what evaluate.sh averages
    warnings.append(("" if gpus else "torch sees no GPU: ") + "training on the CPU, which is slow")
    return {**CPU, **kept, "cpu": True, "distributed-world-size": 1}, 1  # not one for each GPU


def step_options(target: int, processes: int, given: dict[str, Any], notes: list[str]) -> dict[str, int]:
    """--max-tokens and --update-freq, whose product with ``processes`` is ``target``, and room for validation.

    What the user gives is kept. If both are missing, a step has the fewest batches of at most ``MAX_TOKENS`` tokens.
    """
    size, freq = given.get("max-tokens"), given.get("update-freq", [0])[0]
    if given.get("batch-size") and not size:  # a step is of sentences, as many as the user says
        return {}
    valid = max(size or MAX_TOKENS, POSITIONS)  # a held-out sentence is at most a batch of its own
    freq = freq or (max(1, round(target / (processes * size))) if size else -(-target // (processes * MAX_TOKENS)))
    size = size or max(1, target // (processes * freq))
    factors = f"{processes} (processes) x {size} (--max-tokens) x {freq} (--update-freq)"
    notes.append(f"tokens per step: {factors} = {processes * size * freq}; the recipe's: {target}")
    return {"max-tokens": size, "update-freq": freq, "max-tokens-valid": valid}


def find_end(recipe: Recipe, given: dict[str, Any]) -> tuple[int, str]:
    """When a training ends, by the user's options or else the recipe: a number (0: never) and "updates" or "epochs"."""
    ends = given if LENGTHS & given.keys() else recipe.options
    return (ends["max-update"], "updates") if ends.get("max-update") else (ends.get("max-epoch") or 0, "epochs")


def warm_up_of(recipe: Recipe, given: dict[str, Any], notes: list[str], warnings: list[str]) -> int:
    """The number of warm-up updates: the user's, else the recipe's, which shrinks in proportion to a shorter training.
    It is at most a fifth of the training if only the user counts in updates, and is kept if only the recipe does."""
    (end, unit), (whole, whole_unit) = find_end(recipe, given), find_end(recipe, {})
    notes[0] += f": {end:,} {unit}" if end else ""
    full = recipe.options["warmup-updates"]
    share = end / whole if unit == whole_unit else end / (5 * full) if unit == "updates" else 1.0
    warm_up = given.get("warmup-updates", max(1, round(full * min(share or 1.0, 1.0))))
    if "warmup-updates" not in given and (warm_up < full or unit != whole_unit):
        notes.append(f"warm-up: {warm_up} updates; the recipe has {full} for {whole:,} {whole_unit}")
    if unit == "updates" and 0 < end < 2 * warm_up:
        warnings.append(f"the warm-up takes {warm_up} of {end} updates; --warmup-updates N changes it")
    return warm_up
