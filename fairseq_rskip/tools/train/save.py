"""The SAVE-DIR that a training writes: which model its checkpoints belong to, and how far they are."""

import contextlib
import filecmp
import json
import os
import re
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_atomically, write_json
from fairseq_rskip.tools.train.data import PREPARATION, Data

SETTINGS = "training.json"
NUMBERED = {"update": re.compile(r"checkpoint_\d+_(\d+)\.pt"), "epoch": re.compile(r"checkpoint(\d+)\.pt")}


def numbered(folder: Path, unit: str) -> list[tuple[int, Path]]:
    """The checkpoints that can be averaged, written after so many of ``unit``, a key of ``NUMBERED``; newest first."""
    matches = ((NUMBERED[unit].fullmatch(path.name), path) for path in folder.glob("checkpoint*.pt"))
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def shown(path: Path) -> str:
    """Relative to where the user is, if it is below."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


def check_save(save: Path, data: Data, settings: dict[str, Any]) -> None:
    """Raises ``UserError`` if the checkpoints in ``save`` are of another vocabulary or model."""
    if not any(save.glob("checkpoint*.pt")):
        return
    for copy in save.glob("dict.*.txt"):
        mine = data.folder / copy.name
        if data.there and not (mine.is_file() and filecmp.cmp(copy, mine, shallow=False)):
            raise UserError(
                f"{save} holds checkpoints of another vocabulary ({copy.name} is not that of {data.folder}); "
                "give another --save-dir"
            )
    try:
        before = dict(json.loads((save / SETTINGS).read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # checkpoints of a run that train.sh did not start
        before = {}
    for name, now in settings.items():
        was = before.get(name, now)
        if was != now:
            raise UserError(f"{save} holds checkpoints of {name} = {was}, not {now}; give another --save-dir")


def finished(save: Path, max_update: int) -> bool:
    """Whether checkpoint_last has all updates; fairseq would do one more. Raises ``CheckpointError``."""
    last = save / "checkpoint_last.pt"
    if not (max_update and last.exists()):
        return False
    from fairseq_rskip.safe_load import load_checkpoint  # takes seconds to import

    history = load_checkpoint(last, map_location="cpu").get("optimizer_history") or [{}]
    return history[-1].get("num_updates", 0) >= max_update


def fill_save(save: Path, data: Data, dictionaries: list[Path], settings: dict[str, Any]) -> None:
    """Makes ``save``, with copies of the dictionaries and what identifies the model: evaluation and resuming compare
    with them."""
    save.mkdir(parents=True, exist_ok=True)
    for path in [*dictionaries, data.folder / PREPARATION]:
        if path.is_file():
            write_atomically(save / path.name, lambda file, source=path: file.write(source.read_bytes()))
    write_json(save / SETTINGS, settings)


def tidy(save: Path) -> None:
    """Clear away what a training that could not finish a file has left; the caller holds the folder's lock."""
    for part in [*save.glob("*.pt.tmp"), *save.glob("*.part"), *save.glob(".*.part")]:
        part.unlink()


def complete_last(save: Path, since: float) -> None:
    """After a training that began at ``since`` (seconds of the epoch) and filled the disk: what it wrote last, last.

    fairseq writes a numbered checkpoint and copies it to checkpoint_last.pt. Where there was no room for the copy,
    checkpoint_last.pt becomes a second name of the newest numbered one; fairseq replaces it by renaming, so the two do
    not change together.
    """
    found = [path for unit in NUMBERED for _, path in numbered(save, unit) if path.stat().st_mtime >= since]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    last = save / "checkpoint_last.pt"
    if newest and not (last.exists() and last.stat().st_mtime_ns >= newest.stat().st_mtime_ns):
        link = save / ".checkpoint_last.part"
        with contextlib.suppress(OSError):  # a file system without hard links keeps the older one
            os.link(newest, link)
            os.replace(link, last)
