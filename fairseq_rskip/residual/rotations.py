"""Rotations of residual streams, without matmul, whose type autocast would narrow.

The matrices of oHC (quaternions) and JPmHC (Cayley): see ``ManifoldConstrained`` for the sources.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of ``a`` and ``b``, ``(..., n, n)``."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def of_quaternions(pair: Tensor) -> Tensor:
    """The rotation ``x -> p x q`` of four numbers x, ``(..., 4, 4)``; ``pair``, ``(..., 2, 4)``,
    holds p and q, here divided by their lengths."""
    p, q = F.normalize(pair, dim=-1).unbind(-2)
    return product(_left(p), _right(q))


def _left(p: Tensor) -> Tensor:
    """The matrix of ``x -> p x``, for quaternions of the parts 1, i, j, k."""
    a, b, c, d = p.unbind(-1)
    rows = ((a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a))
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _right(q: Tensor) -> Tensor:
    """The matrix of ``x -> x q``."""
    a, b, c, d = q.unbind(-1)
    rows = ((a, -b, -c, -d), (b, a, d, -c), (c, -d, a, b), (d, c, -b, a))
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


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
