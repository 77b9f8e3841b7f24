"""Write a trained model as a folder to share.

CHECKPOINT is one of fairseq-train (checkpoint_best.pt, the averaged.pt of an evaluation), or a seed's folder or
checkpoint.pt of train_cifar.py whose run is finished. DIR, a new folder, gets config.json, model.safetensors, a card
README.md and, for translation, dictionaries and subwords from the prepared corpus. In Python:

    import fairseq_rskip
    fairseq_rskip.from_pretrained(DIR).translate(["A sentence."])
"""

import argparse
import contextlib
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options. A mistake ends the program with one line."""
    parser = Parser(prog="rskip export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--data",
        type=Path,
        help="the prepared corpus that the Transformer was trained on (default: where the checkpoint says it was)",
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="FOLDER",
        help="a folder of rskip evaluate whose scores go into the card (default: one beside the checkpoint that scored"
        " these weights)",
    )
    return parser.parse_args(argv)


def export(options: argparse.Namespace) -> None:
    """Write DIR, whole or not at all. Raises ``UserError``."""
    importlib.import_module("safetensors")  # what is missing is said before anything is computed
    from fairseq_rskip.safe_load import load_checkpoint  # takes seconds: after the options have been checked
    from fairseq_rskip.vision.run import CHECKPOINT, FORMAT

    folder = Path(os.path.abspath(options.folder.expanduser()))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"DIR {options.folder} is there and not an empty folder; give a new one")
    checkpoint = find_checkpoint(options.checkpoint.expanduser(), CHECKPOINT)
    state = load_checkpoint(checkpoint, map_location="cpu")
    if isinstance(state, dict) and state.get("format") == FORMAT:
        from .images import write

        for name in ("data", "evaluation"):
            if getattr(options, name):
                raise UserError(f"--{name} is for translation, and {checkpoint} is of train_cifar.py")
    else:
        from .translation import write
    with staged(folder) as stage:
        write(stage, checkpoint, state, options)
        names = sorted(path.name for path in stage.iterdir())
    print_line(f"written to {options.folder}: {', '.join(names)}")


def find_checkpoint(path: Path, in_seed_folder: str) -> Path:
    """The file that ``path`` is or, of a folder of train_cifar.py, holds. Raises ``UserError``."""
    if not path.is_dir():
        return path
    if (path / in_seed_folder).is_file():
        return path / in_seed_folder
    held = ", ".join(sorted(found.name for found in path.glob("*.pt"))) or "none"
    raise UserError(f"CHECKPOINT {path} is a folder: name a file; it holds {held}")


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder to fill in the block; it becomes ``folder`` when the block ends well, and is removed otherwise."""
    stage = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    stage.mkdir(parents=True)
    try:
        yield stage
        os.replace(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    options = parse(argv)
    return exit_status(lambda: export(options))
