"""Stacks of residual blocks at initialisation, with each skip connection, on a CPU in seconds: three panels.

Left, the norm of the loss gradient at each block's output, over that at the last one's, with lambda^(L-l) dotted (He et
al. 2016b, Eq. 8, for the skip path). Middle, ||F(x)||/||x||; a block where it is near 0 is near the identity.
Right, the mean cosine of two tokens in a stack of self-attention, which goes to 1 without skips (Dong et al. 2021).
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..console import progress
from ..errors import UserError
from . import figures
from .stacks import VARIANTS, Branch, Stack, Variant, self_attention, two_layers

HEADS = 4
TITLES = {
    "gradient": r"gradient norm at block $l$ / at block $L$",
    "branch": r"$\|F(x)\|\,/\,\|x\|$",
    "similarity": "mean cosine of two tokens",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the stacks. ``gain`` is ``|F(x)| / |x|`` of a branch without normalisation, in expectation."""

    blocks: int
    dim: int
    gain: float
    seeds: int
    examples: int
    tokens: int


class Profile(NamedTuple):
    """One quantity of one variant: ``mean`` and ``deviation`` (over seeds; None for one) of each of ``blocks``.

    Blocks count from 1; block 0, which only the similarity has, is the stack's input.
    """

    quantity: str
    variant: Variant
    blocks: list[int]
    mean: list[float]
    deviation: list[float] | None


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


@torch.no_grad()
def similarities(stack: Stack, x: Tensor) -> Tensor:
    """``(blocks + 1,)``: the mean similarity of the input's tokens and of each block's output's."""
    return torch.stack([token_similarity(y).mean() for y in [x, *stack(x).outputs]])


def rate(profile: Profile) -> float | None:
    """The factor by which a quantity grows from one block to the one before, fitted by least squares to its logarithm.

    For gradients it is lambda of Eq. 8 where the skip path is all there is. None if a value is 0.
    """
    if min(profile.mean) <= 0:
        return None
    block = torch.tensor(profile.blocks, dtype=torch.float64)
    logarithm = torch.tensor(profile.mean, dtype=torch.float64).log()
    block, logarithm = block - block.mean(), logarithm - logarithm.mean()
    return math.exp(-float((block * logarithm).sum() / block.square().sum()))


def expected_rate(variant: Variant, gain: float) -> float | None:
    """``sqrt(lambda^2 + gain^2)``: the rate of an xskip stack without G with its branches counted; else None.

    Skip path and branch are uncorrelated at initialisation, so their squared norms add up.
    """
    if variant.kind is None:
        return gain
    return None if variant.path is None else math.hypot(variant.path, gain)


def measure(settings: Settings, variants: Iterable[Variant] = VARIANTS) -> list[Profile]:
    """Every quantity of every variant. Raises ``UserError`` if a stack is too deep for float64."""
    profiles = []
    for variant in variants:
        seeds = [_one_seed(settings, variant, seed) for seed in range(settings.seeds)]
        profiles += [
            _profile(quantity, variant, torch.stack([each[quantity] for each in seeds])) for quantity in TITLES
        ]
    return profiles


def _one_seed(settings: Settings, variant: Variant, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dim = settings.dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dim, dtype=torch.float64, generator=generator)

    def stack(branch: Callable[[], Branch]) -> Stack:
        return Stack(variant, settings.blocks, dim, branch)

    x, upstream, tokens = draw(settings.examples), draw(settings.examples), draw(settings.tokens, settings.examples)
    bare = stack(lambda: two_layers(dim, settings.gain, generator))
    normalised = stack(lambda: two_layers(dim, settings.gain, generator, pre_norm=True))
    attention = stack(lambda: self_attention(dim, HEADS, generator))
    gradients, ratios = gradient_norms(bare, x, upstream), branch_ratios(normalised, x)
    return {"gradient": gradients, "branch": ratios, "similarity": similarities(attention, tokens)}


def _profile(quantity: str, variant: Variant, values: Tensor) -> Profile:
    """``values`` is ``(seeds, blocks)``, or ``(seeds, blocks + 1)`` from block 0 on."""
    first = 0 if quantity == "similarity" else 1
    if not torch.isfinite(values).all():
        raise UserError(f"{variant.name}: the {quantity} leaves what float64 can hold: take fewer --blocks")
    deviation = values.std(0).tolist() if len(values) > 1 else None
    return Profile(quantity, variant, list(range(first, first + values.size(1))), values.mean(0).tolist(), deviation)


def rows(profiles: Sequence[Profile], settings: Settings) -> list[dict[str, Any]]:
    """One row a block, for a CSV; ``skip_path`` is ``lambda^(L - l)`` beside the gradients it predicts."""
    table = []
    for profile in profiles:
        variant = profile.variant
        path = variant.path if profile.quantity == "gradient" else None
        names = {
            "variant": variant.name,
            "kind": variant.kind,
            "skip_lambda": variant.skip_lambda,
            "norm": variant.norm,
        }
        for position, block in enumerate(profile.blocks):
            deviation = profile.deviation and profile.deviation[position]
            values = {"block": block, "mean": profile.mean[position], "deviation_over_seeds": deviation}
            values["skip_path"] = None if path is None else path ** (settings.blocks - block)
            table.append({"quantity": profile.quantity, **names, **values, **dataclasses.asdict(settings)})
    return table


def report(options: argparse.Namespace, stem: Path) -> None:
    if options.dim % HEADS:
        raise UserError(f"--dim {options.dim}: expected a multiple of {HEADS}, the number of attention heads")
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    profiles = measure(settings, progress(VARIANTS, len(VARIANTS), "stacks", "variant"))
    about = f"{settings.blocks} blocks, mean of {settings.seeds} seeds, at initialisation"
    figures.write(stem, rows(profiles, settings), draw(profiles, settings), table(profiles, settings), about)


def draw(profiles: list[Profile], settings: Settings) -> Any:
    """One panel a quantity, one line a variant, and lambda^(L-l) dotted beside the gradients."""
    figure, axes = figures.new_figure(len(TITLES), width=4.8, height=4.2)
    dotted = {"color": "0.45", "linestyle": ":", "marker": "", "linewidth": 2}
    for axis, quantity in zip(axes, TITLES):
        drawn = [profile for profile in profiles if profile.quantity == quantity]
        for number, profile in enumerate(drawn):
            label, every = figures.label_text(profile.variant.name), max(1, len(profile.blocks) // 10)
            axis.plot(profile.blocks, profile.mean, **figures.style(number), markevery=every, label=label)
            if quantity == "gradient" and profile.variant.path is not None:
                path = [profile.variant.path ** (settings.blocks - block) for block in profile.blocks]
                axis.plot(profile.blocks, path, **dotted, zorder=1)
        axis.set_xlabel(r"block $l$")
        axis.set_title(TITLES[quantity])
        positive = any(max(profile.mean) > 0 for profile in drawn)
        axis.set_yscale("log" if quantity != "similarity" and positive else "linear")
    axes[0].plot([], [], **dotted, label=r"$\lambda^{L-l}$ (Eq. 8)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    return figure


def table(profiles: list[Profile], settings: Settings) -> str:
    """A line for each variant: gradients with the predicted rates, branches, token similarity."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    lines = [
        ["", "gradient,", "rate per", "lambda", "sqrt(lambda^2", "||F||/||x||,", "token"],
        ["", "first / last", "block", "(Eq. 8)", "+ gain^2)", "first .. last", "similarity"],
    ]
    for gradient, branch, similarity in zip(profiles[::3], profiles[1::3], profiles[2::3]):
        variant = gradient.variant
        rates = map(number, (rate(gradient), variant.path, expected_rate(variant, settings.gain)))
        ends = f"{branch.mean[0]:.2g} .. {branch.mean[-1]:.2g}"
        lines.append([variant.name, f"{gradient.mean[0]:.3g}", *rates, ends, f"{similarity.mean[-1]:.3f}"])
    return figures.aligned(lines)
