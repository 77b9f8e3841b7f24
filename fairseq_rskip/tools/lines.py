"""Text files of a corpus: strict UTF-8, lines that end at \\n only, one sentence on line i of each.

Python's own line splitting would also split at a carriage return, which real corpora hold inside
sentences.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from fairseq_rskip import files
from fairseq_rskip.errors import UserError

GZIP = b"\x1f\x8b"  # with which a gzipped file begins


def read(path: str | Path) -> Iterator[str]:
    """The lines of ``path`` (gzip is recognised) without their \\n.

    Raises ``UserError`` for a line that is not UTF-8 (with its number), for a damaged gzip file and
    for an empty file.
    """
    number = 0
    with _opened(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                encoding = "utf-8-sig" if number == 1 else "utf-8"  # without a byte order mark
                yield raw.decode(encoding).removesuffix("\n")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}, {error.reason}"
            raise UserError(f"{path}: line {number} is not valid UTF-8 ({byte})") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: damaged gzip file ({error})") from None
    if number == 0:
        raise UserError(f"{path} is empty")


@contextmanager
def _opened(path: str | Path) -> Iterator[IO[bytes]]:
    """The content of ``path``, unpacked if it is gzipped."""
    with open(path, "rb") as plain:
        if plain.peek(len(GZIP))[: len(GZIP)] != GZIP:
            yield plain
            return
        with gzip.open(plain) as unpacked:
            yield unpacked


def read_lines(path: Path) -> list[str]:
    """All of them. Raises ``UserError`` as ``read`` does, and for a file that is blank."""
    content = list(read(path))
    if not any(map(str.strip, content)):
        raise UserError(f"{path} is empty: it must hold one sentence a line")
    return content


def check_lengths(
    hypotheses: Sequence[str], references: dict[Path, list[str]], hyp_path: Path
) -> None:
    """Raise ``UserError`` with both counts unless each reference has a line for each hypothesis."""
    for path, lines in references.items():
        if len(lines) != len(hypotheses):
            counts = f"{hyp_path} has {len(hypotheses)} lines and {path} has {len(lines)}"
            raise UserError(f"{counts}: line i of each must be the same sentence")


def paired(
    sources: Iterator[str], targets: Iterator[str], names: Sequence
) -> Iterator[tuple[str, str]]:
    """Pairs of lines of two iterators.

    Raises ``UserError``, with ``names`` and both counts, where one has more.
    """
    pairs, more_sources, more_targets = 0, 0, 0
    for source, target in itertools.zip_longest(sources, targets):
        if target is None:
            more_sources += 1
        elif source is None:
            more_targets += 1
        else:
            pairs += 1
            yield source, target

    if more_sources or more_targets:
        counts = f"{pairs + more_sources} lines and {names[1]} {pairs + more_targets}"
        raise UserError(
            f"{names[0]} has {counts}; line i of one must translate line i of the other"
        )
    if not pairs:
        raise UserError(f"{names[0]} holds no sentences")


def writing(path: str | Path) -> AbstractContextManager[IO[str]]:
    """A text file to write to; it exists under its name only after the block has ended well."""
    return files.writing(Path(path), "w", encoding="utf-8", newline="\n")
