"""The fairseq-train command for a corpus and an architecture.

The settings stand in recipes.py; this adds what depends on the data, the architecture, the machine and the user.
"""

import argparse
import filecmp
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rskip.console import as_words
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.train.data import POSITIONS, ROOT, Data, updates_per_epoch
from fairseq_rskip.tools.train.options import PLUGIN, Options, check_arch, find_user_dir
from fairseq_rskip.tools.train.recipes import AVERAGED, CPU, RECIPES, Recipe, peak_lr, split_step
from fairseq_rskip.tools.train.save import shown

HALF = ("fp16", "memory_efficient_fp16", "bf16", "memory_efficient_bf16", "amp", "tpu")
LONGEST = 250  # tokens of a training sentence that data preparation lets through


def find_gpus() -> tuple[int, bool]:
    """How many GPUs torch sees, and whether all compute well in half precision (compute capability 7.0)."""
    import torch

    count = torch.cuda.device_count()
    return count, all(torch.cuda.get_device_capability(number) >= (7, 0) for number in range(count))


def device_options(gpus: int, halves: bool, no_fp16: bool, given: dict[str, Any]) -> dict[str, Any]:
    """--fp16, or --cpu. Raises ``UserError`` for half precision without a GPU."""
    chosen = [name for name in HALF if name in given]
    if gpus and "cpu" not in given:
        return {"fp16": True} if halves and not no_fp16 and not chosen else {}
    if "fp16" in chosen or "memory_efficient_fp16" in chosen:
        raise UserError("--fp16 needs a GPU, and " + ("--cpu is given" if gpus else "torch sees none"))
    keep = {"keep-interval-updates": AVERAGED} if given.get("save_interval_updates") else {}
    # fairseq would start as many processes as there are GPUs
    return {**CPU, **keep, "cpu": True, **({"distributed-world-size": 1} if gpus > 1 else {})}


def step_options(target: int, processes: int, unit: str, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """--max-tokens and --update-freq, room for validation, and a line on what a step is. Raises ``UserError``."""
    cap = os.environ.get("MAX_TOKENS_PER_GPU") or "4096"
    if not re.fullmatch("[1-9][0-9]*", cap):
        raise UserError(f"MAX_TOKENS_PER_GPU must be a positive whole number, got {cap!r}")
    freq = given["update_freq"][0] if "update_freq" in given else None
    if "batch_size" in given and "max_tokens" not in given:
        count = given["batch_size"] * processes * (freq or 1)
        return {}, f"per step: at most {count} sentences (--batch-size), in place of the recipe's {target} tokens"
    size, freq = split_step(target, processes, int(cap), given.get("max_tokens"), freq)
    if size < LONGEST and "max_tokens" not in given:
        raise UserError(
            f"{target} tokens per step leave {size} for each of {processes} x {freq} batches, too few for a sentence; "
            "use fewer GPUs (CUDA_VISIBLE_DEVICES) or give --max-tokens"
        )
    longest = max(POSITIONS, *(given.get(f"max_{side}_positions", 0) for side in ("source", "target")))
    room = max(
        size if "max_tokens" in given else int(cap), longest
    )  # a held-out sentence is a batch of its own at most
    result = {"max-tokens": size, "update-freq": freq, "max-tokens-valid": room}
    plural = "s" if processes > 1 and unit == "GPU" else ""
    return result, (
        f"tokens per step: {processes} {unit}{plural} x {size} (--max-tokens) x {freq} (--update-freq) "
        f"= {processes * size * freq}; the recipe's: {target}"
    )


@dataclass
class Plan:
    """What train.sh does: ``command``, into ``save``; ``notes`` and ``warnings`` are lines for the user.

    ``settings`` tell the model from others, ``end`` is the last of ``unit`` (updates or epochs), 0 where there is none.
    """

    command: list[str]
    save: Path
    data: Data
    dictionaries: list[Path]
    settings: dict[str, Any]
    end: int
    unit: str
    notes: list[str]
    warnings: list[str]


def machine_options(
    recipe: Recipe, given: dict[str, Any], own: argparse.Namespace
) -> tuple[dict, dict, str, list[str]]:
    """Options of the device and of the batch, a note and warnings. Raises ``UserError``."""
    gpus, halves = find_gpus() if own.gpus is None else (own.gpus, True)
    device, warnings = device_options(gpus, halves, own.no_fp16, given), []
    on_cpu = "cpu" in device
    if on_cpu:
        warnings = [("" if gpus else "no GPU that torch can use: ") + "training on the CPU, which is slow"]
    processes = given.get("distributed_world_size") or (1 if on_cpu else gpus)
    step, note = step_options(recipe.tokens, processes, "CPU" if on_cpu else "GPU", given)
    return device, step, note, warnings


def log_options(save: Path, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """--tensorboard-logdir where fairseq found a package that writes it, else a note.

    Raises ``UserError`` for --wandb-project without its package, of which fairseq would warn in its log alone.
    """
    from fairseq.logging.progress_bar import SummaryWriter, wandb

    if given.get("wandb_project") and wandb is None:
        raise UserError("--wandb-project needs wandb: pip install wandb")
    if SummaryWriter is None:
        return {}, ["no TensorBoard log: neither tensorboard nor tensorboardX is installed"]
    return {"tensorboard-logdir": shown(save / "tensorboard")}, []


def _length(data: Data, options: Options, recipe: Recipe, ends: dict[str, int], dictionaries: list[Path]) -> str:
    """What the recipe was chosen by, and how many epochs the training means, as far as the data can tell."""
    why = f" (for {data.pairs:,} pairs; --recipe NAME takes another)" if not recipe.prepare and data.pairs else ""
    if not dictionaries or "batch_size" in options.given or not any(ends.values()):
        return why
    each = updates_per_epoch(data.folder, data.pair(options.given), recipe.tokens)
    if ends["update"]:
        return f"{why}: {ends['update']:,} updates, about {ends['update'] / each:,.0f} epochs"
    return f"{why}: {ends['epoch']:,} epochs, about {ends['epoch'] * each:,} updates"


def make_plan(data: Data, arch: str, words: list[str], own: argparse.Namespace) -> Plan:
    """The command and what belongs to it; writes nothing. Raises ``UserError``."""
    recipe = RECIPES[data.recipe]
    check_arch(arch, find_user_dir(words))
    options = Options(arch, {**data.languages, **recipe.options, "share-all-embeddings": True}, words)
    given = options.given
    device, step, note, warnings = machine_options(recipe, given, own)
    dictionaries = data.dictionaries(given)
    joined = not dictionaries or filecmp.cmp(*dictionaries, shallow=False)
    shares = joined and "share_decoder_input_output_embed" not in given
    embeddings = {"share-all-embeddings": True} if shares else {}
    save = Path(given.get("save_dir") or ROOT / "checkpoints" / data.name / arch)
    logs, more = log_options(save, given)
    rate = {"lr": f"{peak_lr(options.dim):g}"}
    chosen = {"user-dir": shown(PLUGIN), "arch": arch, **data.languages, **rate, **device, **recipe.options}
    fits = {"skip-invalid-size-inputs-valid-test": True}  # a held-out sentence that is too long ends nothing
    chosen = {**chosen, **step, **fits, **embeddings, "save-dir": shown(save), "log-format": "json", **logs}
    chosen = {name: value for name, value in chosen.items() if options.leaves(name)}
    if chosen.get("lr") == rate["lr"]:
        more.append(f"peak learning rate: {rate['lr']}, for dimension {options.dim}")
    command = [shutil.which("fairseq-train") or "fairseq-train", shown(data.folder), *as_words(chosen), *words]
    ends = {unit: given.get(f"max_{unit}") or chosen.get(f"max-{unit}", 0) for unit in ("update", "epoch")}
    unit = "update" if ends["update"] else "epoch"
    notes = [f"recipe: {data.recipe}{_length(data, options, recipe, ends, dictionaries)}", note, *more]
    return Plan(command, save, data, dictionaries, options.settings, ends[unit], f"{unit}s", notes, warnings)
