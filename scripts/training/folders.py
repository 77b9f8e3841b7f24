"""The two folders of a training: the data-bin it reads and the SAVE-DIR it writes, beside what fairseq does there."""

import filecmp
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Tuple

from fairseq_rskip.compat import load_checkpoint
from fairseq_rskip.errors import UserError
from training.recipes import GENERAL, NAMES, RECIPES

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = "training.json"


@dataclass
class Data:
    """A data-bin: its ``folder``, the ``name`` of what is in it, its ``recipe``, and what preparation.json says.

    ``there`` is False for a named corpus that is still to be prepared.
    """

    folder: Path
    name: str
    recipe: str
    preparation: Dict[str, Any] = field(default_factory=dict)
    there: bool = True

    @property
    def languages(self) -> Dict[str, str]:
        """fairseq-train's options for what preparation.json says; from file names alone, fairseq guesses."""
        said = {"source-lang": self.preparation.get("src"), "target-lang": self.preparation.get("tgt")}
        return {name: language for name, language in said.items() if isinstance(language, str)}

    def pair(self, given: Dict[str, Any]) -> Tuple[str, str]:
        """Source and target language: the user's, preparation.json's, or the file names'. Raises as the next."""
        return tuple(path.name[len("dict.") : -len(".txt")] for path in self.dictionaries(given))

    def dictionaries(self, given: Dict[str, Any]) -> List[Path]:
        """The source's and the target's. Raises ``UserError`` if this is not the data-bin of a language pair."""
        if not self.there:
            return []
        pairs = [re.fullmatch(r"train\.(.+)-(.+)\.(?:\1|\2)\.idx", path.name) for path in self.folder.glob("train.*")]
        src, tgt = next((match.groups() for match in pairs if match), (None, None))
        src = given.get("source_lang") or self.preparation.get("src") or src
        tgt = given.get("target_lang") or self.preparation.get("tgt") or tgt
        found = [self.folder / f"dict.{src}.txt", self.folder / f"dict.{tgt}.txt"]
        if not (any(pairs) and all(path.is_file() for path in found)):
            again = f"; run: {RECIPES[self.recipe].prepare}" if self.recipe != GENERAL else ""
            raise UserError(f"{self.folder} lacks train.SRC-TGT.SRC.idx, dict.SRC.txt or dict.TGT.txt{again}")
        return found


def find_data(corpus: str, dry_run: bool) -> Data:
    """The data of a corpus's name or of a folder. Raises ``UserError``; a dry run needs no prepared data."""
    if corpus in NAMES:
        data = Data(ROOT / "data" / corpus / "data-bin", corpus, corpus)
        data.there = data.folder.is_dir()
        if not data.there and not dry_run:
            raise UserError(f"{corpus} is not prepared (no {data.folder}); run: {RECIPES[corpus].prepare}")
    elif Path(corpus).is_dir():
        folder = Path(corpus)
        folder = folder / "data-bin" if (folder / "data-bin").is_dir() else folder
        own = folder.resolve()
        data = Data(folder, (own.parent if own.name == "data-bin" else own).name, GENERAL)
    else:
        raise UserError(f"no corpus or folder named {corpus!r}; the corpora are {', '.join(NAMES)}")
    path = data.folder / "preparation.json"
    if path.exists():
        try:
            data.preparation = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
        if data.preparation.get("corpus") in NAMES:
            data.name = data.recipe = data.preparation["corpus"]
    return data


def shown(path: Path) -> str:
    """Relative to where the user is, if it is below."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def check_save(save: Path, data: Data, settings: Dict[str, Any]) -> None:
    """Raises ``UserError`` if the checkpoints in ``save`` are of another vocabulary or model."""
    if not any(save.glob("checkpoint*.pt")):
        return
    for copy in save.glob("dict.*.txt"):
        mine = data.folder / copy.name
        if data.there and not (mine.is_file() and filecmp.cmp(copy, mine, shallow=False)):
            raise UserError(
                f"{save} holds checkpoints of another vocabulary ({copy.name} is not that of {data.folder}); "
                "give another --save-dir"
            )
    try:
        before = dict(json.loads((save / SETTINGS).read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # checkpoints of a run that train.sh did not start
        before = {}
    for name, now in settings.items():
        was = before.get(name, now)
        if was != now:
            raise UserError(f"{save} holds checkpoints of {name} = {was}, not {now}; give another --save-dir")


def finished(save: Path, max_update: int) -> bool:
    """Whether checkpoint_last has all updates; fairseq would do one more. Raises ``CheckpointError``."""
    last = save / "checkpoint_last.pt"
    if not (max_update and last.exists()):
        return False
    history = load_checkpoint(last, map_location="cpu").get("optimizer_history") or [{}]
    return history[-1].get("num_updates", 0) >= max_update


def fill_save(save: Path, data: Data, dictionaries: List[Path], settings: Dict[str, Any]) -> None:
    """Makes ``save``, with copies of the dictionaries and what identifies the model: evaluation and resuming compare
    with them. Raises ``UserError`` if it cannot be written."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        texts = {
            path.name: path.read_bytes() for path in [*dictionaries, data.folder / "preparation.json"] if path.is_file()
        }
        texts[SETTINGS] = json.dumps(settings).encode() + b"\n"
        for name, text in texts.items():
            part = save / f".{name}.{os.getpid()}"
            part.write_bytes(text)
            os.replace(part, save / name)
    except OSError as error:
        raise UserError(f"cannot write to {save}: {error.strerror}") from None
