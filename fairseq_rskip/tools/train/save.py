"""The SAVE-DIR of a training: its checkpoints, and the vocabulary that they belong to."""

import filecmp
import re
from pathlib import Path

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_atomically
from fairseq_rskip.tools.corpus import PREPARATION, Corpus

NUMBERED = {"update": re.compile(r"checkpoint_\d+_(\d+)\.pt"), "epoch": re.compile(r"checkpoint(\d+)\.pt")}


def numbered(folder: Path, unit: str) -> list[tuple[int, Path]]:
    """The checkpoints that can be averaged, written after so many of ``unit``, a key of ``NUMBERED``; newest first."""
    matches = ((NUMBERED[unit].fullmatch(path.name), path) for path in folder.glob("checkpoint*.pt"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def check_vocabulary(save: Path, corpus: Corpus, remedy: str = "give another --save-dir") -> None:
    """Raise ``UserError`` if checkpoints in ``save`` are of another vocabulary; fairseq checks only the rest."""
    for copy in save.glob("dict*.txt") if any(save.glob("checkpoint*.pt")) and corpus.exists else ():
        mine = corpus.folder / copy.name
        if not (mine.is_file() and filecmp.cmp(copy, mine, shallow=False)):
            reason = f"{copy.name} is not that of {corpus.folder}"
            raise UserError(f"{save} holds checkpoints of another vocabulary ({reason}); {remedy}")


def fill_save(save: Path, corpus: Corpus) -> None:
    """Make ``save``, with copies of the dictionaries and preparation.json."""
    save.mkdir(parents=True, exist_ok=True)
    for path in [*corpus.dictionaries(), corpus.folder / PREPARATION]:
        if path.is_file():
            write_atomically(save / path.name, lambda file, source=path: file.write(source.read_bytes()))


def finished(save: Path, max_update: int) -> bool:
    """Whether checkpoint_last.pt has all updates; fairseq would do one more. Raises ``CheckpointError``."""
    last = save / "checkpoint_last.pt"
    if not (max_update and last.exists()):
        return False
    from fairseq_rskip.safe_load import load_checkpoint  # takes seconds to import

    history = load_checkpoint(last, map_location="cpu").get("optimizer_history") or [{}]
    return history[-1].get("num_updates", 0) >= max_update


def remove_unfinished(save: Path) -> None:
    """Remove files that a training could not finish; the caller holds the folder's lock."""
    for path in [*save.glob("*.pt.tmp"), *save.glob("*.part"), *save.glob(".*.part")]:
        path.unlink()
