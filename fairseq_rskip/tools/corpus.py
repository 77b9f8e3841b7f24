"""A binarised corpus: a data-bin of fairseq-preprocess, with the files of data preparation."""

import filecmp
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.pretrained.text import POST_PROCESS
from fairseq_rskip.tools.lines import read_lines

# A command writes below the current folder, or where the user says.
DATA = Path("data")
CHECKPOINTS = Path("checkpoints")
TEXTS = ("captions", "sotu", "wikitext103")  # of one language, for language models
NAMES = (
    "iwslt15-en-vi",
    "wmt14-en-de",
    "wmt14-en-fr",
    "multi30k-en-de",
    "multi30k-en-fr",
    "numbers",
    *TEXTS,
)
PREPARATION = "preparation.json"
SPLITS = ("train", "valid", "test")
POSITIONS = 1024  # fairseq's default of --max-source-positions and --max-target-positions
TOKENIZERS = ("moses", "none")
PAPER_TOKENISED = "iwslt15-en-vi"


@dataclass(frozen=True)
class Corpus:
    """A data-bin, with its languages and its preparation.

    ``source`` and ``target`` are None where neither preparation.json nor file names say them. A
    text, for a language model, has no target.
    """

    folder: Path  # the data-bin
    name: str
    known: str = ""  # its name in ``NAMES``; "" for a corpus of your own
    source: str | None = None
    target: str | None = None
    preparation: dict[str, Any] = field(default_factory=dict)  # preparation.json, or {}
    exists: bool = True

    @classmethod
    def find(cls, data: str | Path) -> "Corpus":
        """The corpus ``data``: one of ``NAMES``, a folder in ./data, a data-bin or its parent.

        Raises ``UserError`` if it does not exist.
        """
        location = _locate(str(data))
        if location.data_bin.is_dir():
            return cls._in(location.data_bin, location.known)
        if not location.known:
            raise UserError(_no_corpus(str(data)))
        command = "make demo" if location.known == "numbers" else f"rskip prepare {location.known}"
        raise UserError(
            f"{location.known} is not prepared (no {location.data_bin}); run: {command}"
        )

    @classmethod
    def find_or_plan(cls, data: str | Path) -> "Corpus":
        """As ``find``; one of ``NAMES``, or a path with a slash in it, need not exist yet."""
        location = _locate(str(data))
        is_path = location.folder.is_dir() or "/" in str(data)
        if not location.known and not is_path:
            raise UserError(_no_corpus(str(data)))
        if location.is_prepared:
            return cls._in(location.data_bin, location.known)
        name = location.known or folder_name(location.folder)
        return cls(location.folder / "data-bin", name, location.known, exists=False)

    @classmethod
    def find_for_evaluation(cls, data: str | Path) -> "Corpus":
        """As ``find``, with all that evaluation needs.

        Raises ``UserError`` also if preparation.json does not say how the text was tokenised and
        split, or a dictionary is missing.
        """
        corpus = cls.find(data)
        path = corpus.folder / PREPARATION
        splits_known = str(_read(path).get("bpe")) in POST_PROCESS
        tokenizer_known = str(_read(path).get("tokenizer")) in TOKENIZERS
        if not (splits_known and tokenizer_known):
            raise UserError(
                f"{path} does not say how text was tokenised and split; prepare it again"
            )
        corpus.dictionaries()
        return corpus

    @classmethod
    def _in(cls, folder: Path, known: str) -> "Corpus":
        """The corpus in the data-bin ``folder``."""
        preparation = {}
        if (folder / PREPARATION).exists():
            preparation = _read(folder / PREPARATION)
        name = str(preparation.get("corpus") or known or folder_name(folder))
        source, target = _languages(folder, preparation)
        return cls(folder, name, name if name in NAMES else known, source, target, preparation)

    @property
    def is_monolingual(self) -> bool:
        """Whether it has one language only, for a language model."""
        if self.target is not None:
            return self.target == ""
        return self.known in TEXTS or (self.folder / "dict.txt").is_file()

    @cached_property
    def pairs(self) -> int:
        """Training pairs or lines; 0 if they are not prepared."""
        if not self.exists:
            return 0
        self.dictionaries()
        return len(self.lengths("train", str(self.source)))

    @property
    def bpe(self) -> str:
        """The kind of subwords, a key of ``POST_PROCESS``."""
        return self.preparation.get("bpe", "none")

    @property
    def tokenizer(self) -> str:
        """One of ``TOKENIZERS``."""
        return self.preparation.get("tokenizer", "none")

    @property
    def normalise_punctuation(self) -> bool:
        """Whether quotes and dashes were made ASCII."""
        return bool(self.preparation.get("normalise_punctuation"))

    @property
    def tokenised(self) -> bool:
        """Whether the raw text is already tokens; IWSLT'15 EN-VI is published so."""
        if self.tokenizer != "none":
            return False
        is_plain_text = self.bpe == "sentencepiece" and self.name != PAPER_TOKENISED
        return not is_plain_text

    def dictionaries(self) -> list[Path]:
        """The dictionaries of source and target, or of a text.

        Raises ``UserError`` if a language pair lacks one.
        """
        if self.is_monolingual:
            return [self.folder / "dict.txt"]
        paths = [self.folder / f"dict.{language}.txt" for language in (self.source, self.target)]
        if all(path.is_file() for path in paths):
            return paths
        languages = (self.source or "SRC", self.target or "TGT")
        wanted = " and ".join(f"dict.{language}.txt" for language in languages)
        names = sorted(path.name for path in self.folder.glob("dict.*.txt"))
        if not names:
            raise UserError(
                f"{self.folder} has no dictionary: expected {wanted}, or dict.txt of a text; "
                "rskip prepare makes a data-bin"
            )
        raise UserError(
            f"{self.folder} is no data-bin of this language pair: expected {wanted}, "
            f"found {', '.join(names)}; rskip prepare makes a data-bin"
        )

    def subwords(self, language: str) -> Path | None:
        """The file of merges or the sentencepiece model, beside the data-bin.

        None for text without subwords. Raises ``UserError`` if the file is missing.
        """
        if self.bpe == "none":
            return None
        folder = self.folder.resolve().parent / "subwords"
        path = folder / f"model.{language}"
        if not path.is_file():
            path = folder / "model"  # of both languages
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no subwords beside it: {path} is missing; "
                "prepare the corpus again"
            )
        return path

    def prefix(self, subset: str, language: str) -> Path:
        """The prefix of a subset's binarised files; a data-bin serves both directions."""
        if self.is_monolingual:
            return self.folder / subset
        forwards = self.folder / f"{subset}.{self.source}-{self.target}.{language}"
        backwards = self.folder / f"{subset}.{self.target}-{self.source}.{language}"
        return backwards if Path(f"{backwards}.idx").is_file() else forwards

    def binarised(self, subset: str) -> list[Path]:
        """The files from which fairseq reads the subset's source sentences."""
        prefix = self.prefix(subset, str(self.source))
        return [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]

    def reference(self, subset: str) -> Path:
        """The file of a subset's raw text, whose sentences a score compares with."""
        return self.folder / "raw" / f"{subset}.{self.target or self.source}"

    def text_sha256(self, subset: str) -> str:
        """The SHA-256 of a subset's raw text, in hexadecimal. Raises ``UserError``."""
        path = self.reference(subset)
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no raw text: {path} is missing; prepare the corpus again"
            )
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def sources(self, subset: str) -> list[str]:
        """The raw source sentences of a subset. Raises ``UserError``."""
        path = self.folder / "raw" / f"{subset}.{self.source}"
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no raw source text: {path} is missing; prepare the corpus again"
            )
        return read_lines(path)

    def references(self, subset: str) -> list[str]:
        """The raw target sentences of a subset that can be translated.

        Raises ``UserError``, which names the missing file.
        """
        subsets = []
        for name in (*SPLITS, subset):
            if all(path.is_file() for path in self.binarised(name)):
                subsets.append(name)
        if not subsets:
            raise UserError(
                f"{self.folder} holds no binarised text: expected a data-bin, which rskip prepare "
                "makes; DATA precedes CHECKPOINT-DIR"
            )
        if subset not in subsets:
            raise UserError(
                f"{self.folder} has no binarised subset {subset!r}; it has {', '.join(subsets)}"
            )
        path = self.reference(subset)
        if not path.is_file():
            raise UserError(
                f"{self.folder} has no raw references: {path} is missing; prepare the corpus again"
            )
        return read_lines(path)

    def lengths(self, subset: str, language: str) -> Any:
        """A numpy array: the tokens of each sentence, with the end-of-sentence token.

        Raises ``UserError``.
        """
        import numpy
        from fairseq.data import indexed_dataset  # takes seconds to import

        prefix = str(self.prefix(subset, language))
        try:
            dataset = indexed_dataset.make_dataset(
                prefix, indexed_dataset.infer_dataset_impl(prefix)
            )
            return numpy.array(dataset.sizes)  # a copy: the original is unmapped with its reader
        except Exception as error:  # the reader checks with assert, struct and numpy
            raise UserError(
                f"cannot read {prefix}.idx ({type(error).__name__}); prepare the corpus again"
            ) from None

    def check_vocabulary(self, save: Path, remedy: str = "give another --save-dir") -> None:
        """Raise ``UserError`` if checkpoints in ``save`` have another vocabulary.

        fairseq compares everything else.
        """
        if not self.exists or not any(save.glob("checkpoint*.pt")):
            return
        for copy in save.glob("dict*.txt"):
            mine = self.folder / copy.name
            if not (mine.is_file() and filecmp.cmp(copy, mine, shallow=False)):
                reason = f"{copy.name} is not that of {self.folder}"
                raise UserError(
                    f"{save} holds checkpoints of another vocabulary ({reason}); {remedy}"
                )

    def checksums(self, subset: str) -> dict[str, str]:
        """The SHA-256 of each file that decides a subset's translation, by the file's name."""
        files = [*self.dictionaries(), *self.binarised(subset)]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def corpus_of(
    checkpoint: object,
    trained_on: str | Path,
    data: str | Path | None,
    find: Callable[[str | Path], Corpus] = Corpus.find_for_evaluation,
) -> Corpus:
    """The corpus ``data``, else the one that the checkpoint was ``trained_on``.

    Raises ``UserError``.
    """
    if data:
        return find(data)
    try:
        return find(trained_on)
    except UserError as error:
        raise UserError(
            f"{checkpoint} was trained on {trained_on}: {error}; name its folder with --data"
        ) from None


class _Location(NamedTuple):
    """Where the word DATA of a command line points; nothing need be there."""

    folder: Path  # of the corpus, or a data-bin itself
    known: str = ""  # the corpus's name in ``NAMES``, or ""

    @property
    def data_bin(self) -> Path:
        inner = self.folder / "data-bin"
        return inner if self.known or inner.is_dir() else self.folder

    @property
    def is_prepared(self) -> bool:
        """Whether a dictionary is there, which fairseq-preprocess makes."""
        return any(self.data_bin.glob("dict*.txt"))


def _locate(data: str) -> _Location:
    """The corpus of this name; else the folder ``data``, or that of this name in ./data.

    The one of these two that is prepared, the first if none is. Raises ``UserError`` for an empty
    word, and where both are prepared.
    """
    if not data.strip():
        raise UserError(_no_corpus(data))
    if data in NAMES:
        return _Location(DATA / data, known=data)
    here, below = _Location(Path(data)), _Location(DATA / data)
    is_word = "/" not in data
    if is_word and below.is_prepared:
        if here.is_prepared and here.data_bin.resolve() != below.data_bin.resolve():
            raise UserError(f"both ./{data} and {DATA / data} are prepared corpora: write which")
        return below
    return here if here.folder.is_dir() else below


def folder_name(folder: Path) -> str:
    """The name of a data-bin: its folder's, or the parent's where that is ``data-bin``."""
    folder = folder.resolve()
    if folder.name == "data-bin":
        folder = folder.parent
    return folder.name


def _languages(folder: Path, preparation: dict[str, Any]) -> tuple[str | None, str | None]:
    """Source and target from preparation.json, else from the binarised files' names, else None."""
    source, target = preparation.get("src"), preparation.get("tgt")
    if isinstance(source, str) and isinstance(target, str):
        return source, target
    for path in folder.glob("train.*"):
        match = re.fullmatch(r"train\.(.+)-(.+)\.(?:\1|\2)\.idx", path.name)
        if match:
            return match[1], match[2]
    return None, None


def _no_corpus(text: str) -> str:
    if Path(text).is_file():
        return f"{text} is a file: expected a corpus or a folder that rskip prepare made"
    if "/" in text or text.startswith("."):
        return f"the folder {text} does not exist; rskip prepare makes it"
    prepared = sorted(path.parent.name for path in DATA.glob("*/data-bin"))
    others = [name for name in prepared if name not in NAMES]
    expected = f"the corpora are {', '.join(NAMES)}"
    if others:
        expected += f", and in {DATA}: {', '.join(others)}"
    return (
        f"no corpus or folder named {text!r}; {did_you_mean(text, [*NAMES, *others], expected)}; "
        "your own text: rskip prepare --src en --tgt de ... FOLDER (two languages) "
        "or rskip prepare --text FILE FOLDER"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; rskip prepare makes it") from None
