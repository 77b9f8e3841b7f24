"""Skip connections that keep two tensors, or what every layer or every block returned."""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from .base import Common, SkipConnection
from .depth_attention import depth_attention, depth_weights
from .options import Choice, Integer, all_norms
from .registry import register

BlockSize = Annotated[
    int, Integer("sublayers summed per history entry of attention residuals", short="block")
]


class StreamSkip(SkipConnection):
    """A rule that keeps several tensors, as channels of its stream.

    ``x`` is ``(..., widths[0] * dim)``, y ``(..., widths[1] * dim)``. Tensor k is the channels from
    k * dim to (k + 1) * dim; the branch reads tensor 0. The first block of a stack takes one
    tensor, x_0, and the last returns one, so that the model outside is the same.
    """

    for_images = False
    needs_place = True

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.first, self.last = self.place.is_first, self.place.is_last

    @property
    def widths(self) -> tuple[int, int]:
        """The number of tensors that this place takes and returns."""
        return 1 if self.first else 2, 1 if self.last else 2

    def tensor(self, x: Tensor, k: int) -> Tensor:
        """Tensor k of a stream: a view of shape ``(..., dim)``."""
        return x.narrow(-1, k * self.dim, self.dim)

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.tensor(x, 0), None


@register("b2t", also=("bottom-to-top",))
class B2T(StreamSkip):
    """Bottom-to-top connection ``x_k = G(x_{k-1} + F_k)``, in a layer's last block
    ``y = G(x_0 + x_{k-1} + F_k)``.

    x_0 is the input of the *layer*, which takes and returns one tensor; between its blocks the
    stream is (x_k, x_0). A layer of one block is plain post-norm. Takase et al. 2022, "B2T
    Connection: Serving Stability and Performance in Deep Transformers"; code takase/b2t_connection,
    which also scales every initial weight of a layer by 1/sqrt(layers): the paper's connection has
    no such factor, nor has this. Where the last branch is zero the layer is recursive, rSkip+LN
    with lambda = 2.
    """

    norms = all_norms(without=("none",))

    @property
    def widths(self) -> tuple[int, int]:
        begins_layer = self.place.position == 0
        ends_layer = self.place.position == self.place.sublayers - 1
        return 1 if begins_layer else 2, 1 if ends_layer else 2

    @property
    def closes_layer(self) -> bool:
        """Whether it is the last of several blocks of a layer, whose input is then tensor 1."""
        return self.widths == (2, 1)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        z = self.tensor(x, 0) + f_x
        return z + self.tensor(x, 1) if self.closes_layer else z

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        y = super().sum_and_norm(x, f_x, carried, padding_mask)
        if self.widths[1] == 1:
            return y
        layer_input = self.tensor(x, self.widths[0] - 1)
        return torch.cat([y, layer_input], -1)


@register("spannorm", also=("SpanNorm",))
class SpanNorm(B2T):
    """SpanNorm ``x_k = G(x_{k-1} + F_k)``, in a layer's last block ``y = G(x_0 + F_k)``, x_0 the
    input of the layer.

    The first skip of a layer is post-norm's, the last spans the whole layer; the stack's first
    branch reads ``G'(x_0)``. A layer of one block is post-norm. Wang et al. 2026, "SpanNorm:
    Reconciling Training Stability and Performance in Deep Transformers", arXiv 2601.22580, Eq. 5 to
    8, which we read in a third party's code; the paper's layers are self-attention and
    feed-forward: that a decoder's middle block, which reads the encoder, is post-norm is ours. The
    paper's scaling of the initial weights is left out: we had no copy of it.
    """

    norms = all_norms(without=("none", "batch"))  # G' is applied without a padding mask

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("pre", "post") if self.place.is_first else ("post",)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return self.tensor(x, 1 if self.closes_layer else 0) + f_x


@register("residual_dual", also=("ResiDual",))
class ResiDual(StreamSkip):
    """Dual residual ``x_k = G_k(x_{k-1} + F_k)``, ``r_k = r_{k-1} + F_k``, r_0 = x_0; at the end
    ``y = x_K + G(r_K)``.

    F_k is a function of x_{k-1}; the stream is (x_k, r_k), and only the stack's last block owns a
    second norm. Xie et al. 2023, "ResiDual: Transformer with Dual Residual Connections"; code
    microsoft/ResiDual. That code has eps 1e-7 in the last norm, and scales for fp16 that it leaves
    at 1; here all norms have one eps. A stack of one block returns 2 G(x + F).
    """

    norms = all_norms(without=("none",))

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.dual_norm = self.new_norm() if self.last else None

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return torch.cat([self.tensor(x, k) + f_x for k in range(self.widths[0])], -1)

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        z = self.combine(x, f_x, carried)
        dual = self.tensor(z, self.widths[0] - 1)
        y = self.post(self.tensor(z, 0), padding_mask=padding_mask)
        if self.dual_norm is None:
            return torch.cat([y, dual], -1)
        return y + self.dual_norm(dual, padding_mask)


@register("x0", also=("nanochat",))
class X0(StreamSkip):
    """Scaled stream with the stack's input mixed back in: ``y = r * x + F(G(x)) + s * x_0``.

    r and s are learned scalars of each block, ``r`` and ``s`` of shape (1,), initially 1 and 0,
    where the stack is pre-norm. The stream is (x, x_0). karpathy/nanochat, ``nanochat/gpt.py``
    (``resid_lambdas``, ``x0_lambdas``), no paper: it has one pair for each layer, applied before
    the layer's first block; here each block has its own, applied after its branch. Its x_0 is
    normalised, and its pairs have learning rates of their own. Since March 2026 they start at 1.15
    to 1.05 and 0.20 to 0.05, linearly over the layers: with ``x0_init="nanochat"`` those of a
    layer's first block, the others keep 1 and 0. There r and s multiply what the branch reads, too,
    and a share of the stack's middle is subtracted at its end.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(
        self,
        dim: int,
        *,
        x0_init: Annotated[
            Literal["plain", "nanochat"],
            Choice("initial r and s of x0: 1 and 0, or nanochat's by depth", affects="start"),
        ] = "plain",
        **common: Unpack[Common],
    ):
        super().__init__(dim, x0_init=x0_init, **common)
        r, s = (1.0, 0.0) if x0_init == "plain" else self._nanochat_values()
        self.r = self.new_parameter(torch.full((1,), r))
        self.s = self.new_parameter(torch.full((1,), s))

    def _nanochat_values(self) -> tuple[float, float]:
        """r from 1.15 in the first layer to 1.05 in the last, s from 0.20 to 0.05."""
        if self.place.position > 0:
            return 1.0, 0.0
        share = self.place.index / max(1, self.place.depth - 1)
        return 1.15 - 0.10 * share, 0.20 - 0.15 * share

    def stream_gain(self) -> float:
        return abs(float(self.r.detach()))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x0 = self.tensor(x, self.widths[0] - 1)
        y = self.r * self.tensor(x, 0) + f_x + self.s * x0
        return y if self.last else torch.cat([y, x0], -1)


@register("siamesenorm", also=("SiameseNorm",))
class SiameseNorm(StreamSkip):
    """SiameseNorm, two streams that share their branches: ``z = F(G(G_1(x) + G_2(y)))``,
    ``x = G_1(x) + z / sqrt(m l)``, ``y = y + z`` in layer l, counted from 1, of m sublayers: a
    post-norm and a pre-norm stream.

    Both start as x_0; the stack's output is ``G_3(x) + G_4(y)``, which the model's last norm
    follows. Li et al. 2026, arXiv 2602.08064; equation and initial values follow code
    Qwen-Applications/SiameseNorm, ``deit-model-siamesenorm.py`` (2l, for two sublayers a
    layer). The paper's language models have other norms on x.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    mixes_streams = False

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.stream_scale = (self.place.sublayers * (self.place.index + 1)) ** -0.5
        self.x_norm, self.y_norm = self.new_norm(), self.new_norm()
        if self.last:
            self.last_x_norm, self.last_y_norm = self.new_norm(), self.new_norm()

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.tensor(x, self.widths[0] - 1)
        x = self.x_norm(self.tensor(x, 0))
        return x + self.y_norm(y), (x, y)

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``G_1(x)`` and ``G_2(y)``, of which the branch reads the sum, and I.

        y grows with depth, but nothing reads it without a norm.
        """
        _, (x, y) = self.current(x)
        h = torch.stack([x, self.y_norm(y)], -2)
        return h, torch.eye(2, dtype=h.dtype, device=h.device)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, y = carried
        x = x + self.stream_scale * f_x
        y = y + f_x
        if self.last:
            return self.last_x_norm(x) + self.last_y_norm(y)
        return torch.cat([x, y], -1)

    def constants(self) -> dict[str, float]:
        sublayers = self.place.sublayers
        return {f"1/sqrt({sublayers}l)": self.stream_scale, **super().constants()}


class HistorySkip(StreamSkip):
    """The stream is (c, h_0, ..., h_k): c is what the branch reads, h what was stored so far.

    ``stored`` is the number of tensors stored before this block, ``stores`` whether this block
    stores one, too. A mixture is computed where its newest member is stored. Memory grows with the
    square of the depth.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    weight: torch.nn.Parameter

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.stored, self.stores = self.history()

    @property
    def widths(self) -> tuple[int, int]:
        takes = 1 if self.first else 1 + self.stored
        returns = 1 if self.last else 1 + self.stored + int(self.stores)
        return takes, returns

    def history(self) -> tuple[int, bool]:
        """``stored`` and ``stores``, by default of a kind that stores each layer's output.

        h_0 is the stack's input.
        """
        return self.place.index + 1, self.place.position == self.place.sublayers - 1

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        """c, and c with (h_0, ..., h_k)."""
        if self.first:
            return x, (x, x)
        # of two slices, each would have a gradient as large as the stream; of a split, one has
        c, history = x.split([self.dim, self.stored * self.dim], -1)
        c = c.contiguous()  # or the branch, which keeps c for its gradient, would keep all of x
        return c, (c, history)

    def store(self, y: Tensor) -> Tensor:
        """The tensor h to store for y, the newest output."""
        return y

    def members(self, f_x: Tensor, carried: Any) -> Tensor | None:
        """h_0, ..., h_k, of which this block makes a mixture, ``(..., k + 1, dim)``; or None."""
        if not self.stores:
            return None
        c, history = carried
        grown = torch.cat([history, self.store(c + f_x)], -1)
        return grown.unflatten(-1, [self.stored + 1, self.dim])

    def weights(self, members: Tensor) -> Tensor:
        """The weight of each of ``members`` in the mixture: ``(k + 1,)`` for all positions,
        ``(..., k + 1)``, or ``(..., heads, k + 1)`` of a rule that attends.
        """
        return self.weight

    def mix(self, members: Tensor) -> Tensor:
        """The next c, ``(..., dim)``: the weighted sum of ``members``, ``(..., k + 1, dim)``."""
        # not matmul, whose type autocast would narrow
        return (members * self.weights(members).unsqueeze(-1)).sum(-2)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        members = self.members(f_x, carried)
        if members is None:
            c, history = carried
            y = c + f_x
        else:
            y, history = self.mix(members), members.flatten(-2)
        return y if self.last else torch.cat([y, history], -1)


@register("dlcl", also=("dynamic linear combination",))
class DLCL(HistorySkip):
    """Dynamic linear combination of layers: layer l, a pre-norm layer, reads
    ``c_l = sum_{k<l} W_lk G_k(y_k)``.

    y_k is the output of layer k, y_0 the stack's input; the mixture after the last layer is the
    stack's output. W_l, of l values, starts uniform: rows sum to 1. G_k is one norm for each y_k,
    so that ``h_k = G_k(y_k)`` is stored. A layer's last block owns the row ``weight`` and
    ``layer_norm``, the stack's first ``first_weight`` and ``input_norm``. Wang et al. 2019,
    "Learning Deep Transformer Models for Machine Translation", of its two forms the pre-norm one;
    code wangqiangneu/dlcl, which leaves y_0 as it is where the paper's sum has LN(y_k) from k = 0
    on, and normalises the stack's output once more.
    """

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        if self.first:
            self.input_norm = self.new_norm()
            self.first_weight = self.new_parameter(torch.ones(1))
        if self.stores:
            members = self.stored + 1
            self.layer_norm = self.new_norm()
            self.weight = self.new_parameter(torch.full((members,), 1.0 / members))

    def needs_final_norm(self) -> bool:
        return False  # the stack's output is a mixture of normalised tensors

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        if not self.first:
            return super().current(x)
        h = self.input_norm(x)
        c = self.first_weight * h
        return c.to(x.dtype), (c, h)

    def store(self, y: Tensor) -> Tensor:
        return self.layer_norm(y)


@register("denseformer", also=("DWA", "depth-weighted average", "depth-weighted averaging"))
class DenseFormer(HistorySkip):
    """Depth-weighted average: layer l, a pre-norm layer, reads ``c_l = sum_{k<l} a_lk y_k``.

    y_k is the output of layer k, y_0 the stack's input; the average after the last layer is the
    stack's output. a_l starts one-hot at its newest member, where the stack is pre-norm; n layers
    have n (n + 3) / 2 weights, each layer's ``weight`` with its last block. Pagliardini et al.
    2024, "DenseFormer: Enhancing Information Flow in Transformers via Depth Weighted Averaging";
    code epfml/DenseFormer, where the weights decay with the linear maps. Without dilation and
    period, which save time.
    """

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        if self.stores:
            self.weight = self.new_parameter(torch.eye(self.stored + 1)[-1])


class AttendingSkip(HistorySkip):
    """A rule that attends over what is stored, with a learned query of shape ``(dim,)``."""

    query: torch.nn.Parameter
    heads = 1
    temperature = 1.0

    def weights(self, members: Tensor) -> Tensor:
        return depth_weights(members, self.query, self.eps, self.heads, self.temperature)

    def mix(self, members: Tensor) -> Tensor:
        return depth_attention(members, self.query, self.eps, self.heads, self.temperature)


@register("attnres", also=("AttnRes", "attention residual", "attn residual"))
class AttentionResidual(AttendingSkip):
    """Attention residuals: block l reads ``c_l = sum_{k<l} p_k v_k``,
    ``p = softmax_k(w_l . v_k / rms(v_k))``.

    v_k is the output of branch k, ``F_k(G(c_k))``, and v_0 the stack's input; the stack's output is
    a mixture, too. w_l, ``query`` of the block before, of shape (dim,), starts at 0, where c_l is
    the mean; the gain that the paper's RMSNorm of v_k may have is a factor of w_l. Kimi Team 2026,
    "Attention Residuals", arXiv 2603.15031: its full form, or with ``block_size`` above 1 its block
    form, where the v_k of that many sublayers are summed, the last of them so far, as in code
    fla-org/flash-linear-attention; wdlctc/open-attention-residuals adds a recency bias, and in its
    full form stores running sums rather than the v_k. In x-transformers (attn_aggregated_residuals)
    the query is computed from the newest state.
    """

    def __init__(
        self,
        dim: int,
        *,
        block_size: BlockSize = 1,
        **options: Any,
    ):
        super().__init__(dim, block_size=block_size, **options)
        self.query = self.new_parameter(torch.zeros(dim))

    def history(self) -> tuple[int, bool]:
        before, size = self.place.block_number - 1, int(self.options.block_size)
        return 1 + math.ceil(before / size), before % size == 0

    def members(self, f_x: Tensor, carried: Any) -> Tensor:
        _, history = carried
        if not self.stores:  # F is added to the last member
            f_x = history[..., -self.dim :] + f_x
            history = history[..., : -self.dim]
        return torch.cat([history, f_x], -1).unflatten(-1, [-1, self.dim])

    def constants(self) -> dict[str, float]:
        return {"block_size": float(self.options.block_size), **super().constants()}
