"""PreAct-ResNets: those that train_cifar.py saved, and fresh ones, on the images they were trained on."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.study import Source, Study, choose, device_of, fit, parsed
from ..console import print_line
from ..errors import UserError
from ..residual import SkipConnection
from ..safe_load import CheckpointError
from ..vision.batches import Augmenter, channel_statistics
from ..vision.config import Config, parse
from ..vision.data import load
from ..vision.model import STAGES, preact_resnet


class Batch(NamedTuple):
    """The network's input ``(N, 3, 32, 32)`` and the labels ``(N,)``."""

    images: Tensor
    labels: Tensor


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each image."""
    return F.cross_entropy(model(batch.images), batch.labels, reduction="none")


def study(models: Sequence[Source], options: argparse.Namespace) -> Study:
    """Build every model and draw the examples. Raises ``UserError``, ``CheckpointError``."""
    if options.split not in ("train", "test"):
        raise UserError(f"--split {options.split}: images have train and test")
    configs, device = [settings(source) for source in models], device_of(options.device)
    images = load(_data(models, configs, options))
    stored, labels = (getattr(images, f"{options.split}_{what}") for what in ("images", "labels"))
    chosen = choose(len(labels), options.examples, options.seed)
    stored, labels = stored[chosen], labels[chosen].to(device)
    mean, std = channel_statistics(images.train_images)
    augmenter = Augmenter(stored.shape[1:], mean, std, 0, device)

    def batches() -> Iterator[Batch]:
        for pixels, answers in zip(stored.split(options.batch_size), labels.split(options.batch_size)):
            yield Batch(augmenter.test(pixels.to(device)), answers)

    def stage(_name: str, skip: SkipConnection) -> str:
        return f"stage{skip.place.index * STAGES // skip.place.depth + 1}"

    built, digest = {}, images.digest()
    for source, config in zip(models, configs):
        torch.manual_seed(options.seed)
        model = preact_resnet(num_classes=len(images.classes), **config.network())
        if source.state:
            fit(model, source.state["model"], source)
            if (source.state.get("identity") or {}).get("SHA-256 of images and labels", digest) != digest:
                print_line(f"note: {source} was trained on other images than these", "stderr")
        built[source.label] = model.to(device, memory_format=torch.channels_last).eval()
    data = f"{len(labels)} {'training' if options.split == 'train' else 'test'} images"
    only = f"stage{options.stage}" if options.stage else ""
    return Study(built, batches, -(-len(labels) // options.batch_size), data, losses, stage, only)


def settings(source: Source) -> Config:
    """The configuration of a run or of a fresh network. Raises ``UserError`` that names the model."""
    if source.state is None:
        return parsed(source, parse, source.fresh)
    saved = source.state.get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{source} has no settings in it")
    return parsed(source, Config.of, saved)


def _data(models: Sequence[Source], configs: Sequence[Config], options: argparse.Namespace) -> Config:
    """Which images all models see: those of --data, else those that the checkpoints (or fresh ones' options) name."""
    saved = [(source, config) for source, config in zip(models, configs) if source.state is not None]
    (source, first), *others = saved or list(zip(models, configs))
    for other, config in () if options.data else others:
        if config.data != first.data:
            raise UserError(f"{source} is of {first.data}, {other} of {config.data}: say --data DATA for both")
    places = {"cache": options.cache or first.cache, "data_dir": options.data_dir or first.data_dir}
    return dataclasses.replace(first, data=options.data or first.data, **places)
