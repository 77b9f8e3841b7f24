"""A Transformer as a folder to share: weights, settings, and its corpus's way from text to
tokens.
"""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import ListConfig, OmegaConf

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.building import SkipModel
from fairseq_rskip.modules.step_hooks import TrainingConfig
from fairseq_rskip.residual import own_rules
from fairseq_rskip.tools.corpus import Corpus, corpus_of
from fairseq_rskip.tools.evaluate.main import DEFAULT_LENPEN
from fairseq_rskip.tools.export.card import Card
from fairseq_rskip.tools.saved_model import read_checkpoint
from fairseq_rskip.tools.score import digits
from fairseq_rskip.tools.source import Source
from fairseq_rskip.tools.systems import evaluations_of
from fairseq_rskip.tools.training_files import CHECKPOINTS
from fairseq_rskip.tools.transformers import build, ours, read

SEARCH = {
    "beam": 4,
    "lenpen": DEFAULT_LENPEN,
    "max_len_a": 1.0,
    "max_len_b": 50,
}  # rskip evaluate's
SAMPLING = {"beam": 1, "sampling": True, "max_len_a": 1.0, "max_len_b": 100}  # of a language model
TASKS = {"translation": ("translation", SEARCH), "language_modeling": ("language_model", SAMPLING)}
TRAINING_ONLY = {  # settings of no use afterwards
    "encoder_embed_path",
    "decoder_embed_path",
    *(field.name for field in dataclasses.fields(TrainingConfig)),
}
SHOWN = ("optimization", "optimizer", "lr_scheduler", "criterion")  # of the training, in the card


def convert(
    stage: Path, checkpoint: Path, data: Path | None, trained: Path
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """config.json, the model, and what :func:`describe` needs: fairseq's checkpoint.

    Dictionaries and subwords are copied to ``stage``. ``trained`` is the folder that the weights
    come from, with copies of the training's dictionaries in it or beside it. Raises ``UserError``.
    """
    logging.getLogger("fairseq.tasks").setLevel(logging.WARNING)  # the sizes of dictionaries
    read_checkpoint(checkpoint)  # an unusable one ends in one line here
    source = Source("CHECKPOINT", str(checkpoint))
    state = read(source)
    cfg = state["cfg"]
    if cfg.task._name not in TASKS:
        raise UserError(
            f"{checkpoint} is of the task {cfg.task._name}: expected {' or '.join(TASKS)}"
        )
    kind, search = TASKS[cfg.task._name]
    corpus = corpus_of(checkpoint, str(cfg.task.data), data)
    beside = trained.parent  # of an evaluation's folder, where an average is
    for folder in (trained, beside, beside / CHECKPOINTS):
        corpus.check_vocabulary(folder, "name the corpus that it was trained on with --data")
    if kind == "translation":
        cfg.task.source_lang = corpus.source
        cfg.task.target_lang = corpus.target

    architecture, settings = model_settings(source, cfg.model)
    _, model = build(source, cfg, state, str(corpus.folder), seed=1)
    for name, value in model.state_dict().items():
        # fairseq leaves this buffer uninitialised: the file would differ every time
        if name.endswith("_float_tensor"):
            value.zero_()

    config = {
        "kind": kind,
        "architecture": architecture,
        "source": corpus.source,
        "target": corpus.target,
        "corpus": corpus.name,
        "tokenizer": corpus.tokenizer,
        "normalise_punctuation": corpus.normalise_punctuation,
        "bpe": corpus.bpe,
        "subwords": copy_vocabulary(corpus, stage),
        "search": search,
        "model": settings,
    }
    return config, model, state


def copy_vocabulary(corpus: Corpus, stage: Path) -> dict[str, str]:
    """Copy dictionaries and subwords to ``stage``; language -> its file of subwords there."""
    for dictionary in corpus.dictionaries():
        shutil.copyfile(dictionary, stage / dictionary.name)
    names = {}
    for language in (corpus.source, corpus.target):
        path = corpus.subwords(language) if language else None
        if language and path:
            names[language] = f"subwords.{path.name}"
            shutil.copyfile(path, stage / names[language])
    return names


def model_settings(source: Source, model: Any) -> tuple[str, dict[str, Any]]:
    """The architecture's name and all of its settings, as JSON has them.

    A stock Transformer of fairseq becomes one of ours. Raises ``UserError`` for another model.
    """
    model = ours(model)
    name = str(getattr(model, "_name", None) or getattr(model, "arch", None))
    kind = ARCH_MODEL_REGISTRY.get(name)
    if not (kind and issubclass(kind, SkipModel)):
        raise UserError(
            f"{source} is of the architecture {name}: expected one of ours, "
            f"or a Transformer of fairseq{own_rules.hint()}"
        )
    settings = {}
    for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[name]()):
        if hasattr(model, field.name) and field.name not in TRAINING_ONLY:
            settings[field.name] = as_json(getattr(model, field.name))
    return name, settings


def as_json(value: Any) -> Any:
    """A setting as JSON has it: a number, a list, or else its text."""
    if isinstance(value, (list, tuple, ListConfig)):
        return list(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)


def describe(
    checkpoint: Path, config: dict[str, Any], state: dict[str, Any]
) -> tuple[Card, dict[str, Any]]:
    """The card, and the settings of the training."""
    languages = [language for language in (config["source"], config["target"]) if language]
    tag = "translation"
    example = 'model.translate(["A sentence as it is written."], beam=4)'
    if config["kind"] == "language_model":
        tag = "text-generation"
        example = 'model.score("A text.").perplexity\nmodel.sample("A text", temperature=0.8)'
    settings = {}
    for part in SHOWN:
        settings[part] = OmegaConf.to_container(OmegaConf.create(state["cfg"][part]))
    card = Card(
        header={"language": languages, "library_name": "fairseq", "pipeline_tag": tag},
        title=f"{config['architecture']}, {'-'.join(languages)}, {config['corpus']}",
        scores=score_lines(checkpoint),
        example=example,
    )
    return card, settings


def score_lines(checkpoint: Path) -> list[str]:
    """The scores of an evaluation beside the checkpoint, if it used exactly these weights."""
    scores = next(evaluations_of(checkpoint), {})
    evaluation = scores.get("evaluation")
    if not evaluation:
        return []
    # names and options without this machine's folders
    names = ", ".join(each["name"] for each in evaluation["checkpoints"])
    options = " ".join(word for word in evaluation["options"] if "=" not in word)
    lines = [f"{evaluation['corpus']}, {evaluation['subset']}, of {names}: {options}"]
    for row in scores.get("scores", []):
        score = f"{row['score']:.{digits(row['name'])}f}"
        lines.append(f"{row['name']} ({row['signature']}): {score}")
    for unit, value in scores.get("perplexity", {}).items():
        lines.append(f"perplexity per {unit}: {value:.2f}")
    for unit, value in scores.get("bits", {}).items():
        lines.append(f"bits per {unit}: {value:.4f}")
    return lines
