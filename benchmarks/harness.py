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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Row = dict[str, Any]
Rates = dict[str, list[float]]


def main(
    argv: Sequence[str] | None, table: Callable[[Any], list[Row]], output: str, rounds: int, about: str, **options: Any
) -> int:
    """A benchmark's command line: write the rows of ``table`` with :func:`machine`; returns the exit status.

    ``options`` has those of this benchmark: what ``add_argument`` takes, or the default of a number.
    """
    parser = Parser(description=about)
    count = {"type": whole_number(1), "metavar": "N"}
    file = {"type": Path, "metavar": "FILE", "default": Path("results") / output}
    options = {"device": {"choices": ("cpu", "cuda"), "default": "cpu"}, "rounds": rounds, "threads": 1, **options}
    for name, option in {"dtype": {"choices": DTYPES, "default": "fp32"}, "csv": file, **options}.items():
        option = option if isinstance(option, dict) else {**count, "default": option}
        parser.add_argument(f"--{name}", **{"help": "(default: %(default)s)", **option})
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to try whether it runs")
    return exit_status(lambda: _run(parser.parse_args(argv), table))


def _run(args: argparse.Namespace, table: Callable[[Any], list[Row]]) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; expected cpu")
    if args.device == "cpu" and args.dtype == "fp16":
        raise UserError("--dtype fp16 is for --device cuda: expected fp32 or bf16")
    args.rounds = min(args.rounds, 2) if args.quick else args.rounds
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    rows = table(args)
    if "march" not in rows[0]:  # otherwise another process has printed them
        print_line(pandas.DataFrame(rows).to_string(index=False))
        rows = [{**row, **machine(args)} for row in rows]
    write(args.csv, rows)


def measure(contenders: Mapping[str, Callable[[Any], float]], args: Any, work: Callable[[int], Any]) -> Rates:
    """Return what each contender did per second, a value for each of ``args.rounds`` rounds after one that warms up.

    Args:
        contenders: name -> a function that does the work it is given and returns how much that was.
        work: the work of a round, by its number from 0 (-1 warms up); the same for all contenders.
    """
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
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


def machine(args: argparse.Namespace) -> Row:
    """What a speed depends on, and the versions of what computes; of a GPU its compute capability and Triton."""
    if args.device == "cuda":
        device, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
        more, clock = {"triton": getattr(sys.modules.get("triton"), "__version__", "")}, "wall"
    else:
        device, capability, more = processor(), torch.backends.cpu.get_cpu_capability(), {}  # of torch's operators
        clock = "processor time" if args.threads == 1 else "wall"
    made = {"device": device, "dtype": args.dtype, "capability": capability}
    made |= {"march": os.environ.get("RSKIP_MARCH", "native"), "threads": args.threads, "clock": clock}
    versions = {"python": platform.python_version(), "torch": torch.__version__, **more}
    return {**made, "rounds": args.rounds, **versions}


def processor() -> str:
    """The processor's name, family and model, as Linux has them."""
    file = Path("/proc/cpuinfo")
    known = dict(re.findall(r"^(.+?)\s*: (.*)$", file.read_text("utf-8"), re.M)) if file.exists() else {}
    name = known.get("model name", platform.machine())
    return f"{name} family {known['cpu family']} model {known['model']}" if "cpu family" in known else name


def write(path: Path, rows: Sequence[Row]) -> None:
    """``rows`` as a CSV file; what a row lacks is an empty cell."""
    pandas.DataFrame(rows, dtype=object).to_csv(path, index=False)
    print_line(f"written to {path}")
