"""Stacks of residual blocks at initialisation, with each skip connection, on a CPU in seconds: three panels.

Left, the norm of the loss gradient at each block's output, over that at the last one's, with lambda^(L-l) dotted (He et
al. 2016b, Eq. 8, for the skip path). Middle, ||F(x)||/||x||; a block where it is near 0 is near the identity.
Right, the mean cosine of two tokens in a stack of self-attention, which goes to 1 without skips (Dong et al. 2021).
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor

from ..console import progress
from ..errors import UserError
from . import figures
from .figures import Row, select
from .stacks import VARIANTS, Branch, Stack, Variant, self_attention, two_layers

HEADS = 4
TITLES = {
    "gradient": r"gradient norm at block $l$ / at block $L$",
    "branch": r"$\|F(x)\|\,/\,\|x\|$",
    "similarity": "mean cosine of two tokens",
}
SIZES = ("blocks", "dim", "gain", "seeds", "examples", "tokens")  # the command's options


def gradient_norms(stack: Stack, x: Tensor, upstream: Tensor) -> Tensor:
    """``(blocks,)``: the mean over examples of the gradient's norm at each block's output, over that at the last's.

    ``upstream``, of ``x``'s shape ``(examples, dim)``, is the loss gradient at the last block's output.
    """
    outputs = stack(x.detach().requires_grad_()).outputs  # no branch has a weight that asks for gradients
    gradients = torch.autograd.grad(outputs[-1], outputs, upstream)
    norms = _norms(gradients)
    return (norms / norms[-1]).mean(1)


@torch.no_grad()
def branch_ratios(stack: Stack, x: Tensor) -> Tensor:
    """``(blocks,)``: the mean over examples of ``|F(x)| / |x|``; ``x`` is ``(examples, dim)``. 0 where F(x) is."""
    found = stack(x)
    branches = _norms(found.branches)
    return torch.where(branches == 0, branches, branches / _norms(found.inputs)).mean(1)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(blocks, examples)``; scaled first, so that squares neither overflow nor vanish."""
    values = torch.stack(list(tensors))
    largest = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.linalg.vector_norm(values / largest, dim=-1) * largest.squeeze(-1)


def token_similarity(x: Tensor) -> Tensor:
    """``(examples,)``: the mean cosine of all pairs of different tokens of ``x``, ``(tokens, examples, dim)``."""
    tokens = x.size(0)
    total = torch.nn.functional.normalize(x, dim=-1).sum(0).square().sum(-1)  # |sum u|^2 = n + pairs
    return (total - tokens) / (tokens * (tokens - 1))


def rate(means: Sequence[float]) -> float | None:
    """The factor by which a quantity grows from one block to the one before, fitted by least squares to its logarithm.

    For gradients it is lambda of Eq. 8 where the skip path is all there is. None if a value is 0.
    """
    if min(means) <= 0:
        return None
    return math.exp(-linear_regression(range(len(means)), [math.log(mean) for mean in means]).slope)


def expected_rate(variant: Variant, gain: float) -> float | None:
    """``sqrt(lambda^2 + gain^2)``: the rate of an xskip stack without G with its branches counted; else None.

    Skip path and branch are uncorrelated at initialisation, so their squared norms add up.
    """
    if variant.kind is None:
        return gain
    return None if variant.path is None else math.hypot(variant.path, gain)


def measure(sizes: argparse.Namespace, variants: Iterable[Variant] = VARIANTS) -> list[Row]:
    """A row for each variant, quantity and block. Raises ``UserError`` if a stack is too deep for float64."""
    rows = []
    for variant in variants:
        seeds = [_one_seed(sizes, variant, seed) for seed in range(sizes.seeds)]
        for quantity in TITLES:
            rows += _rows(sizes, variant, quantity, torch.stack([each[quantity] for each in seeds]))
    return rows


def _one_seed(sizes: argparse.Namespace, variant: Variant, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dim = sizes.dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, dtype=torch.float64, generator=generator)

    def stack(branch: Callable[[], Branch]) -> Stack:
        return Stack(variant, sizes.blocks, dim, branch)

    x, upstream, tokens = draw(sizes.examples), draw(sizes.examples), draw(sizes.tokens, sizes.examples)
    bare = stack(lambda: two_layers(dim, sizes.gain, generator))
    normalised = stack(lambda: two_layers(dim, sizes.gain, generator, pre_norm=True))
    attention = stack(lambda: self_attention(dim, HEADS, generator))
    with torch.no_grad():
        similarity = torch.stack([token_similarity(y).mean() for y in [tokens, *attention(tokens).outputs]])
    return {
        "gradient": gradient_norms(bare, x, upstream),
        "branch": branch_ratios(normalised, x),
        "similarity": similarity,
    }


def _rows(sizes: argparse.Namespace, variant: Variant, quantity: str, values: Tensor) -> list[Row]:
    """``values`` is ``(seeds, blocks)``, of the similarity ``(seeds, blocks + 1)``: block 0 is the stack's input.

    ``skip_path`` is ``lambda^(L - l)`` beside the gradients that it predicts.
    """
    if not torch.isfinite(values).all():
        raise UserError(f"{variant.name}: the {quantity} leaves what float64 can hold: take fewer --blocks")
    deviations = values.std(0).tolist() if len(values) > 1 else [None] * values.size(1)
    path = variant.path if quantity == "gradient" else None
    return [
        {
            "quantity": quantity,
            "variant": variant.name,
            "kind": variant.kind,
            "skip_lambda": variant.skip_lambda,
            "norm": variant.norm,
            "block": block,
            "mean": mean,
            "deviation_over_seeds": deviation,
            "skip_path": None if path is None else path ** (sizes.blocks - block),
            **{name: getattr(sizes, name) for name in SIZES},
        }
        for block, (mean, deviation) in enumerate(
            zip(values.mean(0).tolist(), deviations), 0 if quantity == "similarity" else 1
        )
    ]


def report(options: argparse.Namespace, stem: Path) -> None:
    if options.dim % HEADS:
        raise UserError(f"--dim {options.dim}: expected a multiple of {HEADS}, the number of attention heads")
    rows = measure(options, progress(VARIANTS, len(VARIANTS), "stacks", "variant"))
    about = f"{options.blocks} blocks, mean of {options.seeds} seeds, at initialisation"
    figures.write(stem, rows, draw(rows), table(rows, options.gain), about)


def draw(rows: Sequence[Row]) -> Any:
    """One panel a quantity, one line a variant, and lambda^(L-l) dotted beside the gradients."""
    figure, axes = figures.new_figure(len(TITLES), width=4.8, height=4.2)
    dotted = {"color": "0.45", "linestyle": ":", "marker": "", "linewidth": 2}
    for axis, quantity in zip(axes, TITLES):
        drawn = select(rows, quantity=quantity)
        for number, variant in enumerate(VARIANTS):
            mine = select(drawn, variant=variant.name)
            blocks, means, path = ([row[name] for row in mine] for name in ("block", "mean", "skip_path"))
            label, every = figures.label_text(variant.name), max(1, len(blocks) // 10)
            axis.plot(blocks, means, **figures.style(number), markevery=every, label=label)
            if path[0] is not None:
                axis.plot(blocks, path, **dotted, zorder=1)
        axis.set_xlabel(r"block $l$")
        axis.set_title(TITLES[quantity])
        positive = any(row["mean"] > 0 for row in drawn)
        axis.set_yscale("log" if quantity != "similarity" and positive else "linear")
    axes[0].plot([], [], **dotted, label=r"$\lambda^{L-l}$ (Eq. 8)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    return figure


def table(rows: Sequence[Row], gain: float) -> str:
    """A line for each variant: gradients with the predicted rates, branches, token similarity."""
    lines = [
        ["", "gradient,", "rate per", "lambda", "sqrt(lambda^2", "||F||/||x||,", "token"],
        ["", "first / last", "block", "(Eq. 8)", "+ gain^2)", "first .. last", "similarity"],
    ]
    for variant in VARIANTS:
        gradient, branch, similarity = (
            [row["mean"] for row in select(rows, variant=variant.name, quantity=quantity)] for quantity in TITLES
        )
        rates = (rate(gradient), variant.path, expected_rate(variant, gain))
        shown = ["-" if value is None else f"{value:.4g}" for value in rates]
        ends = f"{branch[0]:.2g} .. {branch[-1]:.2g}"
        lines.append([variant.name, f"{gradient[0]:.3g}", *shown, ends, f"{similarity[-1]:.3f}"])
    return figures.aligned(lines)
