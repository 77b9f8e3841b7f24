"""Measure the cost of a skip connection in a Transformer, beside fairseq's `transformer`.

Words per second of fairseq's own Trainer (forward, backward, clipping, Adam), the most memory that
the process has held by then, sentences per second of beam-4 search in which every hypothesis has
the same length, and the memory that a forward pass keeps for its backward pass. A contender is
stock or RULE[:VALUE], for example xskip_ln:2 or askip_ln:halting; the others are compared with the
first. Each runs in a process of its own (benchmarks/contender.py); NAME=VALUE before a contender
sets a variable of its environment, for example 'RSKIP_OPS=torch rskip_ln:2'.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
from argparse import Namespace

from fairseq_rskip.errors import UserError

from . import harness
from .contender import SIZES

CONTENDERS = ["stock", *(f"rskip_ln:{k}" for k in (1, 2, 3))]
UNITS = {"training": "words", "beam_search": "sentences"}


def start(name: str, args: Namespace) -> subprocess.Popen:
    """The process of one contender, which answers questions on its standard input."""
    *settings, model = name.split()
    environment = dict(os.environ)
    for setting in settings:
        variable, _, value = setting.partition("=")
        environment[variable] = value

    about = {"name": model, "size": args.size, "device": args.device, "dtype": args.dtype}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.contender", json.dumps(about)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(name: str, process: subprocess.Popen, question: str) -> float:
    """The answer of a contender's process. Raises ``UserError`` if the process has ended."""
    with contextlib.suppress(BrokenPipeError):
        print(question, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise UserError(f"the process of the contender {name!r} ended; its message is above")
    return float(answer)


def table(args: Namespace) -> list[harness.Row]:
    if args.quick:
        args.size = "quick"
    elif args.size is None:
        args.size = "base" if args.device == "cuda" else "tiny"

    with contextlib.ExitStack() as stack:
        processes = {}
        for name in args.contenders:
            processes[name] = stack.enter_context(start(name, args))
        return measure(processes, args)


def measure(processes: dict[str, subprocess.Popen], args: Namespace) -> list[harness.Row]:
    """A row for each contender, whose processes take turns."""
    asks = {name: functools.partial(ask, name, process) for name, process in processes.items()}
    base = args.contenders[0]
    tokens = SIZES[args.size][-1]
    rows = {name: {"model": name, "size": args.size, "tokens": tokens} for name in processes}
    for work in args.work:
        turns = {name: functools.partial(answer, work) for name, answer in asks.items()}
        rates = harness.take_turns(turns, args.rounds)
        speeds = harness.medians(rates, base, f"{UNITS[work]}_per_s", f"{work}_over_{base}")
        for name, answer in asks.items():
            rows[name].update(speeds[name])
            if work == "training":
                rows[name]["peak_MB"] = answer("peak_MB")

    for name, answer in asks.items():
        rows[name]["saved_MB"] = answer("saved_MB")
    return list(rows.values())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contenders", nargs="+", default=CONTENDERS, metavar="NAME", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--size", choices=SIZES, help="size of the models (default: tiny, on a GPU base)"
    )
    parser.add_argument(
        "--work", nargs="+", choices=UNITS, default=list(UNITS), help="(default: %(default)s)"
    )


main = functools.partial(harness.main, table, "train_overhead.csv", 9, __doc__, add_options)

if __name__ == "__main__":
    raise SystemExit(main())
