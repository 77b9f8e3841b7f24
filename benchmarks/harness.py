"""Measure speed: contenders take turns in every round, and a table's row is the median over the rounds.

The speed of a machine drifts, so contenders that are compared run within seconds of each other, in a new random order
in every round. A ratio is the median of the rounds' ratios. On a CPU one thread computes, and the clock is the
processor time of this process, which a busy machine changes little; on a GPU it is wall time.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.machine import surroundings

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Row = dict[str, Any]
Rates = dict[str, list[float]]


def main(table: Callable[[Any], list[Row]], output: str, rounds: int, about: str, argv: Any = None, **own: Any) -> int:
    """A benchmark's command line: print and write the rows of ``table``; returns the exit status.

    ``own`` has the benchmark's own options: name -> what ``add_argument`` takes.
    """
    parser = Parser(description=about)
    options = {
        "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
        "dtype": {"choices": DTYPES, "default": "fp32"},
    }
    options["rounds"] = {"type": whole_number(1), "default": rounds, "metavar": "N"}
    options["csv"] = {"type": Path, "default": Path("results") / output, "metavar": "FILE"}
    for name, option in {**options, **own}.items():
        parser.add_argument(f"--{name}", **{"help": "(default: %(default)s)", **option})
    parser.add_argument("--quick", action="store_true", help="small sizes, to try whether it runs")
    args = parser.parse_args(argv)
    return exit_status(lambda: write(args.csv, run(table, args)))


def run(table: Callable[[Any], list[Row]], args: argparse.Namespace) -> list[Row]:
    """The rows of ``table`` with :func:`machine`, which those have already that another process measured."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; expected cpu")
    if args.device == "cpu" and args.dtype == "fp16":
        raise UserError("--dtype fp16 is for --device cuda: expected fp32 or bf16")
    torch.set_num_threads(1)
    rows, about = table(args), {**machine(args.device), "dtype": args.dtype, "rounds": args.rounds}
    print_line(pandas.DataFrame(rows).to_string(index=False))
    return [{**row, **about, **row} for row in rows]


def measure(contenders: Mapping[str, Callable[[Any], float]], args: Any, work: Callable[[int], Any]) -> Rates:
    """Return what each contender did per second, a value for each of ``args.rounds`` rounds after one that warms up.

    Args:
        contenders: name -> a function that does the work it is given and returns how much that was.
        work: the work of a round, by its number from 0 (-1 warms up); the same for all contenders.
    """
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    finish = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    rates: Rates = {name: [] for name in contenders}
    for turn in range(-1, args.rounds):
        todo = work(turn)
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            finish()
            start = clock()
            amount = contenders[name](todo)
            finish()
            if turn >= 0:
                rates[name].append(amount / (clock() - start))
    return rates


def ratio(rates: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(rates, reference)), 3)


def machine(device: str) -> Row:
    """The versions of what computes, and the card, or the processor with torch's and the operator's instructions."""
    made = {name: value for about in surroundings(torch.device(device), 1).values() for name, value in about.items()}
    if device == "cuda":
        return {**made, "clock": "wall"}
    march, capability = os.environ.get("RSKIP_MARCH", "native"), torch.backends.cpu.get_cpu_capability()
    return {**made, "march": march, "capability": capability, "clock": "processor time"}


def write(path: Path, rows: Sequence[Row]) -> None:
    """``rows`` as a CSV file; what a row lacks is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows, dtype=object).to_csv(path, index=False)
    print_line(f"written to {path}")
