"""Rows of text under each other."""

from typing import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The cells of ``rows``, all of one length, in columns: the first flush left, numbers flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )
