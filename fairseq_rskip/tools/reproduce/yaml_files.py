"""The YAML files of tables as mappings: read, each with its rows, also those that it takes from another file."""

import contextlib
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from fairseq_rskip.errors import UserError

from .tables import Row, Table, near

short = reprlib.Repr()  # a value may be huge: YAML's aliases multiply
short.maxlevel, short.maxstring, short.maxother = 2, 80, 80


class Mistakes(list[str]):
    """Messages of several ``UserError``, so that a user sees all of them at once."""

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Keep the message of a ``UserError`` in the block, and go on after it."""
        try:
            yield
        except UserError as error:
            self.append(str(error))

    def refuse(self) -> None:
        """Raise ``UserError`` with a line for each, if there are any."""
        if self:
            raise UserError("\nerror: ".join(dict.fromkeys(self)))


def read_rows(path: Path, readers: Iterable[Path] = ()) -> dict[str, Any]:
    """What ``path`` holds, with ``rows``: one experiment is a row, and what a row has of the whole table goes there.

    So an experiment's file becomes a row by pasting. ``readers`` are the files that take rows from this one.
    Raises ``UserError`` where a row is not of the same table.
    """
    content = read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(keys(Table))}")
    if not {"rows", "rows_from"} & set(content):
        own = [key for key in keys(Row) if key not in keys(Table)]  # of a row alone
        row = {"label": path.stem, **{key: value for key, value in content.items() if key in own}}
        return {**{key: value for key, value in content.items() if key not in own}, "rows": [row]}
    given = _taken(content, path, readers) if "rows_from" in content else content["rows"]
    if not isinstance(given, list) or not given:
        raise UserError(f"{path}: expected 'rows', a list with at least one row")
    default = {"arch": content.pop("arch")} if "arch" in content else {}
    rows = []
    for number, row in enumerate(given, 1):
        own = row
        if isinstance(row, dict):
            own = {**default, **{key: value for key, value in row.items() if not _of_table_alone(key)}}
            for key in filter(_of_table_alone, row):
                if content.setdefault(key, row[key]) != row[key]:
                    said = f"{key} is {short.repr(row[key])}, before it {short.repr(content[key])}"
                    raise UserError(f"{row_name(path, number, row)}: {said}; expected one for the whole table")
        rows.append(own)
    return {**content, "rows": rows}


def _taken(content: dict[str, Any], path: Path, readers: Iterable[Path]) -> Any:
    """The rows of ``content`` with what they have from the file ``rows_from``; all of its rows where there are none.

    A label alone is the row of that label there; a row that lacks an equation has that of its label there.
    Raises ``UserError`` if there is no such row, or file, or if that takes rows from this one.
    """
    source, chain = (path.parent / str(content["rows_from"])).resolve(), [*readers, path.resolve()]
    if source in chain:
        names = " takes rows from ".join(each.name for each in [*chain, source])
        raise UserError(f"{path}: rows_from goes round in a circle: {names}")
    try:
        known = {row.get("label"): row for row in read_rows(source, chain)["rows"] if isinstance(row, dict)}
    except UserError as error:
        raise UserError(f"{path}: rows_from: {error}") from None
    if not isinstance(rows := content.get("rows", list(known)), list):
        return rows
    result, mistakes = [], Mistakes()
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict) and row.get("label") in known:
            row = {"equation": known[row["label"]].get("equation", ""), **row}
        elif isinstance(row, str) and row not in known:
            hint = near(row, known) or f"it has {', '.join(map(str, known))}"
            mistakes.append(f"{path}, row {number}: {source.name} has no row {short.repr(row)}; {hint}")
        result.append(known.get(row) if isinstance(row, str) else row)
    mistakes.refuse()
    return result


def _of_table_alone(key: Any) -> bool:
    return key in keys(Table) and key not in keys(Row)


def row_name(path: Path, number: int, row: Any) -> str:
    label = f" ({short.repr(row['label'])})" if isinstance(row, dict) and "label" in row else ""
    return f"{path}, row {number}{label}"


def keys(cls: type) -> list[str]:
    return [each.name for each in fields(cls) if each.metadata.get("accepts")]


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: list[Any] = []
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"key {short.repr(key)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Any:
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
