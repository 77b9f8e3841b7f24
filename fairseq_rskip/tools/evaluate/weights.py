"""Checkpoints of fairseq: which are taken, whether they can be used, and the mean of their weights."""

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_atomically
from fairseq_rskip.safe_load import CheckpointError, diverged, load_checkpoint
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.train.save import NUMBERED, numbered

ACCEPTED = "checkpoint<epoch>.pt, checkpoint_<epoch>_<update>.pt, checkpoint_best.pt or checkpoint_last.pt"


def choose(folder: Path, count: int, checkpoint: Path | None = None) -> tuple[list[Path], str]:
    """The checkpoints to average (one: to use as it is), newest first, and a line that says which and why.

    That is ``checkpoint``, a path or a name in ``folder``, or the newest ``count`` checkpoints of epochs or of updates,
    whichever there are more of (updates if equal), or with fewer than two of either kind, or a ``count`` of 0,
    checkpoint_best.pt, else checkpoint_last.pt, else the newest. Raises ``UserError`` if there is none.
    """
    if not folder.is_dir():
        raise UserError(f"CHECKPOINT-DIR {folder} is not a folder; give the one that training saved to")
    names = sorted(path.name for path in folder.iterdir())
    listing = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"
    if checkpoint is not None:
        for path in (checkpoint, folder / checkpoint):
            if path.is_file():
                return [path], f"checkpoint {path}"
        raise UserError(f"no checkpoint {checkpoint}, here or in {folder}, which holds {listing}")
    by_unit = {unit: [path for _, path in numbered(folder, unit)] for unit in NUMBERED}
    unit = max(by_unit, key=lambda unit: min(len(by_unit[unit]), max(count, 1)))  # the first of equals: updates
    newest = by_unit[unit]
    if count >= 1 and len(newest) >= min(count, 2):
        taken = newest[:count]
        fewer = f", of which there are fewer than {count}" if len(taken) < count else ""
        text = ", ".join(path.name for path in taken)
        return taken, f"average of the last {len(taken)} {unit} checkpoints{fewer}: {text}"
    single = [path for path in (folder / "checkpoint_best.pt", folder / "checkpoint_last.pt") if path.is_file()]
    single += newest
    if not single:
        raise UserError(f"{folder} has no checkpoint: it holds {listing}; accepted are {ACCEPTED}")
    few = f"; nothing to average: --average {count} found {len(newest)} numbered checkpoint(s)" if count else ""
    return single[:1], f"checkpoint {single[0]}{few}"


def one_file(taken: list[Path], average_path: Path) -> Path:
    """The single checkpoint ``taken``, or the average of several, written to ``average_path`` unless it is there."""
    if len(taken) == 1:
        return taken[0]
    key = {"checkpoints": identity(taken)}
    if not cached.is_made(average_path, key):
        cached.make(average_path, key, lambda path: save(average(taken), path))
    return average_path


def identity(paths: list[Path]) -> list[dict]:
    """Name, size and time of each file: what distinguishes it from others and from its later versions."""
    stats = [(path, path.stat()) for path in paths]
    return [{"name": path.name, "size": stat.st_size, "modified_ns": stat.st_mtime_ns} for path, stat in stats]


def load_state(path: Path) -> dict:
    """One checkpoint of fairseq whose model can be used, loaded safely on the CPU. Raises ``CheckpointError``."""
    state = load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no entry 'model'")
    if not (state.get("cfg") or state.get("args")):
        whose = f"; it is one of {state['format']}" if isinstance(state.get("format"), str) else ""
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no settings ('cfg' or 'args'){whose}")
    if not state["model"]:
        raise CheckpointError(f"{path} holds an empty model: it has no parameters")
    for name, value in state["model"].items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{path} is not a fairseq checkpoint: {name} is a {kind}, not a tensor")
        if diverged(name, value):
            raise CheckpointError(f"{path} cannot be used: {name} holds NaN or infinity, so its training has diverged")
    return state


def check_alike(first: dict, other: dict, first_path: Path, path: Path) -> None:
    """Raises ``CheckpointError`` naming the tensor if two models cannot be averaged."""
    for name in list(first) + list(other):
        if name not in first or name not in other:
            holder, lacking = (first_path, path) if name in first else (path, first_path)
            raise CheckpointError(f"cannot average: {name} is in {holder} but not in {lacking}")
        a, b = first[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            kinds = [f"{tuple(value.shape)} {value.dtype}" for value in (a, b)]
            raise CheckpointError(f"cannot average: {name} is {kinds[0]} in {first_path} but {kinds[1]} in {path}")
        if not a.is_floating_point() and a.numel() > 1 and not torch.equal(a, b):
            raise CheckpointError(f"cannot average: {name} is {a.dtype} and differs between {first_path} and {path}")


def average(paths: list[Path]) -> dict:
    """The first checkpoint with the mean of all weights, without the optimizer's state, which belongs to one only.

    Sums are in float64 and rounded once, to the dtype that is stored. Counters and flags have no mean: those of the
    first checkpoint are kept. Tensors that share memory (tied embeddings) still do. Raises ``CheckpointError``.
    """
    result = load_state(paths[0])
    result.pop("last_optimizer_state", None)
    model = result["model"]
    sums = {name: value.double() for name, value in model.items() if value.is_floating_point()}
    if not sums:
        raise CheckpointError(f"cannot average: {paths[0]} has no floating-point weights")
    for path in paths[1:]:
        other = load_state(path)["model"]
        check_alike(model, other, paths[0], path)
        for name, total in sums.items():
            total += other[name]
    means: dict = {}
    averaged = OrderedDict(model)
    if hasattr(model, "_metadata"):
        averaged._metadata = model._metadata  # the rule of each skip connection, which is checked on loading
    for name, total in sums.items():
        value = model[name]
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        averaged[name] = means.setdefault(place, (total / len(paths)).to(value.dtype))
    result["model"] = averaged
    return result


def save(state: dict, path: Path) -> None:
    """Write ``state``, whole or not at all. Raises ``UserError``."""
    write_atomically(path, lambda file: torch.save(state, file))


def settings(state: dict, part: str) -> dict[str, Any]:
    """The settings of a ``part`` ("model", "task") in a loaded checkpoint; fairseq's oldest hold all parts in one."""
    cfg = state.get("cfg")
    values = cfg.get(part) if isinstance(cfg, dict) else state.get("args")
    return vars(values) if isinstance(values, argparse.Namespace) else values or {}
