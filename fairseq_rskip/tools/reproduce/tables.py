"""A table of the paper as data: what experiments/*.yaml holds, read and checked."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import dacite
import yaml

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.analyze import add_options

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "experiments"
STAND_INS = "stand-ins.yaml"
TASKS = ("images", "translation")
FIGURES = ("gradients", "ratio", "curves")
METRICS = {
    "images": ("error", "best_error", "test_loss", "train_loss"),
    "translation": (
        "sacreBLEU 13a",
        "sacreBLEU intl",
        "sacreBLEU intl lower-cased",
        "chrF",
        "tokenised BLEU",
        "compound-split BLEU",
    ),
}
BY_LOADER = ("name", "path")  # fields of a table that its file does not give

Number = Union[int, float]
Options = Dict[str, Union[bool, int, float, str, List[int]]]


@dataclass(frozen=True)
class Column:
    """What sets the cells of a column apart: a data set of its own, or more options."""

    data: str = ""
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of a table.

    label: the paper's; equation: what y is
    arch: for translation, the fairseq architecture, for all columns or one each
    options: of train_cifar.py or fairseq-train, without the dashes
    reported: the paper's value, for the one column or for each
    baseline: the row to compare with, in place of the table's
    run: false for a row that only quotes a figure
    """

    label: str
    equation: str = ""
    arch: Union[str, Dict[str, str]] = ""
    options: Options = field(default_factory=dict)
    reported: Union[None, int, float, Dict[str, Number]] = None
    baseline: str = ""
    run: bool = True


@dataclass(frozen=True)
class Table:
    """One table, or one figure, of the paper; ``name`` is its file's, ``path`` where that is.

    task: images (train_cifar.py) or translation (train.sh and evaluate.sh)
    metric: what a cell holds: error, best_error, or the name of a score of evaluate.sh
    data: a data set of train_cifar.py, or a corpus of train.sh
    figure: for a figure, the subcommand of analyze.py that draws it
    """

    name: str
    title: str
    source: str
    task: str
    metric: str
    data: str
    seeds: List[int]
    rows: List[Row]
    baseline: str
    columns: Dict[str, Column] = field(default_factory=lambda: {"": Column()})
    options: Options = field(default_factory=dict)
    figure: str = ""
    figure_options: Options = field(default_factory=dict)
    note: str = ""
    path: str = ""

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)

    def baseline_of(self, row: Row) -> str:
        return row.baseline or self.baseline


@dataclass(frozen=True)
class Cell:
    """Where a row and a column meet: what is to be run there, and the value that the paper reports."""

    row: str
    column: str
    arch: str
    options: Options
    data: str
    reported: Optional[Number]
    run: bool


@dataclass(frozen=True)
class StandIn:
    """Data for those who lack the table's: for a ``task``, what stands for it and with which options.

    updates: the length of a whole run on it, where the corpus's recipe counts in epochs
    """

    task: str
    data: str
    options: Options = field(default_factory=dict)
    updates: int = 0


def cells(table: Table) -> List[Cell]:
    """Every cell of ``table``, row by row; a row's options win over its column's, a column's over the table's."""
    result = []
    for row in table.rows:
        for name, column in table.columns.items():
            arch = row.arch.get(name, "") if isinstance(row.arch, dict) else row.arch
            reported = row.reported.get(name) if isinstance(row.reported, dict) else row.reported
            options = {k.replace("_", "-"): v for part in (table, column, row) for k, v in part.options.items()}
            runs = row.run and (table.task == "images" or bool(arch))
            result.append(Cell(row.label, name, arch, options, column.data or table.data, reported, runs))
    return result


def load_all(folder: Path = FOLDER) -> Dict[str, Table]:
    """Every table of ``folder`` by name, tables first. Raises ``UserError`` naming file and row."""
    paths = sorted(path for path in folder.glob("*.yaml") if path.name != STAND_INS)
    if not paths:
        raise UserError(f"{folder} holds no tables: expected files such as table1.yaml")
    return {path.stem: load(path) for path in sorted(paths, key=lambda path: (path.stem.startswith("fig"), path))}


def load(path: Path) -> Table:
    """The table in ``path``. Raises ``UserError`` naming the file, and the row where it is in one."""
    content = _read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(_keys(Table))}")
    rows = content.pop("rows", None)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: expected 'rows', a list with at least one row")
    columns = content.pop("columns", {"": None})
    if not isinstance(columns, dict) or not columns:
        raise UserError(f"{path}: expected 'columns' to be a mapping, from a column's name to its data and options")
    content["columns"] = {
        name: _build(Column, {} if value is None else value, f"{path}, column {name!r}")
        for name, value in columns.items()
    }
    content["rows"] = [_build(Row, row, _where(path, number, row)) for number, row in enumerate(rows, 1)]
    content.setdefault("baseline", "")
    given = sorted(set(content) & set(BY_LOADER))
    if given:
        raise UserError(f"{path}: unknown key {given[0]!r}; expected {', '.join(_keys(Table))}")
    table = _build(Table, {**content, "name": path.stem, "path": str(path)}, str(path))
    _check(table, path)
    return table


def load_stand_ins(folder: Path = FOLDER) -> Dict[str, StandIn]:
    """What ``--corpus`` may name beside data sets and corpora. Raises as ``load``."""
    path = folder / STAND_INS
    content = _read(path) if path.exists() else None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, from a name for --corpus to what it stands for")
    result = {str(name): _build(StandIn, value, f"{path}, {name!r}") for name, value in content.items()}
    for name, value in result.items():
        if value.task not in TASKS:
            raise UserError(f"{path}, {name!r}: task is {value.task!r}; expected one of {', '.join(TASKS)}")
    return result


def _check(table: Table, path: Path) -> None:
    """What the types cannot say. Raises ``UserError``."""
    for name, value, accepted in (("task", table.task, TASKS), ("figure", table.figure or "curves", FIGURES)):
        if value not in accepted:
            raise UserError(f"{path}: {name} is {value!r}; expected one of {', '.join(accepted)}")
    if table.metric not in METRICS[table.task]:
        raise UserError(f"{path}: metric is {table.metric!r}; expected one of {', '.join(METRICS[table.task])}")
    seeds = table.seeds
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is bool or seed < 0 for seed in seeds):
        raise UserError(f"{path}: seeds are {table.seeds}; expected different integers >= 0")
    if table.figure_options:
        _check_figure(table, path)
    labels: List[str] = []
    for number, row in enumerate(table.rows, 1):
        where = f"{path}, row {number} ({row.label!r})"
        if row.label in labels:
            raise UserError(f"{where}: there is a row of that label already, row {labels.index(row.label) + 1}")
        labels.append(row.label)
        _check_row(table, row, where)


def _check_figure(table: Table, path: Path) -> None:
    """Raises ``UserError`` for an option that the subcommand of analyze.py lacks."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(table.figure or "curves", parser)
    known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
    for name in table.figure_options:
        if name not in known:
            raise UserError(f"{path}: figure_options names {name!r}; analyze.py takes {', '.join(known)}")


def _check_row(table: Table, row: Row, where: str) -> None:
    if not row.label.strip():
        raise UserError(f"{where}: its label is empty")
    baseline, labels = table.baseline_of(row), [row.label for row in table.rows]
    if baseline and baseline not in labels:
        raise UserError(f"{where}: its baseline {baseline!r} is no row's label; they are {', '.join(labels)}")
    if table.task == "images" and row.arch:
        raise UserError(f"{where}: 'arch' is for translation; a ResNet is described by options such as depth")
    if table.task == "translation" and row.run and not row.arch:
        raise UserError(f"{where}: expected 'arch', an architecture, or 'run: false' for a quoted figure")
    known = ", ".join(table.columns)
    for key in ("arch", "reported"):
        strange = sorted(set(value) - set(table.columns)) if isinstance(value := getattr(row, key), dict) else []
        if strange:
            raise UserError(f"{where}: {key} names a column {strange[0]!r}; the table's are {known}")
    if isinstance(row.reported, (int, float)) and len(table.columns) > 1:
        raise UserError(f"{where}: reported is {row.reported}; expected a mapping, from the columns {known} to values")
    for value in row.reported.values() if isinstance(row.reported, dict) else [row.reported]:
        if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
            raise UserError(f"{where}: reported is {value}; expected a number")


def _where(path: Path, number: int, row: Any) -> str:
    label = f" ({row['label']!r})" if isinstance(row, dict) and "label" in row else ""
    return f"{path}, row {number}{label}"


def _keys(cls: type) -> List[str]:
    return [name for name in cls.__dataclass_fields__ if name not in BY_LOADER]


def _build(cls: type, content: Any, where: str) -> Any:
    """``content`` as a ``cls``. Raises ``UserError`` beginning with ``where``."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a mapping with the keys {', '.join(_keys(cls))}")
    unknown = [str(key) for key in content if key not in cls.__dataclass_fields__]
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(_keys(cls))}")
    try:
        return dacite.from_dict(cls, content, dacite.Config(strict=True))
    except dacite.MissingValueError as error:
        raise UserError(f"{where}: {error.field_path!r} is missing") from None
    except dacite.DaciteError as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict:
        seen: List[Any] = []
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text("utf-8"), _Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:  # such as a date in a month 13
        raise UserError(f"{path}: not YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {getattr(error, 'problem', None) or 'not YAML'}") from None
