"""Rotations of residual streams, without matmul, whose type autocast would narrow.

The matrices of oHC (quaternions) and JPmHC (Cayley): see ``ManifoldConstrained`` for the sources.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# [k][i][j]: the part of p_k in entry (i, j) of the matrix of x -> p x, and of q_k in that of
# x -> x q, for quaternions of the parts 1, i, j, k
LEFT = (
    ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
    ((0, -1, 0, 0), (1, 0, 0, 0), (0, 0, 0, -1), (0, 0, 1, 0)),
    ((0, 0, -1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (0, -1, 0, 0)),
    ((0, 0, 0, -1), (0, 0, -1, 0), (0, 1, 0, 0), (1, 0, 0, 0)),
)
RIGHT = (
    ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
    ((0, -1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, -1, 0)),
    ((0, 0, -1, 0), (0, 0, 0, -1), (1, 0, 0, 0), (0, 1, 0, 0)),
    ((0, 0, 0, -1), (0, 0, 1, 0), (0, -1, 0, 0), (1, 0, 0, 0)),
)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of ``a`` and ``b``, ``(..., n, n)``."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def of_quaternions(pair: Tensor) -> Tensor:
    """The rotation ``x -> p x q`` of four numbers x, ``(..., 4, 4)``; ``pair``, ``(..., 2, 4)``,
    holds p and q, here divided by their lengths."""
    p, q = F.normalize(pair, dim=-1).unbind(-2)
    left = (p[..., None, None] * p.new_tensor(LEFT)).sum(-3)
    right = (q[..., None, None] * q.new_tensor(RIGHT)).sum(-3)
    return product(left, right)


def cayley(logits: Tensor, alpha: float = 0.1, steps: int = 2) -> Tensor:
    """Nearly the rotation ``(I - alpha W / 2)^-1 (I + alpha W / 2)``, ``W = Q - Q^T``, of the
    ``logits`` Q, ``(..., n, n)``.

    It takes ``steps`` times ``Y = I + alpha W (I + Y) / 2``, beginning with ``I + alpha W``.
    """
    skew = logits - logits.transpose(-1, -2)
    identity = torch.eye(logits.size(-1), dtype=logits.dtype, device=logits.device)
    matrix = identity + alpha * skew
    for _ in range(steps):
        matrix = identity + alpha / 2 * product(skew, identity + matrix)
    return matrix
