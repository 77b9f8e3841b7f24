"""The reader of fairseq's training log (``--log-format json``): one record for each line of figures."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TAIL = 200_000  # bytes that hold the newest figures of a training, of a fresh log on a shared disk, too
_FIGURES = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")


@dataclass(frozen=True)
class Record:
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
    source, values = match.group(1), {}
    try:
        for name, value in json.loads(match.group(2)).items():
            with contextlib.suppress(ValueError, TypeError):
                values[name.removeprefix(f"{source}_")] = float(value)
        return Record(source, int(values["epoch"]), int(values["num_updates"]), values)
    except (ValueError, KeyError):  # a line that a kill has cut off
        return None


def records(log: Path | Iterable[str]) -> Iterator[Record]:
    """The records of a log, a file or its lines, in order. A file that is missing has none."""
    if isinstance(log, Path):
        log = log.read_text("utf-8", "replace").split("\n") if log.is_file() else []
    yield from filter(None, map(record, log))


def last(path: Path) -> dict[str, Record]:
    """The newest record of each source ("train_inner", "train", "valid") in the end of the log ``path``."""
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return {found.source: found for found in records(lines)}
