"""Read the figures in a log of fairseq-train (``--log-format json``)."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FIGURES = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")


class Record(NamedTuple):
    """Figures after ``updates``.

    ``source`` is "train_inner" for an interval, "train" for an epoch, "valid" for the held-out set.
    ``values`` are fairseq's numbers, by names without their "train_" or "valid_".
    """

    source: str
    epoch: int
    updates: int
    values: dict[str, float]


def record(line: str) -> Record | None:
    """Return the figures in one line of a log; None if it has none."""
    match = _FIGURES.search(line)
    if match is None:
        return None
    source, figures = match.groups()
    values: dict[str, float] = {}
    try:
        for name, value in json.loads(figures).items():
            with contextlib.suppress(ValueError, TypeError):
                values[name.removeprefix(f"{source}_")] = float(value)
        return Record(source, int(values["epoch"]), int(values["num_updates"]), values)
    except (ValueError, KeyError):  # a line that a kill has cut off
        return None


def tail(path: Path, size: int) -> str:
    """The text of the last ``size`` bytes of a file."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        return file.read().decode("utf-8", "replace")


def records(log: Path, last: int | None = None) -> Iterator[Record]:
    """Yield the records of a log, or of its ``last`` bytes, in order; none if it is missing."""
    if not log.is_file():
        return
    text = log.read_text("utf-8", "replace") if last is None else tail(log, last)
    for line in text.split("\n"):
        figures = record(line)
        if figures is not None:
            yield figures
