"""The SAVE-DIR of a training: its checkpoints, and the vocabulary that they belong to."""

import filecmp
import re
from pathlib import Path

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import Corpus

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
