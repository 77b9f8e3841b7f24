"""Training speed of PreAct-ResNet-20 with each skip connection beside the plain one.

A step is forward, backward and SGD on one batch of random images, in channels_last memory; on a GPU under autocast for
fp16 and bf16.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
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


def contender(skip: str, args: Any) -> Callable[[int], int]:
    """Build a network and its optimizer; return a function that trains some steps and counts their images."""
    sizes = ["--depth", str(args.depth), "--batch-size", str(args.batch_size)]
    config = parse([*sizes, *skip.split(), "--amp", "off" if args.dtype == "fp32" else args.dtype])
    images, labels = torch.randint(256, (args.batch_size, 32, 32, 3)).byte(), torch.randint(10, (args.batch_size,))
    data = ImageSet(tuple("0123456789"), images, labels, images, labels).to(torch.device(args.device))
    trainer = Trainer(config, 1, data, Group(0, 1, torch.device(args.device)))
    x = trainer.augmenter.test(data.train_images)

    def train(steps: int) -> int:
        for _ in range(steps):
            trainer.update(x, data.train_labels)
        return steps * args.batch_size

    return train


def table(args: Any) -> list[harness.Row]:
    args.depth, args.batch_size = (8, 8) if args.quick else (args.depth, args.batch_size)
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
    steps = 1 if args.quick else 2 if args.device == "cpu" else 50
    rates = harness.measure({name: contender(skip, args) for name, skip in VARIANTS.items()}, args, lambda _: steps)
    rows = [{"model": name, "depth": args.depth, "batch_size": args.batch_size} for name in rates]
    for row, values in zip(rows, rates.values()):
        row |= {
            "images_per_s": round(statistics.median(values), 1),
            "over_plain": harness.ratio(values, rates["plain"]),
        }
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, table, "cifar_speed.csv", 9, __doc__, **{"depth": 20, "batch-size": 128})


if __name__ == "__main__":
    sys.exit(main())
