"""Read a YAML file as a Table.

One reading finds every mistake in the keys and their types; each is a line with the file and the
row. Of the options of a row, the first mistake is named when it is planned (``plan``).
"""

import re
import reprlib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools.corpus import DATA, NAMES
from fairseq_rskip.tools.process import CHECKOUT, EXPERIMENTS

from . import own_text
from .records import Row, Section, Table

FOLDER = CHECKOUT / EXPERIMENTS
TEXTS = (Table.Documents, Table.Published, Table.Pairs)  # what is prepared for a table
Texts = dict[str, own_text.Text]  # folder of the prepared text -> the text


def find(name: str) -> Path:
    """The file of a table, by the table's name or by its path. Raises ``UserError``."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).expanduser().resolve()
    known = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    if name not in known:
        hint = did_you_mean(name, known) or (
            "expected a file whose name ends in .yaml, or a table that rskip reproduce list names"
        )
        raise UserError(f"no table {name!r}; {hint}")
    return known[name]


def read(path: Path) -> dict[str, Any]:
    """The mapping in ``path``; a file without rows becomes a table of one row.

    Raises ``UserError``.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a YAML file of rows to train")
    if not path.is_file():
        raise UserError(f"cannot read {path} as YAML: it is not a file")
    try:
        content = yaml.load(path.read_text("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as text that is not UTF-8
        raise UserError(f"cannot read {path} as YAML: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(keys(Table))}")
    if not {"rows", "rows_from"} & set(content):
        unknown = [key for key in content if key not in {*keys(Row), *keys(Table)}]
        if unknown:  # what is meant as rows may be among them
            hint = did_you_mean(str(unknown[0]), keys(Table)) or (
                f"the keys are {', '.join(keys(Table))}"
            )
            raise UserError(f"{path}: unknown key {unknown[0]!r}; {hint}")
        row = {"label": path.stem}
        for key in list(content):
            if key in keys(Row) and key not in keys(Table):
                row[key] = content.pop(key)
        content["rows"] = [row]
    return content


def _reason(error: Exception) -> str:
    """What is wrong, on one line; of a mistake in the syntax its line and column."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = getattr(error, "problem", None) or "it is not complete"
    if "'\\t'" in problem:
        problem = "a tab; expected blanks before a key"
    elif problem.startswith("mapping values"):
        problem = "a second colon; expected quotes around text that has one"
    context = getattr(error, "context_mark", None)
    if context is not None and context.line != mark.line:
        problem += f", {error.context} that begins in line {context.line + 1}"  # type: ignore
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class NumbersLoader(yaml.SafeLoader):
    """YAML's safe loader, for which 1e-4 is a number, as in YAML 1.2: PyYAML wants 1.0e-4."""


NumbersLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class _Loader(NumbersLoader):
    """A loader which also refuses a key twice in a mapping: its own drops the first.

    Keys are compared before merge keys (``<<``) add others, which may be set again.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise ValueError(f"the key {key.value!r} twice, in lines {first} and {line}")
            lines[key.value] = line
        return node


def load(path: Path, mistakes: list[str]) -> tuple[Table, Texts] | None:
    """The table in ``path``, and its own texts; appends to ``mistakes``.

    None where nothing more can be checked.
    """
    try:
        content = read(path)
        rows = _rows(content, path, [path.resolve()], mistakes)
    except UserError as error:
        mistakes.append(str(error))
        return None

    texts = _TextsOfFile(path, mistakes)
    columns = _columns(content.get("columns", {"": {}}), path, texts, mistakes)
    content = texts.with_folder(content, path.stem, str(path))
    content["columns"] = columns
    content["rows"] = [row or Row(label="?") for row in rows]  # a wrong one is named already
    content = {key: value for key, value in content.items() if key != "rows_from"}
    if "seeds" in content:
        content["seeds"] = _as_list(content["seeds"], path)

    table = _build(Table, content, str(path), mistakes)
    right_rows = [row for row in rows if row is not None]
    if table is None or not right_rows or texts.any_wrong:
        return None
    return table.model_copy(update={"rows": right_rows}), texts.by_folder


def _columns(columns: Any, path: Path, texts: "_TextsOfFile", mistakes: list[str]) -> Any:
    """The file's ``columns``, built; what is no mapping stays, for the table to refuse."""
    if not isinstance(columns, dict):
        return columns
    built = {}
    for name, value in columns.items():
        where = f"{path}, column {name!r}"
        value = texts.with_folder(value or {}, f"{path.stem}-{name}", where)
        built[name] = _build(Table.Column, value, where, mistakes) or Table.Column()
    return built


def _as_list(seeds: Any, path: Path) -> Any:
    """``seeds``; of one number a list, with a note where several may be meant."""
    if type(seeds) is not int:
        return seeds
    if seeds != 1:
        print_line(
            f"note: {path.name}: seeds: {seeds} is seed {seeds} alone; [1, 2, 3] are three",
            "stderr",
        )
    return [seeds]


def _rows(
    content: dict[str, Any], path: Path, chain: list[Path], mistakes: list[str]
) -> list[Row | None]:
    """The rows, None for one that is wrong.

    With ``rows_from``, a label alone means that file's row, and a missing equation is that row's.
    The file's ``arch`` is that of rows without one.
    """
    known = _known_rows(content, path, chain, mistakes)
    values = content.get("rows", list(known))
    if not isinstance(values, list):
        expected = Table.model_fields["rows"].description
        raise UserError(f"{path}: rows is {reprlib.repr(values)}; expected {expected}")

    rows = []
    for number, value in enumerate(values, 1):
        where = f"{path}, row {number}"
        if isinstance(value, str) and "rows_from" in content:
            if value not in known:
                hint = did_you_mean(value, known) or f"expected {', '.join(known)}"
                mistakes.append(f"{where}: rows_from has no row {value!r}; {hint}")
            rows.append(known.get(value))
            continue
        if isinstance(value, dict):
            label = value.get("label")
            if label is not None:
                where += f" ({reprlib.repr(label)})"
            if isinstance(content.get("arch"), str | dict):  # another type is a mistake of the file
                value = {"arch": content["arch"], **value}
            if isinstance(label, str) and label in known:
                value = {"equation": known[label].equation, **value}
        rows.append(_build(Row, value, where, mistakes))
    return rows


def _known_rows(
    content: dict[str, Any], path: Path, chain: list[Path], mistakes: list[str]
) -> dict[str, Row]:
    """The rows of the file in ``rows_from`` by label. Raises ``UserError``."""
    if "rows_from" not in content:
        return {}
    name = content["rows_from"]
    if not isinstance(name, str):
        raise UserError(f"{path}: rows_from is {reprlib.repr(name)}; expected another table's file")
    source = (path.parent / name).resolve()
    if source in chain:
        circle = " -> ".join(each.name for each in [*chain, source])
        raise UserError(f"{path}: rows_from is a circle: {circle}")
    if not source.exists():
        raise UserError(f"{path}: rows_from is {name!r}, and {source} does not exist")
    rows = _rows(read(source), source, [*chain, source], mistakes)
    return {row.label: row for row in rows if row}


def keys(section: type[Section]) -> list[str]:
    """What a user may write in a section of the file."""
    names = list(section.model_fields)
    return [*names, "rows_from"] if section is Table else names


def _build(section: type[Section], content: Any, where: str, mistakes: list[str]) -> Any:
    """``content`` as a ``section``, without the keys that are wrong.

    None where too little is left. Appends to ``mistakes``.
    """
    accepted = ", ".join(keys(section))
    if not isinstance(content, dict):
        expected = f"a mapping with the keys {accepted}"
        if section is Row:
            expected += "; a label alone needs 'rows_from'"
        mistakes.append(f"{where} is {reprlib.repr(content)}; expected {expected}")
        return None
    try:
        return section.model_validate(content)
    except ValidationError as error:
        wrong = _expected_by_key(error)

    for key, messages in wrong.items():
        if key not in content:
            mistakes.append(f"{where}: {key!r} is missing")
        elif key not in keys(section):
            hint = did_you_mean(str(key), keys(section)) or f"the keys are {accepted}"
            if section in TEXTS:
                hint += f"; an option of rskip prepare is written options: {{{key}: ...}}"
            mistakes.append(f"{where}: unknown key {key!r}; {hint}")
        else:
            expected = section.model_fields[key].description or " or ".join(dict.fromkeys(messages))
            expected = expected.replace("valid dictionary", "mapping")
            mistakes.append(f"{where}: {key} is {reprlib.repr(content[key])}; expected {expected}")

    fields = section.model_fields
    needed = [key for key in fields if fields[key].is_required() or key == "arch"]
    if any(key in wrong for key in needed):
        return None
    right = {key: value for key, value in content.items() if key not in wrong}
    return section.model_validate(right)


def _expected_by_key(error: ValidationError) -> dict[Any, list[str]]:
    """What pydantic expects of each key that is wrong."""
    expected: dict[Any, list[str]] = {}
    for each in error.errors(include_input=False, include_context=False, include_url=False):
        message = re.sub(r"^\w+ should (be|have) | after .*", "", each["msg"])
        expected.setdefault(each["loc"][0], []).append(message)
    return expected


class _TextsOfFile:
    """The texts of your own in one file: ``by_folder``, that of the prepared text.

    ``any_wrong`` says that some text could not be read; what is wrong is in ``mistakes``.
    """

    def __init__(self, file: Path, mistakes: list[str]):
        self.file, self.mistakes = file, mistakes
        self.by_folder: Texts = {}
        self.any_wrong = False

    def with_folder(self, content: Any, name: str, where: str) -> Any:
        """``content`` with a folder in place of the text that its ``data`` describes, if any.

        The folder of a text that is wrong is called ``name``.
        """
        if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
            return content
        text = _build(
            _kind_of_text(content["data"]), content["data"], f"{where}, data", self.mistakes
        )
        if text is None:
            self.any_wrong = True
            return {**content, "data": str(DATA / name)}

        text = own_text.beside(text, self.file)
        folder = str(DATA / name)
        try:
            folder = str(own_text.folder(text))
            own_text.check_options(text, folder)
        except UserError as error:  # a file is missing
            self.mistakes.append(f"{where}, data: {error}")
        for_another_text = self.by_folder.get(folder, text) != text
        if for_another_text or Path(folder).name in NAMES:
            self.mistakes.append(
                f"{where}, data: the folder {folder} is for another corpus; "
                "expected another 'folder'"
            )
        self.by_folder.setdefault(folder, text)
        return {**content, "data": folder}


def _kind_of_text(data: dict[str, Any]) -> type[Section]:
    if "text" in data:
        return Table.Documents
    if "corpus" in data:
        return Table.Published
    return Table.Pairs
