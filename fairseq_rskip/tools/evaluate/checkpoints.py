"""Which weights are evaluated: one checkpoint or the average of the last ones, and whether they fit the vocabulary."""

import argparse
from pathlib import Path

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.evaluate.prepared import SPECIAL_SYMBOLS, Prepared, difference, symbols
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.train.data import POSITIONS
from fairseq_rskip.tools.train.save import NUMBERED, numbered

ACCEPTED = "checkpoint<epoch>.pt, checkpoint_<epoch>_<update>.pt, checkpoint_best.pt or checkpoint_last.pt"


def choose(folder: Path, count: int, checkpoint: Path | None = None) -> tuple[list[Path], str]:
    """The checkpoints to average (one: to take as it is), newest first, and a line that says which and why.

    ``checkpoint`` is taken if given, a path or a name in ``folder``. Of epochs' and updates' checkpoints those are
    averaged of which there are more, up to ``count``; updates' where it is the same. With fewer than two of either
    kind, or a ``count`` of 0, it is checkpoint_best.pt, else checkpoint_last.pt, else the newest.
    Raises ``UserError`` if there is nothing to take.
    """
    if not folder.is_dir():
        raise UserError(f"CHECKPOINT-DIR {folder} is not a folder; give the one that training saved to")
    if checkpoint is not None:
        for path in (checkpoint, folder / checkpoint):
            if path.is_file():
                return [path], f"checkpoint {path}"
        raise UserError(f"no checkpoint {checkpoint}, here or in {folder}, which holds {_listing(folder)}")
    found = {unit: [path for _, path in numbered(folder, unit)] for unit in NUMBERED}
    unit = max(found, key=lambda unit: min(len(found[unit]), max(count, 1)))  # the first of equals: updates
    if count >= 1 and len(found[unit]) >= min(count, 2):
        taken = found[unit][:count]
        fewer = f", of which there are fewer than {count}" if len(taken) < count else ""
        listed = ", ".join(path.name for path in taken)
        return taken, f"average of the last {len(taken)} {unit} checkpoints{fewer}: {listed}"
    single = [path for path in (folder / "checkpoint_best.pt", folder / "checkpoint_last.pt") if path.is_file()]
    single += found[unit]
    if not single:
        raise UserError(f"{folder} has no checkpoint: it holds {_listing(folder)}; accepted are {ACCEPTED}")
    few = ""
    if count:
        few = (
            f"; nothing to average: --average {count} found {len(found[unit])} numbered checkpoint(s). fairseq-train "
            "writes them where an epoch ends, or every N updates with --save-interval-updates N; of these "
            "--keep-interval-updates K keeps the last K"
        )
    return single[:1], f"checkpoint {single[0]}{few}"


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "nothing"


def identity(paths: list[Path]) -> list[dict]:
    """What tells these files from others and from later versions of themselves."""
    stats = [(path, path.stat()) for path in paths]
    return [{"name": path.name, "size": stat.st_size, "modified_ns": stat.st_mtime_ns} for path, stat in stats]


def check_dictionaries(prepared: Prepared, folder: Path) -> None:
    """Compare DATA's dictionaries with the copies that training left in ``folder``, if there are any.

    Raises ``UserError`` if the checkpoint belongs to another vocabulary.
    """
    for language in sorted({prepared.src, prepared.tgt}):
        copy = folder / f"dict.{language}.txt"
        if copy.is_file():
            found = difference(symbols(prepared.dictionary(language)), symbols(copy))
            if found:
                _refuse(prepared, folder, f"dict.{language}.txt differs, {found}")


def settings(state: dict, part: str) -> dict:
    """What a loaded checkpoint says of its ``part`` ("model", "task"); fairseq's oldest hold all parts in one."""
    cfg = state.get("cfg")
    found = cfg.get(part) if isinstance(cfg, dict) else state.get("args")
    return vars(found) if isinstance(found, argparse.Namespace) else found or {}


def positions(state: dict) -> tuple[int, int]:
    """The most tokens of a source and of a target sentence that a loaded checkpoint was trained to take."""
    return tuple(settings(state, "model").get(f"max_{side}_positions") or POSITIONS for side in ("source", "target"))


def check_embeddings(prepared: Prepared, checkpoint: Path, model: dict) -> None:
    """Compare the rows of ``model``'s embeddings with the dictionaries' lengths. Raises as the others do."""
    for side, language in (("encoder", prepared.src), ("decoder", prepared.tgt)):
        weight = model.get(f"{side}.embed_tokens.weight")
        needed = len(read_lines(prepared.dictionary(language))) + SPECIAL_SYMBOLS
        if weight is not None and weight.shape[0] != needed:
            what = f"its {side} embeds {weight.shape[0]} symbols, DATA's dict.{language}.txt makes {needed}"
            _refuse(prepared, checkpoint, what)


def _refuse(prepared: Prepared, checkpoint: Path, what: str) -> None:
    raise UserError(
        f"{checkpoint} belongs to another vocabulary than {prepared.folder}: {what};"
        " evaluate with the DATA it was trained on"
    )
