"""Transformers: checkpoints of fairseq, and fresh ones, on pairs or text that fairseq-preprocess has binarised."""

import argparse
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks, utils
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel, TransformerModelBase
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf
from torch import Tensor, nn

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.analysis.study import Source, Study, choose, device_of, fit, parsed
from fairseq_rskip.console import progress
from fairseq_rskip.errors import UserError
from fairseq_rskip.safe_load import CheckpointError


def losses(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    """Cross entropy of each sentence's target, teacher-forced, or of each window of a text: the mean over its tokens,
    without label smoothing."""
    log_probabilities = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True, sample=sample)
    target = sample["target"]
    kept = target.ne(sample["pad"])
    picked = log_probabilities.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(~kept, 0.0)
    return -picked.sum(1) / kept.sum(1)


def study(models: Sequence[Source], options: argparse.Namespace) -> Study:
    """Build every model and draw the examples. Raises ``UserError``, ``CheckpointError``."""
    logging.getLogger().setLevel(logging.WARNING)  # fairseq lets every library's remarks through
    device = device_of(options.device)
    states = [read(source) for source in models]
    data = _data(models, states, options)
    built, first_task = {}, None
    for source, state in progress(list(zip(models, states)), len(models), "loading", "model"):
        cfg = _fresh_settings(source, data) if state is None else state["cfg"]
        task, model = build(source, cfg, state, data, options.seed)
        first_task = first_task or task
        built[source.label] = model.to(device).eval()
    try:
        first_task.load_dataset(options.split)
    except OSError as error:
        raise UserError(f"{data} has no split {options.split!r}: {' '.join(str(error).split())[:150]}") from None
    dataset = first_task.dataset(options.split)
    chosen = _choose(dataset, list(built.values()), options)

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, len(chosen), options.batch_size):
            sample = dataset.collater([dataset[i] for i in chosen[start : start + options.batch_size]])
            sample["pad"] = first_task.target_dictionary.pad()
            yield utils.move_to_cuda(sample) if device.type == "cuda" else sample

    def side(name: str, _skip: Any) -> str:
        return name.partition(".")[0]

    examples = "windows" if (Path(data) / "dict.txt").is_file() else "sentence pairs"
    data = f"{len(chosen)} {examples} of {options.split}"
    return Study(built, batches, -(-len(chosen) // options.batch_size), data, losses, side)


def read(source: Source) -> Any:
    """The checkpoint, with settings of older versions converted; None for a fresh model. Raises ``CheckpointError``."""
    if source.state is None:
        return None
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(source.path)
        if state["cfg"]["task"]["data"] is None or state["cfg"]["model"] is None:
            raise KeyError("settings")
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{source} is not a checkpoint of fairseq-train: it lacks {error}") from None
    return state


def _data(models: Sequence[Source], states: Sequence[Any], options: argparse.Namespace) -> str:
    """The data-bin that all models see: --data, else the one that every checkpoint names."""
    named = {str(state["cfg"]["task"]["data"]): source for source, state in zip(models, states) if state is not None}
    named = {options.data: "--data"} if options.data else named
    if not named:
        raise UserError("fresh Transformers need --data DATA-BIN, a folder that fairseq-preprocess wrote")
    if len(named) > 1:
        listed = ", ".join(f"{source.label}: {folder}" for folder, source in named.items())
        raise UserError(f"the checkpoints name different data: say --data DATA-BIN ({listed})")
    ((folder, source),) = named.items()
    if not list(Path(folder).expanduser().glob("dict*.txt")):
        hint = "" if options.data else f", which {source} was trained on: say --data DATA-BIN"
        raise UserError(f"{folder} is not here or holds no dict.*.txt or dict.txt{hint}")
    return str(Path(folder).expanduser())


def _fresh_settings(source: Source, data: str) -> Any:
    """The settings of ``fairseq-train DATA --arch ARCH ...`` for ``fresh:ARCH ...``."""
    task = ["--task", "language_modeling"] if (Path(data) / "dict.txt").is_file() else []
    parser, argv = fairseq_options.get_training_parser(), [data, "--arch", *source.fresh, *task]
    return convert_namespace_to_omegaconf(parsed(source, fairseq_options.parse_args_and_arch, parser, argv))


def ours(model: Any) -> Any:
    """``model``, or for a Transformer or a language model of fairseq the same network as ours: xskip_ln at lambda 1,
    xskip if pre-norm."""
    name = getattr(model, "_name", None) or getattr(model, "arch", None)
    stock = {TransformerModel: "", TransformerModelBase: "", TransformerLanguageModel: "lm_"}
    prefix = stock.get(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name))
    if prefix is None:
        return model
    pre_norm = getattr(model, "encoder_normalize_before", False) or getattr(model, "decoder_normalize_before", False)
    name = f"transformer_{prefix}xskip" if pre_norm else f"transformer_{prefix}xskip_ln"
    ours = MODEL_DATACLASS_REGISTRY[name](skip_lambda=1.0)
    for field in dataclasses.fields(ours):
        if hasattr(model, field.name):
            setattr(ours, field.name, getattr(model, field.name))
    ours._name = name
    return OmegaConf.structured(ours)


def build(source: Source, cfg: Any, state: Any, data: str, seed: int) -> tuple[Any, nn.Module]:
    """The task on ``data`` and the model with its weights."""
    try:
        cfg.task.data = data
        if "eval_bleu" in cfg.task:
            cfg.task.eval_bleu = False  # it would build a tokenizer and a generator
        task = tasks.setup_task(cfg.task)
        torch.manual_seed(seed)
        model = task.build_model(ours(cfg.model))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except (OSError, AssertionError, AttributeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{source} does not go with {data}: {reason}") from None
    if state is not None:
        weights = dict(state["model"])
        model.upgrade_state_dict(weights)
        fit(model, checkpoint_utils.prune_state_dict(weights, cfg.model), source)
    return task, model


def _choose(dataset: Any, models: list[nn.Module], options: argparse.Namespace) -> list[int]:
    """The examples, drawn from those that fit every model, sorted by length: equal lengths batch best."""
    limits = [model.max_positions() for model in models]
    limit = min(limits) if isinstance(limits[0], int) else tuple(map(min, zip(*limits)))
    fitting, _ = dataset.filter_indices_by_size(torch.arange(len(dataset)).numpy(), limit)
    chosen = fitting[choose(len(fitting), options.examples, options.seed).numpy()]
    return sorted((int(i) for i in chosen), key=lambda i: (dataset.size(i), i))
