#!/usr/bin/env python3
"""Training speed of PreAct-ResNet: each skip connection beside the plain one, and the training loop beside its parts.

Rows "step": forward, backward and SGD on a batch that is there already, for plain, xskip_ln and rskip_ln with lambda 1,
2, 3, in channels_last and contiguous memory. Rows "loop": the bare step, the whole loop of train_cifar.py (shuffling,
augmentation, loss check and log included), and a conventional loop (torchvision's PIL transforms in a DataLoader)
around the same model and update. Contenders take turns in every round; a figure is the median over the rounds, a ratio
the median of the rounds' ratios, since a machine's speed drifts.
"""

import argparse
import csv
import io
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torchvision import transforms  # noqa: E402

from fairseq_rskip.errors import UserError  # noqa: E402
from fairseq_rskip.files import write_text  # noqa: E402
from fairseq_rskip.vision import distributed  # noqa: E402
from fairseq_rskip.vision.config import Config  # noqa: E402
from fairseq_rskip.vision.data import ImageSet  # noqa: E402
from fairseq_rskip.vision.logs import RunLog, machine  # noqa: E402
from fairseq_rskip.vision.main import check_machine, keep_freed_memory  # noqa: E402
from fairseq_rskip.vision.run import Run  # noqa: E402
from fairseq_rskip.vision.trainer import Trainer  # noqa: E402

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


class Loop:
    """The loop of train_cifar.py, of which the bench sees no epoch's end."""

    def __init__(self, config, images, group, folder):
        self.run = Run(config, 1, images, group, Path(folder))
        self.log = RunLog(Path(folder), [], config, active=True)

    def __call__(self, steps):
        for _ in range(steps):
            self.run.iterate(self.log)


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


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(contenders, args, device):
    """Images per second of every contender in every round."""
    rates = {name: [] for name in contenders}
    for turn in range(-1, args.rounds):  # round -1 warms up
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            if hasattr(contenders[name], "prepare"):
                contenders[name].prepare()
            wait(device)
            start = time.perf_counter()
            contenders[name](args.steps)
            wait(device)
            if turn >= 0:
                rates[name].append(args.steps * args.batch_size / (time.perf_counter() - start))
        print(f"round {turn + 1} of {args.rounds} done", file=sys.stderr)
    return rates


def rows(kind, rates, reference_of):
    """One row a contender; ``reference_of(name)`` is what it is compared with."""
    for name, values in rates.items():
        reference = reference_of(name)
        ratio = statistics.median(v / r for v, r in zip(values, rates[reference]))
        yield {
            "measured": kind,
            "model": name[0],
            "memory_format": name[1],
            "images_per_s": round(statistics.median(values), 1),
            "ratio": round(ratio, 4),
            "ratio_to": " ".join(reference),
        }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=20, help="layers (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps a turn (default: 2 on a CPU, 50 on a GPU)")
    parser.add_argument("--workers", type=int, help="of the conventional loop (default: the cores, 8 at most)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--only", choices=("step", "loop"), help="measure only this part")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "cifar_speed.csv")
    args = parser.parse_args()
    if min(args.rounds, args.batch_size, 1 if args.steps is None else args.steps) < 1:
        parser.error("--rounds, --steps and --batch-size must be at least 1")
    return args


def table(args, group):
    images = random_images(50_000, group.device)
    found = []
    if args.only != "loop":
        contenders = {
            (variant, memory): Step(configuration(args, variant, memory), images, group)
            for variant in VARIANTS
            for memory in FORMATS
        }
        rates = measure(contenders, args, group.device)
        found += rows("step", rates, lambda name: ("plain", name[1]))
        del contenders
    if args.only != "step":
        config = configuration(args, LOOP, FORMATS[0])
        with tempfile.TemporaryDirectory() as folder:
            contenders = {
                (f"{LOOP}: bare step", FORMATS[0]): Step(config, images, group),
                (f"{LOOP}: whole loop", FORMATS[0]): Loop(config, images, group, folder),
                (f"{LOOP}: PIL and DataLoader", FORMATS[0]): ConventionalLoop(config, images, group, args.workers),
            }
            rates = measure(contenders, args, group.device)
        found += rows("loop", rates, lambda name: (f"{LOOP}: bare step", FORMATS[0]))
    return found


def rows_to_keep(path, only, device, columns):
    """What ``path`` holds of the part that ``only`` leaves out, measured on the same device."""
    if only is None or not path.is_file():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            kept = [row for row in reader if row.get("measured") != only and row.get("device") == device]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if kept and reader.fieldnames != list(columns):
        raise UserError(f"{path} has other columns than this version writes: choose another --output")
    return kept


def write_table(path, found, only):
    """``found`` as ``path``, steps before loops."""
    rows = found + rows_to_keep(path, only, found[0]["device"], found[0])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, found[0])
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: row["measured"] != "step"))
    write_text(path, text.getvalue())


def bench():
    args = parse()
    group = distributed.join(args.device)
    check_machine(configuration(args, LOOP, FORMATS[0]), group)
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured in vain
    except OSError as error:
        raise UserError(f"--output {args.output}: {error.strerror}") from None
    cuda = group.device.type == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True
    else:
        keep_freed_memory()
    args.steps = args.steps or (50 if cuda else 2)
    args.workers = min(8, os.cpu_count()) if args.workers is None else args.workers
    settings = {
        "depth": args.depth,
        "batch_size": args.batch_size,
        "amp": args.amp,
        "compile": args.compile,
        "rounds": args.rounds,
        "steps": args.steps,
        "workers": args.workers,
        **machine(group.device, 1),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    found = [{**row, **settings} for row in table(args, group)]
    for row in found:
        print("  ".join(f"{key}={value}" for key, value in row.items() if key not in settings))
    write_table(args.output, found, args.only)
    print(f"written to {args.output}")


def main():
    try:
        bench()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
