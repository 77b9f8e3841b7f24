"""Measure speed: contenders take turns in every round, and a row has the median of all rounds.

The speed of a machine drifts, so contenders that are compared run within seconds of each other, in
a new random order in every round. A ratio is the median of the rounds' ratios. On a CPU one thread
computes, and the clock is the processor time of the process that computes, which a busy machine
changes little; on a GPU it is wall time.
"""

import argparse
import functools
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.machine import surroundings

from .timing import rate

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Row = dict[str, Any]


def main(
    table: Callable,
    output: str,
    rounds: int,
    about: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """A benchmark's command line: print and write the rows of ``table``; return the status."""
    parser = Parser(description=about)
    shown = "(default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=shown)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help=shown)
    parser.add_argument("--rounds", type=whole_number(1), default=rounds, metavar="N", help=shown)
    csv = Path("results") / output
    parser.add_argument("--csv", type=Path, default=csv, metavar="FILE", help=shown)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try whether it runs")
    if add_options:
        add_options(parser)

    def measure() -> None:
        args = parser.parse_args(argv)
        write(args.csv, run(table, args))

    return exit_status(measure)


def run(table: Callable[[Any], list[Row]], args: argparse.Namespace) -> list[Row]:
    """The rows of ``table`` with :func:`machine`, which rows of another process have already."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; expected cpu")
    if args.device == "cpu" and args.dtype == "fp16":
        raise UserError("--dtype fp16 is for --device cuda: expected fp32 or bf16")
    torch.set_num_threads(1)
    rows = table(args)
    about = {**machine(args.device), "dtype": args.dtype, "rounds": args.rounds}
    print_line(pandas.DataFrame(rows).to_string(index=False))

    complete = []
    for row in rows:
        missing = {name: value for name, value in about.items() if name not in row}
        complete.append({**row, **missing})
    return complete


def measure(contenders: dict[str, Callable], args: Any, work: Any) -> pandas.DataFrame:
    """What each contender did per second, in turns (:func:`take_turns`).

    A contender does the ``work``, the same for all and in every round, and returns how much that
    was.
    """
    turns = {}
    for name, contender in contenders.items():
        turns[name] = functools.partial(rate, contender, work, args.device)
    return take_turns(turns, args.rounds)


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> pandas.DataFrame:
    """The results of the contenders, a column each, in ``rounds`` rounds after a warm-up round."""
    answers: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, rounds):
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            answers[name].append(contenders[name]())
    return pandas.DataFrame(answers).drop(0)


def medians(rates: pandas.DataFrame, base: str, rate_name: str, ratio_name: str) -> dict[str, Row]:
    """For each contender the medians of its rates and of their ratios to those of ``base``.

    They are named ``rate_name`` and ``ratio_name``.
    """
    ratios = rates.div(rates[base], axis=0).median().round(3)
    columns = {rate_name: rates.median().round(2), ratio_name: ratios}
    return pandas.DataFrame(columns).to_dict("index")


def machine(device: str) -> Row:
    """The versions, and the card, or the processor with the instructions in use.

    Those are torch's and the operator's.
    """
    made = {
        name: value
        for about in surroundings(torch.device(device), 1).values()
        for name, value in about.items()
    }
    cpu = {
        "march": os.environ.get("RSKIP_MARCH", "native"),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return made | ({"clock": "wall"} if device == "cuda" else {**cpu, "clock": "processor time"})


def write(path: Path, rows: Sequence[Row]) -> None:
    """``rows`` as a CSV file; what a row lacks is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows, dtype=object).to_csv(path, index=False)
    print_line(f"written to {path}")
