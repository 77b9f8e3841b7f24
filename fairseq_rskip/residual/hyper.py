"""Hyper-connections, and hyper-connections whose mixing matrices are doubly stochastic (mHC)."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import at_least_float32, create_norm
from . import options as opt
from .base import SkipConnection
from .streams import StreamSkip

_STREAMS = opt.option(4, "number of residual streams n of hyper-connections", "count", short="n")
_MIXING = opt.option(
    "dynamic", "weights of hyper-connections, by position or for all positions", choices=("dynamic", "static")
)
_PARTS = opt.option(4, "parts m of fractional connections, the width's largest divisor up to it", "count", short="m")
_MATRIX = opt.option(
    "sinkhorn", "how mhc's mixing matrix is made doubly stochastic", choices=("sinkhorn", "permutations", "kronecker")
)


class MatrixSkip(StreamSkip, norm=opt.WITHOUT_BATCH, streams=_STREAMS, slots=("pre",)):
    """``H' = R H + w F(G(p H))`` with p, R and w from :meth:`read_mix_write`; H is n rows of dim channels.

    The stack's input enters as n copies; what leaves it is the sum of the rows.
    """

    def stream_widths(self) -> tuple[int, int]:
        self.n = int(self.options.streams)
        self.reads = (self.place.block_number - 1) % self.n  # at the start: the next stream in each block
        return 1 if self.first else self.n, 1 if self.last else self.n

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p, R, whose rows are the streams that come out, and w, of H ``(..., n, dim)``: shapes ``([...,] n)``,
        ``([...,] n, n)`` and ``([...,] n)``."""
        raise NotImplementedError

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        h = torch.stack([x] * self.n, -2) if self.first else x.unflatten(-1, [self.n, self.dim])
        reading, matrix, writing = self.read_mix_write(h)
        return (reading.unsqueeze(-1) * h).sum(-2).to(x.dtype), (h, matrix, writing)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, matrix, writing = carried or self.current(x)[1]
        if self.last:  # the sum of the rows of H'
            matrix, writing = matrix.sum(-2, keepdim=True), writing.sum(-1, keepdim=True)
        y = writing.unsqueeze(-1) * f_x.unsqueeze(-2)
        for k in range(self.n):  # products rather than matmul, whose type autocast would narrow
            y = y + matrix[..., k : k + 1] * h[..., k : k + 1, :]
        return y.flatten(-2)


class HyperConnection(MatrixSkip, kind="hyper", mixing=_MIXING):
    """Hyper-connections ``H' = A_r^T H + B F(G(A_m^T H))``; A_m (n), A_r (n, n) and B (n) are learned.

    With ``mixing`` dynamic, the paper's best, each depends on the position, too: ``A_m + s_a tanh(N(H) W_m)``,
    ``A_r + s_a tanh(N(H) W_r)``, ``B + s_b tanh(N(H) W_b)``, N a layer norm of each stream (``gate_norm``). A_r starts
    at I, B at 1, A_m at one stream, the next one in each block, W at 0, s at 0.01: the sum of the rows is then n times
    the plain pre-norm stack. Zhu et al. 2025, "Hyper-Connections", arXiv 2409.19606; code lucidrains/hyper-connections.
    The paper also scales the start of what writes to the stream (out, fc2) by sqrt(n), so that the sum of the rows
    keeps its size, and lets the W decay; here neither. n = 1 is pre-norm at the start only.
    """

    def setup(self) -> None:
        super().setup()
        n = self.n
        self.a_m = nn.Parameter(torch.eye(n)[self.reads].clone())
        self.a_r = nn.Parameter(torch.eye(n))
        self.b = nn.Parameter(torch.ones(n))
        self.dynamic = self.options.mixing == "dynamic"
        if self.dynamic:
            self.gate_norm = create_norm("layer", self.dim, eps=self.eps)
            self.w_m = nn.Parameter(torch.zeros(self.dim, 1))
            self.w_r = nn.Parameter(torch.zeros(self.dim, n))
            self.w_b = nn.Parameter(torch.zeros(self.dim, 1))
            self.s_a, self.s_b = (nn.Parameter(torch.full((1,), 0.01)) for _ in range(2))

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.dynamic:
            return self.a_m, self.a_r.transpose(-1, -2), self.b
        weight = torch.cat([self.w_r, self.w_b, self.w_m], 1)
        gates = torch.tanh(self.gate_norm(h.to(weight.dtype)).to(weight.dtype) @ weight)
        a_r = self.a_r + self.s_a * gates[..., : self.n]
        reading = self.a_m + self.s_a * gates[..., self.n + 1]
        return reading, a_r.transpose(-1, -2), self.b + self.s_b * gates[..., self.n]


class FractionalConnection(
    SkipConnection, kind="fractional", norm=opt.WITHOUT_BATCH, parts=_PARTS, mixing=_MIXING, slots=("pre",)
):
    """Fractional connections ``H' = A_r^T H + B F(G(A_m^T H))``: H is x itself, as m rows of dim / m channels, and F is
    split alike. A_m, A_r (m, m) and B (m) are learned, and as in hyper-connections depend on the position, too.

    They start at I, I and 1, where it is pre-norm: Zhu et al. 2025, "Frac-Connections: Fractional Extension of
    Hyper-Connections", arXiv 2503.14125, Eq. 15. In code lucidrains/hyper-connections every part of F is added to every
    row. The paper decays the weights that depend on the position; here they are not decayed.
    """

    for_images = False

    def setup(self) -> None:
        m = max(k for k in range(1, int(self.options.parts) + 1) if self.dim % k == 0)
        self.shape = [m, self.dim // m]
        self.a_m, self.a_r = nn.Parameter(torch.eye(m)), nn.Parameter(torch.eye(m))
        self.b = nn.Parameter(torch.ones(m))
        if self.options.mixing == "dynamic":
            self.gate_norm = create_norm("layer", self.shape[1], eps=self.eps)
            self.weight = nn.Parameter(torch.zeros(self.shape[1], 2 * m + 1))  # for A_m, A_r and B
            self.s_a, self.s_b = (nn.Parameter(torch.full((1,), 0.01)) for _ in range(2))

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, m = x.unflatten(-1, self.shape), self.shape[0]
        a_m, a_r, b = self.a_m, self.a_r, self.b
        if self.options.mixing == "dynamic":
            dtype = self.weight.dtype
            gates = torch.tanh(self.gate_norm(h.to(dtype)).to(dtype) @ self.weight)
            a_m, a_r = a_m + self.s_a * gates[..., :m], a_r + self.s_a * gates[..., m : 2 * m]
            b = b + self.s_b * gates[..., 2 * m]
        read, kept = ((a.unsqueeze(-1) * h.unsqueeze(-2)).sum(-3) for a in (a_m, a_r))
        return super().prepare(read.flatten(-2).to(x.dtype))[0], (kept, b)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        kept, b = carried or self.prepare(x)[1]
        return (kept + b.unsqueeze(-1) * f_x.unflatten(-1, self.shape)).flatten(-2)


class ManifoldConstrained(MatrixSkip, kind="mhc", matrix=_MATRIX):
    """mHC ``H' = R H + w F(G(p H))``: R doubly stochastic, ``p = sigmoid(P)``, ``w = 2 sigmoid(W)``.

    P, W (n) and the logits Q are ``alpha * (vec(H) / rms(vec(H))) phi + b``, each with its own alpha, phi and b; the
    gain of the paper's RMSNorm is a factor of phi. ``matrix`` says what R is made of:

    ============ =================================================================================================
    sinkhorn     Q (n, n): 20 steps of Sinkhorn and Knopp, columns then rows, from ``exp(Q)``: rows sum to 1, columns
                 up to what 20 steps leave. Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections", arXiv
                 2512.24880
    permutations Q (n!): ``sum_k softmax(Q)_k P_k`` over all permutation matrices, n up to 5. mHC-lite, arXiv
                 2601.05732, code FFTYYY/mhc-lite
    kronecker    Q (log2 n, 2): the Kronecker product of ``[[p, 1 - p], [1 - p, p]]``, p the first of softmax(Q_k), n a
                 power of 2. KromHC, arXiv 2601.21579, code wz1119/KromHC
    ============ =================================================================================================

    alpha starts at 0.01, phi at 0, b_res at 0 for the identity and -8 elsewhere (R near I), as in code FFTYYY/mhc-lite,
    where b_pre and b_post are 1 for a stream drawn at random and -1 elsewhere. Ours are b_pre at 4 for one stream, the
    next one in each block, and -4 elsewhere, and b_post at 0 (w = 1). R does not change n equal rows, so the sum of the
    rows starts as n times the plain pre-norm stack; and in the first block, whose rows are equal, the parameters of R
    get no gradient. In code lucidrains/hyper-connections phi sees one stream at a time, b_post is outside of 2 sigmoid,
    and, in the version that we read, R is not applied to the tensor that F is added to.
    """

    def setup(self) -> None:
        super().setup()
        n = self.n
        self.b_pre = nn.Parameter(8.0 * torch.eye(n)[self.reads] - 4.0)
        self.b_post = nn.Parameter(torch.zeros(n))
        self.b_res = nn.Parameter(self._logits_of_identity())
        for part, columns in (("pre", n), ("post", n), ("res", self.b_res.numel())):
            self.register_parameter(f"phi_{part}", nn.Parameter(torch.zeros(n * self.dim, columns)))
            self.register_parameter(f"alpha_{part}", nn.Parameter(torch.full((1,), 0.01)))

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat, phi = h.flatten(-2), torch.cat([self.phi_pre, self.phi_post, self.phi_res], 1)
        rms = (at_least_float32(flat).square().mean(-1, keepdim=True) + self.eps).sqrt()
        # the division after the product, as in the paper
        projected = at_least_float32(flat.to(phi.dtype) @ phi) / rms
        pre, post, res = projected.split([self.n, self.n, self.b_res.numel()], -1)
        res = self.alpha_res * res.unflatten(-1, self.b_res.shape) + self.b_res
        writing = 2.0 * torch.sigmoid(self.alpha_post * post + self.b_post)
        return torch.sigmoid(self.alpha_pre * pre + self.b_pre), self.matrix(res), writing

    def _logits_of_identity(self) -> Tensor:
        """Q where R is nearly I."""
        n, choice = self.n, self.options.matrix
        if choice == "sinkhorn":
            return 8.0 * torch.eye(n) - 8.0
        if choice == "permutations":
            if n > 5:
                raise ValueError(f"streams={n}: expected at most 5 with matrix 'permutations'")
            every = torch.eye(n)[torch.tensor(list(itertools.permutations(range(n))))]  # the identity first
            self.register_buffer("permutations", every, persistent=False)
            return torch.tensor([0.0] + [-8.0] * (len(every) - 1))
        if n < 2 or n & (n - 1):
            raise ValueError(f"streams={n}: expected a power of 2 with matrix 'kronecker'")
        return torch.tensor([[0.0, -8.0]] * int(math.log2(n)))

    def matrix(self, logits: Tensor) -> Tensor:
        """R of Q; products rather than matmul, whose type autocast would narrow."""
        if self.options.matrix == "sinkhorn":
            for _ in range(20):  # in logarithms, where nothing overflows and no sum is 0
                logits = torch.log_softmax(torch.log_softmax(logits, -2), -1)
            return torch.exp(logits)
        share = torch.softmax(logits, -1)
        if self.options.matrix == "permutations":
            return (share[..., None, None] * self.permutations).sum(-3)
        factors = torch.stack([share, share.flip(-1)], -2).unbind(-3)
        matrix = factors[0]
        for factor in factors[1:]:
            matrix = (matrix[..., :, None, :, None] * factor[..., None, :, None, :]).flatten(-2).flatten(-3, -2)
        return matrix
