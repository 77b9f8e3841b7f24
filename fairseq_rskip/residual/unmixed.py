"""Streams that are read and written, and not mixed: identity hyper-connections, gated residual."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, root_mean_square
from .base import Common
from .hyper import RowStreams, Streams, mixed
from .manifold import ReadBias, SigmoidGates
from .options import Integer
from .registry import register


class UnmixedStreams(RowStreams):
    """``H' = H + w F(G(r))`` with r and w from :meth:`read_write`: R is I."""

    mixes_streams = False

    def read_write(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """r and w of H ``(..., n, dim)``: ``(..., dim)`` and ``(..., n)``; the branch reads r."""
        raise NotImplementedError

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.rows(x)
        read, writing = self.read_write(h)
        return read.to(x.dtype), (h, writing)

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.rows(x)
        return h, torch.eye(self.n, dtype=h.dtype, device=h.device)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, writing = carried
        h = h + writing.unsqueeze(-1) * f_x.unsqueeze(-2)
        return h.sum(-2) if self.last else h.flatten(-2)


@register("ihc", also=("identity hyper-connection", "identity HC"))
class IdentityHyperConnection(UnmixedStreams, SigmoidGates):
    """Identity hyper-connections ``H' = H + w F(G(p H))``, ``p = sigmoid(P)``, ``w = 2
    sigmoid(W)``: row i of H changes by w_i F alone.

    P and W, and their initial values, are those of :class:`ManifoldConstrained`, which this is with
    R = I: the sum of the rows starts as n times the plain pre-norm stack. The ablation "Identity
    HC" of Xie et al. 2026, "mHC", and Ge et al. 2026, "Chimera", arXiv 2607.28611, which names it;
    we had no copy of either, and follow the equation that both are cited for. The initial values
    are those of our mHC. In Hugging Face's ``hy_v4``, of this equation, 1e-6 (hc_eps) is added to p
    and w, and w's factor 2 is an option (hc_magnitude); a branch reads the mean of the rows at
    first (b_pre = -ln(n - 1)), phi is drawn, and a learned mean ends the stack.
    """

    def __init__(
        self,
        dim: int,
        *,
        streams: Streams = 4,
        read_bias: ReadBias = 4.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, read_bias=read_bias, **common)

    def read_write(self, h: Tensor) -> tuple[Tensor, Tensor]:
        pre, post = self.projected(h, self.phi_pre, self.phi_post)
        p, writing = self.gates(pre, post)
        return mixed(p, h), writing


@register("gated_residual", also=("Qwen gated residual",))
class GatedResidual(UnmixedStreams):
    """Gated residual ``H' = H + w F(r)``, ``r = sum_i a_i * N_i / n``, ``w = 2 sigmoid(J N / n)``,
    where N_i is row i of H over its rms, times a gain, and a, of a weight for each row and feature,
    is ``sigmoid(U silu(V N / n))``.

    N in a product is the concatenation of all rows. The branch reads r without another norm. V,
    (rank, n dim), U and J, (n, n dim), start with standard deviation 0.02, the gains at 1: a is
    about 1/2 and w about 1. Qiu et al. 2026, "On the Design of Qwen3.8-Next Architecture", arXiv
    2608.30320; the equation is that of Hugging Face's ``qwen4_exp``, whose gains are 1 plus a
    weight. There, another such mixture without a norm is the stack's output; here it is the sum of
    the rows, which a norm follows, as in our other rules. The rank is ours, 16; there it is an
    eighth of dim; x-transformers (gated_multi_residual) has biases in both gates, which give each
    block a row to read.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    normalises_x = True

    def __init__(
        self,
        dim: int,
        *,
        streams: Streams = 4,
        gate_rank: Annotated[
            int, Integer("rank of the gate through which a gated residual's branch reads")
        ] = 16,
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, gate_rank=gate_rank, **common)
        n, rank = self.n, int(gate_rank)
        drawn = 0.02 * self.draw(rank + rank + n, n * dim)
        self.gain = self.new_parameter(torch.ones(n, dim))
        self.gate_down = self.new_parameter(drawn[:rank])
        self.gate_up = self.new_parameter(drawn[rank : 2 * rank].T.contiguous())
        self.write = self.new_parameter(drawn[2 * rank :])

    def needs_final_norm(self) -> bool:
        return True  # the stack's output is a sum

    def read_write(self, h: Tensor) -> tuple[Tensor, Tensor]:
        normal = self.gain * at_least_float32(h) / root_mean_square(h, self.eps)
        flat = normal.flatten(-2).to(self.write.dtype) / self.n

        gate = F.linear(F.silu(F.linear(flat, self.gate_down)), self.gate_up).sigmoid()
        read = (gate.unflatten(-1, [self.n, self.dim]) * normal).mean(-2)
        writing = 2.0 * F.linear(flat, self.write).sigmoid()
        return read, writing
