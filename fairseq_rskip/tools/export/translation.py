"""A Transformer as a folder to share: weights, settings, and its corpus's way from text to tokens."""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import ListConfig, OmegaConf

from fairseq_rskip.analysis.study import Source
from fairseq_rskip.errors import UserError
from fairseq_rskip.models._building import SkipModel
from fairseq_rskip.tools.evaluate.main import DEFAULT_LENPEN, corpus_of
from fairseq_rskip.tools.systems import evaluations_of
from fairseq_rskip.tools.transformers import build, ours, read

SEARCH = {"beam": 4, "lenpen": DEFAULT_LENPEN, "max_len_a": 1.0, "max_len_b": 50}  # rskip evaluate's
SAMPLING = {"beam": 1, "sampling": True, "max_len_a": 1.0, "max_len_b": 100}  # of a language model
TASKS = {"translation": ("translation", SEARCH), "language_modeling": ("language_model", SAMPLING)}
OF_TRAINING = {"_name", "encoder_embed_path", "decoder_embed_path", "skip_log_interval"}  # of no use afterwards
SHOWN = ("optimization", "optimizer", "lr_scheduler", "criterion")  # of the training, in the card


def convert(stage: Path, checkpoint: Path, state: dict, data: Path | None) -> tuple[dict[str, Any], Any]:
    """config.json and the model; dictionaries and subwords are copied to ``stage``. Raises ``UserError``."""
    logging.getLogger("fairseq.tasks").setLevel(logging.WARNING)  # the sizes of dictionaries
    source = Source("CHECKPOINT", str(checkpoint), {})
    state.update(read(source))  # with settings of older versions converted
    cfg = state["cfg"]
    if cfg.task._name not in TASKS:
        raise UserError(f"{checkpoint} is of the task {cfg.task._name}: expected {' or '.join(TASKS)}")
    kind, search = TASKS[cfg.task._name]
    corpus = corpus_of(checkpoint, cfg.task.data, data)
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        corpus.check_vocabulary(folder, "name the corpus that it was trained on with --data")
    if kind == "translation":
        cfg.task.source_lang, cfg.task.target_lang = corpus.source, corpus.target
    name, settings = model_settings(source, cfg.model)
    _, model = build(source, cfg, state, str(corpus.folder), seed=1)
    for buffer_name, value in model.state_dict().items():
        if buffer_name.endswith("_float_tensor"):  # fairseq leaves it uninitialised: the file would differ every time
            value.zero_()
    subwords = {}
    for path in corpus.dictionaries():
        shutil.copyfile(path, stage / path.name)
    for language in filter(None, (corpus.source, corpus.target)):
        if path := corpus.subwords(language):
            subwords[language] = f"subwords.{path.name}"
            shutil.copyfile(path, stage / subwords[language])
    config = {"kind": kind, "architecture": name, "source": corpus.source, "target": corpus.target}
    config.update(corpus=corpus.name, tokenizer=corpus.tokenizer, normalise_punctuation=corpus.normalise_punctuation)
    return {**config, "bpe": corpus.bpe, "subwords": subwords, "search": search, "model": settings}, model


def model_settings(source: Source, model: Any) -> tuple[str, dict[str, Any]]:
    """The architecture's name and all of its settings; a stock Transformer of fairseq becomes one of ours."""
    model = ours(model)
    name = getattr(model, "_name", None) or getattr(model, "arch", None)
    kind = ARCH_MODEL_REGISTRY.get(name)
    if not (kind and issubclass(kind, SkipModel)):
        raise UserError(f"{source} is of the architecture {name}: expected one of ours, or a Transformer of fairseq")
    fields = [field.name for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[name]())]
    settings = {field: getattr(model, field) for field in fields if hasattr(model, field) and field not in OF_TRAINING}
    settings = {k: list(v) if isinstance(v, (list, tuple, ListConfig)) else v for k, v in settings.items()}
    return name, {k: v if v is None or isinstance(v, (bool, int, float, list)) else str(v) for k, v in settings.items()}


def describe(checkpoint: Path, config: dict[str, Any], state: dict) -> dict[str, Any]:
    """What the card says. Its scores are those beside the checkpoint of exactly these weights."""
    languages = [*filter(None, (config["source"], config["target"]))]
    tag, example = "translation", 'model.translate(["A sentence as it is written."], beam=4)'
    if config["kind"] == "language_model":
        tag, example = "text-generation", 'model.score("A text.").perplexity\nmodel.sample("A text", temperature=0.8)'
    scores, lines = next(evaluations_of(checkpoint), {}), []
    if about := scores.get("evaluation"):
        names = ", ".join(each["name"] for each in about["checkpoints"])  # without this machine's folders
        options = " ".join(word for word in about["options"] if "=" not in word)
        lines.append(f"{about['corpus']}, {about['subset']}, of {names}: {options}")
        lines += [f"{row['name']} ({row['signature']}): {row['score']:.2f}" for row in scores.get("scores", [])]
        lines += [f"perplexity per {unit}: {value:.2f}" for unit, value in scores.get("perplexity", {}).items()]
        lines += [f"bits per {unit}: {value:.4f}" for unit, value in scores.get("bits", {}).items()]
    return {
        "header": {"language": languages, "library_name": "fairseq", "pipeline_tag": tag},
        "title": f"{config['architecture']}, {'-'.join(languages)}, {config['corpus']}",
        **{"example": example, "scores": lines},
        "settings": {part: OmegaConf.to_container(OmegaConf.create(state["cfg"][part])) for part in SHOWN},
    }
