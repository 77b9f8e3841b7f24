"""Train a step and test: the model, its optimizer, the images on the device, the processes that share the work."""

import dataclasses
import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.live import Movement, summarise, without_decay
from ..analysis.probe import SkipProbe
from ..analysis.study import device_of
from ..console import progress
from ..errors import UserError
from ..residual.adaptive import halting, halting_cost
from ..residual.profile import set_starts, wanting_profile
from ..residual.scaled import scheduled
from .batches import Augmenter, Batch, BatchStream, channel_statistics
from .config import Config
from .data import ImageSet
from .model import preact_resnet

TEST_BATCH = 500
_AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Group:
    """This process's rank among ``world`` processes, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def least(self, value: int) -> int:
        """The least of all processes' ``value``."""
        least = torch.tensor(value, device=self.device)
        if self.world > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def join(device: str) -> Group:
    """Join the processes that torchrun started, on ``auto``, ``cpu`` or ``cuda``. Raises ``UserError``."""
    chosen = device_of(device)
    if chosen.type == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"process {local} has no GPU: expected at most {gpus} processes on this machine")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    return Group(int(os.environ.get("RANK", 0)), world, chosen)


class Trainer:
    """A network initialised from ``seed`` and trained on ``images`` (on ``group.device``) update by update.

    ``iteration`` counts the updates; ``meter`` is this process's sum of losses and of errors, and number of images;
    ``skips`` is what the last update measured of the skip connections, if it was one to log, in the first process.
    Raises ``UserError`` for settings that exclude each other.
    """

    def __init__(self, config: Config, seed: int, images: ImageSet, group: Group):
        self.config, self.seed, self.images, self.group = config, seed, images, group
        device = group.device
        torch.manual_seed(seed)
        self.module: nn.Module = preact_resnet(num_classes=len(images.classes), **config.network())
        self.module = self.module.to(device, memory_format=torch.channels_last)
        self.scheduled, self.halting = scheduled(self.module), halting(self.module)
        self.net = self._wrapped()
        self.optimizer = torch.optim.SGD(
            self._groups(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.amp == "fp16")
        flip = config.flip and config.data != "digits"
        self.stream = BatchStream(len(images.train_labels), config.batch_size, seed, config.crop, flip, device)
        self.mean, self.std = channel_statistics(images.train_images)
        self.augmenter = Augmenter(images.train_images.shape[1:], self.mean, self.std, config.crop, device)
        if wanting_profile(self.module):
            chosen = self.stream.plan.index[: config.batch_size].to(images.train_images.device)  # the training's first
            first, labels = images.train_images[chosen], images.train_labels[chosen]
            loss = lambda: F.cross_entropy(self.module(self.augmenter.test(first)), labels)  # noqa: E731
            set_starts(self.module, loss, self.module.shortcuts())
        self.movement = Movement(self.module)
        self.iteration = 0
        self.reset_meter()
        self.skips: dict[str, float] = {}

    def _groups(self) -> list[dict[str, Any]]:
        """Group the parameters; those without weight decay, if there are any, are the second group."""
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
        """Update the network on this process's share of the next batch; return the loss, detached."""
        torch.manual_seed(_seed_of(self.seed, self.iteration, self.group.rank))
        share = self.config.batch_size // self.group.world
        batch = Batch(*(part.narrow(0, self.group.rank * share, share) for part in self.stream.next()))
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
        count = torch.full_like(loss, share, dtype=torch.float64)
        self.meter += torch.stack([loss.double() * share, (logits.argmax(1) != y).sum().double(), count])
        return loss

    def means(self) -> tuple[float, float, float]:
        """Return mean loss, error (%) and number of images since ``meter`` was reset; all processes must call it."""
        loss_sum, errors, count = self.group.sum(self.meter.clone()).tolist()
        return loss_sum / count, 100 * errors / count, count

    def reset_meter(self) -> None:
        self.meter = torch.zeros(3, dtype=torch.float64, device=self.group.device)

    def update(self, x: Tensor, y: Tensor, net: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Run forward, backward and the optimizer's step on images ``x`` with labels ``y``; return loss and logits."""
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("rate", 1.0) * self.config.learning_rate(self.iteration)
        for skip in self.scheduled:
            skip.set_num_updates(self.iteration)
        with self._autocast():
            logits = (net or self.net)(x)
            loss = F.cross_entropy(logits, y)
            cost = halting_cost(self.halting, Tensor.mean)
            whole = loss if cost is None else loss + cost
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(whole).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), logits.detach()

    def test(self) -> dict[str, float]:
        """``<split>_loss`` and ``<split>_error`` (%) on the test and, if there are any, validation images."""
        measured = self._test("test")
        return measured if self.images.valid_images is None else {**measured, **self._test("valid")}

    @torch.no_grad()
    def _test(self, split: str) -> dict[str, float]:
        """Test on the images of one split, which the processes share."""
        images, labels = (getattr(self.images, f"{split}_{what}") for what in ("images", "labels"))
        self.module.eval()
        for buffer in self.module.buffers() if self.group.world > 1 else ():
            dist.broadcast(buffer, 0)  # running statistics
        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        starts: Any = range(self.group.rank * TEST_BATCH, len(labels), self.group.world * TEST_BATCH)
        for start in progress(starts, len(starts), "testing") if self.group.first else starts:
            y = labels[start : start + TEST_BATCH]
            with self._autocast():
                logits = self.module(self.augmenter.test(images[start : start + TEST_BATCH]))
                loss = F.cross_entropy(logits, y, reduction="sum")
            sums += torch.stack([loss.double(), (logits.argmax(1) != y).sum().double()])
        self.module.train()
        loss_sum, errors = self.group.sum(sums).tolist()
        return {f"{split}_loss": loss_sum / len(labels), f"{split}_error": 100 * errors / len(labels)}

    def _autocast(self) -> torch.autocast:
        amp = self.config.amp
        return torch.autocast(self.group.device.type, dtype=_AMP.get(amp), enabled=amp != "off")

    def weights_are_finite(self) -> bool:
        """Whether all weights and running statistics are finite numbers."""
        values = [value for value in self.module.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack([value.isfinite().all() for value in values]).all())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides how training continues; all processes must call it."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        return {"iteration": self.iteration, **state, "meter": self.group.sum(self.meter.clone()).tolist()}

    def _parts(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer, "scaler": self.scaler, "sampler": self.stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ``ValueError`` for weights that are not finite, and what torch raises."""
        self.load_weights(state["model"])
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.iteration = int(state["iteration"])
        if self.group.first:
            self.meter += torch.tensor(state["meter"], dtype=torch.float64, device=self.group.device)

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load the network's weights. Raises as :meth:`load_state_dict`."""
        self.module.load_state_dict(weights)
        if not self.weights_are_finite():
            raise ValueError("it holds weights that are not finite")


def _seed_of(seed: int, iteration: int, rank: int) -> int:
    """Seed a process's random numbers in one update: every rank draws other masks, and no state has to be saved."""
    return int.from_bytes(hashlib.sha256(f"{seed} {iteration} {rank}".encode()).digest()[:8], "big")
