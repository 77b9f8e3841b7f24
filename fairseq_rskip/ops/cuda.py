"""The operator in Triton, for CUDA tensors: a program takes a few rows and keeps them in registers for all steps.

A launch does at most four steps, fewer of wide rows; longer recursions are a chain of launches, since y_k takes F's
place in step k + 1. Backward recomputes the normalised rows from x, F and the moments. One or two programs for each
multiprocessor sum the gradients of gains and biases over their rows, and torch sums over programs: the same bits in
every run on one card.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .operator import empty_results, library, with_derivative

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _pick(k: tl.constexpr, a, b, c, d):
    """Step k's of four."""
    return a if k == 0 else b if k == 1 else c if k == 2 else d


@triton.jit
def _set(k: tl.constexpr, value, a, b, c, d):
    """The four with step k's replaced."""
    return value if k == 0 else a, value if k == 1 else b, value if k == 2 else c, value if k == 3 else d


@triton.jit
def _row(parameter, columns, dim, TYPE: tl.constexpr):
    """A parameter as a tile of one row, read in its own type."""
    return tl.load(parameter + columns, columns < dim, 0.0).to(TYPE)[None, :]


@triton.jit
def _normalise(z, inside, dim, eps, RMS: tl.constexpr):
    """Normalised rows of z, (rows, columns), their means and one over their deviations."""
    d, mean = z, tl.sum(z, 1) / dim
    if not RMS:
        d = tl.where(inside, z - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(d * d, 1) / dim + eps)
    return d * scale[:, None], mean, scale


@triton.jit
def _forward(
    x, f, g1, g2, g3, g4, b1, b2, b3, b4, y, weights, direction, kept, rows, dim,
    skip: tl.float64, branch: tl.float64, eps: tl.float64,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr, TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (columns < dim)[None, :]
    at = row[:, None] * dim + columns[None, :]
    skipped = tl.full((1, 1), skip, TYPE) * tl.load(x + at, inside, 0.0).to(TYPE)
    z = skipped + tl.full((1, 1), branch, TYPE) * tl.load(f + at, inside, 0.0).to(TYPE)
    value = z
    mixed = tl.zeros((ROWS, COLUMNS), TYPE)
    going_on = tl.full((ROWS,), 1.0, TYPE)
    for k in tl.static_range(STEPS):
        n, mean, scale = _normalise(z, inside, dim, tl.full((1,), eps, TYPE), RMS)
        if MIX == 0:
            tl.store(kept + 2 * k * rows + row, mean, row < rows)
            tl.store(kept + (2 * k + 1) * rows + row, scale, row < rows)
        value = n * _row(_pick(k, g1, g2, g3, g4), columns, dim, TYPE)
        if BIAS:
            value += _row(_pick(k, b1, b2, b3, b4), columns, dim, TYPE)
        z = skipped + value
        if MIX == 1:
            mixed += tl.load(weights + k).to(TYPE) * value
        if MIX == 2:
            weight = going_on
            if k < STEPS - 1:
                along = tl.sum(value * _row(direction, columns, dim, TYPE), 1)
                halts = 1.0 / (1.0 + tl.exp(-along - tl.load(weights + k).to(TYPE)))
                weight = going_on * halts
                going_on *= 1.0 - halts
            tl.store(kept + k * rows + row, weight, row < rows)
            mixed += weight[:, None] * value
    tl.store(y + at, mixed if MIX else value, inside)


@triton.jit
def _backward(
    g, x, f, g1, g2, g3, g4, b1, b2, b3, b4, d_x, d_f, d_params, kept, d_p, direction, d_weights, rows, dim, turns,
    skip: tl.float64, branch: tl.float64, eps: tl.float64,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr, TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    none = tl.zeros((ROWS, COLUMNS), TYPE)
    empty = tl.zeros((ROWS,), TYPE)
    u1, u2, u3, u4 = none, none, none, none  # this program's sums: the gradients of the gains,
    v1, v2, v3, v4 = none, none, none, none  # of the biases,
    w1, w2, w3, w4 = empty, empty, empty, empty  # of the weights,
    d_direction = none
    for turn in range(turns):
        row = (tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < dim)[None, :]
        at = row[:, None] * dim + columns[None, :]
        skipped = tl.full((1, 1), skip, TYPE) * tl.load(x + at, inside, 0.0).to(TYPE)
        z = skipped + tl.full((1, 1), branch, TYPE) * tl.load(f + at, inside, 0.0).to(TYPE)
        n1, n2, n3, n4 = none, none, none, none
        r1, r2, r3, r4 = empty, empty, empty, empty
        for k in tl.static_range(STEPS):
            if MIX == 0:
                n, scale = z, tl.load(kept + (2 * k + 1) * rows + row, row < rows, 0.0)
                if not RMS:
                    n = tl.where(inside, z - tl.load(kept + 2 * k * rows + row, row < rows, 0.0)[:, None], 0.0)
                n = n * scale[:, None]
            else:
                n, _, scale = _normalise(z, inside, dim, tl.full((1,), eps, TYPE), RMS)
            n1, n2, n3, n4 = _set(k, n, n1, n2, n3, n4)
            r1, r2, r3, r4 = _set(k, scale, r1, r2, r3, r4)
            z = skipped + n * _row(_pick(k, g1, g2, g3, g4), columns, dim, TYPE)
            if BIAS:
                z += _row(_pick(k, b1, b2, b3, b4), columns, dim, TYPE)
        upstream = tl.load(g + at, inside, 0.0).to(TYPE)
        d, total = none, none
        if MIX == 0:
            d = upstream
        rest, later = empty, empty  # of p, and of p times its gradients, behind step k
        for k in tl.static_range(STEPS - 1, -1, -1):
            n, scale = _pick(k, n1, n2, n3, n4), _pick(k, r1, r2, r3, r4)
            gain = _row(_pick(k, g1, g2, g3, g4), columns, dim, TYPE)
            if MIX:
                value = n * gain
                if BIAS:
                    value += _row(_pick(k, b1, b2, b3, b4), columns, dim, TYPE)
                slope = tl.sum(upstream * value, 1)
                if MIX == 1:
                    d += tl.load(kept + k).to(TYPE) * upstream
                else:
                    weight = tl.load(kept + k * rows + row, row < rows, 0.0)
                    slope += tl.load(d_p + k * rows + row, row < rows, 0.0)
                    whole = rest + weight
                    of_halt = weight * (rest * slope - later) / tl.where(whole == 0.0, 1.0, whole)
                    later += weight * slope
                    rest = whole
                    slope = of_halt
                    d += weight[:, None] * upstream + slope[:, None] * _row(direction, columns, dim, TYPE)
                    d_direction += slope[:, None] * value
                w1, w2, w3, w4 = _set(k, _pick(k, w1, w2, w3, w4) + slope, w1, w2, w3, w4)
            u1, u2, u3, u4 = _set(k, _pick(k, u1, u2, u3, u4) + d * n, u1, u2, u3, u4)
            if BIAS:
                v1, v2, v3, v4 = _set(k, _pick(k, v1, v2, v3, v4) + d, v1, v2, v3, v4)
            t = d * gain
            d = t - n * (tl.sum(t * n, 1) / dim)[:, None]
            if not RMS:
                d -= (tl.sum(t, 1) / dim)[:, None]
            d = tl.where(inside, d * scale[:, None], 0.0)
            total += d
        tl.store(d_x + at, tl.full((1, 1), skip, TYPE) * total, inside)
        tl.store(d_f + at, tl.full((1, 1), branch, TYPE) * d, inside)
    to = d_params + tl.program_id(0) * (STEPS * (2 if BIAS else 1) + (1 if MIX == 2 else 0)) * dim + columns
    for k in tl.static_range(STEPS):
        tl.store(to + k * dim, tl.sum(_pick(k, u1, u2, u3, u4), 0), columns < dim)
        if BIAS:
            tl.store(to + (STEPS + k) * dim, tl.sum(_pick(k, v1, v2, v3, v4), 0), columns < dim)
        if MIX:
            tl.store(d_weights + tl.program_id(0) * STEPS + k, tl.sum(_pick(k, w1, w2, w3, w4), 0))
    if MIX == 2:
        tl.store(to + STEPS * (2 if BIAS else 1) * dim, tl.sum(d_direction, 0), columns < dim)


def _launch_forward(x, f_x, gains, biases, numbers, rms, kept, y, mix=0, weights=None, direction=None) -> Tensor:
    """y, written, and ``kept``: moments or p. ``numbers`` are λ, α and ε."""
    dim, steps, dtype = x.size(-1), len(gains), reference.computing_type(x, f_x, gains)
    tile, columns, warps = tiling(dim, steps, mix)
    if (rows := x.numel() // max(dim, 1)) > 0:
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _forward[(triton.cdiv(rows, tile),)](
                *_dense(x, f_x), *_four(gains), *_four(biases), y, *_dense(weights, direction), kept, rows, dim,
                *numbers, steps, rms, bool(biases), mix, TYPES[dtype], tile, columns, num_warps=warps,
            )  # fmt: skip
    return y


def _launch_backward(gradient, x, f_x, gains, biases, numbers, rms, kept, d_x, mix=0, d_p=None, direction=None):
    """Write d_x; returns F's gradient, the sums for gains, biases and direction, and those for the weights."""
    dim, steps, dtype = x.size(-1), len(gains), reference.computing_type(x, f_x, gains)
    tile, columns, warps = tiling(dim, steps, mix)
    tiles = triton.cdiv(x.numel() // max(dim, 1), tile)
    resident = 8 if mix else 16  # warps of a multiprocessor: all programs run at once
    programs = min(tiles, _multiprocessors(x.device) * max(1, resident // warps))
    d_f = f_x.new_empty(f_x.shape)
    d_params = x.new_empty((programs, steps * (2 if biases else 1) + (mix == 2), dim), dtype=dtype)
    d_weights = x.new_empty((programs, steps if mix else 0), dtype=dtype)
    if d_x.numel() > 0:
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _backward[(programs,)](
                *_dense(gradient, x, f_x), *_four(gains), *_four(biases), d_x, d_f, d_params,
                *_dense(kept, d_p, direction), d_weights, x.numel() // dim, dim, triton.cdiv(tiles, programs), *numbers,
                steps, rms, bool(biases), mix, TYPES[dtype], tile, columns, num_warps=warps,
            )  # fmt: skip
    return d_f, d_params.sum(0), d_weights.sum(0)


def _chain(x, f_x, gains, biases, numbers, rms, moments) -> list[tuple]:
    """The arguments of each launch, after x. All launches but the last are run: the next takes their y as its F."""
    # as many steps as the registers hold in backward, with the sums for their parameters
    at_once, chain = max(1, min(4, 8192 // triton.next_power_of_2(max(x.size(-1), 1)))), []
    for start in range(0, len(gains), at_once):
        if chain:
            y = x.new_empty(x.shape, dtype=reference.computing_type(x, f_x, gains))
            f_x, numbers = _launch_forward(x, *chain[-1], y), (numbers[0], 1.0, numbers[2])
        part = slice(start, start + at_once)
        chain.append((f_x, gains[part], biases[part], numbers, rms, moments[2 * start : 2 * (start + at_once)]))
    return chain


def forward(x, f_x, gains, biases, weights, direction, *options) -> tuple[Tensor, Tensor]:
    """:data:`.operator.operator` by the kernels."""
    y, kept = empty_results(x, f_x, gains, biases, weights, direction)
    if weights is None:
        return _launch_forward(x, *_chain(x, f_x, gains, biases, options[:3], options[3], kept)[-1], y), kept
    arguments = (x, f_x, gains, biases, options[:3], options[3], kept, y)
    return _launch_forward(*arguments, 1 if direction is None else 2, weights, direction), kept


def backward(gradient, d_kept, x, f_x, gains, biases, weights, direction, kept, *options) -> list[Tensor]:
    """The gradients of x, F, each gain, each bias, weights and direction, of those that there are."""
    chain, mixture = [(f_x, gains, biases, options[:3], options[3], weights if direction is None else kept)], (1,)
    if weights is None:
        chain, mixture = _chain(x, f_x, gains, biases, options[:3], options[3], kept), ()
    elif direction is not None:
        mixture = (2, torch.zeros_like(kept) if d_kept is None else d_kept, direction)
    wide = x.dtype if len(chain) == 1 else reference.computing_type(x, f_x, gains)
    parts, of_gains, of_biases = [], [], []
    for arguments in reversed(chain):
        parts.append(x.new_empty(x.shape, dtype=wide))
        gradient, sums, of_weights = _launch_backward(gradient, x, *arguments, parts[-1], *mixture)
        steps, biased = len(arguments[1]), len(arguments[2])
        of_gains, of_biases = [*sums[:steps], *of_gains], [*sums[steps : steps + biased], *of_biases]
    parameters = [t for t in (*gains, *biases, weights, direction) if t is not None]
    totals = [*of_gains, *of_biases, *([] if weights is None else [of_weights[: len(weights)], sums[-1]])]
    found = [total.to(like.dtype, copy=True) for total, like in zip(totals, parameters)]
    return [sum(parts[1:], parts[0]).to(x.dtype), gradient, *found]


def _dense(*tensors):
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _four(parameters):
    """The tensors of up to four steps: a kernel reads each in its own type, nothing is cast or stacked."""
    return [*_dense(*parameters), None, None, None, None][:4]


def register(device: str = "CUDA") -> None:
    """Make the kernels those of the operator for ``device``; on a CPU Triton's interpreter runs them."""
    library.impl("recursive_skip", forward, device)
    library.impl("recursive_skip", with_derivative, f"Autograd{device}")
    library.impl("recursive_skip_backward", backward, device)


def load() -> str:
    """Register the kernels after one run on a few rows; returns what they are.

    Raises what Triton, its C compiler or the card raises.
    """
    x, gain = torch.ones(2, 16, device="cuda"), torch.ones(16, device="cuda")
    arguments, options = (x, x, [gain], [gain], None, None), (1.0, 1.0, 1e-5, False)
    y, kept = forward(*arguments, *options)
    backward(y, None, *arguments, kept, *options)
    torch.cuda.synchronize()
    register()
    return f"Triton {triton.__version__}"


def tiling(dim: int, steps: int, mix: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps: eight elements a thread for two steps, four for more."""
    columns = triton.next_power_of_2(max(dim, 1))
    rows = max(1, (1024 if mix else 2048) // columns)
    return rows, columns, max(1, rows * columns // (256 if steps <= 2 and not mix else 128))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
