"""A cell trained by train_cifar.py: its settings, its command, how far it is, and what came out."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, get_type_hints

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce.tables import ROOT, Cell, Options, StandIn
from fairseq_rskip.vision.config import DATA_SETS, FOLDER, Config, flag
from fairseq_rskip.vision.imagefolder import ARCHIVES, SPLITS
from fairseq_rskip.vision.logs import LOG
from fairseq_rskip.vision.run import RESULT

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
FREE = [name for name, field in FIELDS.items() if field.metadata.get("free")]  # no part of what a run is
OURS = ("data", "seeds", "output", "resume")
NAMED = (
    "data",
    "depth",
    "skip_kind",
    "skip_lambda",
    "skip_norm",
    "iterations",
    "warmup_iterations",
)  # whatever they are
LOWER_IS_BETTER = True
TYPES = get_type_hints(Config)
WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


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


def is_data(data: str, wanted: str) -> bool:
    """Whether ``data`` is the data set, or the folder, that a table names."""
    return data == find_data(wanted)


def settings(cell: Cell, data: str, stand_in: StandIn, scale: float, changed: Options) -> Dict[str, Any]:
    """The cell's options, without what is train_cifar.py's default, the schedule shortened to ``scale`` of its length.

    Raises ``UserError`` for an option that train_cifar.py does not take, or a value that it refuses.
    """
    options = {**stand_in.options, **cell.options, **changed}
    given = {name.replace("-", "_"): value for name, value in options.items()}
    unknown = sorted(set(given) - set(FIELDS) | set(OURS) & set(given))
    if unknown:
        names = ", ".join(name.replace("_", "-") for name in FIELDS if name not in OURS)
        raise UserError(f"train_cifar.py takes no option {unknown[0].replace('_', '-')!r} here; it takes {names}")
    whole = Config(data=data, **{name: _typed(name, value) for name, value in given.items()})
    steps = whole.milestones and tuple(sorted({max(1, round(step * scale)) for step in whole.milestones}))
    config = dataclasses.replace(
        whole,
        iterations=max(1, round(whole.iterations * scale)),
        warmup_iterations=round(whole.warmup_iterations * scale),
        milestones=steps,
    )
    fixed, defaults = config.fixed(), Config(data=data)
    result = {name: value for name, value in fixed.items() if name in NAMED or value != getattr(defaults, name)}
    result.update({name: getattr(config, name) for name in FREE if name in given})
    return {name: int(value) if _is_whole(value) else value for name, value in result.items()}


def _typed(name: str, value: Any) -> Any:
    """``value`` of the option's type, one way for one value: 2.0 is 2. Raises ``UserError``."""
    hint = TYPES[name]
    if hint not in WANTED:  # milestones
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, list) or not values or any(type(step) is not int for step in values):
            raise UserError(f"option {name!r} is {value!r}; expected integers, as [32000, 48000]")
        return tuple(values)
    if hint is float and isinstance(value, str):  # YAML takes 1e-3 for text
        with contextlib.suppress(ValueError):
            value = float(value)
    value = int(value) if hint is float and _is_whole(value) else value
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise UserError(f"option {name.replace('_', '-')!r} is {value!r}; expected {WANTED[hint]}")
    return value


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer() and abs(value) < 2**53


def is_free(option: str) -> bool:
    """Whether an option (``--set device=cpu``) leaves a run what it is."""
    return option.replace("-", "_") in FREE


def identity(settings: Dict[str, Any]) -> Dict[str, Any]:
    """What tells this cell's runs from others: where a folder of images lies does not (train_cifar.py checks it)."""
    about = {name: value for name, value in settings.items() if name not in FREE}
    return {**about, "data": data_name(settings["data"])}


def slug(settings: Dict[str, Any]) -> str:
    """A readable name for the cell's runs."""
    return f"{Config(**_as_fields(settings)).name()}-{settings['iterations']}"


def _as_fields(settings: Dict[str, Any]) -> Dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def length(settings: Dict[str, Any]) -> str:
    return f"{settings['iterations']:,} iterations"


def commands(settings: Dict[str, Any], seed: int, folder: Path) -> List[List[str]]:
    """The command lines that fill ``folder``, the run's; train_cifar.py makes it itself, one for each seed."""
    words = [sys.executable, str(ROOT / "scripts" / "train_cifar.py")]
    for name, value in settings.items():
        field = FIELDS[name]
        if isinstance(value, bool):
            words += [flag(field)] if value != field.default else []
        else:
            words += [flag(field), *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return [[*words, "--seeds", str(seed), "--output", str(folder.parent), "--resume"]]


def progress(settings: Dict[str, Any], folder: Path) -> float:
    """The part of the run that is done, from 0 to 1, as its log says."""
    try:
        lines = (folder / LOG).read_text("utf-8").splitlines()
        return json.loads(lines[-1])["iteration"] / settings["iterations"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 0.0


def metrics(folder: Path) -> Optional[Dict[str, Any]]:
    """``values`` by name and what else a report shows, or None if the run is not finished."""
    try:
        result = json.loads((folder / RESULT).read_text("utf-8"))
        values = {name: float(result[name]) for name in ("error", "best_error", "test_loss", "train_loss")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    about = {name: result.get(name) for name in ("parameters", "train_seconds", "machine", "versions")}
    return {"values": values, "unit": "% test error", **about}
