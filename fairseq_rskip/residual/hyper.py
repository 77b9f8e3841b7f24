"""Hyper-connections: streams with learned weights, and parts of the features in their place."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..norms import create_norm
from .base import Common, SkipConnection
from .branch_weights import BranchWeights
from .mixing_matrices import product
from .options import Choice, Integer, all_norms, largest_divisor
from .registry import register
from .streams import StreamSkip

Streams = Annotated[int, Integer("number of residual streams n of hyper-connections", short="n")]
Mixing = Annotated[
    Literal["dynamic", "static"],
    Choice("weights of hyper-connections, by position or for all positions"),
]


class RowStreams(StreamSkip):
    """A rule whose stream is H, n rows of dim channels.

    The first block makes n copies of the stack's input; the stack's output is the sum of the rows.
    """

    norms = all_norms(without=("batch",))
    slots: tuple[str, ...] = ("pre",)

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.n = int(self.options.streams)

    @property
    def reads(self) -> int:
        """The stream that the branch reads initially: the next one in each block."""
        return (self.place.block_number - 1) % self.n

    @property
    def widths(self) -> tuple[int, int]:
        return 1 if self.first else self.n, 1 if self.last else self.n

    def rows(self, x: Tensor) -> Tensor:
        """H, ``(..., n, dim)``, of x."""
        return torch.stack([x] * self.n, -2) if self.first else x.unflatten(-1, [self.n, self.dim])

    def constants(self) -> dict[str, float]:
        return {"n": float(self.n), **super().constants()}


class MatrixSkip(RowStreams):
    """``H' = R H + w F(G(r))`` with r, R and w from :meth:`read_mix_write`."""

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r, R and w of H ``(..., n, dim)``: ``(..., dim)``, ``([...,] n, n)`` and ``([...,] n)``.

        r is what the branch reads. Row i of R has the weights of the streams in the next stream i.
        """
        raise NotImplementedError

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.rows(x)
        read, matrix, writing = self.read_mix_write(h)
        return read.to(x.dtype), (h, matrix, writing)

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, (h, matrix, *_) = self.current(x)
        return h, matrix

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, matrix, writing = carried
        if self.last:  # the sum of the rows of H'
            matrix, writing = matrix.sum(-2, keepdim=True), writing.sum(-1, keepdim=True)
        return updated(h, matrix, writing, f_x).flatten(-2)


@register("hyper", also=("hyper-connection", "HC", "DHC"))
class HyperConnection(MatrixSkip):
    """Hyper-connections ``H' = A_r^T H + B F(G(A_m^T H))``; A_m (n), A_r (n, n) and B (n) are
    learned.

    With ``mixing`` dynamic, the paper's best, each depends on the position, too:
    ``A_m + s_a tanh(N(H) W_m)``, ``A_r + s_a tanh(N(H) W_r)``, ``B + s_b tanh(N(H) W_b)``, N a
    layer norm of each stream (``gate_norm``). A_r starts at I, B at 1, A_m at one stream, the next
    one in each block, W at 0, s at 0.01: the sum of the rows is then n times the plain pre-norm
    stack. Zhu et al. 2025, "Hyper-Connections", arXiv 2409.19606; code
    lucidrains/hyper-connections. The paper also scales the initial standard deviation of what
    writes to the stream (out, fc2) by sqrt(n): ``output_init="sqrt_n"``, where we read the factor
    as a division, as each branch is written to n rows that are summed. The sum at the end is then
    ``n x + sqrt(n) F``, where it is ``n (x + F)`` otherwise. The paper lets the W decay; here they
    do not. n = 1 is only initially pre-norm.
    """

    def __init__(
        self,
        dim: int,
        *,
        streams: Streams = 4,
        mixing: Mixing = "dynamic",
        output_init: Annotated[
            Literal["plain", "sqrt_n"],
            Choice(
                "initial out and fc2 of hyper's branches: "
                "as drawn, or over sqrt(n) as in the paper",
                affects="start",
            ),
        ] = "plain",
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, mixing=mixing, output_init=output_init, **common)
        n = self.n
        self.a_m = self.new_parameter(torch.eye(n)[self.reads])
        self.a_r = self.new_parameter(torch.eye(n))
        self.b = self.new_parameter(torch.ones(n))
        self.dynamic = mixing == "dynamic"
        if self.dynamic:
            self.gate_norm = self.new_norm("layer")
            self.w_m = self.new_parameter(torch.zeros(dim, 1))
            self.w_r = self.new_parameter(torch.zeros(dim, n))
            self.w_b = self.new_parameter(torch.zeros(dim, 1))
            self.s_a = self.new_parameter(torch.full((1,), 0.01))
            self.s_b = self.new_parameter(torch.full((1,), 0.01))

    @property
    def starts_branch(self) -> bool:  # type: ignore[override]
        return self.options.output_init == "sqrt_n"

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        if self.starts_branch:
            for role in weights.keys() & {"out", "fc2"}:
                weights[role].scale(self.n**-0.5)

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.dynamic:
            return mixed(self.a_m, h), self.a_r.transpose(-1, -2), self.b
        weight = torch.cat([self.w_r, self.w_b, self.w_m], 1)
        gates = torch.tanh(self.gate_norm(h.to(weight.dtype)).to(weight.dtype) @ weight)
        a_r = self.a_r + self.s_a * gates[..., : self.n]
        a_m = self.a_m + self.s_a * gates[..., self.n + 1]
        return mixed(a_m, h), a_r.transpose(-1, -2), self.b + self.s_b * gates[..., self.n]


@register("fractional", also=("frac-connection", "fractional connection"))
class FractionalConnection(SkipConnection):
    """Fractional connections ``H' = A_r^T H + B F(G(A_m^T H))``: H is x itself, as m rows of dim /
    m channels, and F is split alike. A_m, A_r (m, m) and B (m) are learned, and as in
    hyper-connections depend on the position, too.

    They start at I, I and 1, where it is pre-norm: Zhu et al. 2025, "Frac-Connections: Fractional
    Extension of Hyper-Connections", arXiv 2503.14125, Eq. 15. In code lucidrains/hyper-connections
    every part of F is added to every row. The paper decays the weights that depend on the position;
    here they are not decayed.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    for_images = False

    def __init__(
        self,
        dim: int,
        *,
        parts: Annotated[
            int,
            Integer(
                "parts m of fractional connections, the width's largest divisor up to it",
                short="m",
            ),
        ] = 4,
        mixing: Mixing = "dynamic",
        **common: Unpack[Common],
    ):
        super().__init__(dim, parts=parts, mixing=mixing, **common)
        m = largest_divisor(dim, int(parts))
        self.shape = [m, dim // m]
        self.a_m = self.new_parameter(torch.eye(m))
        self.a_r = self.new_parameter(torch.eye(m))
        self.b = self.new_parameter(torch.ones(m))
        self.dynamic = mixing == "dynamic"
        if self.dynamic:
            width = self.shape[1]
            self.gate_norm = create_norm("layer", width, eps=self.eps, **self.factory)
            self.weight = self.new_parameter(torch.zeros(width, 2 * m + 1))  # for A_m, A_r and B
            self.s_a = self.new_parameter(torch.full((1,), 0.01))
            self.s_b = self.new_parameter(torch.full((1,), 0.01))

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h = x.unflatten(-1, self.shape)
        a_m, a_r, b = self.matrices(h)
        read = product(a_m.transpose(-1, -2), h)
        mixed_parts = product(a_r.transpose(-1, -2), h)
        return read.flatten(-2).to(x.dtype), (mixed_parts, b)

    def matrices(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m, A_r and B of H ``(..., m, dim / m)``."""
        if not self.dynamic:
            return self.a_m, self.a_r, self.b
        m, dtype = self.shape[0], self.weight.dtype
        gates = torch.tanh(self.gate_norm(h.to(dtype)).to(dtype) @ self.weight)
        a_m = self.a_m + self.s_a * gates[..., :m]
        a_r = self.a_r + self.s_a * gates[..., m : 2 * m]
        return a_m, a_r, self.b + self.s_b * gates[..., 2 * m]

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of x ``(..., m, dim / m)``, and ``A_r^T``."""
        h = x.unflatten(-1, self.shape)
        _, a_r, _ = self.matrices(h)
        return h, a_r.transpose(-1, -2)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        mixed_parts, b = carried
        written = b.unsqueeze(-1) * f_x.unflatten(-1, self.shape)
        return (mixed_parts + written).flatten(-2)

    def constants(self) -> dict[str, float]:
        return {"m": float(self.shape[0]), **super().constants()}


def updated(h: Tensor, matrix: Tensor, writing: Tensor, f_x: Tensor) -> Tensor:
    """``R H + w F`` of H ``(..., n, dim)``, R ``([...,] m, n)`` and w ``([...,] m)``."""
    return product(matrix, h) + writing.unsqueeze(-1) * f_x.unsqueeze(-2)


def mixed(weights: Tensor, h: Tensor) -> Tensor:
    """The sum of the rows of H ``(..., n, dim)`` with ``weights``, ``([...,] n)``."""
    return (weights.unsqueeze(-1) * h).sum(-2)
