"""Training speed of PreAct-ResNet-20 with each skip connection beside the plain one.

A step is forward, backward and SGD on one batch of random images, in channels_last memory; on a GPU under autocast for
fp16 and bf16.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fairseq_rskip.errors import exit_status
from fairseq_rskip.vision.main import keep_freed_memory
from fairseq_rskip.vision.model import preact_resnet

from . import harness

VARIANTS = {
    "plain": {"kind": "xskip", "norm": "none"},
    **{f"xskip_ln_lambda{k}": {"kind": "xskip", "norm": "layer", "skip_lambda": float(k)} for k in (1, 2)},
    **{f"rskip_ln_lambda{k}": {"kind": "rskip", "norm": "layer", "skip_lambda": k} for k in (1, 2, 3)},
}


def contender(skip: dict[str, Any], args: Any) -> Callable[[int], int]:
    """A model with its optimizer; a call trains for some steps and returns the number of images."""
    dtype, device = harness.DTYPES[args.dtype], torch.device(args.device)
    torch.manual_seed(1)
    model = preact_resnet(args.depth, 10, skip).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=2e-4)
    scaler = torch.amp.GradScaler(args.device, enabled=args.dtype == "fp16")
    x = torch.randn(args.batch_size, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch_size,), device=device)

    def train(steps: int) -> int:
        for _ in range(steps):
            with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return steps * args.batch_size

    return train


def bench(argv: Sequence[str] | None) -> None:
    parser = harness.parser(__doc__, "cifar_speed.csv", 9)
    harness.add_count(parser, "--depth", 20, "layers, 6n+2")
    harness.add_count(parser, "--batch-size", 128, "images a step")
    args = parser.parse_args(argv)
    if args.quick:
        args.depth, args.batch_size = 8, 8
    harness.prepare(args)
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
    steps = 1 if args.quick else 2 if args.device == "cpu" else 50
    rates = harness.measure({name: contender(skip, args) for name, skip in VARIANTS.items()}, args, lambda _: steps)
    found = [
        {
            "model": name,
            "depth": args.depth,
            "batch_size": args.batch_size,
            "images_per_s": round(statistics.median(values), 1),
            "over_plain": harness.ratio(values, rates["plain"]),
        }
        for name, values in rates.items()
    ]
    harness.report(found, args)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main())
