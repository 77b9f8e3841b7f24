"""The fairseq-train command for a corpus, an architecture, this machine and the user's options."""

import argparse
import filecmp
import logging
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq_rskip.console import as_words
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import POSITIONS, ROOT, Corpus
from fairseq_rskip.tools.recipes import AVERAGED, CPU, RECIPES, Recipe, peak_lr, recipe_for, split_step
from fairseq_rskip.tools.train.arguments import Options, is_language_model, load_architectures, read_own

HALF = {"fp16", "memory_efficient_fp16", "bf16", "memory_efficient_bf16", "amp", "tpu"}
LONGEST = 250  # tokens of a training sentence that data preparation keeps


@dataclass
class Plan:
    """A training: its ``command``, its folder ``save``, and ``notes`` and ``warnings``, lines for the user. ``end`` is
    the last of ``unit`` ("updates" or "epochs"), 0 for none."""

    command: list[str]
    save: Path
    corpus: Corpus
    end: int
    unit: str
    notes: list[str]
    warnings: list[str]


def make_plan(words: list[str]) -> Plan:
    """The plan for the words behind ``rskip train``. Writes nothing. Raises ``UserError``."""
    own, words = read_own(words)
    corpus = Corpus.find(own.corpus, must_exist=not own.dry_run)
    name = own.recipe or corpus.known or ("text" if corpus.is_text else recipe_for(corpus.pairs))
    recipe, task, shares = RECIPES[name], task_options(corpus, own.arch, own.user_dir), "share-all-embeddings"
    if corpus.is_text:
        shares = "share-decoder-input-output-embed"
    options = Options(own.arch, {**task, **recipe.options, shares: True}, words, own.user_dir)
    sides = {side: options.get(f"{side}_lang") or getattr(corpus, side) for side in ("source", "target")}
    corpus = replace(corpus, **sides)
    joined = not corpus.exists or corpus.is_text or filecmp.cmp(*corpus.dictionaries(), shallow=False)
    share = joined and not options.get("share_decoder_input_output_embed")
    if options.of_model("adaptive_softmax_cutoff"):
        share, task = False, {**task, "criterion": "adaptive_loss", "ddp-backend": "legacy_ddp"}
    rate = f"{peak_lr(check_model(own.arch, options, joined, share)):g}"

    gpus, supports_fp16 = find_gpus() if own.gpus is None else (own.gpus, True)
    device, warnings = device_options(gpus, supports_fp16 and not own.no_fp16, options)
    unit, processes = ("CPU", 1) if "cpu" in device else ("GPU", gpus)
    step, note = step_options(recipe.tokens, options.get("distributed_world_size") or processes, unit, options)
    warmup, length, shorter = length_options(recipe, corpus, options, warnings)

    save = Path(options.get("save_dir") or ROOT / "checkpoints" / Path(corpus.name).name / own.arch)
    chosen = {"user-dir": shown(own.user_dir), "arch": own.arch, "lr": rate, **device, **recipe.options, **task}
    chosen |= {**warmup, **step, "skip-invalid-size-inputs-valid-test": True, shares: share}
    chosen |= {"save-dir": shown(save), "log-format": "json", **log_options(save, options)}
    chosen = {option: value for option, value in chosen.items() if options.keeps(option)}
    command = [shutil.which("fairseq-train") or "fairseq-train", shown(corpus.folder), *as_words(chosen), *words]
    what = "lines" if corpus.is_text else "pairs"
    why = f" (for {corpus.pairs:,} {what}; --recipe NAME selects another)" if not (own.recipe or corpus.known) else ""
    notes = [f"recipe: {name}{why}{length}", note, *shorter]
    notes += [f"peak learning rate: {rate}, from the model's dimension"] if chosen.get("lr") == rate else []
    return Plan(command, save, corpus, *find_end(recipe, options), notes, warnings)


def task_options(corpus: Corpus, arch: str, user_dir: Path) -> dict[str, Any]:
    """The languages of a pair, or the task of a text. Raises ``UserError`` where ``arch`` is for the other."""
    load_architectures(user_dir)
    if is_language_model(arch) != corpus.is_text and arch in load_architectures(user_dir):
        kinds = ("has two languages", "a translation model"), ("is a text", "a language model, transformer_lm_…")
        holds, expected = kinds[corpus.is_text]
        raise UserError(f"{corpus.name} {holds}: expected {expected}, not {arch}; --archs lists them")
    if corpus.is_text:
        return {"task": "language_modeling"}
    return {"source-lang": corpus.source, "target-lang": corpus.target} if corpus.source else {}


def shown(path: Path) -> str:
    """``path``, relative where it is below the current folder."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def find_gpus() -> tuple[int, bool]:
    """How many GPUs torch sees, and whether fp16 is fast on all of them (compute capability 7.0)."""
    import torch

    count = torch.cuda.device_count()
    return count, all(torch.cuda.get_device_capability(number) >= (7, 0) for number in range(count))


def device_options(gpus: int, fp16: bool, options: Options) -> tuple[dict[str, Any], list[str]]:
    """--fp16 or --cpu, and warnings. Raises ``UserError`` for fp16 without a GPU."""
    chosen = HALF & options.given
    if gpus and "cpu" not in options.given:
        return ({"fp16": True} if fp16 and not chosen else {}), []
    if chosen & {"fp16", "memory_efficient_fp16"}:
        raise UserError("--fp16 needs a GPU, and " + ("--cpu is given" if gpus else "torch sees none"))
    keep = {"keep-interval-updates": AVERAGED} if options.get("save_interval_updates") else {}
    one_process = {"distributed-world-size": 1} if gpus > 1 else {}  # fairseq would start one for each GPU
    warning = ("" if gpus else "torch sees no GPU: ") + "training on the CPU, which is slow"
    return {**CPU, **keep, "cpu": True, **one_process}, [warning]


def step_options(target: int, processes: int, unit: str, options: Options) -> tuple[dict[str, Any], str]:
    """--max-tokens and --update-freq, room for validation, and a note on the size of a step. Raises ``UserError``."""
    cap = os.environ.get("MAX_TOKENS_PER_GPU") or "4096"
    if not (cap.isdecimal() and int(cap)):
        raise UserError(f"MAX_TOKENS_PER_GPU is {cap!r}: expected an integer of at least 1")
    max_tokens, freq = options.get("max_tokens"), (options.get("update_freq") or [None])[0]
    if options.get("batch_size") and not max_tokens:
        sentences = options.get("batch_size") * processes * (freq or 1)
        return {}, f"per step: at most {sentences} sentences (--batch-size), not the recipe's {target} tokens"
    size, freq = split_step(target, processes, int(cap), max_tokens, freq)
    if size < (getattr(options.args, "tokens_per_sample", None) or LONGEST) and not max_tokens:
        raise UserError(
            f"{target} tokens per step leave {size} for each of {processes} x {freq} batches, too few for a sentence; "
            "use fewer GPUs (CUDA_VISIBLE_DEVICES) or give --max-tokens"
        )
    # a held-out sentence is at most a batch of its own
    longest = max(POSITIONS, *(options.get(f"max_{side}_positions") or 0 for side in ("source", "target")))
    note = f"tokens per step: {processes} {unit}{'s' * (processes > 1 and unit == 'GPU')} x {size} (--max-tokens) "
    note += f"x {freq} (--update-freq) = {processes * size * freq}; the recipe's: {target}"
    return {"max-tokens": size, "update-freq": freq, "max-tokens-valid": max(max_tokens or int(cap), longest)}, note


def find_end(recipe: Recipe, options: Options | None = None) -> tuple[int, str]:
    """After how many of what ("updates" or "epochs") the recipe, or the user's options, end a training; 0 for never."""
    names = {"updates": "max_update", "epochs": "max_epoch"}
    if options and set(names.values()) & options.given:
        ends = {unit: options.get(name) for unit, name in names.items()}
    else:
        ends = {unit: recipe.options.get(name.replace("_", "-"), 0) for unit, name in names.items()}
    return (ends["updates"], "updates") if ends["updates"] else (ends["epochs"] or 0, "epochs")


def length_options(
    recipe: Recipe, corpus: Corpus, options: Options, warnings: list[str]
) -> tuple[dict[str, int], str, list[str]]:
    """--warmup-updates of a training that the user made shorter than the recipe's, and notes on the length and on it.

    The recipe's warm-up shrinks in proportion; the user's own stays.
    """
    (end, unit), (whole, whole_unit) = find_end(recipe, options), find_end(recipe)
    epoch = count_updates(corpus, recipe) if corpus.exists and not options.get("batch_size") else 0  # 0: not known
    each = {"updates": 1, "epochs": epoch}
    updates, whole_updates = end * each[unit], whole * each[whole_unit]
    length = f": {end:,} {unit}" if end else ""
    if end and epoch:
        length += f", about {updates:,} updates" if unit == "epochs" else f", about {end / epoch:,.1f} epochs"
    share = end / whole if unit == whole_unit else updates / whole_updates if whole_updates else 1
    warmup, changed, notes = recipe.options["warmup-updates"], {}, []
    if "warmup_updates" in options.given:
        warmup = options.args.warmup_updates
    elif 0 < share < 1:
        changed = {"warmup-updates": max(1, round(warmup * share))}
        notes = [f"warm-up: {changed['warmup-updates']} updates, the recipe's {warmup} shortened with the training"]
        warmup = changed["warmup-updates"]
    if 0 < updates < 2 * warmup:
        warnings.append(f"the warm-up takes {warmup} of {updates} updates; --warmup-updates N changes it")
    return changed, length, notes


def count_updates(corpus: Corpus, recipe: Recipe) -> int:
    """About how many updates an epoch takes; padding is not counted."""
    import numpy

    sides = [str(side) for side in (corpus.source, corpus.target) if side != ""]
    longer = numpy.max([corpus.lengths("train", side) for side in sides], axis=0)
    return max(1, math.ceil(int(longer.sum()) / recipe.tokens))


def log_options(save: Path, options: Options) -> dict[str, Any]:
    """--tensorboard-logdir where fairseq can write it. Raises ``UserError`` for --wandb-project without wandb."""
    from fairseq.logging.progress_bar import SummaryWriter, wandb

    if options.get("wandb_project") and wandb is None:
        raise UserError("--wandb-project needs wandb: pip install wandb")
    return {"tensorboard-logdir": shown(save / "tensorboard")} if SummaryWriter else {}


def check_model(arch: str, options: Options, joined: bool, share: bool) -> int:
    """The dimension of the model, which is built with one layer on each side as fairseq-train will.

    Raises ``UserError`` where it cannot be built.
    """
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

    kind = MODEL_DATACLASS_REGISTRY.get(arch)
    config = kind() if kind else argparse.Namespace(**vars(options.args))
    share = share or bool(kind and getattr(config, "share_all_embeddings", False))
    values = {name: getattr(options.args, name, None) for name in vars(config)}
    values = {name: value for name, value in values.items() if value is not None}
    values |= {name: 1 for name in ("encoder_layers", "decoder_layers") if isinstance(getattr(config, name, None), int)}
    cutoffs = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
    values |= {name: "2,4" for name in cutoffs if getattr(config, name, None)}  # of the eight words below
    vars(config).update(values, _name=arch, share_all_embeddings=share or "share_all_embeddings" in options.given)
    source, target = Dictionary(), Dictionary()
    for word in "abcd":
        source.add_symbol(word)
        target.add_symbol(word if joined else word * 2)
    logging.disable()  # fairseq-train repeats it, about the whole model
    try:
        # of the task a model wants no more; without data, nothing is profiled
        task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
        ARCH_MODEL_REGISTRY[arch].build_model(config, task)
    except UserError:
        raise
    except Exception as error:  # fairseq checks with assert
        raise UserError(f"fairseq cannot build {arch} with these options: {error or type(error).__name__}") from None
    finally:
        logging.disable(logging.NOTSET)
    return getattr(config, "encoder_embed_dim", None) or getattr(config, "decoder_embed_dim", None) or 512
