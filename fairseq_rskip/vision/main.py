"""Train with every seed in turn: the code of ``scripts/train_cifar.py``. Torch is imported after ``-h`` is answered."""

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..console import print_line
from ..errors import UserError, exit_status
from ..files import locked, write_json
from ..machine import keep_freed_memory, load_operator
from .options import WARM_UP, WHOLE, make_parser

SUMMARY = "summary.json"
RESULT = "result.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` says; returns the exit status. What the user can fix is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):  # before torch is imported, which takes seconds
        make_parser()[0].print_help()
        return 0
    return exit_status(lambda: _train(argv))


def _train(argv: Sequence[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_line("loading PyTorch")
    import torch.distributed as dist

    from .config import parse
    from .trainer import join

    config = parse(argv)
    group = join(config.device)
    if group.first and config.warmup_iterations != WARM_UP:
        print_line(f"warm-up: {config.warmup_iterations} updates; the paper's: {WARM_UP} of {WHOLE}")
    try:
        train_all(config, group)
    except Exception as error:
        line = str(error) if isinstance(error, UserError) else _explained(error)
        if not line:
            raise
        raise UserError(line) if group.first else SystemExit(1) from None  # the first process says it
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _explained(error: Exception) -> str:
    """Return a line for errors of torch and wandb that the user can act on, else ""."""
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error):
        return "the memory is full: try a smaller --batch-size, on a GPU also --amp bf16"
    for module, option in (("torch._", "--compile"), ("wandb", "--wandb-project")):
        if type(error).__module__.startswith(module):
            return f"{option} failed, train without it: {' '.join(str(error).split())[:200]}"
    return ""


def train_all(config: Any, group: Any) -> None:
    """Train once for each of ``config.seeds`` that has no result yet. Raises ``UserError`` for what cannot be done
    on the device, with so many processes, or with the images."""
    import torch

    from .data import load
    from .run import Run

    if config.amp == "fp16" and group.device.type != "cuda":
        raise UserError("--amp fp16 needs a GPU: expected bf16 or off on a CPU")
    if config.batch_size % group.world:
        raise UserError(f"--batch-size {config.batch_size}: expected a multiple of the {group.world} processes")
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
    identity = images.identity()
    for seed in config.seeds:
        folder = config.folder() / f"seed{seed}"
        result = finished(folder / RESULT, config, {"seed": seed, **identity})
        if not group.least(int(result is not None)):
            with locked(folder) if group.first else contextlib.nullcontext(True) as free:
                if not group.least(int(bool(free))):
                    raise UserError(f"another process is training in {folder}: wait, or choose another --output")
                result = Run(config, seed, images, group, folder).run()
        if group.first:
            best = f"best {result['best_error']:.2f} % in epoch {result['best_epoch']}"
            valid = f", validation error {result['valid_error']:.2f} %" if "valid_error" in result else ""
            print_line(f"seed {seed}: error {result['error']:.2f} % ({best}){valid}  ({folder / RESULT})")
    if group.first:
        summarise(config, identity)


def finished(path: Path, config: Any, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Read the result in ``path``, None if there is none. Raises ``UserError`` for that of another run."""
    from .config import check_same

    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        check_same(path, result, config, identity)
        return result
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
        raise UserError(f"{path} is not a result of train_cifar.py; remove it, or choose another --output") from None


def summarise(config: Any, identity: dict[str, Any]) -> None:
    """Write, and print, mean and standard deviation of the errors of all seeds in the folder."""
    results: list[Any] = []
    for path in sorted(config.folder().glob(f"seed*/{RESULT}"), key=lambda path: (len(str(path)), path)):
        with contextlib.suppress(UserError):  # of another run
            results.append(finished(path, config, identity))
    seeds, errors = ([result[name] for result in results] for name in ("seed", "error"))
    mean, deviation = statistics.mean(errors), statistics.stdev(errors) if len(errors) > 1 else None
    summary = {"seeds": seeds, "errors": errors, "mean": mean, "standard_deviation": deviation}
    if config.valid_images:
        valid = [result["valid_error"] for result in results]
        summary |= {"valid_errors": valid, "valid_mean": statistics.mean(valid)}
    write_json(config.folder() / SUMMARY, summary)
    if deviation is not None:
        print_line(f"error of {len(errors)} seeds: {mean:.2f} ± {deviation:.2f} % (mean ± standard deviation)")
