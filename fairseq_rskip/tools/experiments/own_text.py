"""Prepare what a table trains on: a corpus of the project, or your own text."""

import hashlib
import json
import shlex
from pathlib import Path

from fairseq_rskip.console import as_words, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import NAMES, ROOT, Corpus
from fairseq_rskip.tools.process import explain, follow, tail

from .records import Table, dashed
from .tasks import RSKIP


def prepare_all(table: Table, dry_run: bool) -> None:
    """Prepare the data of ``table`` that is not prepared; a dry run prints the commands. Raises ``UserError``."""
    for data in dict.fromkeys(run.data for cell in table.cells for _, run in cell.variants):
        text, inputs = table.texts.get(data), Path(data) / "inputs.json"  # which text data-bin was made from
        if text is None and (data not in NAMES or Corpus.find(data, must_exist=False).exists):
            continue
        command, key = _of_text(text, data) if text else ([*RSKIP, "prepare", data], {})
        if text and (Path(data) / "data-bin").is_dir():
            if inputs.exists() and json.loads(inputs.read_text("utf-8")) == key:
                continue
            raise UserError(
                f"{data} was prepared from other text or options; give the data another 'folder', or remove it"
            )
        print_line(shlex.join(command))
        if not dry_run:
            if text:
                Path(data).mkdir(parents=True, exist_ok=True)
                write_json(inputs, key)
            _run(command)


def _run(command: list[str]) -> None:
    lines: list[bytes] = []
    if status := follow(command, lambda line: (lines.append(line), print_line(line.decode().rstrip()))):
        raise UserError(explain(shlex.join(command[:4]), tail(lines), status))


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
            key[f"{split}-{side}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return [str(ROOT / "data-prep" / "prepare-corpus.sh"), *words, *files, folder], key
