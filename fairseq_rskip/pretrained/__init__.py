"""Models that ``rskip export`` wrote, loaded from their folder alone:
``fairseq_rskip.from_pretrained(DIR)``, or by name for the few that come with the package.

The folder holds ``config.json``, ``model.safetensors``, a card ``README.md`` and, but for images,
dictionaries and subwords. docs/share.md shows both ends. Each kind of model is one module here and
one in ``tools/export``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, missing_package

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

CONFIG, WEIGHTS = "config.json", "model.safetensors"
BUNDLED = Path(__file__).parent / "bundled"  # exported models that come with the package
FORMAT = "fairseq_rskip.export 1"
MODEL_KINDS = ("translation", "images", "language_model")
# What is read of a file from a stranger. The largest models here have a tenth of it.
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**22  # about 40,000 tensors
MAX_POSITIONS = 100_000  # fairseq's own limit of a table of sines
FLOATS = ("torch.float32", "torch.float16", "torch.bfloat16", "torch.float64")


def from_pretrained(folder: str | Path) -> Any:
    """The model in ``folder``, ready for inference on the CPU (``.to(device)`` moves it).

    ``folder`` may also be the name of a model that comes with the package (``bundled_names()``).
    A translation model is a :class:`.translation.Translator`, whose ``translate(sentences)`` takes
    and returns plain text; a language model is a :class:`.language_model.LanguageModel` with
    ``score(text)`` and ``sample(prompt)``; an image classifier is a :class:`.images.Classifier`,
    the PreAct-ResNet itself, whose ``classify(images)`` returns the names of classes. Raises
    ``UserError`` for a folder that is not a complete export, for weights with NaN or infinity, and
    for a Python package that is missing.
    """
    from ..residual import own_rules  # imports torch

    folder = locate(Path(folder).expanduser())
    config = read_config(folder)
    own_rules.check_loaded(folder, config.get("rule_files", {}))
    try:
        return importlib.import_module(f".{config['kind']}", __name__).load(folder, config)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(f"cannot load {folder}: {missing_package(str(error.name))}") from None
    except (
        Exception,
        SystemExit,
    ) as error:  # subword-nmt exits at a broken file; what a config.json lacks is open
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"cannot load {folder}: {CONFIG} or a file beside it is broken ({reason})"
        ) from error


def check_is_not_bundled(path: Path) -> None:
    """Raise ``UserError`` for the name of a model that comes with the package: an export, where a
    training's checkpoints are needed.
    """
    if str(path) in bundled_names():
        raise UserError(
            f"{path} is a model that comes with the package, an export without checkpoints: "
            "expected a training's folder; rskip translate and describe take the model"
        )


def bundled_names() -> list[str]:
    """The names of the models that come with the package, sorted."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{CONFIG}"))


def locate(path: Path) -> Path:
    """The folder of the bundled model that ``path`` names; ``path`` itself where it exists or names
    none.
    """
    if path.exists() or str(path) not in bundled_names():
        return path
    return BUNDLED / path


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of an exported model. Raises ``UserError`` unless it is one, with its weights
    beside it.
    """
    if not folder.exists():
        names = ", ".join(bundled_names()) or "none"
        raise UserError(
            f"{folder} does not exist; expected a folder that rskip export wrote, "
            f"or a model that comes with the package: {names}"
        )
    path = required(folder, CONFIG)
    required(folder, WEIGHTS)
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(
            f"cannot read {path}: it has {path.stat().st_size:,} bytes, "
            f"at most {MAX_CONFIG_BYTES:,} are read"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise UserError(f"cannot read {path}: its brackets are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if isinstance(config, dict) and "model_type" in config:
        raise UserError(
            f"{folder} is an export for Hugging Face, for transformers' AutoModelForCausalLM; "
            "expected one that rskip export wrote without --transformers"
        )
    version = config.get("format") if isinstance(config, dict) else None
    if version != FORMAT or config.get("kind") not in MODEL_KINDS:
        raise UserError(f"{path} is not of {FORMAT!r}: it says {version!r}; export the model again")
    return config


def check_positions(folder: Path, settings: dict[str, Any], names: Sequence[str]) -> None:
    """Raise ``UserError`` for a number of positions that no exported model has.

    fairseq makes a table of that length, which is not among the weights and would not be counted
    with them.
    """
    for name in names:
        value = settings[name]
        if value is None:  # fairseq takes another of them
            continue
        if type(value) is not int or not 1 <= value <= MAX_POSITIONS:
            raise UserError(
                f"{folder / CONFIG} says {name} {str(value)[:40]}: "
                f"expected an integer from 1 to {MAX_POSITIONS:,}"
            )


def required(folder: Path, name: str) -> Path:
    """The file ``name`` of an exported model. Raises ``UserError`` if it is missing or not a
    regular file.
    """
    path = folder / name
    if not path.is_file():
        raise UserError(
            f"{folder} is not an exported model: {name} is missing or not a file; "
            "rskip export writes one"
        )
    return path


def fill(make: Callable[[], Module], layers: int, folder: Path, tensors_per_layer: int = 1) -> Any:
    """The model that ``make()`` builds, with the weights in ``folder``, in evaluation mode.

    Number of layers, size and types are compared with the file first, so a wrong config.json takes
    no time and memory. Raises ``UserError`` for weights that are damaged, diverged or of another
    model; it names the tensor.
    """
    import torch

    path = folder / WEIGHTS
    weights = read_weights(path)
    if layers * tensors_per_layer > len(weights):
        raise UserError(
            f"{folder / CONFIG} says {layers} layers, {path} has {len(weights)} tensors"
        )
    with torch.device("meta"):  # sizes without memory
        expected = make().state_dict()
    size = sum(tensor.numel() for tensor in expected.values())
    stored = sum(tensor.numel() for tensor in weights.values())
    if size > 2 * stored:
        raise UserError(
            f"{folder / CONFIG} describes a model of {size:,} numbers, {path} holds {stored:,}"
        )
    check_types(path, weights, expected)
    model = make()
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # torch's list of tensors, below a heading
        reason = " ".join(str(error).partition("\n")[2].split())[:300]
        raise UserError(f"cannot take the weights of {path}: {reason}") from None
    return model.eval()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by its name; one that several layers share has several
    names.

    Raises ``UserError`` for a file that is damaged, that lists more tensors than a model has, or
    that holds NaN.
    """
    from safetensors import SafetensorError, safe_open

    from ..safe_load import diverged

    check_header(path)
    weights = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                weights[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())[:200]}") from None
    for name, tensor in weights.items():
        if diverged(name, tensor):
            raise UserError(
                f"{path} cannot be used: {name} holds NaN or infinity, so its training has diverged"
            )
    for name, stored_as in metadata.items():
        if stored_as in weights:
            weights[name] = weights[stored_as]
    return weights


def check_header(path: Path) -> None:
    """Raise ``UserError`` if the file's list of tensors is longer than that of any model; reading
    it takes long.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")  # the format's first number
    if length > MAX_HEADER_BYTES:
        raise UserError(
            f"{path} cannot be used: its list of tensors has {length:,} bytes, "
            f"at most {MAX_HEADER_BYTES:,} are read"
        )


def check_types(path: Path, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ``UserError`` for a tensor of another type than the model's; torch would convert it
    without a word.

    Weights may be stored in half precision.
    """
    for name, tensor in expected.items():
        if name not in weights:
            continue
        accepted = FLOATS if str(tensor.dtype) in FLOATS else [str(tensor.dtype)]
        if str(weights[name].dtype) not in accepted:
            raise UserError(
                f"{path} cannot be used: {name} is of {weights[name].dtype}, "
                f"expected {tensor.dtype}"
            )
