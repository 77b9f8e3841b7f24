"""experiments/*.yaml as ``Table``: read, and refused in one line that names the file and the row."""

import argparse
import difflib
import math
import reprlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, List

import dacite
import yaml

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.analyze import add_options
from fairseq_rskip.tools.train.recipes import NAMES

from .tables import FIGURES, METRICS, ROOT, TESTS, Column, Corpus, Row, StandIn, Sweep, Table, cells

FOLDER = Path(__file__).resolve().parents[3] / "experiments"
STAND_INS = "stand-ins.yaml"

_short = reprlib.Repr()  # a value may be huge: YAML's aliases multiply
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80


def load_all(folder: Path, warn: Callable[[str], None]) -> Dict[str, Table]:
    """Every table of ``folder`` by name, tables first; ``warn`` is told of those that cannot be read."""
    result = {}
    for name, path in paths(folder).items():
        try:
            result[name] = load(path)
        except UserError as error:
            warn(f"warning: left out: {error}")
    return result


def load_named(folder: Path, names: List[str]) -> Dict[str, Table]:
    """The tables of these names in ``folder``, or of these files. Raises ``UserError``."""
    files = {name: Path(name).resolve() for name in names if name.endswith((".yaml", ".yml"))}
    known = {**(paths(folder) if len(files) < len(names) or not names else {}), **files}
    for name in names:
        if name not in known:
            raise UserError(f"no table named {name!r}; there are {', '.join(known)}, or give the path of a .yaml file")
    found = [load(known[name]) for name in names]
    return {table.name: table for table in found}


def paths(folder: Path) -> Dict[str, Path]:
    """The files of the tables in ``folder``. Raises ``UserError`` if there are none."""
    found = sorted(path for path in folder.glob("*.yaml") if path.name != STAND_INS)
    if not found:
        raise UserError(f"{folder} holds no tables: expected files such as table1.yaml")
    return {path.stem: path.resolve() for path in sorted(found, key=lambda path: (path.stem.startswith("fig"), path))}


def load(path: Path) -> Table:
    """The table in ``path``. Raises ``UserError`` naming the file, and the row where it is in one."""
    content = _read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(_keys(Table))}")
    content = _with_rows(content, path)
    corpora: Dict[str, Corpus] = {}
    columns = content.pop("columns", {"": None})
    if not isinstance(columns, dict) or not columns:
        raise UserError(f"{path}: expected 'columns' to be a mapping, from a column's name to its data and options")
    read_columns = {}
    for name, value in columns.items():
        where = f"{path}, column {name!r}"
        value = _own_corpus({} if value is None else value, corpora, where, f"{path.stem}-{name}")
        read_columns[name] = build(Column, value, where)
    read_rows = [build(Row, row, _where(path, number, row)) for number, row in enumerate(content.pop("rows"), 1)]
    content = _own_corpus(content, corpora, str(path), path.stem)
    given = {"name": path.stem, "path": str(path), "rows": read_rows, "columns": read_columns, "corpora": corpora}
    table = build(Table, content, str(path), **given)
    of_text = corpora or table.data in NAMES or any(row.arch for row in table.rows)
    task = table.task or ("translation" if of_text else "images")
    metric = table.metric or ("error" if task == "images" else "sacreBLEU 13a")
    table = replace(table, task=task, metric=metric, title=table.title or path.stem, baseline=_baseline(table))
    _check(table, path)
    return table


def _baseline(table: Table) -> str:
    """The label of the row to compare with: in a table of one's own that names none, the first that is run."""
    ran = [row.label for row in table.rows if row.run]
    if table.source or len(ran) < 2 or any(row.baseline for row in table.rows):
        return table.baseline
    return table.baseline or ran[0]


def _with_rows(content: Dict[str, Any], path: Path) -> Dict[str, Any]:
    """``content`` with ``rows``: one experiment is a row, and what a row has of the whole table goes there.

    So an experiment's file becomes a row by pasting. Raises ``UserError`` where a row is not of the same table.
    """
    own = [key for key in _keys(Row) if key not in _keys(Table)]  # of a row alone
    if "rows" not in content:
        row = {"label": path.stem, **{key: value for key, value in content.items() if key in own}}
        return {**{key: value for key, value in content.items() if key not in own}, "rows": [row]}
    if not isinstance(content["rows"], list) or not content["rows"]:
        raise UserError(f"{path}: expected 'rows', a list with at least one row")
    content, rows = dict(content), []
    default = {"arch": content.pop("arch")} if "arch" in content else {}
    for number, row in enumerate(content["rows"], 1):
        own = row
        if isinstance(row, dict):
            own = {**default, **{key: value for key, value in row.items() if not _of_table_alone(key)}}
            for key in filter(_of_table_alone, row):
                if content.setdefault(key, row[key]) != row[key]:
                    said = f"{key} is {_short.repr(row[key])}, before it {_short.repr(content[key])}"
                    raise UserError(f"{_where(path, number, row)}: {said}; expected one for the whole table")
        rows.append(own)
    return {**content, "rows": rows}


def _of_table_alone(key: Any) -> bool:
    return key in _keys(Table) and key not in _keys(Row)


def _own_corpus(content: Any, corpora: Dict[str, Corpus], where: str, name: str) -> Any:
    """``content`` with the folder of its ``data`` where that is a mapping, a corpus added to ``corpora``."""
    if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
        return content
    corpus = build(Corpus, content["data"], f"{where}, data")
    folder = str(Path(corpus.folder).expanduser().resolve() if corpus.folder else ROOT / "data" / name)
    for split in ("train", "valid", "test"):
        if len(files := getattr(corpus, split)) != 2:
            raise UserError(f"{where}, data: {split} is {_short.repr(files)}; expected two files, [SOURCE, TARGET]")
    if Path(folder).name in NAMES:
        raise UserError(f"{where}, data: folder is {folder}, named like a corpus of the project; expected another name")
    if corpora.setdefault(folder, corpus) != corpus:
        raise UserError(f"{where}, data: another corpus of this file has the folder {folder}, too")
    return {**content, "data": folder}


def load_stand_ins(folder: Path = FOLDER) -> Dict[str, StandIn]:
    """What ``--corpus`` may name beside data sets and corpora. Raises as ``load``."""
    path = folder / STAND_INS
    content = _read(path) if path.exists() else None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, from a name for --corpus to what it stands for")
    result = {str(name): build(StandIn, value, f"{path}, {name!r}") for name, value in content.items()}
    for name, value in result.items():
        _expect(f"{path}, {name!r}: task", value.task, METRICS)
    return result


def _expect(what: str, value: str, accepted: Any) -> None:
    if value not in accepted:
        raise UserError(f"{what} is {value!r}; expected one of {', '.join(accepted)}")


def _check(table: Table, path: Path) -> None:
    """What the types cannot say. Raises ``UserError``."""
    _expect(f"{path}: task", table.task, METRICS)
    _expect(f"{path}: figure", table.figure or "curves", FIGURES)
    _expect(f"{path}: test", table.test or "welch", TESTS)
    for metric in (table.metric, *table.also):
        _expect(f"{path}: metric", metric, METRICS[table.task])
    seeds = table.seeds
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is bool or seed < 0 for seed in seeds):
        raise UserError(f"{path}: seeds are {_short.repr(seeds)}; expected different integers >= 0")
    if table.over_seeds and table.test not in ("", "welch"):
        raise UserError(f"{path}: test is {table.test!r}, of sentences; expected welch for {table.metric}")
    _check_sweep(table.sweep, table, str(path))
    if table.figure_options:
        _check_figure(table, path)
    if table.evaluate and not (table.task == "translation" and table.scored):
        raise UserError(f"{path}: evaluate is for scores of translations; nothing is translated for {table.metric}")
    labels: List[str] = []
    for number, row in enumerate(table.rows, 1):
        where = f"{path}, row {number} ({row.label!r})"
        if row.label in labels:
            raise UserError(f"{where}: there is a row of that label already, row {labels.index(row.label) + 1}")
        labels.append(row.label)
        _check_row(table, row, where)


def _check_sweep(sweep: Sweep, table: Table, where: str) -> None:
    for option, values in sweep.items():
        if len(values) < 2 or len(set(values)) < len(values) or any(isinstance(value, bool) for value in values):
            said = f"{where}: sweep of {option} is {_short.repr(values)}"
            raise UserError(f"{said}; expected different values, two or more")
    blind = [cell for cell in cells(table) if cell.run and cell.sweep and not cell.options.get("valid-images")]
    if sweep and table.task == "images" and blind:
        said = f"{where}: a sweep is decided on a held-out set, never on the test set"
        raise UserError(f"{said}; expected options: {{valid-images: N}}")
    if table.sweep_seeds < 1:
        raise UserError(f"{where}: sweep_seeds is {table.sweep_seeds}; expected an integer >= 1")


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
    _check_sweep(row.sweep or {}, table, where)


def _where(path: Path, number: int, row: Any) -> str:
    label = f" ({_short.repr(row['label'])})" if isinstance(row, dict) and "label" in row else ""
    return f"{path}, row {number}{label}"


def _keys(cls: type) -> List[str]:
    return [each.name for each in fields(cls) if each.metadata.get("accepts")]


def build(cls: type, content: Any, where: str, **given: Any) -> Any:
    """``content`` as a ``cls``, with what is ``given`` beside it. Raises ``UserError`` beginning with ``where``."""
    keys = _keys(cls)
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a mapping with the keys {', '.join(keys)}")
    for key in content:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            hint = f"did you mean {near[0]!r}? The keys are" if near else "expected"
            raise UserError(f"{where}: unknown key {_short.repr(key)}; {hint} {', '.join(keys)}")
    try:
        return dacite.from_dict(cls, {**content, **given}, dacite.Config(strict=True))
    except dacite.MissingValueError as error:
        raise UserError(f"{where}: {error.field_path!r} is missing") from None
    except dacite.DaciteError as error:
        name = str(error.field_path).partition(".")[0].partition("[")[0]
        accepts = next(each.metadata["accepts"] for each in fields(cls) if each.name == name)
        raise UserError(f"{where}: {name} is {_short.repr(content[name])}; expected {accepts}") from None


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error instead of the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict:
        seen: List[Any] = []
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"key {_short.repr(key)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
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
