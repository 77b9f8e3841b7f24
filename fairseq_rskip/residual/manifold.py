"""mHC: streams that are read and written through sigmoids; their mixture keeps their sum."""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, root_mean_square
from .base import Common
from .hyper import MatrixSkip, RowStreams, Streams, mixed
from .mixing_matrices import MATRICES
from .options import Choice, Positive
from .registry import register

ReadBias = Annotated[
    float,
    Positive(
        "initial bias of the gate by which an mHC branch reads its stream; minus that for the "
        "others",
        affects="start",
    ),
]


class SigmoidGates(RowStreams):
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
        numbers = super().constants()
        numbers.pop("mean b_pre", None)
        return {**numbers, "b_pre": float(self.b_pre[self.reads].detach())}

    def projected(self, h: Tensor, *phi: Tensor) -> tuple[Tensor, ...]:
        """``(vec(H) / rms(vec(H))) phi`` for each ``phi``, ``(n * dim, k)``: ``(..., k)``."""
        flat = h.flatten(-2)
        together = torch.cat(phi, 1)
        # the division after the product, as in the paper
        products = at_least_float32(flat.to(together.dtype) @ together)
        products = products / root_mean_square(flat, self.eps)
        return products.split([each.size(1) for each in phi], -1)

    def gates(self, pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
        """p and w, of the projections of H to P and W."""
        p = torch.sigmoid(self.alpha_pre * pre + self.b_pre)
        return p, 2.0 * torch.sigmoid(self.alpha_post * post + self.b_post)


@register("mhc", also=("manifold-constrained hyper-connection", "manifold hyper-connection"))
class ManifoldConstrained(SigmoidGates, MatrixSkip):
    """mHC ``H' = R H + w F(G(p H))``, R doubly stochastic or a rotation, ``p = sigmoid(P)``,
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
    the parameters of R get no gradient. Nor do those of permutations and kronecker in the last
    block, whose columns sum to 1. The sigmoid's slope at 4 is 0.018, where that code's 1 has
    0.20: what a branch reads changes more slowly at first. The stack's output is the sum of the
    rows, which a norm follows; mHC-lite's code has the norm of each row and then the sum,
    DeepSeek-V4 a learned mean. In Hugging Face's ``deepseek_v4`` 1e-6 (hc_eps) is added to p and in
    Sinkhorn's steps, whose order is ours; alpha starts at 1, b at 0, and phi is drawn. In code
    lucidrains/hyper-connections phi sees one stream at a time; so it does in x-transformers
    2.31.10, where R is all ones, for any parameters.
    """

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
        self.matrix = MATRICES[matrix](self.n).to(**self.factory)
        self.b_res = self.new_parameter(self.matrix.logits_of_identity)
        self.phi_res = self.new_parameter(torch.zeros(self.n * dim, self.b_res.numel()))
        self.alpha_res = self.new_parameter(torch.full((1,), 0.01))

    def read_mix_write(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        p, matrix, writing = self.weights(h)
        return mixed(p, h), matrix, writing

    def without_gradient(self) -> tuple[str, ...]:
        """Those of R where it cannot matter: the streams of the first block are equal, which a
        matrix with rows of sum 1 keeps, and of the last block's streams only the sum is used.
        """
        keeps_streams = self.first and self.matrix.rows_sum_to_one
        keeps_sum = self.last and self.matrix.columns_sum_to_one
        return ("b_res", "phi_res", "alpha_res") if keeps_streams or keeps_sum else ()

    def weights(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """p, R and w of H ``(..., n, dim)``: ``(..., n)``, ``(..., n, n)`` and ``(..., n)``."""
        pre, post, res = self.projected(h, self.phi_pre, self.phi_post, self.phi_res)
        p, writing = self.gates(pre, post)
        logits = self.alpha_res * res.unflatten(-1, self.b_res.shape) + self.b_res
        return p, self.matrix(logits), writing
