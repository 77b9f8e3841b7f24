"""What a corpus is made from: your own pairs, your own text, or a published corpus."""

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rskip.tools.corpus import SPLITS
from fairseq_rskip.tools.prepare import archives, text


class Source(abc.ABC):
    """A text, or two that are parallel. ``languages`` are those of the text, source first."""

    @abc.abstractmethod
    def identity(self) -> str:
        """Checksums of the content, which distinguish one text from another."""

    @abc.abstractmethod
    def splitting(self) -> list[Any]:
        """How the splits are made of the text; the stage ``raw`` depends on it."""

    @abc.abstractmethod
    def write_raw(self, out: Path, part: Path, languages: list[str]) -> None:
        """Write PART/{train,valid,test}.LANGUAGE; ``out`` has the stages before. ``UserError``."""


@dataclass(frozen=True)
class Pairs(Source):
    """Your own parallel text: by split, the files of source and target."""

    files: dict[str, tuple[Path, Path]]

    def identity(self) -> str:
        checksums = []
        for split in SPLITS:
            checksums += [text.content_hash(path) for path in self.files[split]]
        return " ".join(checksums)

    def splitting(self) -> list[Any]:
        return []

    def write_raw(self, out: Path, part: Path, languages: list[str]) -> None:
        src, tgt = languages
        for split in _missing(part, languages):
            text.join(part / split, src, tgt, [self.files[split]])


@dataclass(frozen=True)
class Documents(Source):
    """Your own text: a file or a folder.

    A document has ``document_lines`` lines; with 0, a blank line ends it.
    """

    path: Path
    document_lines: int
    held_out: float  # share of the documents for validation, and for the test

    def identity(self) -> str:
        return text.content_hash(self.path)

    def splitting(self) -> list[Any]:
        return [self.document_lines, self.held_out]

    def write_raw(self, out: Path, part: Path, languages: list[str]) -> None:
        targets = _every_split(part, languages)
        text.draw_documents(self.path, targets, self.held_out, self.document_lines)


@dataclass(frozen=True)
class Published(Source):
    """A published corpus: archives, the members that are needed, and by split its parts below OUT.

    ``document_lines`` and ``at_titles`` say where a document of a text ends: ``text.documents``.
    A ``held_out`` above 0 is the share of a text's documents for validation, and for the test.
    """

    archives: list[archives.Archive]
    members: dict[str, str]
    parts: dict[str, list[str]]
    document_lines: int
    at_titles: bool
    held_out: float = 0.0

    def identity(self) -> str:
        return " ".join(archive.digits for archive in self.archives)

    def splitting(self) -> list[Any]:
        how = [self.parts, self.document_lines, self.at_titles]
        return [*how, self.held_out] if self.held_out else how

    def write_raw(self, out: Path, part: Path, languages: list[str]) -> None:
        if self.held_out:
            (name,) = self.parts["train"]
            self._draw(out / name, _every_split(part, languages))
            return
        for split in _missing(part, languages):
            paths = [out / name for name in self.parts[split]]
            if len(languages) == 2:
                text.join_parts(part / split, *languages, paths)
            else:
                self._draw(paths[0], [part / f"{split}.{languages[0]}"])

    def _draw(self, path: Path, targets: list[Path]) -> None:
        """Write the documents of ``path`` to the first of ``targets``, the held-out to others."""
        how = (self.held_out, self.document_lines, self.at_titles)
        text.draw_documents(path, targets, *how)


def _every_split(part: Path, languages: list[str]) -> list[Path]:
    (language,) = languages
    return [part / f"{split}.{language}" for split in SPLITS]


def _missing(part: Path, languages: list[str]) -> list[str]:
    """The splits of which a file is not in ``part`` yet; those that are there are complete."""
    missing = []
    for split in SPLITS:
        if not all((part / f"{split}.{language}").exists() for language in languages):
            missing.append(split)
    return missing
