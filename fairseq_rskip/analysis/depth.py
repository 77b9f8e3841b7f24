"""Stacks of residual blocks at initialisation, with each skip connection, on a CPU in seconds: three panels.

Left, the norm of the loss gradient at each block's output, over that at the last one's, with lambda^(L-l) dotted (He et
al. 2016b, Eq. 8, for the skip path). Middle, ||F(x)||/||x||; a block where it is near 0 is near the identity.
Right, the mean cosine of two tokens in a stack of self-attention, which goes to 1 without skips (Dong et al. 2021).
Weights come from one generator, in float64, so that stacks of different skips from one seed have the same branches.

And against width: the coordinate check of Yang et al. 2022 ("Tensor Programs V"), the size of activations in a few
updates.

A stack of every kind of skip connection, with branches ``W2 relu(W1 h)`` as torch draws them, takes three Adam steps of
one learning rate towards random targets, at four widths. Where the size of a block's output does not depend on width,
before and after the steps, a learning rate found at a small width may be used at a large one. The slope is that of
log size over log width: 0 where they do not depend on each other.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..console import progress
from ..errors import UserError
from ..residual import KINDS, Place, SkipConnection
from ..residual.scaled import scheduled
from . import figures
from .figures import Row, select

HEADS = 4
TITLES = {
    "gradient": r"gradient norm at block $l$ / at block $L$",
    "branch": r"$\|F(x)\|\,/\,\|x\|$",
    "similarity": "mean cosine of two tokens",
}
SIZES = ("blocks", "dim", "gain", "seeds", "examples", "tokens")  # the command's options
Branch = Callable[[Tensor], Tensor]


class Variant(NamedTuple):
    """A skip by the paper's name; ``kind`` None is a stack without skip connections, y = F(x)."""

    name: str
    kind: str | None = None
    skip_lambda: float | None = None
    norm: str = "none"

    def skip(self, dim: int) -> SkipConnection | None:
        """The skip connection for features of size ``dim``, if there is one."""
        options = {"skip_lambda": self.skip_lambda, "norm": self.norm}
        return SkipConnection(dim, kind=self.kind, **options).double() if self.kind else None

    @property
    def path(self) -> float | None:
        """The factor of one block's skip path in He et al. 2016b, Eq. 8: lambda, where no G follows, else None."""
        return self.skip_lambda if self.kind == "xskip" and self.norm == "none" else None


VARIANTS = (
    Variant("no skip"),
    Variant("0.5xSkip", "xskip", 0.5),
    Variant("1xSkip", "xskip", 1.0),
    Variant("2xSkip", "xskip", 2.0),
    Variant("1xSkip+LN", "xskip", 1.0, "layer"),
    Variant("2xSkip+LN", "xskip", 2.0, "layer"),
    Variant("2rSkip+LN", "rskip", 2, "layer"),
)


draw = partial(torch.randn, dtype=torch.float64)  # standard normal numbers


def two_layers(dim: int, gain: float, pre_norm: bool, weights: torch.Generator) -> Branch:
    """``F(x) = W2 relu(W1 x)`` over the last dimension, with He's initialisation of W1 and W2 scaled by ``gain``.

    In expectation over the weights ``|F(x)|^2 = gain^2 |x|^2``, and the same for the gradient through F. ``pre_norm``
    normalises x first, as pre-activation ResNets and pre-norm Transformers do. ``gain`` 0 makes F zero.
    """
    hidden = 4 * dim
    first = draw(hidden, dim, generator=weights) * math.sqrt(2 / dim)
    second = draw(dim, hidden, generator=weights) * (gain / math.sqrt(hidden))

    def branch(x: Tensor) -> Tensor:
        x = functional.layer_norm(x, x.shape[-1:]) if pre_norm else x
        return functional.linear(functional.relu(functional.linear(x, first)), second)

    return branch


def self_attention(dim: int, heads: int, weights: torch.Generator) -> Branch:
    """``F(x)``: multi-head self-attention of ``layer_norm(x)``, x ``(tokens, examples, dim)``, without a mask.

    All four weights keep the norm of what they multiply (deviation ``1 / sqrt(dim)``).
    """
    inward, outward = (draw(rows, dim, generator=weights) * (1 / math.sqrt(dim)) for rows in (3 * dim, dim))

    def branch(x: Tensor) -> Tensor:
        tokens, examples, dim = x.shape
        projected = functional.linear(functional.layer_norm(x, (dim,)), inward)
        # (tokens, examples, 3, heads, size) -> three of (examples, heads, tokens, size)
        query, key, value = projected.view(tokens, examples, 3, heads, -1).permute(2, 1, 3, 0, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return functional.linear(mixed.permute(2, 0, 1, 3).reshape(tokens, examples, dim), outward)

    return branch


class Stack:
    """Residual blocks: ``branches``, each with one of ``skips`` around it; None is no skip connection, y = F(x)."""

    def __init__(self, branches: Iterable[Branch], skips: Iterable[SkipConnection | None]):
        self.blocks = list(zip(branches, skips))

    def __call__(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """F(x) and y of every block, for ``x`` ``(..., dim)``; kinds that carry several tensors have all in one y."""
        branches, outputs = [], []
        for branch, skip in self.blocks:
            h, carried = skip.prepare(x) if skip else (x, None)
            branches.append(branch(h))
            x = skip(x, branches[-1], carried) if skip else branches[-1]
            outputs.append(x)
        return branches, outputs


def gradient_norms(stack: Stack, x: Tensor, upstream: Tensor) -> Tensor:
    """``(blocks,)``: the mean over examples of the gradient's norm at each block's output, over that at the last's.

    ``upstream``, of ``x``'s shape ``(examples, dim)``, is the loss gradient at the last block's output.
    """
    _, outputs = stack(x.detach().requires_grad_())  # no branch has a weight that asks for gradients
    norms = _norms(torch.autograd.grad(outputs[-1], outputs, upstream))
    return (norms / norms[-1]).mean(1)


@torch.no_grad()
def branch_ratios(stack: Stack, x: Tensor) -> Tensor:
    """``(blocks,)``: the mean over examples of ``|F(x)| / |x|``; ``x`` is ``(examples, dim)``. 0 where F(x) is."""
    branches, outputs = map(_norms, stack(x))
    return torch.where(branches == 0, branches, branches / torch.cat([_norms([x]), outputs[:-1]])).mean(1)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(blocks, examples)``; scaled first, so that squares neither overflow nor vanish."""
    values = torch.stack(list(tensors))
    largest = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.linalg.vector_norm(values / largest, dim=-1) * largest.squeeze(-1)


def token_similarity(x: Tensor) -> Tensor:
    """``(examples,)``: the mean cosine of all pairs of different tokens of ``x``, ``(tokens, examples, dim)``."""
    tokens = x.size(0)
    total = functional.normalize(x, dim=-1).sum(0).square().sum(-1)  # |sum u|^2 = n + pairs
    return (total - tokens) / (tokens * (tokens - 1))


def rate(means: Sequence[float]) -> float | None:
    """The factor by which a quantity grows from one block to the one before, fitted by least squares to its logarithm:
    of gradients, lambda of Eq. 8 where the skip path is all there is. None if a value is 0."""
    if min(means) <= 0:
        return None
    return math.exp(-slope(range(len(means)), means))


def slope(x: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the logarithm of ``values`` over ``x``, by least squares."""
    return linear_regression(x, [math.log(max(value, 1e-300)) for value in values]).slope


def measure(sizes: argparse.Namespace, variants: Iterable[Variant] = VARIANTS) -> list[Row]:
    """A row for each variant, quantity and block; of the similarity block 0 is the stack's input. ``skip_path`` is
    ``lambda^(L - l)`` beside the gradients that it predicts. Raises ``UserError`` if float64 cannot hold a stack."""
    rows, used = [], {name: getattr(sizes, name) for name in SIZES}
    for variant in variants:
        seeds = zip(*(_one_seed(sizes, variant, seed) for seed in range(sizes.seeds)))
        for quantity, values in zip(TITLES, map(torch.stack, seeds)):
            if not torch.isfinite(values).all():
                raise UserError(f"{variant.name}: the {quantity} leaves what float64 can hold: take fewer --blocks")
            named = {"quantity": quantity, **dict(zip(("variant", "kind", "skip_lambda", "norm"), variant))}
            deviations = values.std(0).tolist() if len(values) > 1 else [None] * values.size(1)
            path = variant.path if quantity == "gradient" else None
            measured = zip(values.mean(0).tolist(), deviations)
            for block, (mean, deviation) in enumerate(measured, 0 if quantity == "similarity" else 1):
                row = {**named, "block": block, "mean": mean, "deviation_over_seeds": deviation}
                rows.append({**row, "skip_path": None if path is None else path ** (sizes.blocks - block), **used})
    return rows


def _one_seed(sizes: argparse.Namespace, variant: Variant, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three quantities of ``TITLES``, each ``(blocks,)``; of the similarity also at the stack's input, first."""
    dim, weights = sizes.dim, torch.Generator().manual_seed(seed)
    x, upstream, tokens = (draw(*more, sizes.examples, dim, generator=weights) for more in ((), (), (sizes.tokens,)))

    def stack(branch: Callable[..., Branch], *options: Any) -> Stack:
        branches = [branch(dim, *options, weights) for _ in range(sizes.blocks)]
        return Stack(branches, [variant.skip(dim) for _ in branches])

    bare, normalised = (stack(two_layers, sizes.gain, pre_norm) for pre_norm in (False, True))
    attention = stack(self_attention, HEADS)
    with torch.no_grad():
        similarity = torch.stack([token_similarity(y).mean() for y in [tokens, *attention(tokens)[1]]])
    return gradient_norms(bare, x, upstream), branch_ratios(normalised, x), similarity


def report(options: argparse.Namespace, stem: Path) -> None:
    if options.dim % HEADS:
        raise UserError(f"--dim {options.dim}: expected a multiple of {HEADS}, the number of attention heads")
    rows = measure(options, progress(VARIANTS, len(VARIANTS), "stacks", "variant"))
    about = f"{options.blocks} blocks, mean of {options.seeds} seeds, at initialisation"
    figures.write(stem, rows, plot(rows), table(rows, options.gain), about)


def plot(rows: Sequence[Row]) -> Any:
    """One panel a quantity, one line a variant, and lambda^(L-l) dotted beside the gradients."""
    figure, axes = figures.new_figure(len(TITLES), width=4.8, height=4.2)
    dotted = {"color": "0.45", "linestyle": ":", "marker": "", "linewidth": 2}
    for axis, (quantity, title) in zip(axes, TITLES.items()):
        for number, variant in enumerate(VARIANTS):
            mine = select(rows, quantity=quantity, variant=variant.name)
            blocks, means, path = ([row[name] for row in mine] for name in ("block", "mean", "skip_path"))
            label, every = figures.label_text(variant.name), max(1, len(blocks) // 10)
            axis.plot(blocks, means, **figures.style(number), markevery=every, label=label)
            if path[0] is not None:
                axis.plot(blocks, path, **dotted, zorder=1)
        positive = any(row["mean"] > 0 for row in select(rows, quantity=quantity))
        axis.set(xlabel=r"block $l$", title=title, yscale="log" if quantity != "similarity" and positive else "linear")
    axes[0].plot([], [], **dotted, label=r"$\lambda^{L-l}$ (Eq. 8)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    return figure


def table(rows: Sequence[Row], gain: float) -> list[list[str]]:
    """A line for each variant. Two paths are uncorrelated at initialisation: the squares of lambda and gain add up."""
    lines = [["", "gradient, first / last", "rate per block", "λ (Eq. 8)", "√(λ² + gain²)", "‖F‖/‖x‖", "similarity"]]
    for variant in VARIANTS:
        mine = select(rows, variant=variant.name)
        gradient, branch, similarity = ([row["mean"] for row in select(mine, quantity=name)] for name in TITLES)
        path = 0.0 if variant.kind is None else variant.path
        rates = (rate(gradient), variant.path, None if path is None else math.hypot(path, gain))
        shown = ["-" if value is None else f"{value:.4g}" for value in rates]
        ends = f"{branch[0]:.2g} .. {branch[-1]:.2g}"
        lines.append([variant.name, f"{gradient[0]:.3g}", *shown, ends, f"{similarity[-1]:.3f}"])
    return lines


WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
RATE = 1e-3  # Adam's
COLUMNS = 7


def measure_widths(
    kind: str, widths: tuple[int, ...] = WIDTHS, steps: int = STEPS, blocks: int = BLOCKS
) -> Iterator[Row]:
    """Rows of a kind: ``size``, the root mean square of block ``block``'s output, from 1, after ``step`` updates."""
    for width in widths:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)]
        branches = nn.ModuleList(nn.Sequential(*each) for each in layers)
        places = [Place("encoder", "ffn", block, blocks) for block in range(blocks)]
        skips = nn.ModuleList(SkipConnection(width, kind, place=place) for place in places)
        optimizer = torch.optim.Adam([*skips.parameters(), *branches.parameters()], RATE)
        x, target = torch.randn(TOKENS, width), torch.randn(TOKENS, width)
        for step in range(steps + 1):
            for skip in scheduled(skips):
                skip.set_num_updates(step)
            _, outputs = Stack(branches, skips)(x)
            for block, output in enumerate(outputs, 1):
                size = float(output.detach().square().mean().sqrt())
                yield {"kind": kind, "width": width, "step": step, "block": block, "size": size}
            optimizer.zero_grad()
            functional.mse_loss(outputs[-1], target).backward()
            optimizer.step()


def coordinates(options: argparse.Namespace, stem: Path) -> None:
    """Measure every kind; write ``stem``'s CSV and figure, print the slopes. On one thread: the matrices are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [row for kind in progress(KINDS, len(KINDS), "kinds", "kind") for row in measure_widths(kind)]
    torch.set_num_threads(threads)
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    steps = range(STEPS + 1)
    table = [["slope of the last block's size over width", *(f"step {step}" for step in steps)]]
    for kind in KINDS:
        last = [select(rows, kind=kind, step=step, block=BLOCKS) for step in steps]
        slopes = [slope([math.log(row["width"]) for row in each], [row["size"] for row in each]) for each in last]
        table.append([kind, *(f"{value:+.2f}" for value in slopes)])
    figures.write(stem, rows, plot_widths(rows), table, about)


def plot_widths(rows: Sequence[Row]) -> Any:
    """A panel for every kind: size against width, a line for each block, before (dotted) and after the steps."""
    import matplotlib.figure

    height = math.ceil(len(KINDS) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * height), layout="constrained")
    for axis, kind in zip(figure.subplots(height, COLUMNS, squeeze=False).flat, KINDS):
        mine = select(rows, kind=kind)
        for block, (step, line) in itertools.product(range(1, BLOCKS + 1), ((0, ":"), (STEPS, "-"))):
            sizes = [row["size"] for row in select(mine, step=step, block=block)]
            axis.plot(WIDTHS, sizes, line, color=figures.style(block)["color"])
        axis.set(xscale="log", yscale="log", title=kind)
        axis.set_xticks(WIDTHS, map(str, WIDTHS))
        sizes = [row["size"] for row in mine if row["step"] in (0, STEPS)]
        axis.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)  # so that a change of a per cent does not fill a panel
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    figure.suptitle(f"rms of each block's output against width: at the start (dotted) and after {STEPS} steps")
    return figure
