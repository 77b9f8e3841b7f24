"""Training speed of PreAct-ResNet-20 with each skip connection beside the plain one.

It is measured over forward, backward and SGD on one batch of random images, on a GPU under autocast
for fp16 and bf16.
"""

import argparse
import functools
import os
from typing import Any

import torch

from fairseq_rskip.machine import keep_freed_memory
from fairseq_rskip.vision.config import parse
from fairseq_rskip.vision.data import ImageSet
from fairseq_rskip.vision.trainer import Group, Trainer

from . import harness

VARIANTS = {
    "plain": "--skip-kind xskip --skip-lambda 1 --skip-norm none",
    **{f"xskip_ln_lambda{k}": f"--skip-kind xskip --skip-lambda {k}" for k in (1, 2)},
    **{f"rskip_ln_lambda{k}": f"--skip-kind rskip --skip-lambda {k}" for k in (1, 2, 3)},
}


def train(trainer: Trainer, x: torch.Tensor, steps: int) -> int:
    """Train some steps; returns the number of images."""
    for _ in range(steps):
        trainer.backward(x, trainer.images.train_labels)
        trainer.step()
    return steps * len(x)


def table(args: Any) -> list[harness.Row]:
    depth, size, steps = 20, 128, 50
    if args.device == "cpu":
        steps = 2
    if args.quick:
        depth, size, steps = 8, 8, 1
    device = torch.device(args.device)
    amp = "off" if args.dtype == "fp32" else args.dtype
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
    images, labels = torch.randint(256, (size, 32, 32, 3)).byte(), torch.randint(10, (size,))
    data = ImageSet(tuple("0123456789"), images, labels, images, labels).to(device)

    contenders = {}
    for name in args.contenders:
        words = VARIANTS[name].split()
        words += ["--depth", str(depth), "--batch-size", str(size), "--amp", amp]
        trainer = Trainer(parse(words), 1, data, Group(0, 1, device))
        x = trainer.augmenter.test(data.train_images)
        contenders[name] = functools.partial(train, trainer, x)

    rates = harness.measure(contenders, args, steps)
    base = args.contenders[0]
    rows = []
    for name, speed in harness.medians(rates, base, "images_per_s", f"over_{base}").items():
        about = {"model": name, "ops": os.environ.get("RSKIP_OPS", "auto")}
        rows.append({**about, "depth": depth, "batch_size": size, **speed})
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="the first is what the others are compared with (default: all)",
    )


main = functools.partial(harness.main, table, "cifar_speed.csv", 9, __doc__, add_options)

if __name__ == "__main__":
    raise SystemExit(main())
