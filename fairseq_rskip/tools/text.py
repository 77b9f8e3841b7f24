"""Parallel text: files of one sentence a line, of which line i is sentence i of a corpus."""

from pathlib import Path
from typing import Dict, List, Sequence

from fairseq_rskip.errors import UserError


def read_lines(path: Path) -> List[str]:
    r"""The lines of a UTF-8 file, split at ``\n`` only: sentence i of a corpus is line i, whatever else is in it.

    Raises ``UserError`` if the file is missing, unreadable, empty or not UTF-8 (naming the line).
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not data.strip():
        raise UserError(f"{path} is empty: it must hold one sentence a line")
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path} is not valid UTF-8: line {line} holds the byte 0x{data[error.start]:02x} ({error.reason})"
        ) from None
    return lines[:-1] if lines[-1] == "" else lines


def check_lengths(hypotheses: Sequence[str], references: Dict[Path, List[str]], hyp_path: Path) -> None:
    """Raises ``UserError`` with both counts if a reference has another number of lines than the hypotheses."""
    for path, lines in references.items():
        if len(lines) != len(hypotheses):
            raise UserError(
                f"{hyp_path} has {len(hypotheses)} lines and {path} has {len(lines)}:"
                " line i of each must be the same sentence"
            )
