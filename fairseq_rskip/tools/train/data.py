"""The data-bin that a training reads: which corpus it is, in which languages, and how long its sentences are."""

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.process import CHECKOUT
from fairseq_rskip.tools.train.recipes import GENERAL, NAMES, RECIPES, recipe_for

ROOT = CHECKOUT if (CHECKOUT / "scripts").is_dir() else Path.cwd()  # holds data/ and checkpoints/
PREPARATION = "preparation.json"
POSITIONS = 1024  # fairseq's --max-source-positions and --max-target-positions


@dataclass
class Data:
    """A data-bin: its ``folder``, the ``name`` of what is in it, its ``recipe``, and what preparation.json says.

    ``there`` is False for a named corpus that is still to be prepared; ``pairs`` is 0 where they cannot be counted.
    """

    folder: Path
    name: str
    recipe: str
    preparation: dict[str, Any] = field(default_factory=dict)
    there: bool = True
    pairs: int = 0

    @property
    def languages(self) -> dict[str, str]:
        """fairseq-train's options for what preparation.json says; from file names alone, fairseq guesses."""
        said = {"source-lang": self.preparation.get("src"), "target-lang": self.preparation.get("tgt")}
        return {name: language for name, language in said.items() if isinstance(language, str)}

    def pair(self, given: dict[str, Any]) -> tuple[str, str]:
        """Source and target language: the user's, preparation.json's, or the file names'. Raises as the next."""
        return tuple(path.name[len("dict.") : -len(".txt")] for path in self.dictionaries(given))

    def dictionaries(self, given: dict[str, Any]) -> list[Path]:
        """The source's and the target's. Raises ``UserError`` if this is not the data-bin of a language pair."""
        if not self.there:
            return []
        pairs = [re.fullmatch(r"train\.(.+)-(.+)\.(?:\1|\2)\.idx", path.name) for path in self.folder.glob("train.*")]
        src, tgt = next((match.groups() for match in pairs if match), (None, None))
        src = given.get("source_lang") or self.preparation.get("src") or src
        tgt = given.get("target_lang") or self.preparation.get("tgt") or tgt
        found = [self.folder / f"dict.{src}.txt", self.folder / f"dict.{tgt}.txt"]
        if not (any(pairs) and all(path.is_file() for path in found)):
            again = f"; run: {RECIPES[self.recipe].prepare}" if RECIPES[self.recipe].prepare else ""
            raise UserError(f"{self.folder} lacks train.SRC-TGT.SRC.idx, dict.SRC.txt or dict.TGT.txt{again}")
        return found


def find_data(corpus: str, dry_run: bool, recipe: str | None = None) -> Data:
    """The data of a corpus's name or of a folder, with the ``recipe`` that is given, else the corpus's, else by size.

    Raises ``UserError``; a dry run needs no prepared data.
    """
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
    if (data.folder / PREPARATION).exists():
        data.preparation = read_preparation(data.folder)
        if data.preparation.get("corpus") in NAMES:
            data.name = data.recipe = data.preparation["corpus"]
    data.pairs = count_pairs(data.folder)
    if recipe is None and data.recipe not in NAMES and data.pairs:
        recipe = recipe_for(data.pairs)
    data.recipe = recipe or data.recipe
    return data


def read_preparation(folder: Path) -> dict[str, Any]:
    """What data preparation says of a data-bin. Raises ``UserError``."""
    path = folder / PREPARATION
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def count_pairs(folder: Path) -> int:
    """Training pairs in a data-bin, read from an index's header; 0 if it has none of fairseq's usual format."""
    for path in folder.glob("train.*.idx"):
        header = path.read_bytes()[:26]  # magic, version, type of the numbers, count
        if header.startswith(b"MMIDIDX") and len(header) == 26:
            return struct.unpack("<Q", header[18:])[0]
    return 0


def read_lengths(prefix: Path):
    """A numpy array of the tokens, end-of-sentence counted, in each sentence of ``prefix``.bin.

    Raises ``UserError`` if fairseq could not read it.
    """
    import numpy
    from fairseq.data import indexed_dataset  # takes seconds to import

    try:
        data = indexed_dataset.make_dataset(str(prefix), indexed_dataset.infer_dataset_impl(str(prefix)))
        lengths = numpy.array(data.sizes)  # the reader's own are gone with it
    except Exception as error:  # the reader checks with assert, struct and numpy
        raise UserError(f"cannot read {prefix}.idx ({type(error).__name__}); prepare the corpus again") from None
    return lengths


def updates_per_epoch(folder: Path, languages: tuple[str, str], tokens: int) -> int:
    """About how many steps of ``tokens`` a pass over the training data takes, its padding not counted."""
    import numpy

    sides = [read_lengths(folder / f"train.{'-'.join(languages)}.{language}") for language in languages]
    return max(1, -(-int(numpy.maximum(*sides).sum()) // tokens))
