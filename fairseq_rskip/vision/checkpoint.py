"""Checkpoints: safe to load, never half written, and checked against the run that they are to go on with."""

import io
from pathlib import Path
from typing import Any, Dict

import torch

from ..files import write_atomically
from ..safe_load import CheckpointError, load_checkpoint
from .config import Config, difference

FORMAT = "fairseq_rskip.vision 1"


def save(path: Path, state: Dict[str, Any]) -> None:
    """``state``, of tensors, numbers, strings and plain containers, as ``path``. Raises ``UserError``."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_atomically(path, lambda file: file.write(buffer.getbuffer()))


def load(path: Path, config: Config, identity: Dict[str, Any]) -> Dict[str, Any]:
    """The state in ``path``, on the CPU.

    ``identity`` is what else must be equal there: a description -> its value. Raises ``CheckpointError`` for a file
    that cannot be read, is not ours, or belongs to a run with other settings.
    """
    state = load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of train_cifar.py")
    differs = difference(state["config"], config, state["identity"], identity)
    if differs:
        raise CheckpointError(f"{path} is of another run: {'; '.join(differs)}")
    return state
