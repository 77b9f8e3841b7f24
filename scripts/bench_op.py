#!/usr/bin/env python3
"""Forward and backward time of the recursive skip's operator beside torch's operators, torch.compile and x + F alone.

The contenders take turns in every round, in a new random order; a time is the median over rounds, a ratio the median of
the rounds' ratios, since a machine's speed drifts. "eager" is what a skip connection runs with RSKIP_OPS=reference:
an addition and a layer norm per step, later additions in place. "compiled" is the same under torch.compile with
dynamic shapes. With one thread times are the process's CPU time, which a busy machine hardly changes.
"""

import csv
import io
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.ops import in_use, skip_norm
from fairseq_rskip.tools.console import Parser, whole_number

OUTPUT = Path(__file__).resolve().parent.parent / "results" / "op_speed.csv"
SHAPES = ((12, 256), (2048, 256), (4096, 512), (131072, 16), (32768, 32), (8192, 64))
STEPS = (1, 2, 3)
CONTENDERS = ("eager", "compiled", "operator")


def eager(x, f_x, gains, biases):
    """Eq. 4 as the skip connection computes it without the operator."""
    y = torch.add(x, f_x)
    for step, (gain, bias) in enumerate(zip(gains, biases)):
        if step > 0:
            y = y.add_(x)
        y = torch.layer_norm(y, x.shape[-1:], gain, bias, 1e-5)
    return y


def main() -> int:
    """Measure, print a line per shape and λ, and write the CSV."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=whole_number(1), default=15, help="default 15")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--threads", type=whole_number(1), default=torch.get_num_threads(), help="default torch's")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="CSV; default results/op_speed.csv")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    backend = in_use()
    if backend.name != "cpu":
        raise UserError(f"the CPU operator is not in use: {backend.reason}")
    functions = {"eager": eager, "operator": skip_norm}
    if not args.no_compile:
        functions["compiled"] = torch.compile(eager, dynamic=True)
    rows = []
    for shape in SHAPES:
        for row in measure(shape, functions, args.rounds):
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            rows.append({**row, **machine()})
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(args.output, text.getvalue())
    return 0


def measure(shape, functions, rounds):
    """A row for each number of steps: milliseconds of each contender and of x + F, and ratios to the operator."""
    x, f_x = (torch.randn(shape, requires_grad=True) for _ in range(2))
    upstream = torch.randn(shape)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats = max(1, 200_000 // (shape[0] * shape[1]))
    jobs = {("bare", 0): (lambda: x + f_x, (x, f_x))}
    for steps in STEPS:
        gains = [torch.ones(shape[1], requires_grad=True) for _ in range(steps)]
        biases = [torch.zeros(shape[1], requires_grad=True) for _ in range(steps)]
        for name, function in functions.items():
            call = lambda function=function, gains=gains, biases=biases: function(x, f_x, gains, biases)  # noqa: E731
            jobs[name, steps] = (call, (x, f_x, *gains, *biases))
    times = {job: [] for job in jobs}
    for turn in range(rounds + 2):  # the first two warm up
        for job in random.sample(list(jobs), len(jobs)):
            call, leaves = jobs[job]
            start = clock()
            for _ in range(repeats):
                torch.autograd.grad(call(), leaves, upstream)
            if turn >= 2:
                times[job].append((clock() - start) / repeats * 1e3)
    median = {job: statistics.median(values) for job, values in times.items()}
    for steps in STEPS:
        row = {"rows": shape[0], "features": shape[1], "lambda": steps}
        row.update({f"{name}_ms": f"{median[name, steps]:.3f}" for name in CONTENDERS if name in functions})
        row["bare_ms"] = f"{median['bare', 0]:.3f}"
        for name in CONTENDERS[:2]:
            if name in functions:
                row[f"{name}_over_operator"] = f"{ratio(times[name, steps], times['operator', steps]):.2f}"
        row["operator_over_lambda1"] = f"{ratio(times['operator', steps], times['operator', 1]):.2f}"
        yield {**row, "rounds": rounds}


def ratio(first, second):
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(first, second))


def machine():
    """What a figure depends on beside the code."""
    return {
        "device": f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if torch.get_num_threads() == 1 else "wall",
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(exit_status(main))
