"""What whole stacks of the rules that mix several streams compute.

It is written out in elementary float64 arithmetic. The references share nothing with the package;
gradients come from autograd.
"""

import itertools
import math

import torch
from stream_blocks import EPS, Blocks, rms, shares
from torch import Tensor

PARTS = ("pre", "post", "res")  # of mHC: what reads, what is written, what stays


def gated(blocks: Blocks, k: int, rows: list[Tensor], weights: list[Tensor]) -> list[list[Tensor]]:
    """A_m, A_r and B of block k, for each of the rows of H, with what tanh(N(H) W) adds to them."""
    matrices = [[blocks.get(k, name)[i] for i in range(len(rows))] for name in ("a_m", "a_r", "b")]
    if not weights:
        return matrices
    normed = [blocks.norm(k, "gate_norm", h) for h in rows]
    scales = [blocks.get(k, name) for name in ("s_a", "s_a", "s_b")]
    return [
        [a + s * torch.tanh(h @ w) for a, h in zip(m, normed)]
        for m, s, w in zip(matrices, scales, weights)
    ]


def mixed(matrix: list[Tensor], rows: list[Tensor], j: int) -> Tensor:
    return sum(a[..., j, None] * h for a, h in zip(matrix, rows))


def hyper(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "b"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        names = ("w_m", "w_r", "w_b") if "skips.0.w_m" in blocks.parameters else ()
        read, kept, written = gated(blocks, k, streams, [blocks.get(k, name) for name in names])
        f = blocks.branch(k, sum(a * h for a, h in zip(read, streams)))
        streams = [mixed(kept, streams, j) + written[j] * f for j in range(n)]
    return sum(streams)


def fractional(x: Tensor, blocks: Blocks) -> Tensor:
    for k in range(len(blocks.branches)):
        m = len(blocks.get(k, "b"))
        rows = x.split(x.size(-1) // m, -1)
        read, kept, written = gated(blocks, k, rows, blocks.get(k, "weight").split([m, m, 1], 1))
        f = blocks.branch(k, torch.cat([mixed(read, rows, j) for j in range(m)], -1)).split(
            x.size(-1) // m, -1
        )
        x = torch.cat([mixed(kept, rows, j) + written[j] * f[j] for j in range(m)], -1)
    return x


def sinkhorn(res: Tensor, n: int) -> list[list[Tensor]]:
    matrix = [[torch.exp(res[..., i * n + j]) for j in range(n)] for i in range(n)]
    for _ in range(20):
        columns = [sum(matrix[i][j] for i in range(n)) for j in range(n)]
        matrix = [[matrix[i][j] / columns[j] for j in range(n)] for i in range(n)]
        matrix = [[entry / sum(line) for entry in line] for line in matrix]
    return matrix


def permutations(res: Tensor, n: int) -> list[list[Tensor]]:
    share, every = (
        torch.exp(res) / torch.exp(res).sum(-1, keepdim=True),
        list(itertools.permutations(range(n))),
    )
    return [
        [sum(share[..., k] for k, p in enumerate(every) if p[i] == j) for j in range(n)]
        for i in range(n)
    ]


def kronecker(res: Tensor, n: int) -> list[list[Tensor]]:
    """Return the matrix whose entry (i, j) is a product over the bits of i and j.

    A factor is p where they agree, 1 - p where they do not.
    """
    bits = n.bit_length() - 1
    stay = [1 / (1 + torch.exp(res[..., 2 * k + 1] - res[..., 2 * k])) for k in range(bits)]
    factors = [
        (p, 1 - p) for p in reversed(stay)
    ]  # by whether a bit differs; the first factor is the highest bit
    return [
        [math.prod(f[(i ^ j) >> k & 1] for k, f in enumerate(factors)) for j in range(n)]
        for i in range(n)
    ]


def weights_of_mhc(blocks: Blocks, k: int, streams: list[Tensor], doubly_stochastic):
    """What block k reads with, its mixing matrix and what it writes with, of its streams."""
    whole = torch.cat(streams, -1)
    whole = whole / ((whole * whole).mean(-1, keepdim=True) + EPS) ** 0.5
    phi, alpha, b = (
        [blocks.get(k, f"{name}_{part}") for part in PARTS] for name in ("phi", "alpha", "b")
    )
    pre, post, res = (alpha[i] * (whole @ phi[i]) + b[i].flatten() for i in range(3))
    matrix = doubly_stochastic(res, len(streams))
    return 1 / (1 + torch.exp(-pre)), matrix, 2 / (1 + torch.exp(-post))


def weighted_sum(weights: Tensor, streams: list[Tensor]) -> Tensor:
    return sum(weights[..., i, None] * stream for i, stream in enumerate(streams))


def after_mhc(streams: list[Tensor], matrix, written: Tensor, f: Tensor) -> list[Tensor]:
    n = len(streams)
    lines = [sum(matrix[i][j][..., None] * streams[j] for j in range(n)) for i in range(n)]
    return [lines[i] + written[..., i, None] * f for i in range(n)]


def mhc(x: Tensor, blocks: Blocks, doubly_stochastic=sinkhorn) -> Tensor:
    streams = [x] * len(blocks.get(0, "b_pre"))
    for k in range(len(blocks.branches)):
        read, matrix, written = weights_of_mhc(blocks, k, streams, doubly_stochastic)
        f = blocks.branch(k, weighted_sum(read, streams))
        streams = after_mhc(streams, matrix, written, f)
    return sum(streams)


def single_pass_mhc(x: Tensor, blocks: Blocks, doubly_stochastic=sinkhorn) -> Tensor:
    """X_{l+1} = B_l X_l + C_l F_l(A_{l-1} X_l) from n copies of x on; the first A is one-hot."""
    n = len(blocks.get(0, "b_pre"))
    streams, read_before = [x] * n, torch.eye(n, dtype=x.dtype)[0]
    for k in range(len(blocks.branches)):
        read, matrix, written = weights_of_mhc(blocks, k, streams, doubly_stochastic)
        f = blocks.branch(k, weighted_sum(read_before, streams))
        streams, read_before = after_mhc(streams, matrix, written, f), read
    return weighted_sum(read_before, streams)


def hamilton(p: list[Tensor], q: list[Tensor]) -> list[Tensor]:
    """The product of two quaternions a + bi + cj + dk."""
    (a, b, c, d), (e, f, g, h) = p, q
    return [
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    ]


def quaternions(res: Tensor, n: int) -> list[list[Tensor]]:
    """Column j is where p 1_j q goes."""
    p, q = res[..., :4], res[..., 4:]
    p, q = (list((z / (z * z).sum(-1, keepdim=True) ** 0.5).unbind(-1)) for z in (p, q))
    one, none = torch.ones_like(p[0]), torch.zeros_like(p[0])
    units = [[one if i == j else none for i in range(n)] for j in range(n)]
    columns = [hamilton(hamilton(p, unit), q) for unit in units]
    return [[columns[j][i] for j in range(n)] for i in range(n)]


def cayley(res: Tensor, n: int) -> list[list[Tensor]]:
    """Two steps towards the Cayley transform: 1 + z + z^2/2 + z^3/4 of z = 0.1 (Q - Q^T)."""
    q = res.unflatten(-1, [n, n])
    z = 0.1 * (q - q.transpose(-1, -2))
    matrix = torch.eye(n, dtype=q.dtype) + z + z @ z / 2 + z @ z @ z / 4
    return [[matrix[..., i, j] for j in range(n)] for i in range(n)]


def multi_gate(x: Tensor, blocks: Blocks, n: int) -> Tensor:
    """n streams: the first are what entered and what the first n - 1 branches returned."""
    streams, root = [x], x.size(-1) ** 0.5
    for k in range(len(blocks.branches)):
        f = blocks.branch(k, x)
        if len(streams) < n:
            streams.append(f)
        else:
            weight, bias = blocks.get(k, "gate_weight"), blocks.get(k, "gate_bias")
            scores = [(weight * s / rms(s)).sum(-1, keepdim=True) / root for s in streams]
            gates = [1 / (1 + torch.exp(-(score + b))) for score, b in zip(scores, bias)]
            streams = [(1 - beta) * s + beta * f for beta, s in zip(gates, streams)]
        query = blocks.get(k, "query")
        scores = [(query * s / rms(s)).sum(-1, keepdim=True) / root for s in streams]
        x = sum(p * s for p, s in zip(shares(scores), streams))
    return x


def ihc(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "b_pre"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        whole = torch.cat(streams, -1)
        whole = whole / rms(whole)
        logits = [
            blocks.get(k, f"alpha_{part}") * (whole @ blocks.get(k, f"phi_{part}"))
            + blocks.get(k, f"b_{part}")
            for part in PARTS[:2]
        ]
        read, written = 1 / (1 + torch.exp(-logits[0])), 2 / (1 + torch.exp(-logits[1]))
        f = blocks.branch(k, sum(read[..., i, None] * streams[i] for i in range(n)))
        streams = [streams[i] + written[..., i, None] * f for i in range(n)]
    return sum(streams)


def gated_residual(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "write"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        normal = [blocks.get(k, "gain")[i] * h / rms(h) for i, h in enumerate(streams)]
        whole = torch.cat(normal, -1) / n
        down = whole @ blocks.get(k, "gate_down").T
        gate = 1 / (1 + torch.exp(-((down / (1 + torch.exp(-down))) @ blocks.get(k, "gate_up").T)))
        read = sum(a * h for a, h in zip(gate.split(x.size(-1), -1), normal)) / n
        written = 2 / (1 + torch.exp(-(whole @ blocks.get(k, "write").T)))
        f = blocks.branches[k](read)
        streams = [streams[i] + written[..., i, None] * f for i in range(n)]
    return sum(streams)
