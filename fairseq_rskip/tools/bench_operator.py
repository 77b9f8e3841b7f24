"""Forward and backward time of the recursive skip's operator beside torch's operators, torch.compile and x + F alone.

"eager" is what a skip connection runs with RSKIP_OPS=reference: an addition and a layer norm per step, later additions
in place. "compiled" is the same under torch.compile with dynamic shapes. Contenders take turns (benchmark.py). The
process keeps freed memory, as train_cifar.py does: otherwise up to half of a time are page faults, whose number is the
allocator's luck. With one thread times are the process's CPU time, which a busy machine changes less.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..console import whole_number
from ..errors import UserError, exit_status
from ..ops import in_use, skip_norm
from ..vision.main import keep_freed_memory
from . import benchmark

SHAPES = ((12, 256), (2048, 256), (4096, 512), (131072, 16), (32768, 32), (8192, 64))
STEPS = (1, 2, 3)
ELEMENTS = 200_000  # of a turn, at least: a small shape is computed several times


def eager(x, f_x, gains, biases):
    """Eq. 4 as the skip connection computes it without the operator."""
    y = torch.add(x, f_x)
    for step, (gain, bias) in enumerate(zip(gains, biases)):
        if step > 0:
            y = y.add_(x)
        y = torch.layer_norm(y, x.shape[-1:], gain, bias, 1e-5)
    return y


class Contender:
    """Forward and backward of ``function`` over ``leaves``, x and F first."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], upstream: Any, steps: int):
        self.function, self.leaves, self.upstream, self.steps = function, leaves, upstream, steps

    def __call__(self, repeats: int) -> int:
        x, f_x, *rest = self.leaves
        for _ in range(repeats):
            y = self.function(x, f_x, rest[: self.steps], rest[self.steps :])
            torch.autograd.grad(y, self.leaves, self.upstream)
        return repeats


def contenders(shape: tuple[int, int], functions: dict[str, Callable]) -> dict[tuple[str, int], Contender]:
    """Each function with each number of steps, and the bare addition with 0."""
    x, f_x = (torch.randn(shape, requires_grad=True) for _ in range(2))
    upstream = torch.randn(shape)
    made = {("bare", 0): Contender(lambda x, f_x, *_: x + f_x, [x, f_x], upstream, 0)}
    for steps in STEPS:
        parameters = [torch.ones(shape[1], requires_grad=True) for _ in range(steps)]
        parameters += [torch.zeros(shape[1], requires_grad=True) for _ in range(steps)]
        for name, function in functions.items():
            made[name, steps] = Contender(function, [x, f_x, *parameters], upstream, steps)
    return made


def rows(shape: tuple[int, int], functions: dict[str, Callable], args: argparse.Namespace) -> Iterator[benchmark.Row]:
    """A row for each number of steps: milliseconds of each contender and of x + F, and ratios to the operator."""
    repeats = max(1, ELEMENTS // (shape[0] * shape[1]))
    found = benchmark.measure(contenders(shape, functions), args.rounds, lambda _: repeats)
    rates = {name: rate.cpu if args.threads == 1 else rate.clock for name, rate in found.items()}
    for steps in STEPS:
        operator = rates["operator", steps]
        row: benchmark.Row = {"rows": shape[0], "features": shape[1], "lambda": steps}
        for name in functions:
            row[f"{name}_ms"] = round(1e3 / statistics.median(rates[name, steps]), 3)
        row["bare_ms"] = round(1e3 / statistics.median(rates["bare", 0]), 3)
        for name in functions:
            if name != "operator":
                row[f"{name}_over_operator"] = round(benchmark.ratio(operator, rates[name, steps]), 2)
        yield {**row, "operator_over_lambda1": round(benchmark.ratio(rates["operator", 1], operator), 2)}


def bench(argv: Sequence[str] | None) -> None:
    parser = benchmark.parser(__doc__, 15, "op_speed.csv")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--threads", type=whole_number(1), default=torch.get_num_threads(), help="(default: torch's)")
    args = parser.parse_args(argv)
    benchmark.check_output(args.output)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    backend = in_use()
    if backend.name != "cpu":
        raise UserError(f"the CPU operator is not in use: {backend.reason}")
    functions = {"eager": eager, "compiled": torch.compile(eager, dynamic=True), "operator": skip_norm}
    if args.no_compile:
        del functions["compiled"]
    found = [row for shape in SHAPES for row in rows(shape, functions, args)]
    settings = {"rounds": args.rounds, "clock": "CPU time" if args.threads == 1 else "wall", **benchmark.machine()}
    benchmark.report(found, settings, args.output)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))
