"""Write a trained model as a folder to share.

CHECKPOINT is a checkpoint of fairseq-train (the averaged.pt of an evaluation, for example) or its folder, of which
checkpoint_best.pt is taken; a run of rskip run; a seed's folder or checkpoint.pt of a finished rskip train-cifar.
DIR, a new folder, gets config.json, model.safetensors, training.json, a card README.md and, for text, dictionaries and
subwords from the prepared corpus. The card says how to load it in Python.
"""

import argparse
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError


def main(argv: list[str] | None = None) -> None:
    """Run the command. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--data", type=Path, help="prepared corpus of a Transformer (the one it was trained on)")
    parser.add_argument("--licence", default="unknown", metavar="NAME", help="licence of the weights (unknown)")
    export(parser.parse_args(argv))


def export(options: argparse.Namespace) -> None:
    """Write DIR, whole or not at all. Raises ``UserError``."""
    from safetensors.torch import save_model  # takes seconds: after the options have been checked

    from fairseq_rskip.files import write_json
    from fairseq_rskip.pretrained import CONFIG, FORMAT, WEIGHTS
    from fairseq_rskip.safe_load import load_checkpoint
    from fairseq_rskip.tools.evaluate.weights import choose
    from fairseq_rskip.tools.export import card
    from fairseq_rskip.vision import run

    folder, checkpoint = Path(os.path.abspath(options.folder.expanduser())), options.checkpoint.expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"DIR {options.folder} exists and is not an empty folder; give a new one")
    if (checkpoint / run.CHECKPOINT).is_file():
        checkpoint = checkpoint / run.CHECKPOINT
    elif checkpoint.is_dir():
        inner = checkpoint / "checkpoints"  # of a run of rskip run
        (checkpoint, *_), which = choose(inner if inner.is_dir() else checkpoint, 0)
        print_line(which)
    state = load_checkpoint(checkpoint, map_location="cpu")
    of_images = isinstance(state, dict) and state.get("format") == run.FORMAT
    kind = import_module(f".{'images' if of_images else 'translation'}", __package__)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent) as temporary:
        stage = Path(temporary) / "stage"
        stage.mkdir()
        config, model = kind.convert(stage, checkpoint, state, options.data)
        write_json(stage / CONFIG, {"format": FORMAT, **config})
        save_model(model, str(stage / WEIGHTS), metadata={"format": "pt"})  # shared tensors are stored once
        shutil.copymode(stage / CONFIG, stage / WEIGHTS)  # others may read it, too
        about = kind.describe(checkpoint, config, state)
        write_json(stage / "training.json", about.pop("settings"))
        card.write(stage / "README.md", model, options.licence, **about)
        os.replace(stage, folder)
    print_line(f"written to {options.folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
