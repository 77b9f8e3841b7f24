"""A PreAct-ResNet of train_cifar.py as a folder to share."""

import argparse
import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from fairseq_rskip.analysis.study import Source, fit
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.pretrained import CONFIG, FORMAT
from fairseq_rskip.safe_load import CheckpointError
from fairseq_rskip.tools.resnets import settings
from fairseq_rskip.vision.config import FOLDER, Config, flag
from fairseq_rskip.vision.model import preact_resnet
from fairseq_rskip.vision.run import RESULT

from . import card


def write(stage: Path, checkpoint: Path, state: dict[str, Any], _options: argparse.Namespace) -> None:
    """Fill ``stage``. Raises ``UserError`` for a checkpoint that is damaged or whose run is not finished."""
    source = Source("CHECKPOINT", str(checkpoint), state)
    run, result = settings(source), read_result(checkpoint, state)
    model = preact_resnet(num_classes=result["classes"], **run.network())
    fit(model, state["model"], source)
    classes = state["identity"]["classes"].split(", ")
    if len(classes) != result["classes"]:  # a name with a comma in it, or more than the checkpoint lists
        classes = [str(number) for number in range(result["classes"])]
    config = {"format": FORMAT, "kind": "images", "classes": classes, **run.network()}
    config.update(mean=result["mean"], std=result["std"])
    write_json(stage / CONFIG, config)
    card.save_weights(model, stage)
    describe(stage, run, model, result)


def read_result(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The result beside a run's last checkpoint, which holds what the input is normalised by. Raises ``UserError``."""
    path = checkpoint.with_name(RESULT)
    if not path.is_file():
        raise UserError(f"{checkpoint} has no {RESULT} beside it: finish the training first (--resume)")
    try:
        result = json.loads(path.read_text("utf-8"))
        same = (result["iterations"], result["identity"]) == (state["iteration"], state["identity"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path} or {checkpoint}: {type(error).__name__} {error}") from None
    if not same:
        raise UserError(f"{path} is not the result of {checkpoint}, but of another run or iteration")
    return result


def command(run: Config, seed: int) -> list[str]:
    """train_cifar.py's options for the run, those that change what is trained and are not the defaults."""
    words = ["rskip", "train-cifar", "--data", data_name(run.data), "--seeds", str(seed)]
    asked = ("depth", "skip_kind", "iterations", "warmup_iterations")
    usual = Config(**{name: getattr(run, name) for name in asked})
    for field in dataclasses.fields(Config):
        value = getattr(run, field.name)
        if field.name == "data" or field.metadata.get("free") or value is None:
            continue
        if field.name in asked or value != getattr(usual, field.name):
            values = [] if isinstance(value, bool) else value if isinstance(value, tuple) else [value]
            words += [flag(field), *map(str, values)]
    return words


def data_name(data: str) -> str:
    """``data`` without the folders of this machine."""
    return FOLDER + Path(data[len(FOLDER) :]).name if data.startswith(FOLDER) else data


def describe(stage: Path, run: Config, model: Any, result: dict[str, Any]) -> None:
    """Write the card."""
    data = data_name(run.data)
    title = f"PreAct-ResNet-{run.depth}, {run.skip_kind}, {data}"
    header = {"library_name": "pytorch", "pipeline_tag": "image-classification"}
    header["tags"] = ["fairseq_rskip", "preact-resnet", "skip-connection"]
    about = {"name": data, "type": data.partition(":")[2] or data}
    values = [("test error, %", "error", result["error"])]
    header.update(card.model_index(title, "image-classification", about, values))
    error = f"{result['error']:.2f} % of {result['test_images']} test images after the last of "
    error += f"{result['iterations']} iterations, seed {result['seed']} ({result['train_images']} training images)."
    text = f"{card.size(model)}, {result['classes']} classes."
    use = "model.classify(images)  # uint8 (N, 32, 32, 3) to names of classes"
    shown = {"title": title, "text": text, "use": use, "entry": "resnet_rskip", "error": error}
    card.write(stage, model, header, **shown, commands=[shlex.join(command(run, result["seed"]))])
