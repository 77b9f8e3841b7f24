"""Prepare what a table trains on: a corpus of the project, or your own text, with the scripts of data-prep/."""

import hashlib
import json
import shlex
import sys
from collections import deque
from pathlib import Path

from fairseq_rskip.console import as_words, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import NAMES, ROOT, Corpus
from fairseq_rskip.tools.process import explain, follow, tail

from .records import Table, dashed


def prepare_all(table: Table, dry_run: bool) -> None:
    """Prepare the data of ``table`` that is not prepared; a dry run prints the commands. Raises ``UserError``."""
    for data in dict.fromkeys(run.data for cell in table.cells for _, run in cell.variants):
        text, inputs = table.texts.get(data), Path(data) / "inputs.json"  # which text data-bin was made from
        if text:
            command, key = _of_text(text, data)
            if (Path(data) / "data-bin").is_dir():
                if not inputs.exists() or json.loads(inputs.read_text("utf-8")) != key:
                    said = f"{data} was prepared from other text, or with other options"
                    raise UserError(f"{said}; give the data another 'folder', or remove that one and its runs")
                continue
        elif data in NAMES and not Corpus.find(data, must_exist=False).exists:
            command = [sys.executable, "-m", "fairseq_rskip.tools", "prepare", data]
        else:
            continue
        print_line(shlex.join(command))
        if not dry_run:
            if text:
                Path(data).mkdir(parents=True, exist_ok=True)
                write_json(inputs, key)
            _run(command)


def _of_text(text: Table.OwnText, folder: str) -> tuple[list[str], dict[str, str]]:
    """The command, and what its result depends on: options and content. Raises ``UserError`` for missing files."""
    words, files = ["--src", text.source, "--tgt", text.target, *as_words(dashed(text.options))], []
    key = {"options": shlex.join(words)}
    for split in ("train", "valid", "test"):
        for side, name in zip(("src", "tgt"), getattr(text, split)):
            path = Path(name).expanduser().absolute()
            if not path.is_file():
                raise UserError(f"data: {split} names {name!r}; there is no file {path}")
            files += [f"--{split}-{side}", str(path)]
            with open(path, "rb") as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
            key[f"{split}-{side}"] = digest.hexdigest()
    return [str(ROOT / "data-prep" / "prepare-corpus.sh"), *words, *files, folder], key


def _run(command: list[str]) -> None:
    lines: deque[bytes] = deque(maxlen=100)

    def take(line: bytes) -> None:
        lines.append(line)
        print_line(line.decode("utf-8", "replace").rstrip("\n"))

    if command[0].startswith("/") and not Path(command[0]).is_file():
        raise UserError(f"the data is not prepared, and only a checkout of the project has {Path(command[0]).name}")
    if status := follow(command, take):
        raise UserError(explain(Path(command[0]).name, tail(list(lines)), status))
