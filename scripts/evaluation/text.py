"""Text files as lists of lines, and files that are either whole or not there."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Sequence


class InputError(ValueError):
    """What we were given cannot be used. The message is one line that says why and what is accepted."""


def read_lines(path: Path) -> List[str]:
    r"""The lines of a UTF-8 file, split at ``\n`` only: sentence i of a corpus is line i, whatever else is in it.

    Raises ``InputError`` if the file is missing, unreadable, empty or not UTF-8 (naming the line).
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise InputError(f"{path} is empty: it must hold one sentence a line")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not valid UTF-8: line {line} holds the byte 0x{data[error.start]:02x} ({error.reason})"
        ) from None
    return lines[:-1] if lines[-1] == "" else lines


def check_lengths(hypotheses: Sequence[str], references: Dict[Path, List[str]], hyp_path: Path) -> None:
    """Raises ``InputError`` with both counts if a reference has another number of lines than the hypotheses."""
    for path, lines in references.items():
        if len(lines) != len(hypotheses):
            raise InputError(
                f"{hyp_path} has {len(hypotheses)} lines and {path} has {len(lines)}:"
                " line i of each must be the same sentence"
            )


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to, renamed to ``path`` when the block ends well and removed when it does not.

    Raises ``InputError`` if the place cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary.exists():
            temporary.unlink()


def write_lines(path: Path, lines: Sequence[str]) -> None:
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def write_json(path: Path, content: Dict) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
