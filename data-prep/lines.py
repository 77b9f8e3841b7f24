"""Text files as a corpus needs them: strict UTF-8, lines that end at \\n only, files that appear when complete.

Python's own line splitting would also split at a carriage return, which real corpora hold inside sentences.
"""

import contextlib
import gzip
import itertools
import os
import zlib

from errors import UserError


def read(path):
    """The lines of ``path`` (gzip is recognised) without their \\n.

    Raises ``UserError`` for a line that is not UTF-8 (with its number), for a damaged gzip file and for an empty file.
    """
    number = 0
    with _open(path) as file:
        try:
            for raw in file:
                number += 1
                text = raw.decode("utf-8" if number > 1 else "utf-8-sig")  # without a byte order mark
                yield text[:-1] if text.endswith("\n") else text
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: line {number} is not valid UTF-8 ({error.reason})") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path}: damaged gzip file ({error})") from None
    if number == 0:
        raise UserError(f"{path} is empty")


def _open(path):
    file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    magic = file.read(2)
    file.seek(0)
    return gzip.open(file) if magic == b"\x1f\x8b" else file


def paired(sources, targets, names):
    """Pairs of lines of two iterators. Raises ``UserError``, with ``names`` and both counts, where one has more."""
    count = 0
    for count, (source, target) in enumerate(itertools.zip_longest(sources, targets), start=1):
        if source is None or target is None:
            count -= 1
            longer = count + 1 + sum(1 for _ in (sources if target is None else targets))
            counts = (longer, count) if target is None else (count, longer)
            raise UserError(
                f"{names[0]} has {counts[0]} lines and {names[1]} {counts[1]}; "
                "line i of one must translate line i of the other"
            )
        yield source, target
    if count == 0:
        raise UserError(f"{names[0]} holds no sentences")


@contextlib.contextmanager
def writing(path):
    """A text file to write to; it gets its name when the block ends well, and is removed otherwise."""
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            yield file
        os.replace(part, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not know where
            error.filename = path
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
