"""Transformers: checkpoints of fairseq, and fresh ones, on binarised pairs or text."""

import argparse
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
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

from fairseq_rskip.analysis.study import Study, draw_examples
from fairseq_rskip.console import progress
from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import device_of

# the import registers the architectures
from fairseq_rskip.models import unknown_architecture_message
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.residual.state import check_file
from fairseq_rskip.safe_load import CheckpointError
from fairseq_rskip.tools.corpus import Corpus, corpus_of
from fairseq_rskip.tools.source import Source, fit, parsed


def losses(model: nn.Module, sample: dict[str, Any]) -> Tensor:
    """Cross entropy of each sentence's target, teacher-forced, or of each window of a text.

    It is the mean over the tokens, without label smoothing.
    """
    log_probabilities = model.get_normalized_probs(
        model(**sample["net_input"]), log_probs=True, sample=sample
    )
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
    _check_task(models, states, data)
    built, tasks_of, seeds = {}, [], {}
    for source, state in progress(list(zip(models, states)), len(models), "loading", "model"):
        cfg = _fresh_settings(source, data) if state is None else state["cfg"]
        task, model = build(source, cfg, state, str(data.folder), options.seed)
        tasks_of.append(task)
        built[source.label] = model.to(device).eval()
        seeds[source.label] = options.seed if state is None else cfg.common.seed
    # all have the same data; the windows of a text are those of the model with the shortest
    task = min(tasks_of, key=window_length)
    try:
        task.load_dataset(options.split)
    except FileNotFoundError:
        raise UserError(f"--split {options.split}: {data.folder} has no such part") from None
    dataset = task.dataset(options.split)
    chosen = _choose(dataset, list(built.values()), options)

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, len(chosen), options.batch_size):
            batch = chosen[start : start + options.batch_size]
            sample = dataset.collater([dataset[index] for index in batch])
            sample["pad"] = task.target_dictionary.pad()
            yield utils.move_to_cuda(sample) if device.type == "cuda" else sample

    unit = "windows" if data.is_monolingual else "sentence pairs"
    about = f"{len(chosen)} {unit} of {options.split}"
    count = math.ceil(len(chosen) / options.batch_size)
    return Study(built, batches, count, about, losses, side_of, seeds=seeds)


def window_length(task: Any) -> int:
    """Tokens in a window of a language modelling task's text; 0 for a task on sentence pairs."""
    return getattr(getattr(task, "args", None), "tokens_per_sample", 0)


def side_of(name: str, skip: SkipConnection) -> str:
    """Encoder or decoder: the first part of a module's name."""
    return name.partition(".")[0]


def read(source: Source) -> Any:
    """The checkpoint, with settings of older versions converted; None for a fresh model.

    Raises ``CheckpointError``.
    """
    if source.fresh:
        return None
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(source.path)
        if state["cfg"]["task"]["data"] is None or state["cfg"]["model"] is None:
            raise KeyError("settings")
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{source} is not a checkpoint of fairseq-train: it lacks {error}"
        ) from None
    for noted in getattr(state["model"], "_metadata", {}).values():
        check_file(noted)  # of a rule of your own
    return state


def _data(models: Sequence[Source], states: Sequence[Any], options: argparse.Namespace) -> Corpus:
    """The data-bin that all models see: --data, else the one that every checkpoint names."""
    named = {}
    for source, state in zip(models, states):
        if state is not None:
            named[str(state["cfg"]["task"]["data"])] = source
    if not (options.data or named):
        raise UserError(
            "fresh Transformers need --data DATA-BIN, a folder that fairseq-preprocess wrote"
        )
    if len(named) > 1 and not options.data:
        listed = ", ".join(f"{source.label}: {folder}" for folder, source in named.items())
        raise UserError(f"the checkpoints name different data: say --data DATA-BIN ({listed})")
    folder, source = next(iter(named.items()), ("", None))
    return corpus_of(source, folder, options.data, Corpus.find)


def _check_task(models: Sequence[Source], states: Sequence[Any], data: Corpus) -> None:
    """Raise ``UserError`` for a language model with pairs, or a translation model with a text."""
    for source, state in zip(models, states):
        if state is None:  # a fresh model is of the task that the data has
            continue
        reads_text = state["cfg"]["task"]["_name"] == "language_modeling"
        if reads_text != data.is_monolingual:
            kind = "a language model" if reads_text else "a translation model"
            found = "a text" if data.is_monolingual else "sentence pairs"
            raise UserError(
                f"{source} is {kind}, and {data.folder} has {found}: expected models of one task "
                "and their data, since all see the same examples"
            )


def _fresh_settings(source: Source, data: Corpus) -> Any:
    """The settings of ``fairseq-train DATA --arch ARCH ...`` for ``fresh:ARCH ...``."""
    if source.fresh[0] not in ARCH_MODEL_REGISTRY:
        raise UserError(f"{source}: {unknown_architecture_message(source.fresh[0])}")
    argv = [str(data.folder), "--arch", *source.fresh]
    if data.is_monolingual:
        argv += ["--task", "language_modeling"]

    def refuse(message: str) -> None:
        raise UserError(message.removeprefix("argument "))

    parser = fairseq_options.get_training_parser()
    parser.error = refuse
    options = parsed(source, fairseq_options.parse_args_and_arch, parser, argv)
    return convert_namespace_to_omegaconf(options)


def ours(model: Any) -> Any:
    """``model``; for a Transformer or a language model of fairseq the same network of this package.

    That is xskip_ln at lambda 1, or xskip if it is pre-norm.
    """
    name = getattr(model, "_name", None) or getattr(model, "arch", None)
    stock = {TransformerModel: "", TransformerModelBase: "", TransformerLanguageModel: "lm_"}
    prefix = stock.get(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name))
    if prefix is None:
        return model
    sides = ("encoder", "decoder")
    pre_norm = any(getattr(model, f"{side}_normalize_before", False) for side in sides)
    rule = "xskip" if pre_norm else "xskip_ln"
    name = f"transformer_{prefix}{rule}"
    config = MODEL_DATACLASS_REGISTRY[name](skip_lambda=1.0)
    for field in dataclasses.fields(config):
        if hasattr(model, field.name):
            setattr(config, field.name, getattr(model, field.name))
    config._name = name
    return OmegaConf.structured(config)


def build(source: Source, cfg: Any, state: Any, data: str, seed: int) -> tuple[Any, nn.Module]:
    """The task on ``data`` and the model with its weights."""
    try:
        cfg.task.data = data
        if "eval_bleu" in cfg.task:
            cfg.task.eval_bleu = False  # it would build a tokenizer and a generator
        task = tasks.setup_task(cfg.task)
        torch.manual_seed(seed)
        # fairseq leaves out options that are unknown now: of rules that were loaded beside it
        model = task.build_model(ours(cfg.model), from_checkpoint=True)
    except (
        OSError,
        AssertionError,
        AttributeError,
        KeyError,
        ValueError,
    ) as error:  # ours, and fairseq's bare ones
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{source} with {data}: {reason}") from None
    if state is not None:
        weights = dict(state["model"])
        model.upgrade_state_dict(weights)
        fit(model, checkpoint_utils.prune_state_dict(weights, cfg.model), source)
    return task, model


def _choose(dataset: Any, models: list[nn.Module], options: argparse.Namespace) -> list[int]:
    """Random examples that fit every model, sorted so that equal lengths share batches."""
    limits = [model.max_positions() for model in models]
    limit = min(limits) if isinstance(limits[0], int) else tuple(map(min, zip(*limits)))
    fitting, _ = dataset.filter_indices_by_size(torch.arange(len(dataset)).numpy(), limit)
    if not len(fitting):
        raise UserError(f"no example of {options.split} fits: the models take {limit} tokens")
    chosen = fitting[draw_examples(len(fitting), options.examples, options.seed).numpy()]
    return sorted((int(i) for i in chosen), key=lambda i: (dataset.size(i), i))
