"""Time of the recursive skip as one operator, and as torch's addition and layer norm per step.

On a CPU the builds for x86-64-v2, v3 and v4 that the processor can run are measured one after the
other, each in a process of its own in which torch uses the same instructions; with $RSKIP_MARCH or
--quick one build. On a GPU torch.compile and, where it is installed, Liger-Kernel's LayerNorm take
part. GB/s counts the least traffic there is: x, F, y, and in training three gradients and x and F
once more. On a CPU the yardstick is a triad, z = x + a·y, of the same shape: it takes turns with
the others, moves three tensors, and writes into memory that it keeps.
"""

import functools
import importlib.util
import math
import os
import platform
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas
import torch

from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import keep_freed_memory
from fairseq_rskip.ops import in_use, should_fuse, skip_norm

from . import harness

TRAINING = {
    "cpu": ((2048, 256), (4096, 512), (131072, 16), (8192, 64)),
    "cuda": ((16384, 512), (65536, 512), (16384, 1024), (131072, 16)),
}
DECODING = {"cpu": (12, 256), "cuda": (12, 512)}
ELEMENTS = {
    "cpu": 200_000,
    "cuda": 200_000_000,
}  # of a turn, at least: a small shape is computed several times,
MOST_REPEATS = 1000  # but not more often than this: decoding's shape would take minutes on a GPU
LEVELS = {"DEFAULT": "x86-64-v2", "AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}  # by torch's name


def liger(x, f_x, gains, biases):
    """Eq. 4 with Liger-Kernel's layer norm, on a GPU."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    y = f_x
    for gain, bias in zip(gains, biases):
        y = LigerLayerNormFunction.apply(x + y, gain, bias, 1e-5)
    return y


def eager(x, f_x, gains, biases):
    """Eq. 4 as a skip connection computes it without the operator."""
    y = torch.add(x, f_x)
    for step, (gain, bias) in enumerate(zip(gains, biases)):
        if step > 0:
            y = y.add_(x)
        y = torch.layer_norm(y, x.shape[-1:], gain, bias, 1e-5)
    return y


def fused(x, f_x, gains, biases):
    """Eq. 4 as a skip connection computes it: by the operator, where that takes so many steps."""
    if should_fuse(x, f_x, x.size(-1), len(gains)):
        return skip_norm(x, f_x, gains, biases)
    return eager(x, f_x, gains, biases)


def row(shape: tuple[int, int], steps: int, training: bool, args: Any) -> harness.Row:
    """Microseconds of each contender, and the others' time over the operator's."""
    elements = math.prod(shape)
    repeats = min(MOST_REPEATS, max(1, ELEMENTS[args.device] // (elements * steps)))
    runs = contenders(shape, steps, training, args)
    rates = harness.measure(runs, args, 1 if args.quick else repeats)
    cells = {
        "rows": shape[0],
        "features": shape[1],
        "lambda": steps,
        "pass": "training" if training else "decoding",
    }
    for name, rate in rates.median().items():
        cells[f"{name}_us"] = round(1e6 / rate, 1)
    for name in rates:
        if name not in ("operator", "triad"):
            ratio = (rates["operator"] / rates[name]).median()
            cells[f"{name}_over_operator"] = round(ratio, 3)
    return cells | memory_speed(rates, elements * harness.DTYPES[args.dtype].itemsize, training)


def contenders(
    shape: tuple[int, int], steps: int, training: bool, args: Any
) -> dict[str, Callable[[int], int]]:
    """Name -> a function that repeats its computation so often, and returns how often."""
    dtype = harness.DTYPES[args.dtype]

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(size, device=args.device, dtype=dtype).requires_grad_()

    x, f_x = leaf(*shape), leaf(*shape)
    gains = [leaf(shape[1]) for _ in range(steps)]
    biases = [leaf(shape[1]) for _ in range(steps)]
    leaves = [x, f_x, *gains, *biases]
    upstream = torch.randn_like(x)

    def run(function: Callable[..., Any], repeats: int) -> int:
        with torch.set_grad_enabled(training):
            for _ in range(repeats):
                y = function(x, f_x, gains, biases)
                if training:
                    torch.autograd.grad(y, leaves, upstream)
        return repeats

    functions = {"torch": eager, "operator": fused}
    if args.device == "cuda":
        functions["compiled"] = torch.compile(eager, dynamic=True)
        if importlib.util.find_spec("liger_kernel"):
            functions["liger"] = liger
    runs = {name: functools.partial(run, function) for name, function in functions.items()}
    if args.device == "cpu":
        runs["triad"] = functools.partial(triad, x.detach(), f_x.detach())
    return runs


def memory_speed(rates: Any, tensor_bytes: int, training: bool) -> harness.Row:
    """The bytes that the operator reads and writes in a second, beside a triad's on a CPU.

    It reads or writes three tensors of ``tensor_bytes``, in training eight.
    """
    tensors = 8 if training else 3
    speed = tensors * tensor_bytes * rates["operator"] / 1e9
    cells: harness.Row = {"operator_GB_per_s": round(speed.median(), 2)}
    if "triad" in rates:
        triad_speed = 3 * tensor_bytes * rates["triad"] / 1e9
        cells["triad_GB_per_s"] = round(triad_speed.median(), 2)
        cells["operator_over_triad"] = round((speed / triad_speed).median(), 3)
        cells["cache"] = cache_level(tensors * tensor_bytes)
    return cells


def triad(x: torch.Tensor, y: torch.Tensor, repeats: int) -> int:
    """Compute z = x + a·y ``repeats`` times; returns ``repeats``."""
    z = torch.empty_like(x)
    for _ in range(repeats):
        torch.add(x, y, alpha=0.5, out=z)
    return repeats


def cache_level(size: int) -> str:
    """Return the smallest cache of the first core that holds ``size`` bytes, else ``memory``.

    Linux lists the caches; elsewhere the result is "".
    """
    caches = []
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (folder / "type").read_text().strip() == "Instruction":
            continue
        kibibytes = int((folder / "size").read_text().strip().removesuffix("K"))
        caches.append((kibibytes * 1024, "L" + (folder / "level").read_text().strip()))
    if not caches:
        return ""
    for capacity, level in sorted(caches):
        if size <= capacity:
            return level
    return "memory"


def every_build(args: Any) -> list[harness.Row]:
    """The rows of each level of x86-64 that this processor can run, each from another process."""
    rows, own = [], torch.backends.cpu.get_cpu_capability()
    for capability, level in LEVELS.items():
        os.environ.update(RSKIP_MARCH=level, ATEN_CPU_CAPABILITY=capability.lower())
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows += process.submit(harness.run, table, args).result()
        if capability == own:
            break
    return rows


def table(args: Any) -> list[harness.Row]:
    one_build = args.quick or "RSKIP_MARCH" in os.environ
    if not one_build and args.device == "cpu" and platform.machine() == "x86_64":
        return every_build(args)
    keep_freed_memory()
    if args.device == "cuda":  # RSKIP_OPS=auto would choose torch's operators
        os.environ.setdefault("RSKIP_OPS", "cuda")
    backend = in_use(args.device, build=True)
    if backend.name != args.device:
        raise UserError(f"the {args.device} operator is not in use: {backend.reason}")
    if args.quick:
        shapes, steps = ((64, 16),), (2,)
    else:
        shapes, steps = TRAINING[args.device], (2, 3, 8)
    rows = [row(DECODING[args.device], k, False, args) for k in steps[:2]]
    rows += [row(shape, k, True, args) for k in steps for shape in shapes]
    ratios = pandas.DataFrame(rows).groupby(["pass", "lambda"])["torch_over_operator"]
    print(ratios.agg([statistics.geometric_mean, "min"]).to_string())
    return rows


main = functools.partial(harness.main, table, "op_speed.csv", 15, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
