"""``rskip run FILE``: an experiment, or a table of them, from its text to its report.

It prepares what is not prepared, and then does what ``rskip reproduce`` does by ``run``, ``status`` and ``report``.
"""

import argparse
import hashlib
import json
import logging
import shlex
import sys
from collections import deque
from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.process import explain, follow, tail

from . import loading, plans, translation
from . import main as reproduce
from .options import parse_experiment
from .tables import Corpus, Table

INPUTS = "inputs.json"  # beside data-bin: what your own text was, so that one folder never means two corpora
KEPT = 100  # lines of output, in which the reason of a failure is looked for


def run(options: argparse.Namespace) -> None:
    """Prepare, run, show and report the tables of ``options``. Raises ``UserError``."""
    tables = loading.load_named(options.experiments, options.tables)
    for table in tables.values():
        reproduce.make_plan(table, options)  # what is wrong is said before hours of preparing
    for table in tables.values():
        if table.task == "translation":
            prepare(table, options)
    failed = None
    try:
        reproduce.run(options)
    except reproduce.RunsFailed as error:
        failed = error
    if options.dry_run:
        return
    from fairseq_rskip.tools.report.main import write_report

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # fairseq has everyone report, matplotlib's fonts too
    named = argparse.Namespace(**{**vars(options), "tables": list(tables)})
    reproduce.status(named)
    write_report(named)
    if failed:
        raise failed


def prepare(table: Table, options: argparse.Namespace) -> None:
    """Have data-prep/ prepare what the table trains on, unless it is prepared, or a folder.

    Raises ``UserError``: for files that are not there, or if it fails.
    """
    _, given = reproduce.find_stand_in(table, options.corpus, loading.load_stand_ins(options.experiments))
    cells = plans.choose_cells(table, options.rows, options.columns)
    for data in [given] if given else dict.fromkeys(cell.data for cell in cells):
        corpus = table.corpora.get(data)
        command = translation.preparation(data, corpus)
        if command and not (corpus and _is_prepared(Path(data), _identity(corpus))):
            print_line(shlex.join(command))
            if not options.dry_run:
                _prepare(command, Path(data), corpus)


def _identity(corpus: Corpus) -> dict[str, Any]:
    """What a preparation depends on: the text by its content, wherever it lies."""
    found: dict[str, Any] = {"source": corpus.source, "target": corpus.target, "options": corpus.options}
    for split in ("train", "valid", "test"):
        found[split] = []
        for name in getattr(corpus, split):
            digest = hashlib.sha256()
            with open(Path(name).expanduser(), "rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
            found[split].append(digest.hexdigest())
    return found


def _is_prepared(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether ``folder`` has the data-bin of this text. Raises ``UserError`` if it has another one's."""
    if not (folder / "data-bin").is_dir():
        return False
    try:
        same = json.loads((folder / INPUTS).read_text("utf-8")) == identity
    except (OSError, ValueError):
        same = False
    if not same:
        said = f"{folder} was prepared from other text, or with other options"
        raise UserError(f"{said}; give the data another 'folder', or remove that one and what was trained on it")
    return True


def _prepare(command: list[str], folder: Path, corpus: Corpus | None) -> None:
    if not Path(command[0]).exists():
        said = f"this is not prepared, and only a checkout of the project has {Path(command[0]).name}"
        raise UserError(f"{said}; prepare the corpus there, and name the folder as data")
    if corpus:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / INPUTS, _identity(corpus))
    lines: deque[bytes] = deque(maxlen=KEPT)

    def take(line: bytes) -> None:
        lines.append(line)
        print_line(line.decode("utf-8", "replace").rstrip("\n"))

    status = follow(command, take)
    if status:
        raise UserError(explain(Path(command[0]).name, tail(list(lines)), status))


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    return reproduce.work(parse_experiment, argv, run)


if __name__ == "__main__":
    sys.exit(main())
