"""What ``scripts/train_cifar.py`` runs: every seed in turn, and their mean. Torch is imported when it trains."""

import contextlib
import ctypes
import json
import logging
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..console import print_line
from ..errors import UserError, exit_status
from ..files import locked, write_json
from .options import make_parser

SUMMARY = "summary.json"
RESULT = "result.json"

ABOUT = "Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, with any skip connection."
EXAMPLES = """\
rows of the paper (five seeds each: --seeds 1 2 3 4 5), with --depth 110 and CIFAR-10 by default:
  baseline, xSkip         --skip-kind xskip --skip-lambda 1|2|3 --skip-norm none
  xSkip+LN, +BN           --skip-kind xskip --skip-lambda 1|2|3 --skip-norm layer|batch
  rSkip+LN, +BN           --skip-kind rskip --skip-lambda 1|2|3 --skip-norm layer|batch
  LN(x+2F)                --skip-kind xskip --skip-lambda 1 --skip-branch-scale 2 --skip-norm layer
all rows, and several GPUs: docs/cifar.md
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` says; returns the exit status. What the user can fix is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):  # before torch is imported, which takes seconds
        make_parser(ABOUT, EXAMPLES)[0].parse_args(["--help"])
    return exit_status(lambda: _train(argv))


def _train(argv: Sequence[str]) -> int:
    if os.environ.get("RANK", "0") == "0" and "--help-skips" not in argv:
        print_line("loading PyTorch")
    from . import distributed
    from .config import parse, skip_help
    from .run import Interrupted

    if "--help-skips" in argv:
        print(skip_help())
        return 0
    config = parse(argv)
    group = distributed.join(config.device)
    try:
        check_machine(config, group)
        train_all(config, group)
    except Interrupted as error:
        print_line(str(error), "stderr")
        return error.status
    except (UserError, RuntimeError, MemoryError) as error:
        line = str(error) if isinstance(error, UserError) else _explained(error)
        if not line:
            raise
        if not group.first:
            return 1  # the first process says it
        raise UserError(line) from None
    finally:
        distributed.leave(group)
    return 0


def _explained(error: Exception) -> str:
    """A line for errors of torch that come from the machine, else ""."""
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU's memory is full: try a smaller --batch-size or --amp bf16"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "the memory is full: try a smaller --batch-size"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return f"--compile failed, train without it: {' '.join(str(error).split())[:200]}"
    return ""


def check_machine(config: Any, group: Any) -> None:
    """Raise ``UserError`` for settings that the device, or the number of processes, cannot do."""
    cuda = group.device.type == "cuda"
    if config.amp == "fp16" and not cuda:
        raise UserError("--amp fp16 needs a GPU: expected bf16 or off on a CPU")
    if config.sync_bn and not (cuda and group.world > 1):
        raise UserError("--sync-bn needs several GPUs: start with torchrun, or leave it out")
    if config.batch_size % group.world:
        raise UserError(f"--batch-size {config.batch_size}: expected a multiple of the {group.world} processes")


def train_all(config: Any, group: Any) -> None:
    """Train once for each of ``config.seeds`` that has no result yet."""
    import torch

    from .data import load
    from .run import Run

    if group.device.type == "cpu":
        keep_freed_memory()
        load_operator()
    else:
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    if not group.first:
        group.least(0)  # wait: the first process downloads and decodes, the others read the cache
    else:
        print_line(f"reading {config.data}")
    images = load(config)
    if group.first:
        group.least(0)
    images = images.to(group.device)
    count = len(images.train_labels)
    if config.batch_size > count:
        raise UserError(f"--batch-size {config.batch_size}: expected at most the {count} training images")
    identity, results = images.identity(), []
    for seed in config.seeds:
        folder = config.folder() / f"seed{seed}"
        result = finished(folder, config, {"seed": seed, **identity})
        if not group.least(int(result is not None)):
            with locked(folder) if group.first else contextlib.nullcontext(True) as free:
                if not group.least(int(bool(free))):
                    raise UserError(f"another process is training in {folder}: wait, or choose another --output")
                result = Run(config, seed, images, group, folder).run()
        results.append(result)
        if group.first:
            best = f"best {result['best_error']:.2f} % in epoch {result['best_epoch']}"
            valid = f", validation error {result['valid_error']:.2f} %" if "valid_error" in result else ""
            speed = f"{result['images_per_second']:.0f} images/s"
            print_line(f"seed {seed}: error {result['error']:.2f} % ({best}){valid}, {speed}  ({folder / RESULT})")
    if group.first:
        summarise(config, results)


def finished(folder: Path, config: Any, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The result in ``folder``, or None. Raises ``UserError`` if it is of a run with other settings or data."""
    from .config import difference

    path = folder / RESULT
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        differs = difference(result["config"], config, result["identity"], identity)
        float(result["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is not a result of train_cifar.py; remove it, or choose another --output") from None
    if differs:
        raise UserError(f"{path} is of another run: {'; '.join(differs)}; choose another --output")
    return result


def summarise(config: Any, results: list[dict[str, Any]]) -> None:
    """Write, and print, mean and standard deviation of the seeds' errors."""
    errors = [result["error"] for result in results]
    mean = statistics.mean(errors)
    deviation = statistics.stdev(errors) if len(errors) > 1 else None
    summary = {"seeds": list(config.seeds), "errors": errors, "mean": mean, "standard_deviation": deviation}
    if config.valid_images:
        summary["valid_errors"] = [result["valid_error"] for result in results]
        summary["valid_mean"] = statistics.mean(summary["valid_errors"])
    write_json(config.folder() / SUMMARY, summary)
    if deviation is not None:
        print_line(f"error of {len(errors)} seeds: {mean:.2f} ± {deviation:.2f} % (mean ± standard deviation)")


def load_operator() -> None:
    """Load the CPU operator of the skip connections; where it is not built yet, say so and build it.

    A run computes with one operator from its start: torch's operators differ from it in the last bits.
    """
    from ..ops import in_use

    logging.basicConfig(format="%(message)s")
    logging.getLogger("fairseq_rskip.ops").setLevel(logging.INFO)
    in_use()


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory; does nothing elsewhere.

    A step on a CPU frees tens of megabytes of activations, and would fault in those pages again at the next.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(option, value)
