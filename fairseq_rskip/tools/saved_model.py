"""Trained models on the disk: what a path means to every command that takes one."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.pretrained import CONFIG, bundled_names, from_pretrained, locate
from fairseq_rskip.safe_load import CheckpointError, load_checkpoint
from fairseq_rskip.tools.evaluate.weights import as_one, choose, choose_by_task
from fairseq_rskip.tools.experiments.run_folder import check_no_seeds
from fairseq_rskip.tools.source import Source, fit
from fairseq_rskip.vision.run import CHECKPOINT, FORMAT

EXPORT, IMAGES, TEXT = "export", "images", "text"  # by rskip export, train-cifar, fairseq-train


class Saved(NamedTuple):
    """A trained model.

    ``kind`` is ``EXPORT``, ``IMAGES`` or ``TEXT``. ``paths``: the folder of an export, the
    checkpoint of train-cifar, or those checkpoints of fairseq-train whose average are the weights,
    newest first. ``which`` says which of a folder's checkpoints these are, and why.
    """

    kind: str
    paths: list[Path]
    which: str = ""


def find_saved(path: Path, average: bool = True, exports: bool = True) -> Saved:
    """The model that ``path`` means.

    That is an export or the name of one that comes with the package; a checkpoint; the folder of a
    training of images; or a folder of fairseq's checkpoints (or ``RUN/seed1`` of rskip run), of
    which the last five are averaged if it is a translation model and ``average`` is true, else
    checkpoint_best.pt. Raises ``UserError``, for an export, too, unless ``exports`` is true, and
    ``CheckpointError``.
    """
    located = locate(path.expanduser())
    if not located.exists():
        raise UserError(f"{located} does not exist; {_expected(located.name, exports)}")
    if (located / CONFIG).is_file():
        if not exports:
            raise UserError(f"{path} is an export: {_expected(located.name, exports)}")
        return Saved(EXPORT, [located])
    if (located / CHECKPOINT).is_file():
        return Saved(IMAGES, [located / CHECKPOINT])
    if located.is_file():
        is_of_images = read_checkpoint(located).get("format") == FORMAT
        return Saved(IMAGES if is_of_images else TEXT, [located])

    check_no_seeds(located)
    paths, which = choose_by_task(located) if average else choose(located, 0)
    return Saved(TEXT, paths, which)


def _expected(name: str, exports: bool) -> str:
    """What a command takes in place of ``name``, with the nearest bundled model."""
    if not exports:
        return "expected a checkpoint, or a folder of checkpoints"
    expected = "expected a checkpoint, a folder of checkpoints, an export, "
    expected += f"or a model that comes with the package: {', '.join(bundled_names())}"
    return did_you_mean(name, bundled_names(), expected)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of train-cifar or fairseq-train, on the CPU. Raises ``CheckpointError``."""
    state = load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(
            f"{path} is no checkpoint of train_cifar.py or fairseq-train: it has no entry 'model'"
        )
    return state


def load_model(path: Path) -> nn.Module:
    """The model with its weights and without its data, on the CPU.

    A line says which checkpoint of a folder it is: the best one, as in ``rskip analyze``. Raises
    ``UserError``, ``CheckpointError``.
    """
    saved = find_saved(path, average=False)
    if saved.which:
        print_line(saved.which)
    if saved.kind == EXPORT:
        exported = from_pretrained(saved.paths[0])
        return exported.models[0] if hasattr(exported, "models") else exported
    if saved.kind == IMAGES:
        return _resnet(saved.paths[0])
    with as_one(saved.paths) as checkpoint:
        return _transformer(checkpoint)


def _resnet(path: Path) -> nn.Module:
    from fairseq_rskip.tools.resnets import settings
    from fairseq_rskip.vision.model import PreActResNet

    state = read_checkpoint(path)
    source = Source(path.name, str(path), state)
    classes = state["model"]["fc.weight"].shape[0]
    model = PreActResNet(num_classes=classes, **settings(source).network())
    fit(model, state["model"], source)
    return model


def _transformer(path: Path) -> nn.Module:
    from fairseq import models

    from fairseq_rskip.tools.transformers import ours, read

    source = Source(path.name, str(path))
    state = read(source)
    weights = dict(state["model"])
    task = argparse.Namespace(
        source_dictionary=_words(weights, "encoder.embed_tokens.weight"),
        target_dictionary=_words(weights, "decoder.embed_tokens.weight"),
    )
    if task.source_dictionary is None:  # a language model
        task.source_dictionary = task.target_dictionary
    if task.target_dictionary is None:
        raise UserError(
            f"{path} has no table of embeddings: its model cannot be built without its data"
        )
    model = models.build_model(ours(state["cfg"]["model"]), task)
    model.upgrade_state_dict(weights)
    fit(model, weights, source)
    return model


def _words(weights: dict[str, Any], name: str) -> Any:
    """A dictionary of the size of the embedding table ``name``; None if there is no such table."""
    from fairseq.data import Dictionary

    if name not in weights:
        return None
    words = Dictionary()
    for number in range(len(words), weights[name].shape[0]):
        words.add_symbol(f"word{number}")
    return words
