"""Models that ``rskip export`` wrote, loaded from their folder alone: ``fairseq_rskip.from_pretrained(DIR)``.

The folder holds ``config.json``, ``model.safetensors``, a card ``README.md`` and, but for images, dictionaries and
subwords. docs/share.md shows both ends. Each kind of model is one module here and one in ``tools/export``.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "fairseq_rskip.export 1"
KINDS = ("translation", "images", "language_model")


def from_pretrained(folder: str | Path) -> Any:
    """The model in ``folder``, ready for inference on the CPU (``.to(device)`` moves it).

    A translation model is a :class:`.translation.Translator`, whose ``translate(sentences)`` takes and returns plain
    text; a language model is a :class:`.language_model.LanguageModel` with ``score(text)`` and ``sample(prompt)``; an
    image classifier is a :class:`.images.Classifier`, the PreAct-ResNet itself, whose ``classify(images)``
    returns the names of classes. Raises ``UserError`` for a folder that is not a complete export, for weights with NaN
    or infinity, and for a Python package that is missing.
    """
    folder = Path(folder).expanduser()
    config = read_config(folder)
    try:
        return importlib.import_module(f".{config['kind']}", __name__).load(folder, config)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        package = str(error.name).replace("_", "-")
        raise UserError(f"{folder} needs the Python package {package}: pip install {package}") from None
    except (Exception, SystemExit) as error:  # subword-nmt exits at a broken file; what a config.json lacks is open
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"cannot load {folder}: {CONFIG} or a file beside it is broken ({reason})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of an exported model. Raises ``UserError`` unless it is one, with its weights beside it."""
    path = required(folder, CONFIG)
    required(folder, WEIGHTS)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    version = config.get("format") if isinstance(config, dict) else None
    if version != FORMAT or config.get("kind") not in KINDS:
        raise UserError(f"{path} is not of {FORMAT!r}: it says {version!r}; export the model again")
    return config


def required(folder: Path, name: str) -> Path:
    """The file ``name`` of an exported model. Raises ``UserError`` if it is missing or not a regular file."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} is not an exported model: {name} is missing or not a file; rskip export writes one")
    return path


def fill(make: Callable[[], Any], layers: int, folder: Path) -> Any:
    """The model that ``make()`` builds, with the weights in ``folder``.

    Its ``layers`` and size are compared with the file first, so a wrong config.json takes no time and memory.
    Raises ``UserError`` for weights that are damaged, diverged or of another model; it names the tensor.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from ..safe_load import diverged

    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            shared = {name: other for name, other in (file.metadata() or {}).items() if other in weights}
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
    bad = next((name for name, value in weights.items() if diverged(name, value)), None)
    if bad:
        raise UserError(f"{path} cannot be used: {bad} holds NaN or infinity, so its training has diverged")
    weights.update({name: weights[other] for name, other in shared.items()})
    if layers > len(weights):
        raise UserError(f"{folder / CONFIG} says {layers} layers, {path} has {len(weights)} tensors")
    with torch.device("meta"):  # sizes without memory
        size = sum(value.numel() for value in make().state_dict().values())
    stored = sum(value.numel() for value in weights.values())
    if size > 2 * stored:
        raise UserError(f"{folder / CONFIG} describes a model of {size:,} numbers, {path} holds {stored:,}")
    model = make()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # torch's list of tensors, below a heading
        reason = " ".join(str(error).partition("\n")[2].split())[:300]
        raise UserError(f"cannot take the weights of {path}: {reason}") from None
    return model.eval()
