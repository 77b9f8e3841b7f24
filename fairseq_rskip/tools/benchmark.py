"""One way to measure speed: contenders take turns in every round, and a row of the table is a median over the rounds.

A machine's speed drifts, so contenders that are compared run within seconds of each other, in a new random order in
every round, and what is reported beside a median is the median of the rounds' ratios.
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..analysis.figures import write_csv
from ..console import Parser, print_line, whole_number
from ..errors import UserError

RESULTS = Path("results")
Name = TypeVar("Name", bound=Hashable)
Row = dict[str, Any]


class Rates(NamedTuple):
    """What a contender did per second of the clock and of processor time (all threads), one value a round."""

    clock: list[float]
    cpu: list[float]


def measure(
    contenders: Mapping[Name, Callable[[Any], float]],
    rounds: int,
    work: Callable[[int], Any],
    device: torch.device | None = None,
) -> dict[Name, Rates]:
    """The rates of every contender, in ``rounds`` rounds after one that warms up.

    Args:
        contenders: name -> what does the work it is given, and returns how much that was, in tokens or images. One with
            a method ``prepare()`` has it called before each of its turns, outside the clock.
        rounds: at least 1.
        work: the work of a round, by its number from 0 (-1 warms up); the same for all contenders.
        device: a GPU that has to have finished before the clock is read.
    """
    rates: dict[Name, Rates] = {name: Rates([], []) for name in contenders}
    for turn in range(-1, rounds):
        todo = work(turn)
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            contender = contenders[name]
            getattr(contender, "prepare", lambda: None)()
            synchronise(device)
            start = time.perf_counter(), time.process_time()
            amount = contender(todo)
            synchronise(device)
            end = time.perf_counter(), time.process_time()
            if turn >= 0:
                for values, begun, done in zip(rates[name], start, end):
                    values.append(amount / (done - begun))
        print_line(f"round {turn + 1} of {rounds} done", "stderr")
    return rates


def synchronise(device: torch.device | None = None) -> None:
    """Wait for a GPU, if ``device`` (or without one the machine) is one."""
    if device.type == "cuda" if device is not None else torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the rounds' ratios to what ``reference`` did in the same round."""
    return statistics.median(value / other for value, other in zip(values, reference))


def machine(device: torch.device | None = None) -> Row:
    """What a speed depends on, and the versions of what computes."""
    cuda = device.type == "cuda" if device is not None else torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def parser(description: str, rounds: int, output: str) -> Parser:
    """The command line of a benchmark: ``--rounds``, and ``--output`` in the project's results."""
    made = Parser(description=description)
    add_count(made, "--rounds", rounds, "interleaved rounds")
    made.add_argument("--output", type=Path, default=RESULTS / output, metavar="CSV", help="(default: %(default)s)")
    return made


def add_count(to: argparse.ArgumentParser, option: str, default: int, text: str, least: int = 1) -> None:
    to.add_argument(
        option, type=whole_number(least), default=default, metavar="N", help=f"{text} (default: %(default)s)"
    )


def check_output(path: Path) -> None:
    """Make the folder of ``path`` before anything is measured in vain."""
    path.parent.mkdir(parents=True, exist_ok=True)


def report(rows: Sequence[Row], settings: Row, path: Path, kept: Sequence[Row] = ()) -> None:
    """Print ``rows``; write them, each with ``settings``, and those ``kept`` of an earlier table to ``path``.

    Raises ``UserError`` for an earlier table of other columns.
    """
    table: list[Row] = [{**row, **settings} for row in rows]
    if kept and list(kept[0]) != list(table[0]):
        raise UserError(f"{path} has other columns than this version writes: choose another --output")
    for row in rows:
        print_line("  ".join(f"{key}={value}" for key, value in row.items()))
    write_csv(path, [*kept, *table])
    print_line(f"written to {path}")
