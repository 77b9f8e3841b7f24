"""The fairseq-train command for a corpus, an architecture, this machine and the user's options."""

import argparse
import filecmp
import importlib.util
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import fairseq_rskip
from fairseq_rskip.console import Parser, as_words
from fairseq_rskip.errors import UserError, missing_package
from fairseq_rskip.tools.corpus import NAMES, POSITIONS, ROOT, Corpus
from fairseq_rskip.tools.recipes import AVERAGED, CPU, RECIPES, Recipe, peak_lr, recipe_for
from fairseq_rskip.tools.train.options import Options, check_model

DESCRIPTION = f"""Train ARCH on CORPUS with the paper's settings for it (docs/training.md), on all GPUs that torch sees,
or on the CPU. The same command again resumes from SAVE-DIR/checkpoint_last.pt.

CORPUS is {", ".join(NAMES)},
prepared in data/CORPUS, or a folder: a data-bin of fairseq-preprocess, or the folder around it. ARCH is an architecture
of this plugin or of fairseq. Any option of fairseq-train may follow and overrides the recipe's; fairseq-train --help
lists them. --save-dir is checkpoints/CORPUS/ARCH by default."""
EPILOG = """In the environment, MAX_TOKENS_PER_GPU sets the largest batch of one GPU in tokens (4096), which does not
change the tokens per step, and CUDA_VISIBLE_DEVICES selects GPUs."""
PLUGIN = Path(fairseq_rskip.__file__).resolve().parent
HALF = {"fp16", "memory_efficient_fp16", "bf16", "memory_efficient_bf16", "amp", "tpu"}


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


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """CORPUS, ARCH and our own options; the other words are fairseq-train's. Raises ``UserError``."""
    usage = "%(prog)s CORPUS ARCH [option ...] [fairseq-train option ...]\n       %(prog)s --archs"
    parser = Parser(usage=usage, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("corpus", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arch", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--archs", action="store_true", help="list the architectures")
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command and exit")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --dry-run: plan for a machine with N GPUs")
    parser.add_argument("--no-fp16", action="store_true", help="train in fp32 even if fp16 is supported")
    recipe = "use the settings of small, medium, large or a corpus (default: the corpus's, else by its size)"
    parser.add_argument("--recipe", choices=list(RECIPES), metavar="NAME", help=recipe)
    own, words = parser.parse_known_args(argv)
    if not own.archs and [own.corpus, own.arch] != argv[:2]:
        raise UserError("expected CORPUS and ARCH first, in this order, then options; -h shows the usage")
    if own.gpus is not None and (not own.dry_run or own.gpus < 0):
        raise UserError("--gpus N needs --dry-run; to train on some of the GPUs, set CUDA_VISIBLE_DEVICES")
    return own, words


def make_plan(own: argparse.Namespace, words: list[str]) -> Plan:
    """The plan for what ``read`` returns. Writes nothing. Raises ``UserError``."""
    corpus = Corpus.find(own.corpus, must_exist=not own.dry_run)
    name = own.recipe or corpus.known or ("text" if corpus.is_text else recipe_for(corpus.pairs))
    recipe = RECIPES[name]
    task = {"source-lang": corpus.source, "target-lang": corpus.target} if corpus.source else {}
    shares = "share-all-embeddings"
    if corpus.is_text:
        task, shares = {"task": "language_modeling"}, "share-decoder-input-output-embed"
    options = Options(own.arch, {**task, **recipe.options, shares: True}, words)
    if options.get("wandb_project") and not importlib.util.find_spec("wandb"):
        raise UserError(missing_package("wandb"))
    sides = {side: options.get(f"{side}_lang") or getattr(corpus, side) for side in ("source", "target")}
    corpus = replace(corpus, **sides)
    joined = not corpus.exists or corpus.is_text or filecmp.cmp(*corpus.dictionaries(), shallow=False)
    share = joined and not options.get("share_decoder_input_output_embed")
    if getattr(options.model, "adaptive_softmax_cutoff", None):
        share, task = False, {**task, "criterion": "adaptive_loss", "ddp-backend": "legacy_ddp"}
    check_model(own.arch, options, corpus, joined, share)
    dimensions = (getattr(options.model, f"{side}_embed_dim", None) for side in ("encoder", "decoder"))
    rate = f"{peak_lr(next(filter(None, dimensions), 512)):g}"

    gpus, supports_fp16 = find_gpus() if own.gpus is None else (own.gpus, True)
    device, warnings = device_options(gpus, supports_fp16 and not own.no_fp16, options)
    processes = options.get("distributed_world_size") or (1 if "cpu" in device else gpus)
    step, note = step_options(recipe.tokens, processes, "CPU" if "cpu" in device else "GPU", options)
    warmup, length, shorter = length_options(recipe, corpus, options, warnings)
    save = Path(options.get("save_dir") or ROOT / "checkpoints" / Path(corpus.name).name / own.arch)
    chosen = {"user-dir": shown(PLUGIN), "arch": own.arch, "lr": rate, **device, **recipe.options, **task}
    chosen |= {**warmup, **step, "skip-invalid-size-inputs-valid-test": True, shares: share}
    chosen |= {"save-dir": shown(save), "log-format": "json", "tensorboard-logdir": shown(save / "tensorboard")}
    chosen = {option: value for option, value in chosen.items() if options.keeps(option)}
    command = [shutil.which("fairseq-train") or "fairseq-train", shown(corpus.folder), *as_words(chosen), *words]
    what = f"{corpus.pairs:,} {'lines' if corpus.is_text else 'pairs'}"
    why = f" (for {what}; --recipe NAME selects another)" if not (own.recipe or corpus.known) else ""
    notes = [f"recipe: {name}{why}{length}", note, *shorter]
    notes += [f"peak learning rate: {rate}, from the model's dimension"] if chosen.get("lr") == rate else []
    return Plan(command, save, corpus, *find_end(recipe, options), notes, warnings)


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
    """--max-tokens and --update-freq, whose product with ``processes`` is ``target``, room for validation, and a note.

    What the user gives stays; with neither, it is the fewest batches that a GPU takes. Raises ``UserError``.
    """
    cap = os.environ.get("MAX_TOKENS_PER_GPU") or "4096"
    if not (cap.isdecimal() and int(cap)):
        raise UserError(f"MAX_TOKENS_PER_GPU is {cap!r}: expected an integer of at least 1")
    size, freq = options.get("max_tokens"), (options.get("update_freq") or [None])[0]
    if options.get("batch_size") and not size:
        sentences = options.get("batch_size") * processes * (freq or 1)
        return {}, f"per step: at most {sentences} sentences (--batch-size), not the recipe's {target} tokens"
    # a held-out sentence is at most a batch of its own
    longest = max(POSITIONS, *(options.get(f"max_{side}_positions") or 0 for side in ("source", "target")))
    valid = max(size or int(cap), longest)
    freq = freq or (max(1, round(target / (processes * size))) if size else -(-target // (processes * int(cap))))
    size = size or max(1, target // (processes * freq))
    note = f"tokens per step: {processes} {unit}{'s' * (processes > 1 and unit == 'GPU')} x {size} (--max-tokens) "
    note += f"x {freq} (--update-freq) = {processes * size * freq}; the recipe's: {target}"
    return {"max-tokens": size, "update-freq": freq, "max-tokens-valid": valid}, note


def find_end(recipe: Recipe, options: Options | None = None) -> tuple[int, str]:
    """After how many of what ("updates" or "epochs") the recipe, or the user's options, end a training; 0 for never."""
    names = ("max_update", "max_epoch")
    if options and options.given.intersection(names):
        updates, epochs = map(options.get, names)
    else:
        updates, epochs = (recipe.options.get(name.replace("_", "-")) for name in names)
    return (updates, "updates") if updates else (epochs or 0, "epochs")


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
    full = recipe.options["warmup-updates"]
    warmup = options.get("warmup_updates") if "warmup_updates" in options.given else full
    changed, notes = {}, []
    if "warmup_updates" not in options.given and 0 < share < 1:
        warmup = max(1, round(full * share))
        changed = {"warmup-updates": warmup}
        notes = [f"warm-up: {warmup} updates, the recipe's {full} shortened with the training"]
    if 0 < updates < 2 * warmup:
        warnings.append(f"the warm-up takes {warmup} of {updates} updates; --warmup-updates N changes it")
    return changed, length, notes


def count_updates(corpus: Corpus, recipe: Recipe) -> int:
    """About how many updates an epoch takes; padding is not counted."""
    import numpy

    sides = [str(side) for side in (corpus.source, corpus.target) if side != ""]
    longer = numpy.max([corpus.lengths("train", side) for side in sides], axis=0)
    return max(1, math.ceil(int(longer.sum()) / recipe.tokens))
