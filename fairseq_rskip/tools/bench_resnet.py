"""Training speed of PreAct-ResNet: each skip connection beside the plain one, and the training loop beside its parts.

Rows "step": forward, backward and SGD on a batch that is there already, for plain, xskip_ln and rskip_ln with lambda 1,
2, 3, in channels_last and contiguous memory. Rows "loop": the bare step, the whole loop of train_cifar.py (shuffling,
augmentation, loss check and log included), and a conventional loop (torchvision's PIL transforms in a DataLoader)
around the same model and update. Contenders take turns (benchmark.py).
"""

import argparse
import csv
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision import transforms

from ..console import whole_number
from ..errors import exit_status
from ..vision import distributed
from ..vision.config import Config
from ..vision.data import ImageSet
from ..vision.logs import RunLog
from ..vision.main import check_machine, keep_freed_memory
from ..vision.run import Run
from ..vision.trainer import Trainer
from . import benchmark

VARIANTS = {
    "plain": {"skip_kind": "xskip", "skip_lambda": 1.0, "skip_norm": "none"},
    "xskip_ln_lambda1": {"skip_kind": "xskip", "skip_lambda": 1.0, "skip_norm": "layer"},
    "xskip_ln_lambda2": {"skip_kind": "xskip", "skip_lambda": 2.0, "skip_norm": "layer"},
    "rskip_ln_lambda1": {"skip_kind": "rskip", "skip_lambda": 1.0, "skip_norm": "layer"},
    "rskip_ln_lambda2": {"skip_kind": "rskip", "skip_lambda": 2.0, "skip_norm": "layer"},
    "rskip_ln_lambda3": {"skip_kind": "rskip", "skip_lambda": 3.0, "skip_norm": "layer"},
}
FORMATS = ("channels_last", "contiguous")
LOOP = "rskip_ln_lambda2"
PREFETCH = 2  # batches a worker of the conventional loop prepares ahead


def configuration(args, variant, memory_format):
    return Config(
        depth=args.depth,
        batch_size=args.batch_size,
        amp=args.amp,
        compile=args.compile,
        device=args.device,
        memory_format=memory_format,
        **VARIANTS[variant],
    )


def random_images(count, device):
    """As many random images as CIFAR-10 has; their speed is that of any."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return ImageSet(tuple("0123456789"), images, labels, images[:500], labels[:500]).to(device)


class Step:
    """The bare training step of one variant."""

    def __init__(self, config, images, group):
        self.trainer = Trainer(config, 1, images, group)
        self.x = self.trainer.augmenter.train(images.train_images, self.trainer.stream.next())
        self.y = images.train_labels[: config.batch_size]

    def __call__(self, steps):
        for _ in range(steps):
            self.trainer.update(self.x, self.y)
        return steps * len(self.y)


class Loop:
    """The loop of train_cifar.py, of which the bench sees no epoch's end."""

    def __init__(self, config, images, group, folder):
        self.run = Run(config, 1, images, group, Path(folder))
        self.log = RunLog(Path(folder), [], config, active=True)

    def __call__(self, steps):
        for _ in range(steps):
            self.run.iterate(self.log)
        return steps * self.run.config.batch_size


class PilImages(torch.utils.data.Dataset):
    """What torchvision.datasets.CIFAR10 does with an image, for images in memory."""

    def __init__(self, images, mean, std):
        self.images, self.labels = images.train_images.cpu().numpy(), images.train_labels.tolist()
        crop, flip = transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()
        normalise = transforms.Normalize(mean.tolist(), std.tolist())
        self.transform = transforms.Compose([crop, flip, transforms.ToTensor(), normalise])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


class ConventionalLoop:
    """DataLoader and PIL transforms around the same model and update, with the loss read as ours is."""

    def __init__(self, config, images, group, workers):
        self.trainer = Trainer(config, 1, images, group)
        self.device, self.workers = group.device, workers
        self.memory_format = getattr(torch, config.memory_format.replace("contiguous", "contiguous_format"))
        self.loader = torch.utils.data.DataLoader(
            PilImages(images, self.trainer.mean.cpu(), self.trainer.std.cpu()),
            config.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            prefetch_factor=PREFETCH if workers else None,
            pin_memory=group.device.type == "cuda",
            persistent_workers=workers > 0,
        )
        self.batches = iter(self.loader)

    def next(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def prepare(self):
        """Use up what the workers prepared during the others' turns."""
        for _ in range(PREFETCH * self.workers):
            self.next()

    def __call__(self, steps):
        for _ in range(steps):
            x, y = self.next()
            x = x.to(self.device, non_blocking=True, memory_format=self.memory_format)
            self.trainer.update(x, y.to(self.device, non_blocking=True))
        return steps * self.loader.batch_size


Name = tuple[str, str]  # model, memory format


def rows(
    kind: str, rates: dict[Name, benchmark.Rates], reference_of: Callable[[Name], Name]
) -> Iterator[benchmark.Row]:
    """One row a contender; ``reference_of(name)`` is what it is compared with."""
    for name, found in rates.items():
        reference = reference_of(name)
        yield {
            "measured": kind,
            "model": name[0],
            "memory_format": name[1],
            "images_per_s": round(statistics.median(found.clock), 1),
            "ratio": round(benchmark.ratio(found.clock, rates[reference].clock), 4),
            "ratio_to": " ".join(reference),
        }


def table(args: argparse.Namespace, group: distributed.Group) -> list[benchmark.Row]:
    """Steps, then loops; only the part that ``args.only`` names, if any."""
    images = random_images(args.images, group.device)
    found: list[benchmark.Row] = []

    def measure(contenders):
        return benchmark.measure(contenders, args.rounds, lambda _: args.steps, group.device)

    if args.only != "loop":
        steps = {
            (variant, memory): Step(configuration(args, variant, memory), images, group)
            for variant in VARIANTS
            for memory in FORMATS
        }
        found += rows("step", measure(steps), lambda name: ("plain", name[1]))
        del steps
    if args.only != "step":
        config = configuration(args, LOOP, FORMATS[0])
        bare = (f"{LOOP}: bare step", FORMATS[0])
        with tempfile.TemporaryDirectory() as folder:
            loops = {
                bare: Step(config, images, group),
                (f"{LOOP}: whole loop", FORMATS[0]): Loop(config, images, group, folder),
                (f"{LOOP}: PIL and DataLoader", FORMATS[0]): ConventionalLoop(config, images, group, args.workers),
            }
            found += rows("loop", measure(loops), lambda _: bare)
    return found


def rows_to_keep(path: Path, only: str | None, device: str) -> list[benchmark.Row]:
    """What ``path`` holds of the part that ``only`` leaves out, measured on the same device."""
    if only is None or not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [r for r in csv.DictReader(file) if r.get("measured") != only and r.get("device") == device]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark.parser(__doc__, 9, "cifar_speed.csv")
    benchmark.add_count(parser, "--depth", 20, "layers")
    benchmark.add_count(parser, "--batch-size", 128, "images a step")
    benchmark.add_count(parser, "--images", 50_000, "images of the set")
    parser.add_argument("--steps", type=whole_number(1), help="steps a turn (default: 2 on a CPU, 50 on a GPU)")
    parser.add_argument("--workers", type=int, help="of the conventional loop (default: the cores, 8 at most)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--only", choices=("step", "loop"), help="measure only this part")
    return parser.parse_args(argv)


def bench(argv: Sequence[str] | None) -> None:
    args = parse(argv)
    group = distributed.join(args.device)
    check_machine(configuration(args, LOOP, FORMATS[0]), group)
    benchmark.check_output(args.output)
    cuda = group.device.type == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
    args.steps = args.steps or (50 if cuda else 2)
    args.workers = min(8, os.cpu_count()) if args.workers is None else args.workers
    settings: dict[str, Any] = {
        name: getattr(args, name) for name in ("depth", "batch_size", "amp", "compile", "rounds", "steps", "workers")
    }
    device, *others = benchmark.machine(group.device).items()
    settings.update([device, ("processes", 1), *others])
    found = table(args, group)
    benchmark.report(found, settings, args.output, rows_to_keep(args.output, args.only, settings["device"]))


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))
