"""What ``scripts/train_cifar.py`` runs: every seed in turn, and their mean."""

import contextlib
import ctypes
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..console import print_line
from ..errors import UserError, exit_status
from ..files import locked, write_json
from . import distributed
from .config import Config, difference, parse
from .data import ImageSet, load
from .distributed import Group
from .run import RESULT, Interrupted, Run

SUMMARY = "summary.json"


ABOUT = "Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, with any skip connection."
EXAMPLES = """\
The paper's rows (Liu et al. 2020; five seeds each: --seeds 1 2 3 4 5), with --depth 110 and CIFAR-10 by default:
  baseline, xSkip         --skip-kind xskip --skip-lambda 1|2|3 --skip-norm none
  xSkip+LN, +BN           --skip-kind xskip --skip-lambda 1|2|3 --skip-norm layer|batch
  rSkip+LN, +BN           --skip-kind rskip --skip-lambda 1|2|3 --skip-norm layer|batch
  0.5x+F, LN(0.5x+F)      --skip-kind xskip --skip-lambda 0.5 --skip-norm none|layer
  LN(x+2F), LN(x+3F)      --skip-kind xskip --skip-lambda 1 --skip-branch-scale 2|3 --skip-norm layer
  wSkip+LN, w from 1, 2   --skip-kind wskip --skip-init 1|2 --skip-norm layer
  CIFAR-100, Table 6      --data cifar100 --depth 20|32|44|56|110, baseline or rSkip+LN with lambda 2
Several GPUs: torchrun --nproc_per_node N scripts/train_cifar.py ... (see docs/cifar.md).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` says; returns the exit status. What the user can fix is one line on stderr."""
    return exit_status(lambda: _train(parse(argv, ABOUT, EXAMPLES)))


def _train(config: Config) -> int:
    group = distributed.join(config.device)
    try:
        check_machine(config, group)
        train_all(config, group)
    except Interrupted as error:
        print_line(f"error: {error}", "stderr")
        return error.status
    except (UserError, RuntimeError, MemoryError) as error:
        line = str(error) if isinstance(error, UserError) else _explained(error)
        if line and not group.first:
            return 1  # the first process says it
        if line and not isinstance(error, UserError):
            raise UserError(line) from None
        raise
    finally:
        distributed.leave(group)
    return 0


def _explained(error: Exception) -> str:
    """A line for what torch raises when the machine, not the program, falls short; else ""."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "the GPU's memory is full: try a smaller --batch-size or --amp bf16"
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "the memory is full: try a smaller --batch-size"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = " ".join(str(error).split())[:200]
        return f"--compile failed, train without it: {reason}"
    return ""


def check_machine(config: Config, group: Group) -> None:
    """Raise ``UserError`` for settings that the device, or the number of processes, cannot do."""
    cuda = group.device.type == "cuda"
    if config.amp == "fp16" and not cuda:
        raise UserError("--amp fp16 needs a GPU: expected bf16 or off on a CPU")
    if config.sync_bn and not (cuda and group.world > 1):
        raise UserError("--sync-bn needs several GPUs: start with torchrun, or leave it out")
    if config.batch_size % group.world:
        raise UserError(f"--batch-size {config.batch_size}: expected a multiple of the {group.world} processes")


def train_all(config: Config, group: Group) -> list[dict[str, Any]]:
    """Train once for each of ``config.seeds`` that has no result yet; returns the results."""
    if group.device.type == "cpu":
        keep_freed_memory()
    else:
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    images = _load(config, group)
    if config.batch_size > len(images.train_labels):
        count = len(images.train_labels)
        raise UserError(f"--batch-size {config.batch_size}: expected at most the {count} training images")
    identity = images.identity()
    results = []
    for seed in config.seeds:
        folder = config.folder() / f"seed{seed}"
        result = finished(folder, config, {"seed": seed, **identity})
        if not group.least(int(result is not None)):
            result = train_one(config, seed, images, group, folder)
        results.append(result)
        if group.first:
            print_line(f"seed {seed}: {_one(result)}  ({folder / RESULT})")
    if group.first:
        summarise(config, identity)
    return results


def train_one(config: Config, seed: int, images: ImageSet, group: Group, folder: Path) -> dict[str, Any]:
    """Train from ``seed`` in ``folder``. Raises ``UserError`` if another process does so already."""
    with locked(folder) if group.first else contextlib.nullcontext(True) as free:
        if not group.least(int(bool(free))):
            raise UserError(f"another process is training in {folder}: wait for it, or choose another --output")
        return Run(config, seed, images, group, folder).run()


def finished(folder: Path, config: Config, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The result in ``folder``, if there is one. Raises ``UserError`` if it is of a run with other settings or data."""
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


def summarise(config: Config, identity: dict[str, Any]) -> None:
    """Print mean and deviation of the errors of all seeds that are finished with these settings and write them."""
    results = []
    for path in config.folder().glob(f"seed*/{RESULT}"):
        seed = path.parent.name[len("seed") :]
        with contextlib.suppress(UserError):  # of other settings: another run's
            results.append(finished(path.parent, config, {"seed": int(seed) if seed.isdecimal() else seed, **identity}))
    results.sort(key=lambda result: result["seed"])
    errors = [result["error"] for result in results]
    mean = statistics.mean(errors)
    deviation = statistics.stdev(errors) if len(errors) > 1 else None
    summary = {"seeds": [r["seed"] for r in results], "errors": errors, "mean": mean, "standard_deviation": deviation}
    if config.valid_images:
        summary["valid_errors"] = [result["valid_error"] for result in results]
        summary["valid_mean"] = statistics.mean(summary["valid_errors"])
    write_json(config.folder() / SUMMARY, summary)
    if deviation is not None:
        print_line(f"error of {len(errors)} seeds: {mean:.2f} ± {deviation:.2f} % (mean ± standard deviation)")


def _one(result: dict[str, Any]) -> str:
    best = f"best {result['best_error']:.2f} % in epoch {result['best_epoch']}"
    valid = f", validation error {result['valid_error']:.2f} %" if "valid_error" in result else ""
    return f"error {result['error']:.2f} % ({best}){valid}, {result['images_per_second']:.0f} images/s"


def _load(config: Config, group: Group) -> ImageSet:
    """The data on the device; the first process downloads and decodes, the others then find it done."""
    if not group.first:
        group.wait()
    images = load(config)
    if group.first:
        group.wait()
    return images.to(group.device)


def keep_freed_memory() -> None:
    """Ask glibc not to return freed memory to the system; does nothing elsewhere.

    A step on a CPU frees its activations, tens of megabytes, and would fault those pages in anew at the next.
    """
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(option, value)
