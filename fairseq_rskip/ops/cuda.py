"""The operator in Triton, for CUDA tensors: a program takes a few rows and keeps them in registers
for all steps.

It takes at most four steps, fewer for wide rows; torch's operators compute longer recursions,
mixtures and fp64. Backward recomputes the normalised rows from x, F and the moments. One or two
programs for each multiprocessor sum the gradients of gains and biases over their rows, and torch
sums over programs: the same bits in every run on one card.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operator import empty_results, library, with_derivative

INTERPRETED_PROGRAMS = 3  # several, so that sums over programs are interpreted, too


@triton.jit
def _pick(k: tl.constexpr, a, b, c, d):
    """Select the k-th of four values."""
    return a if k == 0 else b if k == 1 else c if k == 2 else d


@triton.jit
def _set(k: tl.constexpr, value, a, b, c, d):
    """The four values with the k-th replaced."""
    return (
        value if k == 0 else a,
        value if k == 1 else b,
        value if k == 2 else c,
        value if k == 3 else d,
    )


@triton.jit
def _row(parameter, columns, dim):
    """A parameter, read in its own type, as a tile of one row."""
    return tl.load(parameter + columns, columns < dim, 0.0).to(tl.float32)[None, :]


@triton.jit
def _normalised(z, k: tl.constexpr, moments, row, rows, inside, RMS: tl.constexpr):
    """Step k's rows, normalised by the moments that forward has stored, and their scales."""
    if not RMS:
        mean = tl.load(moments + 2 * k * rows + row, row < rows, 0.0)
        z = tl.where(inside, z - mean[:, None], 0.0)
    scale = tl.load(moments + (2 * k + 1) * rows + row, row < rows, 0.0)
    return z * scale[:, None], scale


# Triton compiles again for a number that is 1 or a multiple of 16; batches have any number of rows
@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, f, g1, g2, g3, g4, b1, b2, b3, b4, y, moments, rows, dim, skip, branch, eps,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (columns < dim)[None, :]
    at = row[:, None] * dim + columns[None, :]
    skipped = skip * tl.load(x + at, inside, 0.0).to(tl.float32)
    z = skipped + branch * tl.load(f + at, inside, 0.0).to(tl.float32)
    value = z
    for k in tl.static_range(STEPS):
        n, mean = z, tl.sum(z, 1) / dim
        if not RMS:
            n = tl.where(inside, z - mean[:, None], 0.0)
        square = tl.sum(n * n, 1) / dim
        if not RMS:  # an infinite variance must not give finite values
            square = tl.where(square < float("inf"), square, float("nan"))
        scale = 1.0 / tl.sqrt(square + eps)
        tl.store(moments + 2 * k * rows + row, mean, row < rows)
        tl.store(moments + (2 * k + 1) * rows + row, scale, row < rows)
        value = n * scale[:, None] * _row(_pick(k, g1, g2, g3, g4), columns, dim)
        if BIAS:
            value += _row(_pick(k, b1, b2, b3, b4), columns, dim)
        z = skipped + value
    tl.store(y + at, value, inside)


@triton.jit(do_not_specialize=["rows", "turns"])
def _backward(
    g, x, f, g1, g2, g3, g4, b1, b2, b3, b4, d_x, d_f, d_params, moments,
    rows, dim, turns, skip, branch,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    none = tl.zeros((ROWS, COLUMNS), tl.float32)
    no_row = tl.zeros((ROWS,), tl.float32)
    # this program's sums of the gradients of gains and biases
    dg1, dg2, dg3, dg4 = none, none, none, none
    db1, db2, db3, db4 = none, none, none, none
    for turn in range(turns):
        tile = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < dim)[None, :]
        at = row[:, None] * dim + columns[None, :]
        skipped = skip * tl.load(x + at, inside, 0.0).to(tl.float32)
        z = skipped + branch * tl.load(f + at, inside, 0.0).to(tl.float32)
        # forward again: each step's normalised rows and their scales
        n1, n2, n3, n4 = none, none, none, none
        s1, s2, s3, s4 = no_row, no_row, no_row, no_row
        for k in tl.static_range(STEPS):
            n, scale = _normalised(z, k, moments, row, rows, inside, RMS)
            n1, n2, n3, n4 = _set(k, n, n1, n2, n3, n4)
            s1, s2, s3, s4 = _set(k, scale, s1, s2, s3, s4)
            z = skipped + n * _row(_pick(k, g1, g2, g3, g4), columns, dim)
            if BIAS:
                z += _row(_pick(k, b1, b2, b3, b4), columns, dim)
        # back from the last step: d is the gradient of y_k, then of z_k, which `total` sums
        d = tl.load(g + at, inside, 0.0).to(tl.float32)
        total = none
        for k in tl.static_range(STEPS - 1, -1, -1):
            n = _pick(k, n1, n2, n3, n4)
            scale = _pick(k, s1, s2, s3, s4)
            gain = _row(_pick(k, g1, g2, g3, g4), columns, dim)
            dg1, dg2, dg3, dg4 = _set(k, _pick(k, dg1, dg2, dg3, dg4) + d * n, dg1, dg2, dg3, dg4)
            if BIAS:
                db1, db2, db3, db4 = _set(k, _pick(k, db1, db2, db3, db4) + d, db1, db2, db3, db4)
            t = d * gain
            d = t - n * (tl.sum(t * n, 1) / dim)[:, None]
            if not RMS:
                d -= (tl.sum(t, 1) / dim)[:, None]
            d = tl.where(inside, d * scale[:, None], 0.0)
            total += d
        tl.store(d_x + at, skip * total, inside)
        tl.store(d_f + at, branch * d, inside)
    to = d_params + tl.program_id(0) * STEPS * (2 if BIAS else 1) * dim + columns
    for k in tl.static_range(STEPS):
        tl.store(to + k * dim, tl.sum(_pick(k, dg1, dg2, dg3, dg4), 0), columns < dim)
        if BIAS:
            tl.store(to + (STEPS + k) * dim, tl.sum(_pick(k, db1, db2, db3, db4), 0), columns < dim)


def forward(x, f_x, gains, biases, _weights, _direction, *options) -> tuple[Tensor, Tensor]:
    """:data:`.operator.operator` by the kernel, which has no mixtures."""
    y, moments = empty_results(x, f_x, gains, biases, None, None)
    dim, steps = x.size(-1), len(gains)
    tile, columns, warps = tiling(dim, steps)
    rows = x.numel() // max(dim, 1)
    if rows > 0:
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _forward[(triton.cdiv(rows, tile),)](
                x.contiguous(), f_x.contiguous(), *_four(gains), *_four(biases), y, moments,
                rows, dim, *options[:3],
                steps, options[3], bool(biases), tile, columns, num_warps=warps,
            )  # fmt: skip
    return y, moments


def backward(
    gradient, _d_moments, x, f_x, gains, biases, _weights, _direction, moments, *options
) -> list[Tensor]:
    """The gradients of x, F, each gain and each bias."""
    dim, steps = x.size(-1), len(gains)
    tile, columns, warps = tiling(dim, steps)
    tiles = triton.cdiv(x.numel() // max(dim, 1), tile)
    programs = min(tiles, _multiprocessors(x.device) * max(1, 16 // warps))  # all run at once
    d_x, d_f = x.new_empty(x.shape), f_x.new_empty(f_x.shape)
    d_params = x.new_empty((programs, steps * (2 if biases else 1), dim), dtype=moments.dtype)
    if x.numel() > 0:
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _backward[(programs,)](
                gradient.contiguous(), x.contiguous(), f_x.contiguous(),
                *_four(gains), *_four(biases), d_x, d_f, d_params, moments,
                x.numel() // dim, dim, triton.cdiv(tiles, programs), *options[:2],
                steps, options[3], bool(biases), tile, columns, num_warps=warps,
            )  # fmt: skip
    totals = zip(d_params.sum(0), (*gains, *biases))
    return [d_x, d_f, *(total.to(like.dtype, copy=True) for total, like in totals)]


def _four(parameters):
    """The tensors of up to four steps; a kernel reads each in its own type."""
    return [*(parameter.contiguous() for parameter in parameters), None, None, None, None][:4]


@functools.cache  # torch refuses a second registration
def register(device: str = "CUDA") -> None:
    """Register the kernels as the operator's for ``device``, once in a process.

    On a CPU Triton's interpreter runs them.
    """
    library.impl("recursive_skip", forward, device)
    library.impl("recursive_skip", with_derivative, f"Autograd{device}")
    library.impl("recursive_skip_backward", backward, device)


def load(_build: bool = False) -> str:
    """Register the kernels after one run on a few rows; returns what they are.

    Triton compiles each at its first use.

    Raises what Triton, its C compiler or the card raises.
    """
    x = torch.ones(2, 16, device="cuda")
    gain = torch.ones(16, device="cuda")
    arguments = (x, x, [gain], [gain], None, None)
    options = (1.0, 1.0, 1e-5, False)
    y, moments = forward(*arguments, *options)
    backward(y, None, *arguments, moments, *options)
    torch.cuda.synchronize()
    register()
    return f"Triton {triton.__version__}"


def tiling(dim: int, steps: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps.

    A thread has eight elements for two steps, four for more.
    """
    columns = triton.next_power_of_2(max(dim, 1))
    rows = max(1, 2048 // columns)
    return rows, columns, max(1, rows * columns // (256 if steps <= 2 else 128))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
