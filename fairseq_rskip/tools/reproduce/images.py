"""A cell trained by train_cifar.py: its settings, its command, how far it is, and what came out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fairseq_rskip.console import checked
from fairseq_rskip.errors import UserError
from fairseq_rskip.vision.config import DATA_SETS, FOLDER, Config, parse
from fairseq_rskip.vision.imagefolder import ARCHIVES, SPLITS
from fairseq_rskip.vision.logs import LOG
from fairseq_rskip.vision.run import RESULT

from .tables import METRICS, Cell, Options, Settings, StandIn, near, one_number, tool

FIELDS = {field.name.replace("_", "-"): field for field in dataclasses.fields(Config)}
FREE = [name for name, field in FIELDS.items() if field.metadata.get("free")]  # no part of what a run is
OURS = ("data", "seeds", "output", "resume")


def find_data(corpus: str) -> str:
    """``--corpus`` as train_cifar.py's --data: a folder's path is one of images. Raises ``UserError``."""
    if corpus in DATA_SETS:
        return corpus
    path = Path(corpus[len(FOLDER) :] if corpus.startswith(FOLDER) else corpus).expanduser()
    if not path.is_dir():
        raise UserError(f"the data {corpus!r} is no folder of images, and none of {', '.join(DATA_SETS)}")
    return f"{FOLDER}{path.resolve()}"


def check_data(data: str) -> None:
    """Raise ``UserError`` for a folder in which train_cifar.py would find no images; data sets are downloaded."""
    path = Path(data[len(FOLDER) :])
    for split in SPLITS if data.startswith(FOLDER) else ():
        names = [split, *(split + suffix for suffix in ARCHIVES)]
        if not any((path / name).exists() for name in names):
            raise UserError(f"{path} is no folder of images: it holds none of {', '.join(names)}")


def data_name(data: str) -> str:
    """What a report calls ``data``: a folder's own name, if no data set has it."""
    name = Path(data[len(FOLDER) :]).name if data.startswith(FOLDER) else data
    return f"folder {name}" if name in DATA_SETS and data.startswith(FOLDER) else name


def settings(cell: Cell, data: str, stand_in: StandIn, scale: float, changed: Options) -> Settings:
    """The cell's options, the schedule shortened to ``scale`` of its length.

    Raises ``UserError`` for an option that train_cifar.py does not take, or a value that it refuses.
    """
    options = {**stand_in.options, **cell.options, **changed}
    whole = _config(data, options)
    if scale != 1:
        steps = sorted({max(1, round(step * scale)) for step in whole.milestones or ()})
        options["iterations"] = max(1, round(whole.iterations * scale))
        options["warmup-iterations"] = round(whole.warmup_iterations * scale)
        options.update({"milestones": steps} if steps else {})
    config, defaults = _config(data, options), _config(data, {})
    about = {
        name: one_number(value)
        for name, value in config.fixed().items()
        if name in ("data", "iterations") or value != getattr(defaults, name)
    }
    identity = json.loads(json.dumps({**about, "data": data_name(data)}))
    return Settings(data, options, identity, f"{config.name()}-{config.iterations}", config.iterations, "iterations")


def _config(data: str, options: Options) -> Config:
    """train_cifar.py's own reading of the options. Raises ``UserError``."""
    for name in options:
        if name in OURS or name not in FIELDS:
            hint = (near(name, FIELDS) if name not in OURS else "") or "-h lists what it takes"
            raise UserError(f"train_cifar.py takes no option {name!r} here; {hint}")
    return checked(parse, _words(data, options), "")


def _words(data: str, options: Options) -> list[str]:
    """Options as train_cifar.py takes them. Raises ``UserError`` for a value that no word can be made of."""
    words = ["--data", data]
    for name, value in options.items():
        default = FIELDS[name].default
        if default is not None and isinstance(default, bool) != isinstance(value, bool):
            accepted = "true or false" if isinstance(default, bool) else "a value, not true or false"
            raise UserError(f"option {name!r} is {value!r}; expected {accepted}")
        if isinstance(value, bool):
            words += [] if value == bool(default) else [f"--no-{name}" if default else f"--{name}"]
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(str(one_number(each)) for each in values)]
    return words


def commands(settings: Settings, seed: int, folder: Path) -> list[list[str]]:
    """The command lines that fill ``folder``, the run's; train_cifar.py makes it itself, one for each seed."""
    words = [*tool("train_cifar.py", "train-cifar"), *_words(settings.data, settings.options)]
    return [[*words, "--seeds", str(seed), "--output", str(folder.parent), "--resume"]]


def progress(settings: Settings, folder: Path) -> tuple[float, str]:
    """The part of the run that is done, from 0 to 1, and its last loss and error in words, as its log says."""
    try:
        records = [json.loads(line) for line in (folder / LOG).read_text("utf-8").splitlines()]
        last = {name: value for record in records for name, value in record.items()}
        loss = records[-1].get("train_loss_so_far", records[-1].get("train_loss"))
        told = [f"train loss {loss:.3f}"] if loss is not None else []
        told += [f"{kind} error {last[f'{kind}_error']:.2f} %" for kind in ("valid", "test") if f"{kind}_error" in last]
        return last["iteration"] / settings.length, ", ".join(told)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return 0.0, ""


def metrics(_settings: Settings, folder: Path) -> dict[str, Any] | None:
    """``values`` by name and what else a report shows, or None if the run is not finished."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
        values = {name: float(result[name]) for name in METRICS["images"] if result.get(name) is not None}
        about = {name: result.get(name) for name in ("parameters", "train_seconds", "machine", "versions")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"values": values, "unit": "% test error", **about} if "error" in values else None
