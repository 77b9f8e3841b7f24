"""Read a YAML file as a Table. Every mistake is found in one reading, each a line with the file and the row."""

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools.corpus import NAMES, ROOT
from fairseq_rskip.tools.process import CHECKOUT

from .records import SET_BY_US, Row, Section, Table
from .tasks import TASKS

FOLDER = CHECKOUT / "experiments"
short = reprlib.Repr()
short.maxstring = short.maxother = 80


class Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, keys = super().compose_mapping_node(anchor), []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            keys.append(key.value)
        return node


def read(path: Path) -> dict[str, Any]:
    """The mapping in ``path``. Raises ``UserError``."""
    try:
        content = yaml.load(path.read_text("utf-8"), Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except (ValueError, RecursionError) as error:  # such as text that is not UTF-8, or a date in month 13
        raise UserError(f"{path}: not YAML: {str(error)[:80]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(keys(Table))}")
    return content


def paths(folder: Path = FOLDER) -> dict[str, Path]:
    """The tables of ``folder``, a file for each name; figures last."""
    found = sorted(folder.glob("*.yaml"), key=lambda path: (path.stem.startswith("fig"), path))
    return {path.stem: path for path in found}


def find(name: str) -> Path:
    """The file of a table that is given by name or by path. Raises ``UserError``."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).expanduser().resolve()
    if name not in paths():
        known = ", ".join(paths()) or "none here"
        raise UserError(f"no table {name!r}; {did_you_mean(name, paths())} the tables are {known}, or give a .yaml file")
    return paths()[name]


def load(path: Path, mistakes: list[str]) -> Table | None:
    """The table in ``path``; appends to ``mistakes``. None where so much is wrong that nothing more can be checked."""
    try:
        content = with_rows(read(path), path.stem)
        rows = list(_expanded(content, path, [path.resolve()], mistakes))
    except UserError as error:
        mistakes.append(str(error))
        return None
    content.pop("rows_from", None)
    mistakes += [f"{path}: unknown key {key!r}" for key in SET_BY_US if content.pop(key, None) is not None]
    content["rows"] = [row for row in rows if row is not None]
    texts: dict[str, Table.OwnText] = {}
    columns = content.get("columns", {"": None})
    content["columns"] = {
        name: _build(Table.Column, _own_text(value or {}, texts, f"{path.stem}-{name}", where, mistakes), where, mistakes)
        for name, value in (columns.items() if isinstance(columns, dict) else ())
        if (where := f"{path}, column {name!r}")
    }
    content = _own_text(content, texts, path.stem, str(path), mistakes)
    if type(content.get("seeds")) is int:
        content["seeds"] = [content["seeds"]]
    table = _build(Table, {**content, "name": path.stem, "path": str(path), "texts": texts}, str(path), mistakes)
    if table is None or None in rows or None in content["columns"].values():
        return None
    table = _with_defaults(table)
    mistakes += [f"{path}{mistake}" for mistake in _contradictions(table)]
    return table if table.task in TASKS and table.metric in TASKS[table.task].metrics else None


def with_rows(content: dict[str, Any], label: str) -> dict[str, Any]:
    """One experiment as a table of one row, called ``label``."""
    if {"rows", "rows_from"} & set(content):
        return content
    of_row = [key for key in keys(Row) if key not in keys(Table)]
    row = {"label": label, **{key: content.pop(key) for key in of_row if key in content}}
    return {**content, "rows": [row]}


def _expanded(content: dict[str, Any], path: Path, chain: list[Path], mistakes: list[str]) -> Iterator[Row | None]:
    """The rows, those of ``rows_from`` too. What a row says of the whole table moves to ``content``."""
    known = _rows_from(content, path, chain, mistakes)
    rows = content.get("rows", list(known))
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: expected 'rows', a list with at least one row")
    default = {"arch": content.pop("arch")} if "arch" in content else {}
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        if isinstance(row, str):
            if row not in known:
                mistakes.append(f"{where}: {short.repr(row)} is no row of rows_from; {did_you_mean(row, known)}")
            yield known.get(row)
            continue
        if isinstance(row, dict):
            where += f" ({short.repr(row['label'])})" if "label" in row else ""
            for key in [key for key in row if key in keys(Table) and key not in keys(Row)]:
                if content.setdefault(key, row[key]) != row[key]:
                    said = f"{key} is {short.repr(row[key])}, elsewhere {short.repr(content[key])}"
                    mistakes.append(f"{where}: {said}; expected one for the whole table")
            row = {**default, **{key: value for key, value in row.items() if key not in keys(Table) or key in keys(Row)}}
            if (same := known.get(row.get("label"))) and "equation" not in row:
                row["equation"] = same.equation
        yield _build(Row, row, where, mistakes)


def _rows_from(content: dict[str, Any], path: Path, chain: list[Path], mistakes: list[str]) -> dict[str, Row]:
    """By label, the rows of the file that ``rows_from`` names. Raises ``UserError``."""
    if "rows_from" not in content:
        return {}
    source = (path.parent / str(content["rows_from"])).resolve()
    if source in chain:
        raise UserError(f"{path}: rows_from is a circle: {' -> '.join(each.name for each in [*chain, source])}")
    try:
        rows = list(_expanded(with_rows(read(source), source.stem), source, [*chain, source], mistakes))
    except UserError as error:
        raise UserError(f"{path}: rows_from: {error}") from None
    return {row.label: row for row in rows if row is not None}


def keys(section: type[Section]) -> list[str]:
    """What a user may write in a section of the file."""
    return [name for name in section.model_fields if name not in SET_BY_US] + ["rows_from"] * (section is Table)


def _build(section: type[Section], content: Any, where: str, mistakes: list[str]) -> Any:
    """``content`` as a ``section``, without the keys that are wrong; None where what is left is not enough."""
    if not isinstance(content, dict):
        mistakes.append(f"{where}: expected a mapping with the keys {', '.join(keys(section))}")
        return None
    content = dict(content)
    for _ in range(2):
        try:
            return section.model_validate(content)
        except ValidationError as error:
            wrong = {problem["loc"][0]: problem["type"] for problem in error.errors()}
        for key, kind in wrong.items():
            value = content.pop(key, None)
            if kind == "extra_forbidden":
                hint = did_you_mean(str(key), keys(section))
                mistakes.append(f"{where}: unknown key {short.repr(key)}; {hint} The keys are {', '.join(keys(section))}")
            elif kind == "missing":
                mistakes.append(f"{where}: {key!r} is missing; expected {section.model_fields[key].description}")
            else:
                expected = section.model_fields[key].description
                mistakes.append(f"{where}: {key} is {short.repr(value)}; expected {expected}")
    return None


def _own_text(content: Any, texts: dict, name: str, where: str, mistakes: list[str]) -> Any:
    """``content`` with a folder in place of your own text, which is added to ``texts``."""
    if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
        return content
    text = _build(Table.OwnText, content["data"], f"{where}, data", mistakes)
    folder = str(Path(text.folder).expanduser().resolve() if text and text.folder else ROOT / "data" / name)
    if Path(folder).name in NAMES:
        mistakes.append(f"{where}, data: folder is {folder}, named like a corpus of the project; expected another name")
    if text and texts.setdefault(folder, text) != text:
        mistakes.append(f"{where}, data: other text of this file has the folder {folder}, too")
    return {**content, "data": folder}


def _with_defaults(table: Table) -> Table:
    """Task and metric by the data and the rows; the first row is the baseline of a table without published values."""
    of_text = table.texts or table.data in NAMES or any(row.arch for row in table.rows)
    task = table.task or ("translation" if of_text else "images")
    metric = table.metric or (TASKS[task].metric if task in TASKS else "")
    ran = [row.label for row in table.rows if row.run]
    first = "" if table.source or len(ran) < 2 or any(row.baseline for row in table.rows) else ran[0]
    given = {"task": task, "metric": metric, "baseline": table.baseline or first, "title": table.title or table.name}
    return table.model_copy(update={**given, "tried": table.seeds[: table.sweep_seeds]})


def _contradictions(table: Table) -> Iterator[str]:
    """What no key alone shows, each as what follows the file's name in a message."""
    yield from _not_one_of(": task", [table.task], TASKS)
    if table.task not in TASKS:
        return
    task = TASKS[table.task]
    yield from _not_one_of(": metric", [table.metric, *table.also], task.metrics)
    if len(set(table.seeds)) < len(table.seeds):
        yield f": seeds are {table.seeds}; expected different ones"
    over_seeds = table.metric in task.over_seeds
    if over_seeds and table.test not in ("", "welch"):
        yield f": test is {table.test}, of sentences; expected welch for {table.metric}"
    if table.evaluate and set(task.over_seeds).issuperset([table.metric, *table.also]):
        yield f": evaluate is for scores of translations; nothing is translated for {table.metric}"
    yield from _few_values(table.sweep, ": ")
    labels = [row.label for row in table.rows]
    for number, row in enumerate(table.rows, 1):
        where = f", row {number} ({row.label!r}): "
        if row.label in labels[: number - 1]:
            yield f"{where}row {labels.index(row.label) + 1} has that label, too"
        if (baseline := table.baseline_of(row)) and baseline not in labels:
            yield f"{where}its baseline {baseline!r} is no row's label; {did_you_mean(baseline, labels)}"
        if row.run and bool(row.arch) != task.has_architectures:
            yield where + ("expected 'arch', or 'run: false'" if task.has_architectures else "images take no 'arch'")
        yield from _few_values(row.sweep or {}, where)
        for key, value in (("arch", row.arch), ("reported", row.reported)):
            if isinstance(value, dict):
                yield from _not_one_of(f"{where}{key} names a column that", list(value), table.columns)
        if isinstance(row.reported, int | float) and len(table.columns) > 1:
            yield f"{where}reported is {row.reported}; expected a mapping from the columns {', '.join(table.columns)}"


def _not_one_of(what: str, values: list[str], known: Iterable[str]) -> Iterator[str]:
    for value in values:
        if value not in known:
            yield f"{what} is {value!r}; {did_you_mean(value, known)} expected one of {', '.join(known)}"


def _few_values(sweep: Mapping[str, list[Any]], where: str) -> Iterator[str]:
    for option, values in sweep.items():
        if len(values) < 2 or len(set(values)) < len(values) or any(v != v or abs(v) == math.inf for v in values if isinstance(v, float)):
            yield f"{where}sweep of {option} is {short.repr(values)}; expected different values, two or more"
