"""Train with every seed in turn, and summarise the errors of all seeds."""

import contextlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from ..console import print_line
from ..errors import UserError
from ..files import locked, write_json
from ..machine import keep_freed_memory, load_operator
from .config import Config, check_same
from .data import ImageSet, load
from .run import RESULT, Run, identity_of
from .trainer import Group

SUMMARY = "summary.json"
SUMMARY_LOCK = "summary.lock"


def train_all(config: Config, group: Group) -> None:
    """Train once for each of ``config.seeds`` that has no result yet.

    Raises ``UserError`` for what the device, the number of processes or the images do not allow.
    """
    _check_processes(config, group)
    on_cpu = group.device.type == "cpu"
    if on_cpu:
        keep_freed_memory()
    else:
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
    images = _read_images(config, group)
    if on_cpu:
        load_operator()  # after what may be wrong with the images: it may take half a minute
    identity = identity_of(config, images)
    _check_other_seeds(config, identity)

    for seed in config.seeds:
        folder = config.folder() / f"seed{seed}"
        result = _train_seed(config, seed, images, identity, group, folder)
        if group.first:
            _print_result(seed, result, folder / RESULT)
    if group.first:
        summarise(config, identity)


def _check_processes(config: Config, group: Group) -> None:
    """Raise ``UserError`` for settings that the device or the processes do not allow."""
    if config.amp == "fp16" and group.device.type != "cuda":
        raise UserError("--amp fp16 needs a GPU: expected bf16 or off on a CPU")
    if config.batch_size % group.world:
        raise UserError(
            f"--batch-size {config.batch_size}: expected a multiple of the {group.world} processes"
        )


def _read_images(config: Config, group: Group) -> ImageSet:
    """Return the images, on the device.

    The first process downloads and decodes them; then the others read its cache. Raises
    ``UserError`` for fewer training images than a batch has.
    """
    if group.first:
        print_line(f"reading {config.data}")
    else:
        group.wait()  # for the first process
    images = load(config)
    if group.first:
        group.wait()

    images = images.to(group.device)
    count = len(images.train_labels)
    if config.batch_size > count:
        raise UserError(
            f"--batch-size {config.batch_size}: expected at most the {count} training images"
        )
    return images


def _train_seed(
    config: Config,
    seed: int,
    images: ImageSet,
    identity: dict[str, Any],
    group: Group,
    folder: Path,
) -> dict[str, Any]:
    """Return the result of ``seed``; train first unless ``folder`` has it already.

    Raises ``UserError`` if another process is training in ``folder``.
    """
    result = read_result(folder / RESULT, config, {"seed": seed, **identity})
    if group.least(int(result is not None)):
        return result

    lock: Any = locked(folder) if group.first else contextlib.nullcontext(True)
    with lock as holder:  # None if another process has the lock
        if not group.least(int(holder is not None)):
            raise UserError(
                f"another process is training in {folder}: wait, or choose another --output"
            )
        return Run(config, seed, images, identity, group, folder).run()


def _check_other_seeds(config: Config, identity: dict[str, Any]) -> None:
    """Raise ``UserError`` if a seed in the folder has its result from other settings or images.

    The summary is of all seeds there.
    """
    for path in config.folder().glob(f"seed*/{RESULT}"):
        read_result(path, config, identity)


def _print_result(seed: int, result: dict[str, Any], path: Path) -> None:
    line = (
        f"seed {seed}: error {result['error']:.2f} % "
        f"(best {result['best_error']:.2f} % in epoch {result['best_epoch']})"
    )
    if "valid_error" in result:
        line += f", validation error {result['valid_error']:.2f} %"
    print_line(f"{line}  ({path})")


def read_result(path: Path, config: Config, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result in ``path``, None if there is none.

    Raises ``UserError`` for the result of another run.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text("utf-8"))
        check_same(path, result, config, identity)
        return result
    except UserError:
        raise
    except (ValueError, AttributeError, KeyError, TypeError):  # no JSON, or another file's
        raise UserError(
            f"{path} is not a result of train_cifar.py; remove it, or choose another --output"
        ) from None


def summarise(config: Config, identity: dict[str, Any]) -> None:
    """Write, and print, mean and standard deviation of the errors of all seeds in the folder."""
    # another seed's process may end at the same time
    with locked(config.folder(), SUMMARY_LOCK, wait=True):
        _summarise(config, identity)


def _summarise(config: Config, identity: dict[str, Any]) -> None:
    results = _all_results(config, identity)
    errors = [result["error"] for result in results]
    mean = statistics.mean(errors)
    deviation = statistics.stdev(errors) if len(errors) > 1 else None

    summary: dict[str, Any] = {
        "seeds": [result["seed"] for result in results],
        "errors": errors,
        "mean": mean,
        "standard_deviation": deviation,
    }
    if config.valid_images:
        valid_errors = [result["valid_error"] for result in results]
        summary["valid_errors"] = valid_errors
        summary["valid_mean"] = statistics.mean(valid_errors)
    write_json(config.folder() / SUMMARY, summary)

    if deviation is not None:
        print_line(
            f"error of {len(errors)} seeds: {mean:.2f} ± {deviation:.2f} % "
            "(mean ± standard deviation)"
        )


def _all_results(config: Config, identity: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of this run in its folder, ordered by seed."""
    paths = sorted(
        config.folder().glob(f"seed*/{RESULT}"),
        key=lambda path: (len(str(path)), path),  # seed2 before seed10
    )
    results = []
    for path in paths:
        result = read_result(path, config, identity)
        if result is not None:
            results.append(result)
    return results
