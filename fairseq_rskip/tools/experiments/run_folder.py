"""The folder of a run: the names of its files, and its record, run.json.

A record has ``settings`` (the ``Run``), ``commands``, ``versions`` and ``git``, and ``parent``, the
SHA-256 of the checkpoint that the training starts from, if it starts from one. Once the run is
trained it has ``metrics``, the results of the training, and for each way of evaluation ``scores``,
by the name of their folder; or ``failed`` with the reason.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.training_files import CHECKPOINTS

from .records import Run, evaluation_name

RECORD, LOG, LOCK = "run.json", "log.txt", "run.lock"
EVALUATION = evaluation_name({})
LOSSES = ("valid_loss", "last_valid_loss")  # of a training on text, per token, in bits


def read_record(folder: Path) -> dict[str, Any]:
    """The run's record; {} if it is missing or damaged."""
    try:
        return dict(json.loads((folder / RECORD).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def trained(record: dict[str, Any]) -> dict[str, Any]:
    """The results of the training; {} if it has not finished."""
    metrics = record.get("metrics")
    if isinstance(metrics, dict) and isinstance(metrics.get("values"), dict):
        return metrics
    return {}


def measured(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """The results of training and evaluation that ``run`` needs; {} if something is missing."""
    metrics = trained(record)
    if not metrics or not run.scored:
        return metrics
    scores = record.get("scores", {}).get(run.evaluation)
    if not scores:
        return {}
    values = {**metrics["values"], **scores["values"]}
    return {"folder": run.evaluation, **metrics, **scores, "values": values}


def checksum_of(path: Path) -> str:
    """The SHA-256 of a file, read again only when its size or time has changed."""
    status = path.stat()
    return _checksum(path, status.st_size, status.st_mtime_ns)


@functools.cache
def _checksum(path: Path, _size: int, _time: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def has_checkpoints(folder: Path) -> bool:
    """Whether the run's checkpoints were kept."""
    return any((folder / CHECKPOINTS).glob("checkpoint*.pt"))


def check_no_seeds(path: Path) -> None:
    """Raise ``UserError`` for a folder of several seeds, which has the runs of each below it."""
    seeds = sorted([*path.glob("seed*/checkpoint.pt"), *path.glob(f"seed*/{CHECKPOINTS}")])
    if seeds:
        names = ", ".join(str(seed.parent) for seed in seeds[:4])
        raise UserError(f"{path} is a folder of seeds: expected one of {names}")
