"""Time of the recursive skip as one operator beside torch's operators: an addition and a layer norm for each step.

On a CPU the builds for x86-64-v2, v3 and v4 that the processor can run are measured one after the other, each in a
process of its own in which torch uses the same instructions. On a GPU torch.compile and, where it is installed,
Liger-Kernel's LayerNorm take part, and GB/s counts the least traffic there is: x, F, y, and in training three gradients
and x and F once more.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import torch

from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import keep_freed_memory
from fairseq_rskip.ops import in_use, skip_norm

from . import harness

TRAINING = {
    "cpu": ((2048, 256), (4096, 512), (131072, 16), (8192, 64)),
    "cuda": ((16384, 512), (65536, 512), (16384, 1024), (131072, 16)),
}
DECODING = {"cpu": (12, 256), "cuda": (12, 512)}
QUICK = (64, 16)
STEPS = (2, 3, 8)
ELEMENTS = {"cpu": 200_000, "cuda": 200_000_000}  # of a turn, at least: a small shape is computed several times
CAPABILITIES = {"x86-64-v2": "default", "x86-64-v3": "avx2", "x86-64-v4": "avx512"}  # torch's name of each level
CAN_RUN = {"DEFAULT": 1, "AVX2": 2, "AVX512": 3}  # how many of them
BUILDS = "every level of x86-64 that runs here, or one build for this machine (or $RSKIP_MARCH) (default: every)"


def eager(x, f_x, gains, biases):
    """Eq. 4 as a skip connection computes it without the operator."""
    y = torch.add(x, f_x)
    for step, (gain, bias) in enumerate(zip(gains, biases)):
        if step > 0:
            y = y.add_(x)
        y = torch.layer_norm(y, x.shape[-1:], gain, bias, 1e-5)
    return y


def functions(device: str) -> dict[str, Callable[..., Any]]:
    """What is compared: torch's operators first, then ours."""
    found = {"torch": eager, "operator": skip_norm}
    if device == "cuda":
        found["compiled"] = torch.compile(eager, dynamic=True)
        try:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction as norm
        except ImportError:
            return found

        def liger(x, f_x, gains, biases):
            y = f_x
            for gain, bias in zip(gains, biases):
                y = norm.apply(x + y, gain, bias, 1e-5)
            return y

        found["liger"] = liger
    return found


def contender(function: Callable[..., Any], leaves: list[Any], steps: int, training: bool) -> Callable[[int], int]:
    """``function`` over ``leaves``, x and F first, as often as is asked for."""
    x, f_x, *rest = leaves
    upstream = torch.randn_like(x)

    def run(repeats: int) -> int:
        with torch.set_grad_enabled(training):
            for _ in range(repeats):
                y = function(x, f_x, rest[:steps], rest[steps:])
                if training:
                    torch.autograd.grad(y, leaves, upstream)
        return repeats

    return run


def row(shape: tuple[int, int], steps: int, training: bool, args: Any) -> harness.Row:
    """Microseconds of each contender, and the others' time over the operator's."""
    sizes = [shape] * 2 + [shape[1:]] * 2 * steps
    dtype = harness.DTYPES[args.dtype]
    leaves = [torch.randn(size, device=args.device, dtype=dtype).requires_grad_() for size in sizes]
    runs = {name: contender(f, leaves, steps, training) for name, f in functions(args.device).items()}
    elements = math.prod(shape)
    repeats = 1 if args.quick else max(1, ELEMENTS[args.device] // (elements * steps))
    rates = harness.measure(runs, args, lambda _: repeats)
    made = {"rows": shape[0], "features": shape[1], "lambda": steps, "pass": "training" if training else "decoding"}
    made |= {f"{name}_us": round(1e6 / statistics.median(rates[name]), 1) for name in rates}
    others = [name for name in rates if name != "operator"]
    made |= {f"{name}_over_operator": harness.ratio(rates["operator"], rates[name]) for name in others}
    traffic = elements * dtype.itemsize * (8 if training else 3)
    return {**made, "operator_GB_per_s": round(traffic * statistics.median(rates["operator"]) / 1e9, 2)}


def every_build(args: Any) -> list[harness.Row]:
    """The rows of each level of x86-64 that this processor can run, each from a process of its own."""
    found: list[harness.Row] = []
    for level in list(CAPABILITIES)[: CAN_RUN[torch.backends.cpu.get_cpu_capability()]]:
        environment = {**os.environ, "RSKIP_MARCH": level, "ATEN_CPU_CAPABILITY": CAPABILITIES[level]}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "part.csv"
            given = ["--rounds", str(args.rounds), "--threads", str(args.threads), "--dtype", args.dtype]
            given += ["--builds", "one", "--csv", str(path)] + ["--quick"] * args.quick
            if subprocess.run([sys.executable, "-m", "benchmarks.operator", *given], env=environment).returncode != 0:
                raise UserError(f"the benchmark of {level} failed; its message is above")
            found += pandas.read_csv(path, dtype=str).to_dict("records")
    return found


def table(args: Any) -> list[harness.Row]:
    if args.builds == "every" and args.device == "cpu" and torch.backends.cpu.get_cpu_capability() in CAN_RUN:
        return every_build(args)
    keep_freed_memory()
    backend = in_use(args.device)
    if backend.name != args.device:
        raise UserError(f"the {args.device} operator is not in use: {backend.reason}")
    shapes, steps = ((QUICK,), (2,)) if args.quick else (TRAINING[args.device], STEPS)
    training = {k: [row(shape, k, True, args) for shape in shapes] for k in steps}
    for k, rows in training.items():
        ratios = [r["torch_over_operator"] for r in rows]
        print(f"lambda={k}: {statistics.geometric_mean(ratios):.2f} times torch, least {min(ratios):.2f}")
    return sum(training.values(), [row(DECODING[args.device], k, False, args) for k in steps[:2]])


def main(argv: Sequence[str] | None = None) -> int:
    builds = {"choices": ("every", "one"), "default": "every", "help": BUILDS}
    return harness.main(argv, table, "op_speed.csv", 15, __doc__, builds=builds)


if __name__ == "__main__":
    sys.exit(main())
