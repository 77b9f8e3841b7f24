"""A PreAct-ResNet of rskip train-cifar as a folder to share."""

import json
from pathlib import Path
from typing import Any

from fairseq_rskip.analysis.study import Source, fit
from fairseq_rskip.errors import UserError
from fairseq_rskip.safe_load import CheckpointError
from fairseq_rskip.tools.resnets import settings
from fairseq_rskip.vision.config import FOLDER, Config
from fairseq_rskip.vision.model import preact_resnet
from fairseq_rskip.vision.run import RESULT


def convert(_stage: Path, checkpoint: Path, state: dict, data: Path | None) -> tuple[dict[str, Any], Any]:
    """config.json and the model. Raises ``UserError`` for a checkpoint that is damaged or whose run is not finished."""
    if data:
        raise UserError(f"--data is for translation, and {checkpoint} is of rskip train-cifar")
    source, path = Source("CHECKPOINT", str(checkpoint), state), checkpoint.with_name(RESULT)
    try:
        result = state["result"] = json.loads(path.read_text("utf-8"))
        if (result["iterations"], result["identity"]) != (state["iteration"], state["identity"]):
            raise UserError(f"{path} is the result of another run or iteration than {checkpoint}")
        network = settings(source).network()
        model = preact_resnet(num_classes=result["classes"], **network)
        classes = state["identity"]["classes"].split(", ")
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__} {error}; a training that has not finished has no {RESULT} (--resume)"
        raise CheckpointError(f"cannot read {path} or {checkpoint}: {reason}") from None
    fit(model, state["model"], source)
    if len(classes) != result["classes"]:  # a name with a comma in it, or more than the checkpoint lists
        classes = [str(number) for number in range(result["classes"])]
    return {"kind": "images", "classes": classes, **network, "mean": result["mean"], "std": result["std"]}, model


def describe(_checkpoint: Path, config: dict[str, Any], state: dict) -> dict[str, Any]:
    """What the card says."""
    result, run = state["result"], state["result"]["config"]
    data = FOLDER + Path(run["data"]).name if run["data"].startswith(FOLDER) else run["data"]  # no path of this machine
    scored = f"{result['error']:.2f} % of {result['test_images']} test images, seed {result['seed']}"
    return {
        "header": {"library_name": "pytorch", "pipeline_tag": "image-classification"},
        "title": f"PreAct-ResNet-{config['depth']}, {config['skip']['kind']}, {data}, {result['classes']} classes",
        "example": "model.classify(images)  # uint8 (N, 32, 32, 3) to names of classes",
        "scores": [f"test error: {scored}, {result['train_images']} training images"],
        "settings": {**{k: v for k, v in Config.of(run).fixed().items() if v is not None}, "data": data},
    }
