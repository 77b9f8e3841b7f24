"""Rules whose branches read a mixture of earlier outputs, with weights of each position."""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, root_mean_square
from .base import Common
from .options import Choice, Integer, Positive, Real, largest_divisor
from .registry import register
from .streams import AttendingSkip, AttentionResidual, BlockSize, HistorySkip


@register("mudd", also=("MUDDFormer", "multiway dynamic dense"))
class MUDD(HistorySkip):
    """Multiway dynamic dense connections, the residual stream alone: layer l, a pre-norm layer,
    reads ``c_l = sum_{k<l} w_lk y_k``, where ``w_l = W_2 gelu(W_1 y / rms(y)) + a_l`` and y is the
    newest y_k.

    y_k is the output of layer k, y_0 the stack's input; the mixture after the last layer is the
    stack's output. a_l starts one-hot at its newest member and W_2, of shape (k + 1, h), at 0,
    where the stack is pre-norm; with W_2 = 0 it is DenseFormer. W_1, (h, dim), starts with standard
    deviation 1/sqrt(dim). Xiao et al. 2025, "MUDDFormer: Breaking Residual Bottlenecks in
    Transformers via Multiway Dynamic Dense Connections", arXiv 2502.12170; code
    Caiyun-AI/MUDDFormer. The paper's layers read four mixtures: queries, keys and values have their
    own, which changes the sublayer. Here all read the fourth, as in code
    wdlctc/hyper-connection-factory with ``qkv=False``, from which we take h: the next multiple of
    64 above 4 (k + 1), 128 where that is 64. Its optional norm of the aggregate, for deep narrow
    models, and its feed-forward layers that grow with depth are left out.
    """

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        if self.stores:
            members = self.stored + 1
            hidden = 64 * (4 * members // 64 + 1)
            self.weight = self.new_parameter(torch.eye(members)[-1])
            self.w1 = self.new_parameter(self.draw(hidden, dim) * dim**-0.5)
            self.w2 = self.new_parameter(torch.zeros(members, hidden))

    def weights(self, members: Tensor) -> Tensor:
        newest = at_least_float32(members[..., -1, :])
        normal = newest / root_mean_square(newest, self.eps)
        hidden = F.gelu(F.linear(normal.to(self.w1.dtype), self.w1))
        return self.weight + F.linear(hidden, self.w2)


@register("mhar", also=("multi-head attention residual",))
class MultiHeadAttentionResidual(AttentionResidual):
    """Multi-head attention residuals: in each of H groups of channels, block l reads ``c_l =
    sum_{k<l} p_k v_k``, where ``p = softmax_k(w_l . v_k / (t rms(v_k)))`` with the group's part of
    w_l and v_k, and rms over all channels.

    Otherwise it is :class:`.AttentionResidual`, which is H = 1 and t = 1; it starts as the same
    mean. Luo et al. 2026, "Multi-Head Attention Residuals", arXiv 2607.27230, Eq. 3, which has as
    many heads as keys and values have; fairseq's attention has no such number: H is ``heads``, the
    width's largest divisor up to it, 4 as in code wdlctc/hyper-connection-factory. The paper has no
    temperature: t, ``temperature``, is ours, a constant.
    """

    def __init__(
        self,
        dim: int,
        *,
        block_size: BlockSize = 1,
        heads: Annotated[
            int,
            Integer(
                "groups H of channels with weights of their own, "
                "the width's largest divisor up to it"
            ),
        ] = 4,
        temperature: Annotated[
            float, Positive("t: divides the logits of a softmax over depth")
        ] = 1.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, block_size=block_size, heads=heads, temperature=temperature, **common)
        self.heads = largest_divisor(dim, int(heads))
        self.temperature = float(temperature)

    def constants(self) -> dict[str, float]:
        own = {"H": float(self.heads), "t": self.temperature}
        return {**own, **super().constants()}


@register("delta_attnres", also=("delta attention residual",))
class DeltaAttentionResidual(AttendingSkip):
    """Delta attention residuals ``y = x + F(G(x + g * sum_{k<l} p_k v_k))``,
    ``p = softmax_k(q_l . v_k / rms(v_k))``.

    v_k is the output of branch k and v_0 the stack's input, whose first block reads only x; x is
    the ordinary sum and the stack's output. q_l, ``query``, of shape (dim,), starts at 0, as in
    code wdlctc/hyper-connection-factory, where the mixture is the mean of the v_k, a share of x:
    pre-norm but for eps; the authors' code draws it with standard deviation 0.02 and lets it decay.
    The gain that the paper's RMSNorm of v_k may have is a factor of q_l.

    g is 1, or with ``depth_gate`` "zero" a learned scalar of each block, ``gate``, that starts at
    0: pre-norm bit for bit, the authors' start from a trained model. Luo et al. 2026, "Delta
    Attention Residuals", arXiv 2605.18855; code wdlctc/delta-attention-residuals-code, its mode
    "delta". In code wdlctc/hyper-connection-factory the first block reads x + g x, which G takes
    for x. Of the paper, the form with one v_k for a block of layers is left out. The stream carries
    x, though it is the sum of the v_k.
    """

    def __init__(
        self,
        dim: int,
        *,
        depth_gate: Annotated[
            Literal["none", "zero"],
            Choice("weight g of the mixture: 1, or learned and 0 at first"),
        ] = "none",
        **common: Unpack[Common],
    ):
        super().__init__(dim, depth_gate=depth_gate, **common)
        is_gated = depth_gate == "zero" and not self.first
        self.gate = self.new_parameter(torch.zeros(1)) if is_gated else None
        if not self.first:
            self.query = self.new_parameter(torch.zeros(dim))

    def history(self) -> tuple[int, bool]:
        return self.place.block_number, True

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h, carried = super().current(x)
        if self.first:
            return h, carried
        members = self._returned(carried)
        mixture = self.mix(members)
        if self.gate is not None:
            mixture = self.gate * mixture
        return (h + mixture).to(x.dtype), carried

    def members(self, f_x: Tensor, carried: Any) -> Tensor | None:
        """v_0, ..., v_(l-1), which this block's branch reads beside x."""
        return None if self.first else self._returned(carried)

    def _returned(self, carried: Any) -> Tensor:
        """What the branches before this block returned."""
        return carried[1].unflatten(-1, [self.stored, self.dim])

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, history = carried
        y = h + f_x
        return y if self.last else torch.cat([y, history, f_x], -1)


@register("multi_gate", also=("multi-gate residual",))
class MultiGateResidual(AttendingSkip):
    """Multi-gate residuals of n streams, ``s_i = (1 - beta_i) s_i + beta_i F(G(c))``,
    ``c = sum_i p_i s_i``, with gates ``beta_i = sigmoid(w . s_i / (rms(s_i) sqrt(dim)) + b_i)``
    and, for the next block, ``p = softmax_i(q . s_i / (rms(s_i) sqrt(dim)))``.

    s_1 is what enters the stack, and the first n - 1 blocks add what their branch returned as a
    stream, so that no two streams are equal: these have no gates. w, ``gate_weight``, and q,
    ``query``, of shape (dim,), start at 0, so that c is the mean; b, ``gate_bias`` (n), at
    ``-log(sqrt(L / 21) (e^3 + 1) - n)`` for L blocks with gates, which keeps what they add to a
    stream the same at every depth; at 0 where that has no value (ours), or at the option. What
    leaves the stack is a mixture, too. Zheng et al. 2026, "Multi-Gate Residuals", arXiv 2605.23259,
    with its independent gates; equations and start as in code swfsql/burn-mamba, whose streams are
    those of whole layers: here each sublayer is a block.
    """

    def __init__(
        self,
        dim: int,
        *,
        streams: Annotated[
            int, Integer("number of residual streams n of multi-gate residuals", short="n")
        ] = 4,
        gate_bias: Annotated[
            float | None,
            Real("initial bias of the gates (by depth if not given)", affects="start"),
        ] = None,
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, gate_bias=gate_bias, **common)
        self.query = self.new_parameter(torch.zeros(dim))
        self.temperature = dim**0.5
        if not self.stores:
            start = self._bias_by_depth() if gate_bias is None else float(gate_bias)
            self.gate_weight = self.new_parameter(torch.zeros(dim))
            self.gate_bias = self.new_parameter(torch.full((self.stored,), start))

    def _bias_by_depth(self) -> float:
        n = int(self.options.streams)
        blocks = self.place.num_blocks - (n - 1)
        left = math.sqrt(blocks / 21) * (math.exp(3) + 1) - n
        return -math.log(left) if left > 0 else 0.0

    def history(self) -> tuple[int, bool]:
        n, number = int(self.options.streams), self.place.block_number
        return min(number, n), number < n

    def members(self, f_x: Tensor, carried: Any) -> Tensor:
        """The streams as this block leaves them, ``(..., n, dim)``."""
        _, history = carried
        streams = at_least_float32(history.unflatten(-1, [self.stored, self.dim]))
        f_x = f_x.unsqueeze(-2).to(streams.dtype)
        if self.stores:
            return torch.cat([streams, f_x], -2)
        return streams + self.gates(streams).unsqueeze(-1) * (f_x - streams)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return super().combine(x, f_x, carried).to(x.dtype)

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The streams so far, and ``diag(1 - beta)``: I in a block that adds a stream."""
        _, (_, history) = self.current(x)
        h = at_least_float32(history.unflatten(-1, [self.stored, self.dim]))
        if self.stores:
            return h, torch.eye(self.stored, dtype=h.dtype, device=h.device)
        return h, torch.diag_embed(1.0 - self.gates(h))

    def gates(self, streams: Tensor) -> Tensor:
        """beta of ``streams``, ``(..., n, dim)``: shape ``(..., n)``."""
        rms = root_mean_square(streams, self.eps).squeeze(-1)
        scores = (streams * self.gate_weight).sum(-1) / (rms * self.dim**0.5)
        return torch.sigmoid(scores + self.gate_bias)

    def constants(self) -> dict[str, float]:
        return {"n": float(self.options.streams), **super().constants()}
