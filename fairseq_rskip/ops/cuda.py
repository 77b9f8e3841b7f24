"""The operator in Triton, for CUDA tensors: a program takes a few rows and keeps them in registers for all steps.

Backward recomputes step k's normalised row from x and F for every k; a fixed number of programs sum the gains' and
biases' gradients over their rows, in the order of the rows, and torch sums over programs: the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference

PROGRAMS = 512  # of the backward pass, at most
TILE = 4096  # elements that a program holds of each tensor


@triton.jit
def _normalise(z, inside, dim, eps, RMS: tl.constexpr):
    """Normalised rows of z, (rows, columns), and one over their deviations."""
    d = z
    if not RMS:
        d = tl.where(inside, z - (tl.sum(z, 1) / dim)[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(d * d, 1) / dim + eps)
    return d * scale[:, None], scale


@triton.jit
def _next(n, skipped, gains, biases, k, columns, dim, BIAS: tl.constexpr):
    """y of step k from its normalised rows, and z of the next step."""
    y = n * tl.load(gains + k * dim + columns, columns < dim, 0.0)[None, :]
    if BIAS:
        y += tl.load(biases + k * dim + columns, columns < dim, 0.0)[None, :]
    return y, skipped + y


@triton.jit
def _forward(
    x, f, gains, biases, y, weights, direction, p, rows, dim, skip, branch, eps,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (columns < dim)[None, :]
    at = row[:, None] * dim + columns[None, :]
    skipped = skip * tl.load(x + at, inside, 0.0).to(gains.dtype.element_ty)
    z = skipped + branch * tl.load(f + at, inside, 0.0).to(gains.dtype.element_ty)
    value = z
    mixed = tl.zeros((ROWS, COLUMNS), gains.dtype.element_ty)
    going_on = tl.full((ROWS,), 1.0, gains.dtype.element_ty)
    for k in tl.static_range(STEPS):
        n, _ = _normalise(z, inside, dim, eps, RMS)
        value, z = _next(n, skipped, gains, biases, k, columns, dim, BIAS)
        if MIX == 1:
            mixed += tl.load(weights + k) * value
        elif MIX == 2:
            weight = going_on
            if k < STEPS - 1:
                along = tl.load(direction + columns, columns < dim, 0.0)[None, :]
                halts = 1.0 / (1.0 + tl.exp(-tl.sum(value * along, 1) - tl.load(weights + k)))
                weight = going_on * halts
                going_on *= 1.0 - halts
            tl.store(p + k * rows + row, weight, row < rows)
            mixed += weight[:, None] * value
    tl.store(y + at, mixed if MIX else value, inside)


@triton.jit
def _backward(
    g, x, f, gains, biases, d_x, d_f, d_params, p, d_p, direction, d_weights, rows, dim, skip, branch, eps, tiles,
    STEPS: tl.constexpr, RMS: tl.constexpr, BIAS: tl.constexpr, MIX: tl.constexpr, X: tl.constexpr, F: tl.constexpr,
    PARAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, COLUMNS)
    slots = tl.arange(0, SLOTS)
    d_gains = tl.zeros((SLOTS, COLUMNS), gains.dtype.element_ty)
    d_biases = tl.zeros((SLOTS, COLUMNS), gains.dtype.element_ty)
    d_direction = tl.zeros((COLUMNS,), gains.dtype.element_ty)
    d_given = tl.zeros((SLOTS,), gains.dtype.element_ty)
    for tile in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (columns < dim)[None, :]
        at = row[:, None] * dim + columns[None, :]
        skipped = skip * tl.load(x + at, inside, 0.0).to(gains.dtype.element_ty)
        first = skipped + branch * tl.load(f + at, inside, 0.0).to(gains.dtype.element_ty)
        upstream = tl.load(g + at, inside, 0.0).to(gains.dtype.element_ty)
        total = tl.zeros((ROWS, COLUMNS), gains.dtype.element_ty)
        rest = tl.zeros((ROWS,), gains.dtype.element_ty)  # of p, and of p times its gradients, behind step k
        later = rest
        d = total
        for back in tl.static_range(STEPS):
            k = STEPS - 1 - back
            z = first
            for step in tl.static_range(STEPS - 1 - back):
                n, _ = _normalise(z, inside, dim, eps, RMS)
                _, z = _next(n, skipped, gains, biases, step, columns, dim, BIAS)
            n, scale = _normalise(z, inside, dim, eps, RMS)
            if MIX == 0:
                if back == 0:
                    d += upstream
            else:
                value, _ = _next(n, skipped, gains, biases, k, columns, dim, BIAS)
                slope = tl.sum(upstream * value, 1)
                if MIX == 1:
                    d += tl.load(p + k) * upstream
                else:
                    weight = tl.load(p + k * rows + row, row < rows, 0.0)
                    slope += tl.load(d_p + k * rows + row, row < rows, 0.0)
                    whole = rest + weight
                    of_halt = weight * (rest * slope - later) / tl.where(whole == 0.0, 1.0, whole)
                    later += weight * slope
                    rest = whole
                    slope = of_halt
                    along = tl.load(direction + columns, columns < dim, 0.0)[None, :]
                    d += weight[:, None] * upstream + slope[:, None] * along
                    d_direction += tl.sum(slope[:, None] * value, 0)
                d_given += tl.where(slots == k, tl.sum(slope, 0), 0.0)
            if PARAMS:
                d_gains += tl.where((slots == k)[:, None], tl.sum(d * n, 0)[None, :], 0.0)
                d_biases += tl.where((slots == k)[:, None], tl.sum(d, 0)[None, :], 0.0)
            t = d * tl.load(gains + k * dim + columns, columns < dim, 0.0)[None, :]
            d = t - n * (tl.sum(t * n, 1) / dim)[:, None]
            if not RMS:
                d -= (tl.sum(t, 1) / dim)[:, None]
            d = tl.where(inside, d * scale[:, None], 0.0)
            total += d
        if X:
            tl.store(d_x + at, skip * total, inside)
        if F:
            tl.store(d_f + at, branch * d, inside)
    if PARAMS:
        start = tl.program_id(0) * (2 * STEPS + 1)
        to = d_params + (start + slots)[:, None] * dim + columns[None, :]
        known = (slots < STEPS)[:, None] & (columns < dim)[None, :]
        tl.store(to, d_gains, known)
        tl.store(to + STEPS * dim, d_biases, known)
        tl.store(d_params + (start + 2 * STEPS) * dim + columns, d_direction, columns < dim)
    if MIX:
        tl.store(d_weights + tl.program_id(0) * STEPS + slots, d_given, slots < STEPS)


def _run_forward(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms, mix, weights, direction) -> list[Tensor]:
    y, dim = x.new_empty(x.shape), x.size(-1)
    rows = x.numel() // max(dim, 1)
    dtype = reference.computing_type(x, f_x, gains)
    p = x.new_empty((len(gains), *x.shape[:-1]) if mix == 2 else (0,), dtype=dtype)
    if y.numel() > 0:
        gain, bias = _stacked(dtype, gains, biases)
        tile, columns = _tile(dim)
        given, along = (gain if t is None else t.to(dtype).contiguous() for t in (weights, direction))
        with _on(x):
            _forward[(triton.cdiv(rows, tile),)](
                x.contiguous(), f_x.contiguous(), gain, bias, y, given, along, p, rows, dim, skip_scale, branch_scale,
                eps, len(gains), rms, bool(biases), mix, tile, columns,
            )  # fmt: skip
    return [y, p]


def forward(x, f_x, gains, biases, *options) -> Tensor:
    """``skip_norm`` by the kernel; arguments and result as of :func:`fairseq_rskip.ops.skip_norm`."""
    return _run_forward(x, f_x, gains, biases, *options, 0, None, None)[0]


def mix_forward(x, f_x, gains, biases, weights, direction, *options) -> tuple[Tensor, Tensor]:
    """``skip_mix`` by the kernel; p is empty without a direction."""
    return tuple(_run_forward(x, f_x, gains, biases, *options, 1 if direction is None else 2, weights, direction))


def _run_backward(
    gradient, x, f_x, gains, biases, skip_scale, branch_scale, eps, rms, wanted, mix=0, p=None, d_p=None, direction=None
) -> tuple[Tensor, ...]:
    dim, steps = x.size(-1), len(gains)
    rows = x.numel() // max(dim, 1)
    dtype = reference.computing_type(x, f_x, gains)
    gain, bias = _stacked(dtype, gains, biases)
    tile, columns = _tile(dim)
    tiles = max(1, triton.cdiv(triton.cdiv(rows, tile), PROGRAMS))
    programs = triton.cdiv(rows, tile * tiles)
    d_x, d_f = x.new_empty(x.shape), f_x.new_empty(f_x.shape if wanted[1] else (0,))
    d_params = gain.new_zeros((programs if wanted[2] else 0, 2 * steps + 1, dim))
    d_weights = gain.new_zeros((programs if mix else 0, steps))
    if mix == 2 and d_p is None:
        d_p = torch.zeros_like(p)
    given, more, along = (gain if t is None else t.to(dtype).contiguous() for t in (p, d_p, direction))
    if programs > 0:
        with _on(x):
            _backward[(programs,)](
                gradient.contiguous(), x.contiguous(), f_x.contiguous(), gain, bias, d_x, d_f, d_params, given, more,
                along, d_weights, rows, dim, skip_scale, branch_scale, eps, tiles, steps, rms, bool(biases), mix,
                *wanted, tile, columns, triton.next_power_of_2(steps),
            )  # fmt: skip
    return d_x, d_f, d_params.sum(0), d_weights.sum(0)


def _as(parameters, sums) -> list[Tensor]:
    return [total.to(like.dtype, copy=True) for total, like in zip(sums, parameters)]


def backward(
    gradient, x, f_x, gains, biases, skip_scale, branch_scale, eps, rms, wanted_x, wanted_f, wanted_params
) -> list[Tensor]:
    """The gradients wanted: of x, of F (left out where it is x's), of each gain, of each bias."""
    from .dispatch import gradients_shared

    if wanted_x and gradients_shared(x, f_x, len(gains), skip_scale, branch_scale):
        wanted_f = False
    wanted = (wanted_x, wanted_f, wanted_params)
    d_x, d_f, sums, _ = _run_backward(gradient, x, f_x, gains, biases, skip_scale, branch_scale, eps, rms, wanted)
    return [d_x] * wanted_x + [d_f] * wanted_f + (_as((*gains, *biases), sums) if wanted_params else [])


def mix_backward(gradient, d_p, x, f_x, gains, biases, p, direction, *options) -> list[Tensor]:
    """The gradients of x, F, the weights, the direction (where there is one), gains and biases."""
    mix = 1 if direction is None else 2
    d_x, d_f, sums, d_weights = _run_backward(
        gradient, x, f_x, gains, biases, *options, (True, True, True), mix, p, d_p, direction
    )
    along = [] if direction is None else _as([direction], sums[-1:])
    return [d_x, d_f, d_weights[: len(gains) - len(along)].clone(), *along, *_as((*gains, *biases), sums)]


class SkipNorm(torch.autograd.Function):
    """The operator's derivative on CUDA; a second derivative is the reference's."""

    @staticmethod
    def forward(ctx, options, steps, *tensors):
        ctx.options, ctx.steps = options, steps
        ctx.save_for_backward(*tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fairseq_rskip.skip_norm(*_arguments(tensors, steps), *options)

    @staticmethod
    def backward(ctx, gradient):
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        results = [None] * len(tensors)
        if torch.is_grad_enabled():
            copies = [tensor.view_as(tensor) for tensor in tensors]  # a tensor may stand in two places
            y = reference.skip_norm(*_arguments(copies, ctx.steps), *ctx.options)
            wanted = [copy for copy, need in zip(copies, needed) if need]
            found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
            return (None, None, *(next(found) if need else None for need in needed))
        wanted = (needed[0], needed[1], any(needed[2:]))
        arguments = _arguments(tensors, ctx.steps)
        found = iter(torch.ops.fairseq_rskip.skip_norm_backward(gradient, *arguments, *ctx.options, *wanted))
        if needed[0]:
            results[0] = next(found)
        if needed[1]:
            shared = needed[0] and tensors[0].dtype == tensors[1].dtype and ctx.steps == 1
            results[1] = results[0] if shared and ctx.options[0] == ctx.options[1] else next(found)
        if wanted[2]:
            results[2:] = found
        return (None, None, *results)


def register(library: torch.library.Library, device: str = "CUDA") -> None:
    """Make the kernels those of the operator for ``device``; on a CPU Triton's interpreter runs them."""
    library.impl("skip_norm", forward, device)
    library.impl("skip_norm_backward", backward, device)
    library.impl("skip_norm", differentiable, f"Autograd{device}")
    library.impl("skip_mix", mix_forward, device)
    library.impl("skip_mix_backward", mix_backward, device)


def differentiable(x, f_x, gains, biases, *options) -> Tensor:
    """``skip_norm`` with its derivative."""
    return SkipNorm.apply(options, len(gains), x, f_x, *gains, *biases)


def _arguments(tensors, steps):
    return tensors[0], tensors[1], list(tensors[2 : 2 + steps]), list(tensors[2 + steps :])


def _stacked(dtype, gains, biases):
    """Gains and biases as (steps, dim)."""
    gain = torch.stack([gain.to(dtype) for gain in gains])
    return gain, torch.stack([bias.to(dtype) for bias in biases]) if biases else gain


def _tile(dim):
    columns = triton.next_power_of_2(max(dim, 1))
    return max(1, min(64, TILE // columns)), columns


def _on(x):
    return torch.cuda.device(x.device if x.is_cuda else -1)
