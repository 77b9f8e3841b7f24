"""Write a trained model as a folder to share.

CHECKPOINT is a checkpoint of fairseq-train (the averaged.pt of an evaluation, for example); a
folder of checkpoints or of a run (RUN/seed1), of which the weights are those of rskip translate and
rskip evaluate: the average of the last five, of a language model checkpoint_best.pt; or a seed's
folder or checkpoint.pt of a finished rskip train-cifar. DIR, a new folder, gets config.json,
model.safetensors, training.json, a card README.md and, for text, dictionaries and subwords from the
prepared corpus. The card says how to load it in Python.
--transformers writes a language model for Hugging Face transformers instead (docs/share.md).
"""

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError


def main(argv: list[str] | None = None) -> None:
    """Run the command. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--data", type=Path, help="prepared corpus of a Transformer (the one it was trained on)"
    )
    parser.add_argument(
        "--half", action="store_true", help="store the weights in fp16, in half of the space"
    )
    parser.add_argument(
        "--licence", default="unknown", metavar="NAME", help="licence of the weights (unknown)"
    )
    parser.add_argument(
        "--transformers",
        action="store_true",
        help="write a language model as Hugging Face transformers loads it, without this package",
    )
    export(parser.parse_args(argv))


def _exporter(is_of_images: bool) -> Any:
    """The module that converts and describes models of a kind; its imports take seconds."""
    if is_of_images:
        from fairseq_rskip.tools.export import images

        return images
    from fairseq_rskip.tools.export import translation

    return translation


def export(options: argparse.Namespace) -> None:
    """Write DIR, whole or not at all. Raises ``UserError``."""
    from fairseq_rskip.files import make_folder, write_json
    from fairseq_rskip.residual import own_rules, skips
    from fairseq_rskip.tools.evaluate.weights import as_one  # takes seconds: after the options
    from fairseq_rskip.tools.export import card as cards
    from fairseq_rskip.tools.export import hugging_face
    from fairseq_rskip.tools.saved_model import IMAGES, find_saved

    folder = Path(os.path.realpath(options.folder.expanduser()))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"DIR {options.folder} exists and is not an empty folder; give a new one")
    saved = find_saved(options.checkpoint, exports=False)
    _check(saved, options)
    if saved.which:
        print_line(saved.which)
    exporter = _exporter(is_of_images=saved.kind == IMAGES)

    make_folder(folder.parent)
    with as_one(saved.paths) as checkpoint, stage_beside(folder) as stage:
        trained = saved.paths[0].parent
        config, model, facts = exporter.convert(stage, checkpoint, options.data, trained)
        card, settings = exporter.describe(checkpoint, config, facts)
        if options.half:
            to_half(model)
        if options.transformers:
            card = hugging_face.write_export(stage, config, model, card)
        else:
            files = own_rules.checksums_of(skip.kind for skip in skips(model).values())
            if files:
                config["rule_files"] = files
            write_export(stage, config, model)
            copy_own_rules(stage, model)
        write_json(stage / "training.json", settings)
        cards.write(stage / "README.md", card, model, options.licence)
        os.replace(stage, folder)
    names = sorted(path.name for path in folder.iterdir())
    print_line(f"written to {options.folder}: {', '.join(names)}")


def _check(saved: Any, options: argparse.Namespace) -> None:
    """Raise ``UserError`` for a model that cannot be exported as ``options`` say."""
    from fairseq_rskip.residual import own_rules
    from fairseq_rskip.residual.state import rule_files
    from fairseq_rskip.tools.evaluate.weights import task_of
    from fairseq_rskip.tools.saved_model import IMAGES, read_checkpoint

    if options.transformers:
        if saved.kind == IMAGES:
            raise UserError(
                f"--transformers: {options.checkpoint} is of rskip train-cifar: "
                "expected a language model"
            )
        task_of(saved.paths[0], expected="language_modeling")
    if not own_rules.own_kinds():
        return
    changed = own_rules.changed_files(rule_files(read_checkpoint(saved.paths[0])["model"]))
    if changed:
        raise UserError(
            f"{options.checkpoint} was trained with another version of {', '.join(changed)}: "
            "expected the file as it was, because the export contains it"
        )


def to_half(model: Any) -> None:
    """Convert the weights to fp16; the statistics of batch norms stay fp32, their range is larger.

    Raises ``UserError`` for a weight that fp16 cannot hold.
    """
    statistics = {}
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            statistics[name] = buffer.clone()
    model.half()
    for name, buffer in statistics.items():
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, buffer)
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"--half: fp16 cannot hold {name}; export without it")


@contextlib.contextmanager
def stage_beside(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``, which is removed when the block ends.

    Raises ``UserError``.
    """
    from fairseq_rskip.files import cannot_write

    try:
        temporary = tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent)
    except OSError as error:
        raise cannot_write(folder.parent, error) from None
    try:
        stage = Path(temporary) / "stage"
        stage.mkdir()
        yield stage
    finally:
        shutil.rmtree(temporary)


def copy_own_rules(folder: Path, model: Any) -> None:
    """Put the files of your own rules in ``model`` into ``folder``, beside the card."""
    from fairseq_rskip.residual import own_rules, skips

    files = {own_rules.file_of(skip.kind) for skip in skips(model).values()}
    for file in files:
        if file is not None:
            shutil.copy(file, folder)


def write_export(folder: Path, config: dict[str, Any], model: Any) -> None:
    """Write config.json and weights into ``folder``."""
    from safetensors.torch import save_model

    from fairseq_rskip.files import write_json
    from fairseq_rskip.pretrained import CONFIG, FORMAT, WEIGHTS

    write_json(folder / CONFIG, {"format": FORMAT, **config})
    # tensors that several layers share are stored once
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # others may read it, too
