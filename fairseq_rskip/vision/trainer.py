"""Train and test: the network, its optimizer, the images on the device, the processes."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.live import summarise
from ..analysis.probe import SkipProbe
from ..console import progress
from ..errors import UserError
from ..machine import device_of
from ..parameters import ParameterSettings, UnmovedCoefficients, parameter_settings
from ..residual import initialise_from_batch, skips
from ..residual.halting import halting_cost, halting_modules
from ..residual.profile import wanting_profile
from .batches import Augmenter, Batch, BatchStream, channel_statistics
from .config import Config
from .data import ImageSet
from .model import PreActResNet

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
        """Return the sum of ``values`` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def least(self, value: int) -> int:
        """Return the least of all processes' ``value``."""
        least = torch.tensor(value, device=self.device)
        if self.world > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def wait(self) -> None:
        """Wait until every process waits here."""
        if self.world > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def join(device: str) -> Group:
    """Join the processes that torchrun started, on ``auto``, ``cpu`` or ``cuda``.

    Raises ``UserError`` if there are fewer GPUs than processes on this machine.
    """
    chosen = device_of(device)
    backend = "gloo"
    if chosen.type == "cuda":
        backend = "nccl"
        local = int(os.environ.get("LOCAL_RANK", 0))
        gpus = torch.cuda.device_count()
        if local >= gpus:
            raise UserError(
                f"process {local} has no GPU: expected at most {gpus} processes on this machine"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)

    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return Group(int(os.environ.get("RANK", 0)), world, chosen)


class Trainer:
    """A network initialised from ``seed`` and trained on ``images`` update by update.

    The images are on ``group.device``. ``iteration`` counts the updates. ``meter`` has this
    process's sum of losses, number of errors and number of images. ``skips`` is what the last
    update measured of the skip connections, if it was one to log, in the first process. Raises
    ``UserError`` for settings that exclude each other.
    """

    def __init__(self, config: Config, seed: int, images: ImageSet, group: Group):
        self.config = config
        self.seed = seed
        self.images = images
        self.group = group
        device = group.device

        torch.manual_seed(seed)
        self.module: nn.Module = PreActResNet(num_classes=len(images.classes), **config.network())
        self.module = self.module.to(device, memory_format=torch.channels_last)
        self.skip_connections = list(skips(self.module).values())
        self.halting = halting_modules(self.module)
        self.optimizer = torch.optim.SGD(
            self._parameter_groups(),
            config.lr,
            momentum=config.momentum,
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=config.amp == "fp16")

        flip = config.flip and config.data != "digits"
        self.stream = BatchStream(
            len(images.train_labels), config.batch_size, seed, config.crop, flip, device
        )
        self.mean, self.std = channel_statistics(images.train_images)
        self.augmenter = Augmenter(
            images.train_images.shape[1:], self.mean, self.std, config.crop, device
        )
        if wanting_profile(self.module):
            self._initialise_from_first_batch()
        self.net = self._wrapped()  # which sends the first process's values to all
        self.unmoved = UnmovedCoefficients(self.module)
        self.iteration = 0
        self.reset_meter()
        self.skips: dict[str, float] = {}

    def _wrapped(self) -> nn.Module:
        """Return the network as it is trained: compiled, shared between processes."""
        net: Any = torch.compile(self.module) if self.config.compile else self.module
        if self.group.world == 1:
            return net
        if self.config.compile and self.config.skip_log_interval:
            raise UserError(
                "--skip-log-interval does not work with --compile and several processes: "
                "leave one out"
            )
        device_ids = [self.group.device.index] if self.group.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(net, device_ids=device_ids)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Group the parameters by their settings; those of the convolutions come first."""
        by_parameter = parameter_settings(self.module, self.config.skip_lr_scale)
        default = ParameterSettings()
        by_settings: dict[ParameterSettings, list[nn.Parameter]] = {default: []}
        for parameter in self.module.parameters():
            settings = by_parameter.get(id(parameter), default)
            by_settings.setdefault(settings, []).append(parameter)

        groups = []
        for settings, parameters in by_settings.items():
            decay = self.config.weight_decay if settings.decays else 0.0
            groups.append({"params": parameters, "weight_decay": decay, "rate": settings.lr})
        return groups

    def _initialise_from_first_batch(self) -> None:
        """Initialise rules that depend on data, from the training's first batch."""
        images = self.images.train_images
        first = self.stream.plan.index[: self.config.batch_size].to(images.device)
        x = images[first]
        labels = self.images.train_labels[first]

        def loss() -> Tensor:
            return F.cross_entropy(self.module(self.augmenter.test(x)), labels)

        initialise_from_batch(self.module, loss, self.module.shortcuts())

    def train_step(self) -> Tensor:
        """Update the network on this process's share of the next batch.

        Returns the loss, detached.
        """
        torch.manual_seed(_process_seed(self.seed, self.iteration, self.group.rank))
        share = self.config.batch_size // self.group.world
        first = self.group.rank * share
        batch = Batch(*(part.narrow(0, first, share) for part in self.stream.next()))
        x = self.augmenter.train(self.images.train_images, batch)
        y = self.images.train_labels[batch.index]

        self.skips = {}
        if self._logs_skips():
            scale = self.scaler.get_scale()
            net = self.module if self.config.compile else self.net  # compiled code calls no hooks
            with SkipProbe(self.module) as probe:
                loss, logits = self.backward(x, y, net)
            self.skips = summarise(probe, scale)  # of the weights that these gradients are of
        else:
            loss, logits = self.backward(x, y)
        self.step()

        self.iteration += 1
        loss_sum = loss.double() * share
        errors = (logits.argmax(1) != y).sum().double()
        count = torch.full_like(loss, share, dtype=torch.float64)
        self.meter += torch.stack([loss_sum, errors, count])
        return loss

    def _logs_skips(self) -> bool:
        """Return whether the next update measures the skip connections, in this process."""
        interval = self.config.skip_log_interval
        if not interval or not self.group.first:
            return False
        return (self.iteration + 1) % interval == 0

    def means(self) -> tuple[float, float, float]:
        """Return mean loss, error (%) and number of images since ``meter`` was reset.

        All processes must call it.
        """
        loss_sum, errors, count = self.group.sum(self.meter.clone()).tolist()
        return loss_sum / count, 100 * errors / count, count

    def reset_meter(self) -> None:
        self.meter = torch.zeros(3, dtype=torch.float64, device=self.group.device)

    def backward(self, x: Tensor, y: Tensor, net: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        """Compute the gradients on images ``x`` with labels ``y``.

        Returns the mean loss and the logits ``(N, classes)``, detached.
        """
        for skip in self.skip_connections:
            skip.set_num_updates(self.iteration)

        with self._autocast():
            logits = (net or self.net)(x)
            loss = F.cross_entropy(logits, y)
            cost = halting_cost(self.halting, "mean")
            objective = loss if cost is None else loss + cost
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(objective).backward()
        return loss.detach(), logits.detach()

    def step(self) -> None:
        """Update the weights by their gradients."""
        rate = self.config.learning_rate(self.iteration)
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("rate", 1.0) * rate
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def test(self) -> dict[str, float]:
        """Return ``test_loss`` and ``test_error`` (%).

        If there are validation images, also ``valid_loss`` and ``valid_error``. All processes must
        call it.
        """
        measured = self._test("test", self.images.test_images, self.images.test_labels)
        if self.images.valid_images is not None:
            measured |= self._test("valid", self.images.valid_images, self.images.valid_labels)
        return measured

    @torch.no_grad()
    def _test(self, split: str, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Test on the images of one split, which the processes share."""
        self.module.eval()
        if self.group.world > 1:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)  # running statistics

        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        step = self.group.world * TEST_BATCH
        starts: Any = range(self.group.rank * TEST_BATCH, len(labels), step)
        shown: Iterable[int] = starts
        if self.group.first:
            shown = progress(starts, len(starts), "testing")
        for start in shown:
            x = self.augmenter.test(images[start : start + TEST_BATCH])
            y = labels[start : start + TEST_BATCH]
            with self._autocast():
                logits = self.module(x)
                loss = F.cross_entropy(logits, y, reduction="sum")
            errors = (logits.argmax(1) != y).sum()
            sums += torch.stack([loss.double(), errors.double()])
        self.module.train()

        loss_sum, error_sum = self.group.sum(sums).tolist()
        return {
            f"{split}_loss": loss_sum / len(labels),
            f"{split}_error": 100 * error_sum / len(labels),
        }

    def _autocast(self) -> torch.autocast:
        amp = self.config.amp
        return torch.autocast(self.group.device.type, dtype=_AMP.get(amp), enabled=amp != "off")

    def weights_are_finite(self) -> bool:
        """Return whether all weights and running statistics are finite numbers."""
        values = [value for value in self.module.state_dict().values() if value.is_floating_point()]
        return bool(torch.stack([value.isfinite().all() for value in values]).all())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides how training continues; all processes must call it."""
        others = {name: part.state_dict() for name, part in self._other_parts().items()}
        return {
            "iteration": self.iteration,
            "model": self.module.state_dict(),
            **others,
            "meter": self.group.sum(self.meter.clone()).tolist(),
        }

    def _other_parts(self) -> dict[str, Any]:
        """Return what has a state dict besides the network."""
        return {"optimizer": self.optimizer, "scaler": self.scaler, "sampler": self.stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``.

        Raises ``ValueError`` for weights that are not finite, and what torch raises.
        """
        self._load_weights(state["model"])
        for name, part in self._other_parts().items():
            part.load_state_dict(state[name])
        self.iteration = int(state["iteration"])
        if self.group.first:
            self.meter += torch.tensor(
                state["meter"], dtype=torch.float64, device=self.group.device
            )

    def start_from(self, weights: dict[str, Any]) -> None:
        """Begin a training with these weights. Raises as :meth:`load_state_dict`."""
        self._load_weights(weights)
        self.unmoved = UnmovedCoefficients(self.module)

    def _load_weights(self, weights: dict[str, Any]) -> None:
        self.module.load_state_dict(weights)
        if not self.weights_are_finite():
            raise ValueError("it holds weights that are not finite")


def _process_seed(seed: int, iteration: int, rank: int) -> int:
    """Return the seed of a process's random numbers in one update.

    Every rank draws other masks, and no state of a generator has to be saved.
    """
    digest = hashlib.sha256(f"{seed} {iteration} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
