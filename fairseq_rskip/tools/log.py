"""The reader of fairseq's training log (``--log-format json``): one record for each line of figures."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TAIL = 200_000  # bytes that hold the newest figures of a training
_FIGURES = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")


class Record(NamedTuple):
    """Figures after ``updates``: of an interval ("train_inner"), of an epoch ("train") or of the held-out set.

    ``values`` are fairseq's, by names without their "train_" or "valid_"; what is no number is left out.
    """

    source: str
    epoch: int
    updates: int
    values: dict[str, float]


def record(line: str) -> Record | None:
    """The figures in one line of a log; None where it has none."""
    match = _FIGURES.search(line)
    if not match:
        return None
    source, values = match[1], {}
    try:
        for name, value in json.loads(match[2]).items():
            with contextlib.suppress(ValueError, TypeError):
                values[name.removeprefix(f"{source}_")] = float(value)
        return Record(source, int(values["epoch"]), int(values["num_updates"]), values)
    except (ValueError, KeyError):  # a line that a kill has cut off
        return None


def records(log: Path, last: int = 0) -> Iterator[Record]:
    """The records of a log, or of its ``last`` bytes, in order. A file that is missing has none."""
    text = log.read_bytes()[-last:].decode("utf-8", "replace") if log.is_file() else ""
    yield from filter(None, map(record, text.split("\n")))


def last(path: Path) -> dict[str, Record]:
    """The newest record of each source ("train_inner", "train", "valid") in the end of the log ``path``."""
    return {each.source: each for each in records(path, TAIL)}
