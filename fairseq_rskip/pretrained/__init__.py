"""Models that ``rskip export`` wrote, loaded from their folder alone: ``fairseq_rskip.from_pretrained(DIR)``.

The folder holds ``config.json``, ``model.safetensors``, a card ``README.md`` and, for translation, dictionaries and
subwords. docs/share.md shows both ends.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "fairseq_rskip.export 1"
KINDS = ("translation", "images")


def from_pretrained(folder: str | Path) -> Any:
    """The model in ``folder``, ready for inference on the CPU (``.to(device)`` moves it).

    A translation model is a :class:`.translation.Translator`, whose ``translate(sentences)`` takes and returns plain
    text; an image classifier is a :class:`.images.Classifier`, the PreAct-ResNet itself, whose ``classify(images)``
    gives the names of classes. Raises ``UserError`` for a folder that ``rskip export`` did not write or that lacks a
    file.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    if config["kind"] == "images":
        from .images import load
    else:
        from .translation import load
    return load(folder, config)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of an exported model. Raises ``UserError`` unless it is one, with its weights beside it."""
    path = folder / CONFIG
    for needed in (path, folder / WEIGHTS):
        if not needed.is_file():
            raise UserError(f"{folder} is not an exported model: {needed.name} is missing; rskip export writes one")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    found = config.get("format") if isinstance(config, dict) else None
    if found != FORMAT or config.get("kind") not in KINDS:
        raise UserError(f"{path} is not of {FORMAT!r}: it says {found!r}; export the model again")
    return config


def load_weights(model: Any, folder: Path) -> None:
    """Fill ``model`` with the weights in ``folder``, whose metadata names those that several tensors share.

    Raises ``UserError`` if they are damaged or of another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            same = {name: stored for name, stored in file.metadata().items() if stored in weights}
        model.load_state_dict({**weights, **{name: weights[stored] for name, stored in same.items()}})
    except (SafetensorError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"cannot take the weights of {folder / WEIGHTS}: {reason}") from None
