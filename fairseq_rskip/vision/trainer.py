"""One training step and one test: the model, its optimizer, the data on the device, the random numbers."""

import contextlib
import math
import random
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.learned import Movement, without_decay
from ..analysis.live import summarise
from ..analysis.probe import SkipProbe
from ..errors import UserError
from ..norms import convert_sync_batchnorm
from ..residual.adaptive import halting_cost
from ..residual.profile import set_starts, wanting_profile
from ..safe_load import CheckpointError
from .batches import Augmenter, Batch, BatchStream, channel_statistics
from .config import Config
from .data import ImageSet
from .distributed import Group
from .model import preact_resnet

TEST_BATCH = 500
NEVER = 2**62
_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A network started from ``seed``, trained on ``images`` (on ``group.device``) update by update.

    ``iteration`` counts the updates. ``meter`` is the sum of losses, of errors, and the number of images, of this
    process, as far as ``settle`` has read them. ``skips`` is what the last update, if it was one to log, showed of the
    skip connections (:mod:`..analysis.live`), in the first process. Raises ``UserError`` for settings that exclude each
    other.
    """

    def __init__(self, config: Config, seed: int, images: ImageSet, group: Group):
        self.config, self.seed, self.images, self.group = config, seed, images, group
        device = group.device
        seed_everything(seed)
        self.module: nn.Module = preact_resnet(num_classes=len(images.classes), **config.network())
        if config.sync_bn:
            self.module = convert_sync_batchnorm(self.module)
        self.module = self.module.to(device).to(memory_format=_FORMATS[config.memory_format])
        self.net = self._wrapped()
        self.optimizer = torch.optim.SGD(
            self._groups(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self.scaler = _gradient_scaler(config.amp == "fp16")
        flip = config.flip and images.may_flip
        self.stream = BatchStream(len(images.train_labels), config.batch_size, seed, config.crop, flip, device)
        self.mean, self.std = channel_statistics(images.train_images)
        channels_last = config.memory_format == "channels_last"
        shape = tuple(images.train_images.shape[1:])
        self.augmenter = Augmenter(shape, self.mean, self.std, config.crop, config.padding, channels_last, device)
        if wanting_profile(self.module):
            first, labels = images.train_images[: config.batch_size], images.train_labels[: config.batch_size]
            set_starts(
                self.module,
                lambda: F.cross_entropy(self.module(self.augmenter.test(first)), labels),
                self.module.shortcuts(),
            )
        self.movement = Movement(self.module)
        self.iteration = 0
        self.reset_meter()
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.skips: dict[str, float] = {}

    def _groups(self) -> list[dict[str, Any]]:
        """The parameters, those that weight decay leaves alone in a group of their own, where there are any."""
        alone = without_decay(self.module)
        chosen = {id(parameter) for parameter in alone}
        rest = [parameter for parameter in self.module.parameters() if id(parameter) not in chosen]
        # a rule that multiplies its coefficients has their gradients multiplied, too, and SGD would square that
        rate = 1.0 / getattr(self.module.blocks[0].skip.options, "lambda_lr", 1.0)
        return [{"params": rest}] + ([{"params": alone, "weight_decay": 0.0, "rate": rate}] if alone else [])

    def _wrapped(self) -> nn.Module:
        net: Any = torch.compile(self.module) if self.config.compile else self.module
        if self.group.world > 1:
            if self.config.compile and self.config.skip_log_interval:
                raise UserError("--skip-log-interval does not work with --compile and several processes: leave one out")
            ids = [self.group.device.index] if self.group.device.type == "cuda" else None
            net = nn.parallel.DistributedDataParallel(net, device_ids=ids)
        return net

    def train_step(self) -> Tensor:
        """One update on this process's share of the next batch; returns its loss, detached."""
        batch = self.stream.next()
        if self.group.world > 1:
            # other draws of stochastic depth and dropout in each process, the same ones after a training has resumed
            torch.manual_seed(((self.seed * 10**9 + self.iteration) * self.group.world + self.group.rank) % 2**63)
            share = self.group.share(self.config.batch_size)
            batch = Batch(*(part[share] for part in batch))
        x = self.augmenter.train(self.images.train_images, batch)
        y = self.images.train_labels[batch.index]
        interval, self.skips = self.config.skip_log_interval, {}
        if interval and (self.iteration + 1) % interval == 0 and self.group.first:
            scale = self.scaler.get_scale()
            with SkipProbe(self.module) as probe:  # compiled code calls no hooks
                loss, logits = self.update(x, y, self.module if self.config.compile else self.net)
            self.skips = summarise(probe, scale)
        else:
            loss, logits = self.update(x, y)
        self.iteration += 1
        self.pending.append((loss, (logits.argmax(1) != y).sum()))  # read later: reading waits for the device
        return loss

    def settle(self) -> int:
        """Add what has not been read yet to ``meter``; returns the first iteration of it whose loss is not finite.

        If all are, that is ``NEVER``.
        """
        if not self.pending:
            return NEVER
        losses, errors = (torch.stack(values).tolist() for values in zip(*self.pending))
        first = self.iteration - len(losses) + 1
        count = self.config.batch_size // self.group.world
        for loss, wrong in zip(losses, errors):
            self.meter = [self.meter[0] + loss * count, self.meter[1] + wrong, self.meter[2] + count]
        self.pending.clear()
        return next((first + k for k, loss in enumerate(losses) if not math.isfinite(loss)), NEVER)

    def means(self) -> tuple[float, float, float]:
        """Mean loss, error (%) and images since ``meter`` was reset, over all processes; all of them must call it."""
        loss_sum, errors, count = self.group.sum(self._meter()).tolist()
        return loss_sum / count, 100 * errors / count, count

    def reset_meter(self) -> None:
        self.meter = [0.0, 0.0, 0.0]

    def _meter(self) -> Tensor:
        return torch.tensor(self.meter, dtype=torch.float64, device=self.group.device)

    def update(self, x: Tensor, y: Tensor, net: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Forward, backward and the optimizer's step on images ``x`` with labels ``y``; returns loss and logits.

        ``net`` is this trainer's network in another wrapping, if any.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("rate", 1.0) * self.config.learning_rate(self.iteration)
        with self._autocast():
            logits = (net or self.net)(x)
            loss = F.cross_entropy(logits, y)
            cost = halting_cost(self.module, Tensor.mean)
            loss = loss if cost is None else loss + cost
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), logits.detach()

    def test(self) -> dict[str, float]:
        """Loss and error (%) on the test images and, where there are some, on the validation images."""
        found = self._test("test", self.images.test_images, self.images.test_labels)
        if self.images.valid_images is not None:
            found.update(self._test("valid", self.images.valid_images, self.images.valid_labels))
        return found

    @torch.no_grad()
    def _test(self, name: str, images: Tensor, labels: Tensor) -> dict[str, float]:
        """``<name>_loss`` and ``<name>_error`` on ``images``, which the processes share."""
        self.module.eval()
        self.group.broadcast_buffers(self.module)
        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        for start in range(self.group.rank * TEST_BATCH, len(labels), self.group.world * TEST_BATCH):
            y = labels[start : start + TEST_BATCH]
            with self._autocast():
                logits = self.module(self.augmenter.test(images[start : start + TEST_BATCH]))
                loss = F.cross_entropy(logits, y, reduction="sum")
            sums += torch.stack([loss.double(), (logits.argmax(1) != y).sum().double()])
        self.module.train()
        loss_sum, errors = self.group.sum(sums).tolist()
        return {f"{name}_loss": loss_sum / len(labels), f"{name}_error": 100 * errors / len(labels)}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.amp == "off":
            return contextlib.nullcontext()
        return torch.autocast(self.group.device.type, dtype=_AMP[self.config.amp])

    def weights_are_finite(self) -> bool:
        """Whether all weights and running statistics are finite numbers."""
        values = [value for value in self.module.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack([value.isfinite().all() for value in values]).all())

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how training continues; all processes must call it."""
        return {
            "iteration": self.iteration,
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": self.stream.state_dict(),
            "random": capture_generators(self.group.device),
            "meter": self.group.sum(self._meter()).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ``CheckpointError`` if it does not fit this network or is not finite."""
        self.load_weights(state["model"])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.stream.load_state_dict(state["sampler"])
            restore_generators(state["random"], self.group.device)
            self.iteration = int(state["iteration"])
            if self.group.first:
                self.meter = [float(value) for value in state["meter"]]
        except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise _unfit(error) from None

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Have the network's ``weights``. Raises ``CheckpointError`` if they do not fit it or are not finite."""
        try:
            self.module.load_state_dict(weights)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise _unfit(error) from None
        if not self.weights_are_finite():
            raise CheckpointError("the checkpoint holds weights that are not finite")


def _unfit(error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint does not fit this network: {' '.join(str(error).split())[:200]}")


def _gradient_scaler(enabled: bool) -> Any:
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler("cuda", enabled=enabled)
    return torch.cuda.amp.GradScaler(enabled=enabled)  # torch < 2.3


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_generators(device: torch.device) -> dict[str, Any]:
    """Their state, as tensors and plain containers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = numpy.random.get_state()
    state = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    state["numpy"] = [name, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put them back to what ``capture_generators`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
