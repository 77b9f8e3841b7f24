"""Hyper-connections, and hyper-connections whose mixing matrices are doubly stochastic (mHC)."""

import itertools
import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, create_norm
from .base import Common, SkipConnection
from .options import Choice, Count, Positive, all_norms
from .place import BranchWeights
from .registry import register
from .rotations import cayley, of_quaternions
from .streams import StreamSkip

Streams = Annotated[int, Count("number of residual streams n of hyper-connections", short="n")]
ReadBias = Annotated[
    float,
    Positive(
        "initial bias of the gate by which an mHC branch reads its stream; minus that for the "
        "others",
        affects="start",
    ),
]
Mixing = Annotated[
    Literal["dynamic", "static"],
    Choice("weights of hyper-connections, by position or for all positions"),
]


class MatrixSkip(StreamSkip):
    """``H' = R H + w F(G(r))`` with r, R and w from :meth:`read_mix_write`.

    H is n rows of dim channels. The first block makes n copies of the stack's input; the stack's
    output is the sum of the rows.
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

    def stream_widths(self) -> tuple[int, int]:
        n = int(self.options.streams)  # the base's constructor asks before self.n is there
        return 1 if self.first else n, 1 if self.last else n

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r, R and w of H ``(..., n, dim)``: ``(..., dim)``, ``([...,] n, n)`` and ``([...,] n)``.

        r is what the branch reads. Row i of R has the weights of the streams in the next stream i.
        """
        raise NotImplementedError

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h = torch.stack([x] * self.n, -2) if self.first else x.unflatten(-1, [self.n, self.dim])
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

    def constants(self) -> dict[str, float]:
        return {"n": float(self.n), **super().constants()}


@register("hyper")
class HyperConnection(MatrixSkip):
    """Hyper-connections ``H' = A_r^T H + B F(G(A_m^T H))``; A_m (n), A_r (n, n) and B (n) are
    learned.

    With ``mixing`` dynamic, the paper's best, each depends on the position, too:
    ``A_m + s_a tanh(N(H) W_m)``, ``A_r + s_a tanh(N(H) W_r)``, ``B + s_b tanh(N(H) W_b)``, N a
    layer norm of each stream (``gate_norm``). A_r starts at I, B at 1, A_m at one stream, the next
    one in each block, W at 0, s at 0.01: the sum of the rows is then n times the plain pre-norm
    stack. Zhu et al. 2025, "Hyper-Connections", arXiv 2409.19606; code
    lucidrains/hyper-connections. The paper also scales the initial standard deviation of what
    writes to the stream (out, fc2) by sqrt(n), so that the output of the stack keeps its size:
    ``output_init="sqrt_n"``, where we read the factor as a division, as each branch is written to n
    rows that are summed. The paper lets the W decay; here they do not. n = 1 is only initially
    pre-norm.
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

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        if self.options.output_init == "sqrt_n":
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


@register("fractional")
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
            Count(
                "parts m of fractional connections, the width's largest divisor up to it",
                short="m",
            ),
        ] = 4,
        mixing: Mixing = "dynamic",
        **common: Unpack[Common],
    ):
        super().__init__(dim, parts=parts, mixing=mixing, **common)
        m = max(k for k in range(1, int(parts) + 1) if dim % k == 0)
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

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h = x.unflatten(-1, self.shape)
        a_m, a_r, b = self.matrices(h)
        read = (a_m.unsqueeze(-1) * h.unsqueeze(-2)).sum(-3)
        mixed_parts = (a_r.unsqueeze(-1) * h.unsqueeze(-2)).sum(-3)
        branch_input, _ = super().prepare(read.flatten(-2).to(x.dtype))
        return branch_input, (mixed_parts, b)

    def matrices(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m, A_r and B of H ``(..., m, dim / m)``."""
        if not self.dynamic:
            return self.a_m, self.a_r, self.b
        m, dtype = self.shape[0], self.weight.dtype
        gates = torch.tanh(self.gate_norm(h.to(dtype)).to(dtype) @ self.weight)
        a_m = self.a_m + self.s_a * gates[..., :m]
        a_r = self.a_r + self.s_a * gates[..., m : 2 * m]
        return a_m, a_r, self.b + self.s_b * gates[..., 2 * m]

    def carry(self, x: Tensor) -> Any:
        return self.prepare(x)[1]

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


class SigmoidGates(MatrixSkip):
    """The rules that read ``p H``, ``p = sigmoid(P)``, and write by ``w = 2 sigmoid(W)``.

    P and W, of shape (n), are ``alpha * (vec(H) / rms(vec(H))) phi + b``, each with its own alpha,
    phi and b.
    """

    def __init__(self, dim: int, *, read_bias: float, **options: Any):
        super().__init__(dim, read_bias=read_bias, **options)
        n = self.n
        self.b_pre = self.new_parameter(read_bias * (2.0 * torch.eye(n)[self.reads] - 1.0))
        self.b_post = self.new_parameter(torch.zeros(n))
        self.phi_pre = self.new_parameter(torch.zeros(n * dim, n))
        self.phi_post = self.new_parameter(torch.zeros(n * dim, n))
        self.alpha_pre = self.new_parameter(torch.full((1,), 0.01))
        self.alpha_post = self.new_parameter(torch.full((1,), 0.01))

    def constants(self) -> dict[str, float]:
        # of b_pre, the gate of the stream that the branch reads at first: the others begin at minus
        # that, and the mean says little
        return {**super().constants(), "b_pre": float(self.b_pre[self.reads].detach())}

    def projected(self, h: Tensor, *phi: Tensor) -> tuple[Tensor, ...]:
        """``(vec(H) / rms(vec(H))) phi`` for each ``phi``, ``(n * dim, k)``: ``(..., k)``."""
        flat = h.flatten(-2)
        together = torch.cat(phi, 1)
        # the division after the product, as in the paper
        products = at_least_float32(flat.to(together.dtype) @ together) / rms(flat, self.eps)
        return products.split([each.size(1) for each in phi], -1)

    def gates(self, pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
        """p and w, of the projections of H to P and W."""
        p = torch.sigmoid(self.alpha_pre * pre + self.b_pre)
        return p, 2.0 * torch.sigmoid(self.alpha_post * post + self.b_post)


def updated(h: Tensor, matrix: Tensor, writing: Tensor, f_x: Tensor) -> Tensor:
    """``R H + w F`` of H ``(..., n, dim)``, R ``([...,] m, n)`` and w ``([...,] m)``."""
    y = writing.unsqueeze(-1) * f_x.unsqueeze(-2)
    for k in range(h.size(-2)):  # products rather than matmul, whose type autocast would narrow
        y = y + matrix[..., k : k + 1] * h[..., k : k + 1, :]
    return y


def mixed(weights: Tensor, h: Tensor) -> Tensor:
    """The sum of the rows of H ``(..., n, dim)`` with ``weights``, ``([...,] n)``."""
    return (weights.unsqueeze(-1) * h).sum(-2)


def rms(z: Tensor, eps: float) -> Tensor:
    """The root mean square of z's rows, ``(..., 1)``, at least fp32."""
    return (at_least_float32(z).square().mean(-1, keepdim=True) + eps).sqrt()


@register("mhc")
class ManifoldConstrained(SigmoidGates):
    """mHC ``H' = R H + w F(G(p H))``: R doubly stochastic or a rotation, ``p = sigmoid(P)``,
    ``w = 2 sigmoid(W)``.

    P, W (n) and the logits Q are ``alpha * (vec(H) / rms(vec(H))) phi + b``, each with its own
    alpha, phi and b; the gain of the paper's RMSNorm is a factor of phi. ``matrix`` says what R is
    made of:

    ============ ============================================================================
    sinkhorn     Q (n, n): 20 steps of Sinkhorn and Knopp, columns then rows, from ``exp(Q)``: rows
                 sum to 1, columns nearly so. Xie et al. 2025, "mHC: Manifold-Constrained
                 Hyper-Connections", arXiv 2512.24880
    permutations Q (n!): ``sum_k softmax(Q)_k P_k`` over all permutation matrices, n up to 5.
                 mHC-lite, arXiv 2601.05732, code FFTYYY/mhc-lite
    kronecker    Q (log2 n, 2): the Kronecker product of ``[[p, 1 - p], [1 - p, p]]``, p the first
                 of softmax(Q_k), n a power of 2. KromHC, arXiv 2601.21579, code wz1119/KromHC
    quaternions  Q (2, 4): the rotation ``x -> p x q`` of four streams by two quaternions, the rows
                 of Q over their lengths. oHC (Guo et al. 2026), which we read in summaries
    cayley       Q (n, n): two steps towards the Cayley transform of ``0.1 (Q - Q^T)``, nearly a
                 rotation. JPmHC (Sengupta et al. 2026), arXiv 2602.18308, in other authors' code
                 where the two steps diverge if ``Q - Q^T`` grows beyond about 20
    ============ ============================================================================

    alpha starts at 0.01, phi at 0, b_res at 0 for the identity and -8 elsewhere (R near I), as in
    code FFTYYY/mhc-lite, where b_pre and b_post are 1 for a stream drawn at random and -1
    elsewhere. Ours are b_pre at ``read_bias``, 4, for one stream, the next one in each block, and
    minus that elsewhere, and b_post at 0 (w = 1). R does not change n equal rows, so the sum of the
    rows starts as n times the plain pre-norm stack; and in the first block, whose rows are equal,
    the parameters of R get no gradient. The sigmoid's slope at 4 is 0.018, where that code's 1 has
    0.20: what a branch reads changes more slowly at first. The stack's output is the sum of the
    rows, which a norm follows; mHC-lite's code has the norm of each row and then the sum,
    DeepSeek-V4 a learned mean. In Hugging Face's ``deepseek_v4`` 1e-6 (hc_eps) is added to p and in
    Sinkhorn's steps, whose order is ours; alpha starts at 1, b at 0, and phi is drawn. In code
    lucidrains/hyper-connections phi sees one stream at a time; so it does in x-transformers
    2.31.10, where R is all ones, for any parameters.
    """

    permutations: Tensor

    def __init__(
        self,
        dim: int,
        *,
        streams: Streams = 4,
        read_bias: ReadBias = 4.0,
        matrix: Annotated[
            Literal["sinkhorn", "permutations", "kronecker", "quaternions", "cayley"],
            Choice(
                "how mhc's mixing matrix is made: doubly stochastic, or the last two a rotation"
            ),
        ] = "sinkhorn",
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, read_bias=read_bias, matrix=matrix, **common)
        self.b_res = self.new_parameter(self._logits_of_identity())
        self.phi_res = self.new_parameter(torch.zeros(self.n * dim, self.b_res.numel()))
        self.alpha_res = self.new_parameter(torch.full((1,), 0.01))

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, matrix, writing = self.weights(h)
        return mixed(p, h), matrix, writing

    def weights(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p, R and w of H ``(..., n, dim)``: ``(..., n)``, ``(..., n, n)`` and ``(..., n)``."""
        pre, post, res = self.projected(h, self.phi_pre, self.phi_post, self.phi_res)
        p, writing = self.gates(pre, post)
        logits = self.alpha_res * res.unflatten(-1, self.b_res.shape) + self.b_res
        return p, self.matrix(logits), writing

    def _logits_of_identity(self) -> Tensor:
        """Q where R is nearly I."""
        n, choice = self.n, self.options.matrix
        if choice == "sinkhorn":
            return 8.0 * torch.eye(n) - 8.0
        if choice == "cayley":
            return torch.zeros(n, n)
        if choice == "quaternions":
            if n != 4:
                raise ValueError(f"streams={n}: expected 4 with matrix 'quaternions'")
            return torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2)
        if choice == "permutations":
            if n > 5:
                raise ValueError(f"streams={n}: expected at most 5 with matrix 'permutations'")
            orders = list(itertools.permutations(range(n)))  # the identity first
            every = torch.eye(n)[torch.tensor(orders)].to(**self.factory)
            self.register_buffer("permutations", every, persistent=False)
            return torch.tensor([0.0] + [-8.0] * (len(orders) - 1))
        if n < 2 or n & (n - 1):
            raise ValueError(f"streams={n}: expected a power of 2 with matrix 'kronecker'")
        return torch.tensor([[0.0, -8.0]] * int(math.log2(n)))

    def matrix(self, logits: Tensor) -> Tensor:
        """R of Q; products rather than matmul, whose type autocast would narrow."""
        if self.options.matrix == "sinkhorn":
            for _ in range(20):  # in logarithms, where nothing overflows and no sum is 0
                logits = torch.log_softmax(torch.log_softmax(logits, -2), -1)
            return torch.exp(logits)
        if self.options.matrix == "quaternions":
            return of_quaternions(logits)
        if self.options.matrix == "cayley":
            return cayley(logits)
        share = torch.softmax(logits, -1)
        if self.options.matrix == "permutations":
            return (share[..., None, None] * self.permutations).sum(-3)
        factors = torch.stack([share, share.flip(-1)], -2).unbind(-3)
        matrix = factors[0]
        for factor in factors[1:]:
            product = matrix[..., :, None, :, None] * factor[..., None, :, None, :]
            matrix = product.flatten(-2).flatten(-3, -2)
        return matrix


class UnmixedStreams(MatrixSkip):
    """The rules ``H' = H + w F(...)``: R, the buffer ``identity``, is not multiplied."""

    mixes_streams = False
    identity: Tensor

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, _, writing = carried
        if self.last:  # the sum of the rows of H'
            return sum(h.unbind(-2), writing.sum(-1, keepdim=True) * f_x)
        return (h + writing.unsqueeze(-1) * f_x.unsqueeze(-2)).flatten(-2)


@register("ihc")
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
        self.register_buffer("identity", torch.eye(self.n).to(**self.factory), persistent=False)

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post = self.projected(h, self.phi_pre, self.phi_post)
        p, writing = self.gates(pre, post)
        return mixed(p, h), self.identity, writing


@register("gated_residual")
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

    def __init__(
        self,
        dim: int,
        *,
        streams: Streams = 4,
        gate_rank: Annotated[
            int, Count("rank of the gate through which a gated residual's branch reads")
        ] = 16,
        **common: Unpack[Common],
    ):
        super().__init__(dim, streams=streams, gate_rank=gate_rank, **common)
        n, rank = self.n, int(gate_rank)
        drawn = 0.02 * self.draw(rank + rank + n, n * dim)
        self.register_buffer("identity", torch.eye(n).to(**self.factory), persistent=False)
        self.gain = self.new_parameter(torch.ones(n, dim))
        self.gate_down = self.new_parameter(drawn[:rank])
        self.gate_up = self.new_parameter(drawn[rank : 2 * rank].T.contiguous())
        self.write = self.new_parameter(drawn[2 * rank :])

    def needs_final_norm(self) -> bool:
        return True  # the stack's output is a sum

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = at_least_float32(h)
        normal = self.gain * wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        flat = normal.flatten(-2).to(self.write.dtype) / self.n

        gate = F.linear(F.silu(F.linear(flat, self.gate_down)), self.gate_up).sigmoid()
        read = (gate.unflatten(-1, [self.n, self.dim]) * normal).mean(-2)
        writing = 2.0 * F.linear(flat, self.write).sigmoid()
        return read, self.identity, writing
