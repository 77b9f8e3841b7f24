"""A PreAct-ResNet of rskip train-cifar as a folder to share."""

import json
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.safe_load import CheckpointError
from fairseq_rskip.tools.export.card import LOADING_IMAGES, Card
from fairseq_rskip.tools.resnets import settings
from fairseq_rskip.tools.saved_model import read_checkpoint
from fairseq_rskip.tools.source import Source, fit
from fairseq_rskip.vision.config import FOLDER, Config
from fairseq_rskip.vision.model import PreActResNet
from fairseq_rskip.vision.run import RESULT


def convert(
    _stage: Path, checkpoint: Path, data: Path | None, _trained: Path
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """config.json, the model, and what :func:`describe` needs: the run's result.

    Raises ``UserError`` for a checkpoint that is damaged or whose run is not finished.
    """
    if data:
        raise UserError(f"--data is for translation, and {checkpoint} is of rskip train-cifar")
    state = read_checkpoint(checkpoint)
    source = Source("CHECKPOINT", str(checkpoint), state)
    path = checkpoint.with_name(RESULT)
    try:
        result = json.loads(path.read_text("utf-8"))
        if (result["iterations"], result["identity"]) != (state["iteration"], state["identity"]):
            raise UserError(f"{path} is the result of another run or iteration than {checkpoint}")
        network = settings(source).network()
        model = PreActResNet(num_classes=result["classes"], **network)
        classes = result.get("class_names") or []  # a run of an earlier commit has none
    except UserError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path} or {checkpoint}: {type(error).__name__} {error}; "
            f"a training that has not finished has no {RESULT} (--resume)"
        ) from None
    fit(model, state["model"], source)
    if len(classes) != result["classes"]:
        classes = [str(number) for number in range(result["classes"])]
    config = {"kind": "images", "classes": classes, **network}
    config.update(mean=result["mean"], std=result["std"])
    return config, model, result


def describe(
    _checkpoint: Path, config: dict[str, Any], result: dict[str, Any]
) -> tuple[Card, dict[str, Any]]:
    """The card, and the settings of the training."""
    run = result["config"]
    data = run["data"]
    if data.startswith(FOLDER):  # the card names no path of this machine
        data = FOLDER + Path(data.removeprefix(FOLDER)).name
    title = f"PreAct-ResNet-{config['depth']}, {config['skip']['kind']}, {data}"
    score = (
        f"test error: {result['error']:.2f} % of {result['test_images']} test images, "
        f"seed {result['seed']}, {result['train_images']} training images"
    )
    training = {name: value for name, value in Config.of(run).fixed().items() if value is not None}
    card = Card(
        header={"library_name": "pytorch", "pipeline_tag": "image-classification"},
        title=f"{title}, {result['classes']} classes",
        scores=[score],
        example="model.classify(images)  # uint8 (N, 32, 32, 3) to names of classes",
        loading=LOADING_IMAGES,
    )
    return card, {**training, "data": data}
