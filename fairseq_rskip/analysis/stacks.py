"""Stacks of residual blocks around :class:`fairseq_rskip.residual.SkipConnection`, at initialisation, in float64.

Weights come from one generator, so that stacks of different skips from one seed have the same branches.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..residual import SkipConnection

Branch = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A skip by the paper's name; ``kind`` None is a stack without skip connections, y = F(x)."""

    name: str
    kind: str | None = None
    skip_lambda: float | None = None
    norm: str = "none"

    def skip(self, dim: int) -> Callable[[Tensor, Tensor], Tensor]:
        """``y = skip(x, f_x)`` for features of size ``dim``, a module if there is a skip connection."""
        if self.kind is None:
            return lambda x, f_x: f_x
        return SkipConnection(dim, kind=self.kind, skip_lambda=self.skip_lambda, norm=self.norm).double()

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


def weight(rows: int, columns: int, deviation: float, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator) * deviation


def two_layers(dim: int, gain: float, generator: torch.Generator, pre_norm: bool = False) -> Branch:
    """``F(x) = W2 relu(W1 x)`` over the last dimension, with He's initialisation of W1 and W2 scaled by ``gain``.

    In expectation over the weights ``|F(x)|^2 = gain^2 |x|^2``, and the same for the gradient through F. ``pre_norm``
    normalises x first, as pre-activation ResNets and pre-norm Transformers do. ``gain`` 0 makes F zero.
    """
    hidden = 4 * dim
    first = weight(hidden, dim, math.sqrt(2 / dim), generator)
    second = weight(dim, hidden, gain / math.sqrt(hidden), generator)

    def branch(x: Tensor) -> Tensor:
        if pre_norm:
            x = functional.layer_norm(x, x.shape[-1:])
        return functional.linear(functional.relu(functional.linear(x, first)), second)

    return branch


def self_attention(dim: int, heads: int, generator: torch.Generator) -> Branch:
    """``F(x)``: multi-head self-attention of ``layer_norm(x)``, x ``(tokens, examples, dim)``, without a mask.

    All four weights keep the norm of what they multiply (deviation ``1 / sqrt(dim)``).
    """
    inward = weight(3 * dim, dim, 1 / math.sqrt(dim), generator)
    outward = weight(dim, dim, 1 / math.sqrt(dim), generator)

    def branch(x: Tensor) -> Tensor:
        tokens, examples, dim = x.shape
        projected = functional.linear(functional.layer_norm(x, (dim,)), inward)
        # (tokens, examples, 3, heads, size) -> three of (examples, heads, tokens, size)
        query, key, value = projected.view(tokens, examples, 3, heads, -1).permute(2, 1, 3, 0, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return functional.linear(mixed.permute(2, 0, 1, 3).reshape(tokens, examples, dim), outward)

    return branch


class Pass(NamedTuple):
    """What one forward pass met, block by block from the input on: x, F(x) and y."""

    inputs: list[Tensor]
    branches: list[Tensor]
    outputs: list[Tensor]


class Stack(nn.Module):
    """``blocks`` residual blocks, each with its own branch from ``branch()`` and a skip of ``variant``."""

    def __init__(self, variant: Variant, blocks: int, dim: int, branch: Callable[[], Branch]):
        super().__init__()
        self.branches = [branch() for _ in range(blocks)]
        self.skips = [variant.skip(dim) for _ in range(blocks)]
        self.modules_ = nn.ModuleList(skip for skip in self.skips if isinstance(skip, nn.Module))

    def forward(self, x: Tensor) -> Pass:
        """``x`` is ``(..., dim)``, float64."""
        values = Pass([x], [], [])
        for branch, skip in zip(self.branches, self.skips):
            values.branches.append(branch(x))
            x = skip(x, values.branches[-1])
            values.outputs.append(x)
        return values._replace(inputs=[*values.inputs, *values.outputs[:-1]])
