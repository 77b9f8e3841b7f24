"""Training speed of PreAct-ResNet-20 with each skip connection beside the plain one.

A step is forward, backward and SGD on one batch of random images, in channels_last memory; on a GPU under autocast for
fp16 and bf16.
"""

import functools
import statistics
import sys
from collections.abc import Callable
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


def contender(skip: str, depth: int, size: int, args: Any) -> Callable[[int], int]:
    """Build a network and its optimizer; return a function that trains some steps and counts their images."""
    amp = "off" if args.dtype == "fp32" else args.dtype
    config = parse([*skip.split(), "--depth", str(depth), "--batch-size", str(size), "--amp", amp])
    images, labels = torch.randint(256, (size, 32, 32, 3)).byte(), torch.randint(10, (size,))
    data = ImageSet(tuple("0123456789"), images, labels, images, labels).to(torch.device(args.device))
    trainer = Trainer(config, 1, data, Group(0, 1, torch.device(args.device)))
    x = trainer.augmenter.test(data.train_images)

    def train(steps: int) -> int:
        for _ in range(steps):
            trainer.update(x, data.train_labels)
        return steps * size

    return train


def table(args: Any) -> list[harness.Row]:
    depth, size, steps = (8, 8, 1) if args.quick else (20, 128, 2 if args.device == "cpu" else 50)
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
    contenders = {name: contender(skip, depth, size, args) for name, skip in VARIANTS.items()}
    rates = harness.measure(contenders, args, lambda _: steps)
    rows = []
    for name in rates:
        speed, over = round(statistics.median(rates[name]), 1), harness.ratio(rates[name], rates["plain"])
        rows.append({"model": name, "depth": depth, "batch_size": size, "images_per_s": speed, "over_plain": over})
    return rows


main = functools.partial(harness.main, table, "cifar_speed.csv", 9, __doc__)

if __name__ == "__main__":
    sys.exit(main())
