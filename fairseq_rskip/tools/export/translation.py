"""A Transformer as a folder to share: weights, settings, and the way from text to tokens that its corpus went."""

import argparse
import dataclasses
import logging
import shlex
import shutil
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

from fairseq_rskip.analysis.study import Source
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.models.skip_transformer import SkipTransformerModel
from fairseq_rskip.pretrained import CONFIG, FORMAT
from fairseq_rskip.tools.evaluate.checkpoints import check_dictionaries, check_embeddings
from fairseq_rskip.tools.evaluate.generation import DEFAULT_LENPEN
from fairseq_rskip.tools.evaluate.prepared import Prepared
from fairseq_rskip.tools.evaluate.scored import SCORES, evaluations_of, find_corpus, read_scores
from fairseq_rskip.tools.train.run import LOG
from fairseq_rskip.tools.transformers import build, ours, read

from . import card

SEARCH = {"beam": 4, "lenpen": DEFAULT_LENPEN, "max_len_a": 1.0, "max_len_b": 50}  # rskip evaluate's
# what says nothing of a trained model
OF_TRAINING = {"_name", "encoder_embed_path", "decoder_embed_path", "skip_log_interval"}


def write(stage: Path, checkpoint: Path, _state: Any, options: argparse.Namespace) -> None:
    """Fill ``stage``. Raises ``UserError`` for a checkpoint, corpus or evaluation that will not do."""
    logging.getLogger("fairseq.tasks").setLevel(logging.WARNING)  # the sizes of dictionaries
    source = Source("CHECKPOINT", str(checkpoint), {})
    state = read(source)
    cfg = state["cfg"]
    if cfg.task._name != "translation":
        raise UserError(f"{checkpoint} is of the task {cfg.task._name}: expected one of translation")
    prepared = find_corpus(checkpoint, cfg.task.data, options.data)
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        check_dictionaries(prepared, folder)
    check_embeddings(prepared, checkpoint, state["model"])
    cfg.task.source_lang, cfg.task.target_lang = prepared.src, prepared.tgt
    scores = find_scores(checkpoint, options.evaluation)
    name, settings = model_settings(source, cfg.model)
    _, model = build(source, cfg, state, str(prepared.folder), seed=1)
    for buffer_name, value in model.state_dict().items():
        if buffer_name.endswith("_float_tensor"):  # fairseq leaves it uninitialised: the file would differ every time
            value.zero_()
    config = {"format": FORMAT, "kind": "translation", "architecture": name}
    config.update(source=prepared.src, target=prepared.tgt, corpus=prepared.corpus)
    config.update(tokenizer=prepared.tokenizer, normalise_punctuation=prepared.normalise_punctuation)
    config.update(bpe=prepared.bpe, subwords=copy_text_files(prepared, stage))
    config.update(search=SEARCH, model=settings)
    write_json(stage / CONFIG, config)
    card.save_weights(model, stage)
    describe(stage, config, model, scores, training_command(checkpoint))


def model_settings(source: Source, model: Any) -> Any:
    """The architecture's name and all of its settings, for stock fairseq's Transformers as one of ours."""
    model = ours(model)
    name = getattr(model, "_name", None) or getattr(model, "arch", None)
    kind = ARCH_MODEL_REGISTRY.get(name)
    if not (kind and issubclass(kind, SkipTransformerModel)):
        raise UserError(f"{source} is of the architecture {name}: expected one of ours, or fairseq's transformer")
    fields = [field.name for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[name]())]
    settings = {field: getattr(model, field) for field in fields if hasattr(model, field) and field not in OF_TRAINING}
    return name, {k: v if v is None or isinstance(v, (bool, int, float)) else str(v) for k, v in settings.items()}


def copy_text_files(prepared: Prepared, stage: Path) -> dict[str, str]:
    """Copy dictionaries and subwords; language -> name of its subwords' file, none without subwords."""
    names = {}
    for language in (prepared.src, prepared.tgt):
        shutil.copyfile(prepared.dictionary(language), stage / f"dict.{language}.txt")
        path = prepared.subwords(language)
        if path:
            names[language] = f"subwords.{path.name}"
            shutil.copyfile(path, stage / names[language])
    return names


def find_scores(checkpoint: Path, given: Path | None) -> dict[str, Any] | None:
    """What rskip evaluate wrote: to ``given``, else about exactly these weights, else None. Raises ``UserError``."""
    if given:
        if not (given / SCORES).is_file():
            raise UserError(f"--evaluation {given} holds no {SCORES}: expected a folder that rskip evaluate wrote")
        return read_scores(given)
    for _, scores in evaluations_of([checkpoint]):
        return scores
    print_line("no scores found: --evaluation FOLDER names them")
    return None


def training_command(checkpoint: Path) -> list[str]:
    """The last fairseq-train command in train.sh's log, this machine's folders left out; none without a log."""
    run = checkpoint.parent.parent  # of an average in evaluation/, train.sh's own folder or a run's
    logs = [folder / LOG for folder in (checkpoint.parent, run, run / "checkpoints") if (folder / LOG).is_file()]
    lines = logs[0].read_text("utf-8", "replace").splitlines() if logs else []
    found = [line for line in lines if line.split(" ", 1)[0].strip("'").endswith("fairseq-train")]
    if not found:
        return []
    words = shlex.split(found[-1])
    stand_ins = {"--save-dir": "SAVE-DIR", "--tensorboard-logdir": "SAVE-DIR/tensorboard"}
    stand_ins.update({"--restore-file": "CHECKPOINT", "--user-dir": "PLUGIN"})
    shown = ["fairseq-train", "DATA", *(stand_ins.get(option, word) for option, word in zip(words[1:], words[2:]))]
    return [shlex.join(shown).replace(" PLUGIN ", ' "$(python -m fairseq_rskip)" ')]


def describe(
    stage: Path, config: dict[str, Any], model: Any, scores: dict[str, Any] | None, commands: list[str]
) -> None:
    """Write the card, with ``commands`` and the one that translated."""
    pair = f"{config['source']}-{config['target']}"
    title = f"{config['architecture']}, {pair}, {config['corpus']}"
    header = {"language": [config["source"], config["target"]], "library_name": "fairseq"}
    header.update(pipeline_tag="translation", tags=["fairseq_rskip", config["architecture"], "skip-connection"])
    data = {"name": f"{config['corpus']} {pair}", "type": config["corpus"]}
    rows = scores["scores"] if scores else []
    kinds = ["chrf" if row["name"] == "chrF" else "bleu" for row in rows]
    values = [(f"{row['name']} ({row['signature']})", kind, row["score"]) for row, kind in zip(rows, kinds)]
    header.update(card.model_index(title, "translation", data, values))
    text = f"A Transformer that translates {config['source']} to {config['target']}: {card.size(model)}."
    if config["tokenizer"] == "none" and config["bpe"] != "sentencepiece":
        text += "\n\nIts corpus is tokenised as published: give it text of such tokens; translations are such tokens."
    weights = ""
    if scores:
        about = scores["evaluation"]
        scored = about["checkpoints"]
        # without the folders and the diagnostics of this machine
        weights = f"checkpoint {scored[0]['name']}" if len(scored) == 1 else about["weights"]
        options = shlex.join(word for word in about["options"] if "=" not in word)
        generate = 'fairseq-generate DATA --user-dir "$(python -m fairseq_rskip)" --path CHECKPOINT'
        commands = [*commands, f"{generate} {options}"]
    use = 'model.translate(["A sentence as it is written."], beam=4)'
    shown = {"title": title, "text": text, "use": use, "entry": "transformer_rskip"}
    card.write(stage, model, header, **shown, scores=scores, weights=weights, commands=commands)
