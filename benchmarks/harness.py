"""Measure speed: contenders take turns in every round, and a table's row is the median over the rounds.

The speed of a machine drifts, so contenders that are compared run within seconds of each other, in a new random order
in every round. A ratio is the median of the rounds' ratios. On a CPU with one thread the clock is the processor time of
this process, which a busy machine changes little; otherwise it is wall time.
"""

import argparse
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas
import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError

RESULTS = Path("results")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Name = TypeVar("Name", bound=Hashable)
Row = dict[str, Any]


def parser(description: str, output: str, rounds: int) -> Parser:
    """The options that every benchmark has."""
    made = Parser(description=description)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    made.add_argument("--dtype", choices=DTYPES, default="fp32", help="(default: %(default)s)")
    made.add_argument("--csv", type=Path, default=RESULTS / output, metavar="FILE", help="(default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds, to try whether it runs")
    add_count(made, "--rounds", rounds, "interleaved rounds")
    add_count(made, "--threads", 1, "threads of torch")
    return made


def add_count(to: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    kind = whole_number(1)
    to.add_argument(option, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")


def prepare(args: argparse.Namespace) -> None:
    """Refuse what cannot be measured before anything is; set torch's threads."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; expected cpu")
    if args.device == "cpu" and args.dtype == "fp16":
        raise UserError("--dtype fp16 is for --device cuda: expected fp32 or bf16")
    if args.quick:
        args.rounds = min(args.rounds, 2)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)


def measure(
    contenders: Mapping[Name, Callable[[Any], float]],
    args: argparse.Namespace,
    work: Callable[[int], Any],
) -> dict[Name, list[float]]:
    """Return what each contender did per second, a value for each of ``args.rounds`` rounds after one that warms up.

    Args:
        contenders: name -> a function that does the work it is given and returns how much that was.
        work: the work of a round, by its number from 0 (-1 warms up); the same for all contenders.
    """
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    finish = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    rates: dict[Name, list[float]] = {name: [] for name in contenders}
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


def machine(args: argparse.Namespace) -> Row:
    """What a speed depends on, and the versions of what computes; of a GPU its compute capability and Triton."""
    cuda = args.device == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if cuda else ""
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "dtype": args.dtype,
        "capability": capability or torch.backends.cpu.get_cpu_capability(),  # instructions of torch's own operators
        "march": os.environ.get("RSKIP_MARCH", "native"),  # and of the fused operator
        "threads": args.threads,
        "clock": "processor time" if not cuda and args.threads == 1 else "wall",
        "rounds": args.rounds,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"triton": getattr(sys.modules.get("triton"), "__version__", "")} if cuda else {}),
    }


def processor() -> str:
    """The processor's name, family and model, as Linux has them."""
    file = Path("/proc/cpuinfo")
    known = dict(re.findall(r"^(.+?)\s*: (.*)$", file.read_text("utf-8"), re.M)) if file.exists() else {}
    name = known.get("model name", platform.machine())
    return f"{name} family {known['cpu family']} model {known['model']}" if "cpu family" in known else name


def report(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Print the rows; write them with :func:`machine` to ``args.csv``, in place of an earlier table; return these."""
    for row in rows:
        print_line("  ".join(f"{key}={value}" for key, value in row.items()))
    table = [{**row, **machine(args)} for row in rows]
    write(args.csv, table)
    return table


def write(path: Path, rows: Sequence[Row]) -> None:
    """``rows`` as a CSV file; what a row lacks is an empty cell."""
    pandas.DataFrame(rows, dtype=object).to_csv(path, index=False)
    print_line(f"written to {path}")
