"""Read a YAML file as a Table. Every mistake is found in one reading, each a line with the file and the row."""

import re
import reprlib
from collections.abc import Iterator
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


def find(name: str) -> Path:
    """The file of a table that is given by name or by path. Raises ``UserError``."""
    known = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
    if name.endswith((".yaml", ".yml")):
        return Path(name).expanduser().resolve()
    if name not in known:
        hint = did_you_mean(name, known) or f"expected a .yaml file or {', '.join(known)}"
        raise UserError(f"no table {name!r}; {hint}")
    return known[name]


def read(path: Path) -> dict[str, Any]:
    """The mapping in ``path``, one experiment as a table of one row. Raises ``UserError``."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as text that is not UTF-8
        raise UserError(f"cannot read {path} as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(keys(Table))}")
    if not {"rows", "rows_from"} & set(content):
        own = [key for key in content if key in keys(Row) and key not in keys(Table)]
        content["rows"] = [{"label": path.stem, **{key: content.pop(key) for key in own}}]
    return content


def load(path: Path, mistakes: list[str]) -> Table | None:
    """The table in ``path``; appends to ``mistakes``. None where so much is wrong that nothing more can be checked."""
    try:
        content = read(path)
        rows = list(_rows(content, path, [path.resolve()], mistakes))
    except UserError as error:
        mistakes.append(str(error))
        return None
    mistakes += [f"{path}: unknown key {key!r}" for key in SET_BY_US if content.pop(key, None) is not None]
    texts, columns, seeds = {}, content.get("columns", {"": {}}), content.get("seeds", [1])
    for name, value in columns.items() if isinstance(columns, dict) else ():
        where = f"{path}, column {name!r}"
        value = _own_text(value or {}, texts, f"{path.stem}-{name}", where, mistakes)
        columns[name] = _build(Table.Column, value, where, mistakes) or Table.Column()
    content = _own_text(content, texts, path.stem, str(path), mistakes)
    content |= {"name": path.stem, "path": str(path), "columns": columns, "rows": [r or Row(label="?") for r in rows]}
    content |= {"texts": {k: v for k, v in texts.items() if v}, "seeds": [seeds] if type(seeds) is int else seeds}
    table = _build(Table, {k: v for k, v in content.items() if k != "rows_from"}, str(path), mistakes)
    if table is None or None in [*rows, *texts.values()]:
        return None
    table = _with_defaults(table)
    mistakes += [f"{path}{mistake}" for mistake in _contradictions(table)]
    return table if table.task in TASKS and table.metric in TASKS[table.task].metrics else None


def _rows(content: dict[str, Any], path: Path, chain: list[Path], mistakes: list[str]) -> Iterator[Row | None]:
    """The rows. With ``rows_from``, a label alone stands for that file's row, which also gives missing equations."""
    known: dict[str, Row] = {}
    if "rows_from" in content:
        source = (path.parent / str(content["rows_from"])).resolve()
        if source in chain:
            raise UserError(f"{path}: rows_from is a circle: {' -> '.join(each.name for each in [*chain, source])}")
        known = {row.label: row for row in _rows(read(source), source, [*chain, source], mistakes) if row}
    rows, default = content.get("rows", list(known)), {"arch": content.pop("arch")} if "arch" in content else {}
    if not isinstance(rows, list):
        raise UserError(f"{path}: rows is {reprlib.repr(rows)}; expected {Table.model_fields['rows'].description}")
    for number, row in enumerate(rows, 1):
        where = f"{path}, row {number}"
        if isinstance(row, str) and "rows_from" in content:
            if row not in known:
                hint = did_you_mean(row, known) or f"expected {', '.join(known)}"
                mistakes.append(f"{where}: rows_from has no row {row!r}; {hint}")
            yield known.get(row)
            continue
        if isinstance(row, dict):
            where += f" ({row['label']!r})" if "label" in row else ""
            same = known.get(str(row.get("label")))
            row = {**default, **({"equation": same.equation} if same else {}), **row}
        yield _build(Row, row, where, mistakes)


def keys(section: type[Section]) -> list[str]:
    """What a user may write in a section of the file."""
    return [name for name in section.model_fields if name not in SET_BY_US] + ["rows_from"] * (section is Table)


def _build(section: type[Section], content: Any, where: str, mistakes: list[str]) -> Any:
    """``content`` as a ``section``, without the keys that are wrong; None where what is left is not enough."""
    accepted = ", ".join(keys(section))
    if not isinstance(content, dict):
        label = "; a label alone needs 'rows_from'" if section is Row else ""
        mistakes.append(f"{where} is {reprlib.repr(content)}; expected a mapping with the keys {accepted}{label}")
        return None
    try:
        return section.model_validate(content)
    except ValidationError as error:
        wrong: dict[Any, list[str]] = {}
        for each in error.errors():
            wrong.setdefault(each["loc"][0], []).append(re.sub(r"^\w+ should (be|have) | after .*", "", each["msg"]))
    for key, messages in wrong.items():
        if key not in content:
            mistakes.append(f"{where}: {key!r} is missing")
        elif key not in keys(section):
            hint = did_you_mean(str(key), keys(section)) or f"the keys are {accepted}"
            mistakes.append(f"{where}: unknown key {key!r}; {hint}")
        else:
            expected = section.model_fields[key].description or " or ".join(dict.fromkeys(messages))
            expected = expected.replace("valid dictionary", "mapping")
            mistakes.append(f"{where}: {key} is {reprlib.repr(content[key])}; expected {expected}")
    if any(section.model_fields[key].is_required() for key in wrong if key in section.model_fields):
        return None
    return section.model_validate({key: value for key, value in content.items() if key not in wrong})


def _own_text(content: Any, texts: dict, name: str, where: str, mistakes: list[str]) -> Any:
    """``content`` with a folder in place of your own text, which is added to ``texts``."""
    if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
        return content
    kind = Table.Documents if "text" in content["data"] else Table.OwnText
    text = _build(kind, content["data"], f"{where}, data", mistakes)
    folder = str(Path(text.folder).expanduser().resolve() if text and text.folder else ROOT / "data" / name)
    if texts.setdefault(folder, text) != text or (text and Path(folder).name in NAMES):
        mistakes.append(f"{where}, data: the folder {folder} is for another corpus; expected another 'folder'")
    return {**content, "data": folder}


def _with_defaults(table: Table) -> Table:
    """Task and metric by the data and the rows; the first row is the baseline of a table without published values."""
    of_text = table.texts or table.data in NAMES or any(row.arch for row in table.rows)
    of_documents = any(isinstance(text, Table.Documents) for text in table.texts.values())
    decoders = any("transformer_lm" in str(row.arch) for row in table.rows)  # arch may be a mapping from columns
    task = table.task or ("language-model" if of_documents or decoders else "translation" if of_text else "images")
    metric = table.metric or (TASKS[task].metric if task in TASKS else "")
    ran = [row.label for row in table.rows if row.run]
    first = "" if table.source or len(ran) < 2 or any(row.baseline for row in table.rows) else ran[0]
    given = {"task": task, "metric": metric, "baseline": table.baseline or first, "title": table.title or table.name}
    return table.model_copy(update={**given, "tried": table.seeds[0]})


def _contradictions(table: Table) -> Iterator[str]:
    """Mistakes that no single key shows, each as the text after the file's name in a message."""
    labels, task = [row.label for row in table.rows], TASKS.get(table.task)
    names = [(": task", table.task, TASKS)]
    names += [(": metric", metric, task.metrics) for metric in [table.metric, *table.also] if task]
    for number, row in enumerate(table.rows, 1):
        where, by_column = f", row {number} ({row.label!r}): ", (row.arch, row.reported)
        names += [(f"{where}a column", key, table.columns) for x in by_column if isinstance(x, dict) for key in x]
        names += [(f"{where}baseline", each, labels) for each in [row.baseline or table.baseline] if each]
        if row.label in labels[: number - 1]:
            yield f"{where}row {labels.index(row.label) + 1} has that label, too"
        if task and row.run and bool(row.arch) != task.has_architectures:
            yield where + ("images take no 'arch'" if row.arch else "expected 'arch', or 'run: false'")
        if isinstance(row.reported, int | float) and len(table.columns) > 1:
            yield f"{where}reported is {row.reported}; expected a mapping from the columns {', '.join(table.columns)}"
    for what, name, known in names:
        if name not in known:
            yield f"{what} is {name!r}; {did_you_mean(name, known)} expected one of {', '.join(known)}"
    sweeps = [("seeds", table.seeds), *(s for x in [table, *table.rows] for s in (x.sweep or {}).items())]
    twice = [(name, values) for name, values in sweeps if len(set(values)) < len(values)]
    yield from (f": {name} has the values {values}; expected different ones" for name, values in twice)
