"""experiments/*.yaml as ``Table``: read, or refused with a line for each mistake that names the file and the row."""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import dacite

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.analyze import add_options
from fairseq_rskip.tools.process import CHECKOUT
from fairseq_rskip.tools.train.recipes import NAMES

from .tables import FIGURES, METRICS, ROOT, TESTS, Column, Corpus, Row, StandIn, Sweep, Table, cells, near
from .yaml_files import Mistakes, read, read_rows, row_name, short

FOLDER = CHECKOUT / "experiments"
STAND_INS = "stand-ins.yaml"


def load_all(folder: Path, warn: Callable[[str], None]) -> dict[str, Table]:
    """Every table of ``folder`` by name, tables first; ``warn`` is told of those that cannot be read."""
    result = {}
    for name, path in paths(folder).items():
        try:
            result[name] = load(path)
        except UserError as error:
            warn(f"warning: left out: {str(error).splitlines()[0]}")
    return result


def load_named(folder: Path, names: list[str]) -> dict[str, Table]:
    """The tables of these names in ``folder``, or of these files. Raises ``UserError``."""
    files = {name: Path(name).resolve() for name in names if name.endswith((".yaml", ".yml"))}
    known = {**(paths(folder) if len(files) < len(names) or not names else {}), **files}
    for name in names:
        if name not in known:
            raise UserError(f"no table named {name!r}; there are {', '.join(known)}, or give the path of a .yaml file")
    found = [load(known[name]) for name in names]
    return {table.name: table for table in found}


def paths(folder: Path) -> dict[str, Path]:
    """The files of the tables in ``folder``. Raises ``UserError`` if there are none."""
    found = sorted(path for path in folder.glob("*.yaml") if path.name != STAND_INS)
    if not found:
        raise UserError(f"{folder} holds no tables: expected files such as table1.yaml")
    return {path.stem: path.resolve() for path in sorted(found, key=lambda path: (path.stem.startswith("fig"), path))}


def load(path: Path) -> Table:
    """The table in ``path``. Raises ``UserError`` naming the file, and the row where it is in one."""
    content = read_rows(path)
    columns = content.pop("columns", {"": None})
    if not isinstance(columns, dict) or not columns:
        raise UserError(f"{path}: expected 'columns' to be a mapping, from a column's name to its data and options")
    if type(content.get("seeds")) is int:
        content["seeds"] = [content["seeds"]]
    mistakes, corpora, built, rows = Mistakes(), {}, {}, []
    for name, value in columns.items():
        where = f"{path}, column {name!r}"
        with mistakes.noted():
            value = _own_corpus({} if value is None else value, corpora, where, f"{path.stem}-{name}")
            built[name] = build(Column, value, where)
    for number, row in enumerate(content.pop("rows"), 1):
        with mistakes.noted():
            rows.append(build(Row, row, row_name(path, number, row)))
    with mistakes.noted():
        content = _own_corpus(content, corpora, str(path), path.stem)
        given = {"name": path.stem, "path": str(path), "rows": rows, "columns": built, "corpora": corpora}
        table = build(Table, content, str(path), **given)
    mistakes.refuse()
    of_text = corpora or table.data in NAMES or any(row.arch for row in table.rows)
    task = table.task or ("translation" if of_text else "images")
    metric = table.metric or ("error" if task == "images" else "sacreBLEU 13a")
    table = replace(table, task=task, metric=metric, title=table.title or path.stem, baseline=_baseline(table))
    mistakes += [f"{path}{mistake}" for mistake in _mistakes(table)]
    mistakes.refuse()
    return table


def _baseline(table: Table) -> str:
    """The label of the row to compare with: in a table of one's own that names none, the first that is run."""
    ran = [row.label for row in table.rows if row.run]
    if table.source or len(ran) < 2 or any(row.baseline for row in table.rows):
        return table.baseline
    return table.baseline or ran[0]


def _own_corpus(content: Any, corpora: dict[str, Corpus], where: str, name: str) -> Any:
    """``content`` with the folder of its ``data`` where that is a mapping, a corpus added to ``corpora``."""
    if not isinstance(content, dict) or not isinstance(content.get("data"), dict):
        return content
    corpus = build(Corpus, content["data"], f"{where}, data")
    folder = str(Path(corpus.folder).expanduser().resolve() if corpus.folder else ROOT / "data" / name)
    for split in ("train", "valid", "test"):
        if len(files := getattr(corpus, split)) != 2:
            raise UserError(f"{where}, data: {split} is {short.repr(files)}; expected two files, [SOURCE, TARGET]")
    if Path(folder).name in NAMES:
        raise UserError(f"{where}, data: folder is {folder}, named like a corpus of the project; expected another name")
    if corpora.setdefault(folder, corpus) != corpus:
        raise UserError(f"{where}, data: another corpus of this file has the folder {folder}, too")
    return {**content, "data": folder}


def load_stand_ins(folder: Path = FOLDER) -> dict[str, StandIn]:
    """What ``--corpus`` may name beside data sets and corpora. Raises as ``load``."""
    path = folder / STAND_INS
    content = read(path) if path.exists() else None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping, from a name for --corpus to what it stands for")
    result, mistakes = {}, Mistakes()
    for name, value in content.items():
        with mistakes.noted():
            stand_in = result[str(name)] = build(StandIn, value, f"{path}, {name!r}")
            mistakes += _strange(f"{path}, {name!r}: task", [stand_in.task], METRICS)
    mistakes.refuse()
    return result


def _mistakes(table: Table) -> Iterator[str]:
    """What the types cannot say, each as what follows the file's name in a message."""
    yield from _strange(": task", [table.task], METRICS)
    yield from _strange(": figure", [table.figure or "curves"], FIGURES)
    yield from _strange(": test", [table.test or "welch"], TESTS)
    yield from _strange(": metric", [table.metric, *table.also], METRICS.get(table.task, [table.metric, *table.also]))
    seeds = table.seeds
    if not seeds or len(set(seeds)) < len(seeds) or any(type(seed) is bool or seed < 0 for seed in seeds):
        yield f": seeds are {short.repr(seeds)}; expected different integers >= 0"
    if table.over_seeds and table.test not in ("", "welch"):
        yield f": test is {table.test!r}, of sentences; expected welch for {table.metric}"
    if table.sweep_seeds < 1:
        yield f": sweep_seeds is {table.sweep_seeds}; expected an integer >= 1"
    if table.evaluate and not (table.task == "translation" and table.scored):
        yield f": evaluate is for scores of translations; nothing is translated for {table.metric}"
    yield from _mistakes_of_sweep(table.sweep)
    yield from _mistakes_of_figure(table)
    if table.task == "images" and any(c.run and c.sweep and not c.options.get("valid-images") for c in cells(table)):
        yield ": a sweep is decided on a held-out set, never on the test set; expected options: {valid-images: N}"
    labels: list[str] = []
    for number, row in enumerate(table.rows, 1):
        where = f", row {number} ({row.label!r})"
        if row.label in labels:
            yield f"{where}: there is a row of that label already, row {labels.index(row.label) + 1}"
        labels.append(row.label)
        yield from (f"{where}: {mistake}" for mistake in _mistakes_of_row(table, row))


def _strange(what: str, values: list[str], accepted: Iterable[str]) -> Iterator[str]:
    for value in values:
        if value not in accepted:
            yield f"{what} is {value!r}; expected one of {', '.join(accepted)}"


def _mistakes_of_sweep(sweep: Sweep, where: str = ": ") -> Iterator[str]:
    for option, values in sweep.items():
        if len(values) < 2 or len(set(values)) < len(values) or any(isinstance(value, bool) for value in values):
            yield f"{where}sweep of {option} is {short.repr(values)}; expected different values, two or more"


def _mistakes_of_figure(table: Table) -> Iterator[str]:
    """Options that the subcommand of analyze.py lacks."""
    if table.figure_options and table.figure in ("", *FIGURES):
        parser = argparse.ArgumentParser(add_help=False)
        add_options(table.figure or "curves", parser)
        known = [option[2:] for option in parser._option_string_actions if option.startswith("--")]
        for name in table.figure_options:
            if name not in known:
                yield f": figure_options names {name!r}; analyze.py takes {', '.join(known)}"


def _mistakes_of_row(table: Table, row: Row) -> Iterator[str]:
    if not row.label.strip():
        yield "its label is empty"
    baseline, labels = table.baseline_of(row), [row.label for row in table.rows]
    if baseline and baseline not in labels:
        yield f"its baseline {baseline!r} is no row's label; they are {', '.join(labels)}"
    if table.task == "images" and row.arch:
        yield "'arch' is for translation; a ResNet is described by options such as depth"
    if table.task == "translation" and row.run and not row.arch:
        yield "expected 'arch', an architecture, or 'run: false' for a quoted figure"
    known = ", ".join(table.columns)
    for key in ("arch", "reported"):
        strange = sorted(set(value) - set(table.columns)) if isinstance(value := getattr(row, key), dict) else []
        if strange:
            yield f"{key} names a column {strange[0]!r}; the table's are {known}"
    if isinstance(row.reported, (int, float)) and len(table.columns) > 1:
        yield f"reported is {row.reported}; expected a mapping, from the columns {known} to values"
    for value in row.reported.values() if isinstance(row.reported, dict) else [row.reported]:
        if value is not None and (isinstance(value, bool) or not math.isfinite(value)):
            yield f"reported is {value}; expected a number"
    yield from _mistakes_of_sweep(row.sweep or {}, "")


def build(cls: type, content: Any, where: str, **given: Any) -> Any:
    """``content`` as a ``cls``, with what is ``given`` beside it. Raises ``UserError`` beginning with ``where``."""
    known = {each.name: each for each in fields(cls) if each.metadata.get("accepts")}
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a mapping with the keys {', '.join(known)}")
    mistakes = Mistakes()
    for key, value in content.items():
        if key not in known:
            hint = f"{near(key, known)} The keys are" if near(key, known) else "expected"
            mistakes.append(f"{where}: unknown key {short.repr(key)}; {hint} {', '.join(known)}")
            continue
        try:  # each alone: dacite would stop at the first
            dacite.from_dict(make_dataclass("Key", [(key, known[key].type)]), {key: value})
        except dacite.DaciteError:
            mistakes.append(f"{where}: {key} is {short.repr(value)}; expected {known[key].metadata['accepts']}")
    for name, each in known.items():
        if each.default is MISSING is each.default_factory and name not in {**content, **given}:
            mistakes.append(f"{where}: {name!r} is missing")
    mistakes.refuse()
    return cls(**content, **given)
