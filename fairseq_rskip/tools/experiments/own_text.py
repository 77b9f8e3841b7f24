"""Prepare what a table trains on: a corpus of the project, or your own text, with the scripts of data-prep/."""

import hashlib
import json
import shlex
from argparse import Namespace
from collections import deque
from pathlib import Path
from typing import Any

from fairseq_rskip.console import as_words, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import NAMES, ROOT, Corpus
from fairseq_rskip.tools.process import explain, follow, tail

from .records import Table, dashed

INPUTS = "inputs.json"  # beside data-bin: which text it was made from
SPLITS = ("train", "valid", "test")


def prepare_all(table: Table, options: Namespace) -> None:
    """Prepare the data of ``table`` that is not prepared; a dry run prints the commands. Raises ``UserError``."""
    for data in dict.fromkeys(run.data for cell in table.cells for _, run in cell.variants):
        text = table.texts.get(data)
        if text is None and (data not in NAMES or Corpus.find(data, must_exist=False).exists):
            continue
        command = _of_text(text, data) if text else _of_corpus(data)
        if text and _is_prepared(Path(data), _identity(text)):
            continue
        print_line(shlex.join(command))
        if not options.dry_run:
            if text:
                Path(data).mkdir(parents=True, exist_ok=True)
                write_json(Path(data) / INPUTS, _identity(text))
            _run(command)


def _of_corpus(name: str) -> list[str]:
    from fairseq_rskip.tools.train.recipes import RECIPES

    script, *words = RECIPES[name].prepare.split()
    return [str(ROOT / script), *words] if script.startswith("data-prep/") else [script, *words]


def _of_text(text: Table.OwnText, folder: str) -> list[str]:
    """Raises ``UserError`` for files that do not exist."""
    words = ["--src", text.source, "--tgt", text.target]
    for split in SPLITS:
        for side, name in zip(("src", "tgt"), getattr(text, split)):
            path = Path(name).expanduser().absolute()
            if not path.is_file():
                raise UserError(f"data: {split} names {name!r}; there is no file {path}")
            words += [f"--{split}-{side}", str(path)]
    return [str(ROOT / "data-prep" / "prepare-corpus.sh"), *words, *as_words(dashed(text.options)), folder]


def _identity(text: Table.OwnText) -> dict[str, Any]:
    """What a preparation depends on: the content of the text, wherever it is."""
    found: dict[str, Any] = {"source": text.source, "target": text.target, "options": text.options}
    for split in SPLITS:
        found[split] = []
        for name in getattr(text, split):
            with open(Path(name).expanduser(), "rb") as file:
                found[split].append(hashlib.file_digest(file, "sha256").hexdigest())
    return found


def _is_prepared(folder: Path, identity: dict[str, Any]) -> bool:
    """Whether ``folder`` has the data-bin of this text. Raises ``UserError`` if it has that of other text."""
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


def _run(command: list[str]) -> None:
    if not Path(command[0]).is_file():
        raise UserError(f"the data is not prepared, and only a checkout of the project has {Path(command[0]).name}")
    lines: deque[bytes] = deque(maxlen=100)

    def take(line: bytes) -> None:
        lines.append(line)
        print_line(line.decode("utf-8", "replace").rstrip("\n"))

    status = follow(command, take)
    if status:
        raise UserError(explain(Path(command[0]).name, tail(list(lines)), status))
