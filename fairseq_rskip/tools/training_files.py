"""The files of fairseq-train: figures in its log (``--log-format json``), numbered checkpoints."""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq_rskip.fairseq_log import Record, records, tail

# in a training's folder
BEST, LAST, LOG = "checkpoint_best.pt", "checkpoint_last.pt", "train.log"
CHECKPOINTS = "checkpoints"  # that folder, in a run of rskip run
NUMBERED = {
    "update": re.compile(r"checkpoint_\d+_(\d+)\.pt"),
    "epoch": re.compile(r"checkpoint(\d+)\.pt"),
}
TAIL = 200_000  # bytes that hold the newest figures of a training
LAST_LINES = 20  # of a log, which have the reason for its end
_EARLY_STOP = re.compile(r"early stop since valid performance hasn't improved for last (\d+) runs")


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a checkpoint's settings, such as ``task``; {} where it has none.

    Those of fairseq's older classes, as the task translation_multi_simple_epoch, are Namespaces.
    """
    part = settings.get(name) or {}
    return vars(part).copy() if isinstance(part, Namespace) else dict(part)


def last(path: Path) -> dict[str, Record]:
    """The newest record of each source in the end of the log ``path``."""
    return {each.source: each for each in records(path, TAIL)}


def summary(newest: dict[str, Record]) -> str:
    """A line of the newest record of each source, such as

    ``epoch 1, 20 updates, train loss 9.500, valid loss 8.250, 1,234 words/s``.

    The train loss is the mean over the last --log-interval updates. Only a training that logs no
    such interval shows the mean over an epoch.
    """
    if not newest:
        return "no update logged yet"
    latest = max(newest.values(), key=lambda each: each.updates)
    updates = "update" if latest.updates == 1 else "updates"
    parts = [f"epoch {latest.epoch}, {latest.updates:,} {updates}"]
    train = newest.get("train_inner") or newest.get("train")
    valid = newest.get("valid")
    if train and "loss" in train.values:
        when = f" at update {train.updates:,}" if train.updates < latest.updates else ""
        parts.append(f"train loss {train.values['loss']:.3f}{when}")
    if valid and "loss" in valid.values:
        parts.append(f"valid loss {valid.values['loss']:.3f}")
    if train and "wps" in train.values:
        parts.append(f"{train.values['wps']:,.0f} words/s")
    return ", ".join(parts)


def early_stop(folder: Path) -> int:
    """The --patience that has ended the training in ``folder``; 0 if it has not ended so."""
    log = folder / LOG
    if not log.is_file():
        return 0
    for line in tail(log, TAIL).splitlines()[-LAST_LINES:]:
        match = _EARLY_STOP.search(line)
        if match:
            return int(match[1])
    return 0


def epochs_before(checkpoint: Path) -> float:
    """The epochs that a numbered checkpoint has seen: n for ``checkpoint<n>.pt``, and n - 0.5 for
    ``checkpoint_<n>_<update>.pt``, which is of the n-th epoch.
    """
    epoch = int(re.findall(r"\d+", checkpoint.name)[0])
    return epoch if NUMBERED["epoch"].fullmatch(checkpoint.name) else epoch - 0.5


def numbered(folder: Path, unit: str) -> list[Path]:
    """The checkpoints that can be averaged, newest first: of ``unit``, a key of ``NUMBERED``."""
    checkpoints = []
    for path in folder.glob("checkpoint*.pt"):
        match = NUMBERED[unit].fullmatch(path.name)
        if match:
            checkpoints.append((int(match[1]), path))
    return [path for _, path in sorted(checkpoints, reverse=True)]
