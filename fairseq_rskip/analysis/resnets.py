"""PreAct-ResNets: those that train_cifar.py saved, and fresh ones, on the images they were trained on."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..residual import SkipConnection
from ..safe_load import CheckpointError
from ..tools.console import print_line, progress
from ..vision.batches import Augmenter, channel_statistics
from ..vision.config import DATA_SETS, FOLDER, Config, parse
from ..vision.data import ImageSet, load
from ..vision.model import WIDTHS, preact_resnet
from ..vision.trainer import seed_everything
from .study import Source, Study, calibrate, choose, device_of, fit, parsed

SPLITS = ("train", "test")


class Batch(NamedTuple):
    """The network's input ``(N, 3, 32, 32)`` and the labels ``(N,)``."""

    images: Tensor
    labels: Tensor


def group(_name: str, skip: SkipConnection) -> str:
    """The stage of the network, by its width."""
    return f"stage{WIDTHS.index(skip.dim) + 1}"


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each image."""
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none")


def study(models: Sequence[Source], options: argparse.Namespace) -> Study:
    """Build every model and draw the examples. Raises ``UserError``, ``CheckpointError``."""
    if options.split not in SPLITS:
        raise UserError(f"--split {options.split}: images have {' and '.join(SPLITS)}")
    configs = [settings(source) for source in models]
    device = device_of(options.device)
    images = load(_data(models, configs, options))
    stored, labels = (getattr(images, f"{options.split}_{what}") for what in ("images", "labels"))
    chosen = choose(len(labels), options.examples, options.seed)
    stored, labels = stored[chosen], labels[chosen].to(device)
    mean, std = channel_statistics(images.train_images)
    augmenter = Augmenter(tuple(stored.shape[1:]), mean, std, 0, "mean", True, device)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(labels), options.batch_size):
            part = slice(start, start + options.batch_size)
            yield Batch(augmenter.test(stored[part].to(device)), labels[part])

    built = {}
    digest = images.digest()
    for source, config in progress(list(zip(models, configs)), len(models), "loading", "model"):
        model = _build(source, config, images, options.seed).to(device)
        if source.state is None:
            calibrate(model, batches(), lambda net, batch: net(batch.images))
        elif (source.state.get("identity") or {}).get("SHA-256 of images and labels", digest) != digest:
            print_line(f"note: {source} was trained on other images than these", "stderr")
        built[source.label] = model.eval()
    return Study(
        models=built,
        batches=batches,
        batch_size=options.batch_size,
        examples=len(labels),
        data=f"{len(labels)} {'training' if options.split == 'train' else 'test'} images",
        losses=losses,
        group=group,
        only=f"stage{options.stage}" if options.stage else "",
    )


def settings(source: Source) -> Config:
    """The configuration of a run or of a fresh network. Raises ``UserError`` that names the model."""
    if source.state is None:
        return parsed(source, lambda: parse(source.fresh, ""))
    saved = source.state.get("config")
    if not isinstance(saved, dict) or not isinstance(source.state.get("model"), dict):
        raise CheckpointError(f"{source} has no settings or no weights in it")
    known = {field.name for field in dataclasses.fields(Config)}
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in saved.items() if key in known}
    return parsed(source, lambda: Config(**values))


def _data(models: Sequence[Source], configs: Sequence[Config], options: argparse.Namespace) -> Config:
    """Which images all models see: those of --data, else those that the checkpoints (or fresh ones' options) name."""
    trained = [i for i, source in enumerate(models) if source.state is not None] or list(range(len(models)))
    first = configs[trained[0]]
    for i in trained:
        other = configs[i]
        if not options.data and other.data != first.data:
            raise UserError(
                f"{models[trained[0]]} and {models[i]} are of different data, {first.data} and {other.data}: say with "
                "--data which images all of them are to see"
            )
    places = {"cache": options.cache or first.cache, "data_dir": options.data_dir or first.data_dir}
    if options.data and options.data not in DATA_SETS and not options.data.startswith(FOLDER):
        raise UserError(f"--data {options.data!r}: expected one of {', '.join(DATA_SETS)} or {FOLDER}PATH")
    chosen = dataclasses.replace(first, data=options.data or first.data, **places)
    folder = chosen.data[len(FOLDER) :] if chosen.data.startswith(FOLDER) else ""
    if folder and not options.data and not Path(folder).expanduser().is_dir():
        raise UserError(f"{models[trained[0]]} was trained on {chosen.data}, not here: say --data imagefolder:PATH")
    return chosen


def _build(source: Source, config: Config, images: ImageSet, seed: int) -> nn.Module:
    classes = len(images.classes)
    seed_everything(seed)
    model = preact_resnet(config.depth, classes, config.skip_options(), config.shortcut)
    if source.state is not None:
        weights: Any = source.state["model"]
        rows = len(weights["fc.bias"]) if "fc.bias" in weights else classes
        if rows != classes:
            raise CheckpointError(f"{source} tells {rows} classes apart, the data has {classes}: say --data")
        fit(model, weights, source)
    return model.to(memory_format=torch.channels_last)
