"""What fairseq-train leaves: figures in its log (``--log-format json``), and numbered checkpoints."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NUMBERED = {"update": re.compile(r"checkpoint_\d+_(\d+)\.pt"), "epoch": re.compile(r"checkpoint(\d+)\.pt")}
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
    kind = property(lambda self: self.source.partition("_")[0], doc="train or valid.")


def record(line: str) -> Record | None:
    """The figures in one line of a log; None where it has none."""
    if not (match := _FIGURES.search(line)):
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
    """The newest record of each kind in the end of the log ``path``."""
    return {each.kind: each for each in records(path, TAIL)}


def summary(newest: dict[str, Record]) -> str:
    """``epoch 1, 20 updates, train loss 9.500, valid loss 8.250, 1,234 words/s``, of the newest record of each kind."""
    train, losses = newest.get("train"), {kind: newest[kind].values.get("loss") for kind in sorted(newest)}
    if not newest:
        return "no update yet"
    latest = max(newest.values(), key=lambda each: each.updates)
    parts = [f"epoch {latest.epoch}, {latest.updates:,} updates"]
    parts += [f"{kind} loss {loss:.3f}" for kind, loss in losses.items() if loss is not None]
    return ", ".join(parts + ([f"{train.values['wps']:,.0f} words/s"] if train and "wps" in train.values else []))


def numbered(folder: Path, unit: str) -> list[Path]:
    """The checkpoints that can be averaged, written after so many of ``unit``, a key of ``NUMBERED``; newest first."""
    matches = ((NUMBERED[unit].fullmatch(path.name), path) for path in folder.glob("checkpoint*.pt"))
    return [path for _, path in sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)]
