"""Stacks of residual blocks at initialisation with each skip connection, on a CPU in seconds.

The figure has three panels. Left, the norm of the loss gradient at each block's output, over that
at the last one's, with lambda^(L-l) dotted (He et al. 2016b, Eq. 8, for the skip path). Middle,
||F(x)||/||x||; a block where it is near 0 is near the identity. Right, the mean cosine of two
tokens in a stack of self-attention, which goes to 1 without skips (Dong et al. 2021). Weights come
from one generator, in float64, so that stacks of different skips from one seed have the same
branches.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..console import progress
from ..errors import UserError
from ..residual import SkipConnection, create_skip
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
        if self.kind is None:
            return None
        return create_skip(self.kind, dim, skip_lambda=self.skip_lambda, norm=self.norm).double()

    @property
    def path(self) -> float | None:
        """The factor of one block's skip path in He et al. 2016b, Eq. 8; None where a G follows."""
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
    """``F(x) = W2 relu(W1 x)`` over the last dimension: He's initialisation, W2 scaled by ``gain``.

    In expectation over the weights ``|F(x)|^2 = gain^2 |x|^2``, and the same for the gradient
    through F. ``pre_norm`` normalises x first, as pre-activation ResNets and pre-norm Transformers
    do. ``gain`` 0 makes F zero.
    """
    hidden = 4 * dim
    first = draw(hidden, dim, generator=weights) * math.sqrt(2 / dim)
    second = draw(dim, hidden, generator=weights) * (gain / math.sqrt(hidden))

    def branch(x: Tensor) -> Tensor:
        x = functional.layer_norm(x, x.shape[-1:]) if pre_norm else x
        return functional.linear(functional.relu(functional.linear(x, first)), second)

    return branch


def self_attention(dim: int, heads: int, weights: torch.Generator) -> Branch:
    """``F(x)``: multi-head self-attention, without a mask, of ``layer_norm(x)``.

    x is ``(tokens, examples, dim)``. All four weights keep the norm of what they multiply
    (deviation ``1 / sqrt(dim)``).
    """
    deviation = 1 / math.sqrt(dim)
    inward = draw(3 * dim, dim, generator=weights) * deviation
    outward = draw(dim, dim, generator=weights) * deviation

    def branch(x: Tensor) -> Tensor:
        tokens, examples, dim = x.shape
        projected = functional.linear(functional.layer_norm(x, (dim,)), inward)
        # (tokens, examples, 3, heads, size) -> three of (examples, heads, tokens, size)
        query, key, value = projected.view(tokens, examples, 3, heads, -1).permute(2, 1, 3, 0, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return functional.linear(mixed.permute(2, 0, 1, 3).reshape(tokens, examples, dim), outward)

    return branch


class Stack:
    """Residual blocks: ``branches``, each with one of ``skips`` around it; y = F(x) with None."""

    def __init__(self, branches: Iterable[Branch], skips: Iterable[SkipConnection | None]):
        self.blocks = list(zip(branches, skips))

    def __call__(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """F(x) and y of every block, for ``x`` ``(..., dim)``.

        Kinds that carry several tensors have all in one y.
        """
        branches, outputs = [], []
        for branch, skip in self.blocks:
            h, carried = skip.prepare(x) if skip else (x, None)
            branches.append(branch(h))
            x = skip(x, branches[-1], carried) if skip else branches[-1]
            outputs.append(x)
        return branches, outputs


def gradient_norms(stack: Stack, x: Tensor, upstream: Tensor) -> Tensor:
    """``(blocks,)``: the gradient's norm at each block's output over that at the last's.

    It is the mean over examples. ``upstream``, of ``x``'s shape ``(examples, dim)``, is the loss
    gradient at the last block's output.
    """
    _, outputs = stack(x.detach().requires_grad_())  # no weight of a branch requires a gradient
    norms = _norms(torch.autograd.grad(outputs[-1], outputs, upstream))
    return (norms / norms[-1]).mean(1)


@torch.no_grad()
def branch_ratios(stack: Stack, x: Tensor) -> Tensor:
    """``(blocks,)``: the mean over examples of ``|F(x)| / |x|``, 0 where F(x) is.

    ``x`` is ``(examples, dim)``.
    """
    branches, outputs = stack(x)
    branch_norms = _norms(branches)
    input_norms = _norms([x, *outputs[:-1]])
    return torch.where(branch_norms == 0, branch_norms, branch_norms / input_norms).mean(1)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """``(blocks, examples)``; scaled first, so that squares neither overflow nor vanish."""
    values = torch.stack(list(tensors))
    largest = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.linalg.vector_norm(values / largest, dim=-1) * largest.squeeze(-1)


def token_similarity(x: Tensor) -> Tensor:
    """``(examples,)``: the mean cosine of all pairs of different tokens.

    ``x`` is ``(tokens, examples, dim)``.
    """
    tokens = x.size(0)
    total = functional.normalize(x, dim=-1).sum(0).square().sum(-1)  # |sum u|^2 = n + pairs
    return (total - tokens) / (tokens * (tokens - 1))


def rate(means: Sequence[float]) -> float | None:
    """The factor by which a quantity grows from one block to the one before; None if one is 0.

    It is fitted by least squares to the logarithm. For gradients it is Eq. 8's lambda if there is
    only the skip path.
    """
    if min(means) <= 0:
        return None
    logarithms = [math.log(mean) for mean in means]
    return math.exp(-linear_regression(range(len(means)), logarithms).slope)


def measure(sizes: argparse.Namespace, variants: Iterable[Variant] = VARIANTS) -> list[Row]:
    """A row for each variant, quantity and block; of the similarity block 0 is the stack's input.

    ``skip_path`` is ``lambda^(L - l)`` beside the gradients that it predicts. Raises ``UserError``
    if float64 cannot hold a stack.
    """
    rows = []
    for variant in variants:
        seeds = [_one_seed(sizes, variant, seed) for seed in range(sizes.seeds)]
        for position, quantity in enumerate(TITLES):
            values = torch.stack([of_seed[position] for of_seed in seeds])
            if not torch.isfinite(values).all():
                raise UserError(
                    f"{variant.name}: the {quantity} leaves what float64 can hold: "
                    "take fewer --blocks"
                )
            rows += _rows_of(sizes, variant, quantity, values)
    return rows


def _rows_of(
    sizes: argparse.Namespace, variant: Variant, quantity: str, values: Tensor
) -> list[Row]:
    """A row for each block, of one quantity of a variant; ``values`` is ``(seeds, blocks)``."""
    means = values.mean(0).tolist()
    deviations = values.std(0).tolist() if len(values) > 1 else [None] * len(means)
    path = variant.path if quantity == "gradient" else None
    first = 0 if quantity == "similarity" else 1
    used = {name: getattr(sizes, name) for name in SIZES}

    rows = []
    for block, (mean, deviation) in enumerate(zip(means, deviations), first):
        rows.append(
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
                **used,
            }
        )
    return rows


def _one_seed(
    sizes: argparse.Namespace, variant: Variant, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three quantities of ``TITLES``, each ``(blocks,)``.

    The similarity has one value more, first: that of the stack's input.
    """
    dim = sizes.dim
    weights = torch.Generator().manual_seed(seed)
    x = draw(sizes.examples, dim, generator=weights)
    upstream = draw(sizes.examples, dim, generator=weights)
    tokens = draw(sizes.tokens, sizes.examples, dim, generator=weights)

    def stack(make_branch: Callable[..., Branch], *options: Any) -> Stack:
        branches = [make_branch(dim, *options, weights) for _ in range(sizes.blocks)]
        return Stack(branches, [variant.skip(dim) for _ in branches])

    bare = stack(two_layers, sizes.gain, False)
    normalised = stack(two_layers, sizes.gain, True)
    attention = stack(self_attention, HEADS)
    with torch.no_grad():
        _, outputs = attention(tokens)
        similarity = torch.stack([token_similarity(y).mean() for y in [tokens, *outputs]])
    return gradient_norms(bare, x, upstream), branch_ratios(normalised, x), similarity


def report(options: argparse.Namespace, stem: Path) -> None:
    if options.dim % HEADS:
        raise UserError(
            f"--dim {options.dim}: expected a multiple of {HEADS}, the number of attention heads"
        )
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
            blocks = [row["block"] for row in mine]
            means = [row["mean"] for row in mine]
            path = [row["skip_path"] for row in mine]
            label = figures.label_text(variant.name)
            every = max(1, len(blocks) // 10)
            axis.plot(blocks, means, **figures.style(number), markevery=every, label=label)
            if path[0] is not None:
                axis.plot(blocks, path, **dotted, zorder=1)
        positive = any(row["mean"] > 0 for row in select(rows, quantity=quantity))
        axis.set(
            xlabel=r"block $l$",
            title=title,
            yscale="log" if quantity != "similarity" and positive else "linear",
        )
    axes[0].plot([], [], **dotted, label=r"$\lambda^{L-l}$ (Eq. 8)")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small"
    )
    return figure


def expected_rate(variant: Variant, gain: float) -> float | None:
    """√(λ² + gain²), at initialisation; |gain| without a skip, None where a norm follows."""
    if variant.kind is None:
        return abs(gain)
    if variant.path is None:
        return None
    return math.hypot(variant.path, gain)


def table(rows: Sequence[Row], gain: float) -> list[list[str]]:
    """A line for each variant.

    Two paths are uncorrelated at initialisation: the squares of lambda and gain add up.
    """
    lines = [
        [
            "",
            "gradient, first / last",
            "rate per block",
            "λ (Eq. 8)",
            "√(λ² + gain²)",
            "‖F‖/‖x‖",
            "similarity",
        ]
    ]
    for variant in VARIANTS:
        mine = select(rows, variant=variant.name)
        gradient, branch, similarity = (
            [row["mean"] for row in select(mine, quantity=name)] for name in TITLES
        )
        rates = (rate(gradient), variant.path, expected_rate(variant, gain))
        shown = ["-" if value is None else f"{value:.4g}" for value in rates]
        ends = f"{branch[0]:.2g} .. {branch[-1]:.2g}"
        lines.append([variant.name, f"{gradient[0]:.3g}", *shown, ends, f"{similarity[-1]:.3f}"])
    return lines
