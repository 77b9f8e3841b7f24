"""PreAct-ResNets that train_cifar.py saved, and fresh ones, with the images of their training."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.study import Study, draw_examples
from ..console import print_line
from ..errors import UserError
from ..machine import device_of
from ..residual import SkipConnection
from ..safe_load import CheckpointError
from ..vision.batches import Augmenter, channel_statistics
from ..vision.config import Config, parse
from ..vision.data import load
from ..vision.model import STAGES, PreActResNet
from .source import Source, fit, parsed


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
    device = device_of(options.device)
    configs = [settings(source) for source in models]
    images = load(_data(models, configs, options))
    stored = getattr(images, f"{options.split}_images")
    labels = getattr(images, f"{options.split}_labels")
    chosen = draw_examples(len(labels), options.examples, options.seed)
    stored, labels = stored[chosen], labels[chosen].to(device)
    mean, std = channel_statistics(images.train_images)
    augmenter = Augmenter(stored.shape[1:], mean, std, 0, device)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(labels), options.batch_size):
            end = start + options.batch_size
            pixels = stored[start:end].to(device)
            yield Batch(augmenter.test(pixels), labels[start:end])

    def stage(_name: str, skip: SkipConnection) -> str:
        return f"stage{skip.place.index * STAGES // skip.place.depth + 1}"

    built = {}
    digest = images.digest()
    for source, config in zip(models, configs):
        torch.manual_seed(options.seed)
        model = PreActResNet(num_classes=len(images.classes), **config.network())
        if not source.fresh:
            fit(model, source.state["model"], source)
            trained_on = source.state.get("identity") or {}
            if trained_on.get("SHA-256 of images and labels", digest) != digest:
                print_line(f"note: {source} was trained on other images than these", "stderr")
        built[source.label] = model.to(device, memory_format=torch.channels_last).eval()
    split = "training" if options.split == "train" else "test"
    about = f"{len(labels)} {split} images"
    count = math.ceil(len(labels) / options.batch_size)
    only = f"stage{options.stage}" if options.stage else ""
    return Study(built, batches, count, about, losses, stage, only)


def settings(source: Source) -> Config:
    """The configuration of a run or of a fresh network.

    Raises ``UserError`` that names the model.
    """
    if source.fresh:
        return parsed(source, parse, source.fresh)
    saved = source.state.get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{source} has no settings in it")
    return parsed(source, Config.of, saved)


def _data(
    models: Sequence[Source], configs: Sequence[Config], options: argparse.Namespace
) -> Config:
    """Settings that say which images: --data, else those of the checkpoints or of fresh models."""
    pairs = list(zip(models, configs))
    saved = [(source, config) for source, config in pairs if not source.fresh]
    chosen = saved or pairs
    source, first = chosen[0]
    if not options.data:
        for other, config in chosen[1:]:
            if config.data != first.data:
                raise UserError(
                    f"{source} is of {first.data}, {other} of {config.data}: "
                    "say --data DATA for both"
                )
    places = {"cache": options.cache or first.cache, "data_dir": options.data_dir or first.data_dir}
    return dataclasses.replace(first, data=options.data or first.data, **places)
