"""mHC's mixing matrices, doubly stochastic ones and rotations, of unconstrained logits.

Each class has the logits Q where its matrix is nearly the identity, and makes R of Q.
:class:`.ManifoldConstrained` has the sources.
"""

import itertools
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..option_error import OptionError


class MixingMatrix(nn.Module):
    """R ``(..., n, n)`` of the logits Q, whose shape is that of :attr:`logits_of_identity`.

    Raises :class:`.OptionError` for a number of ``streams`` for which there is no such matrix.
    """

    name: ClassVar[str]
    rows_sum_to_one: ClassVar[bool] = True  # so that equal streams stay as they are
    columns_sum_to_one: ClassVar[bool] = True  # so that the sum of the streams stays as it is
    logits_of_identity: Tensor

    def refuse(self, streams: int, accepted: str) -> OptionError:
        return OptionError("streams", streams, accepted, {"matrix": self.name})


class Sinkhorn(MixingMatrix):
    """20 steps of Sinkhorn and Knopp, columns then rows, from ``exp(Q)``, Q ``(n, n)``."""

    name = "sinkhorn"
    columns_sum_to_one = False  # nearly

    def __init__(self, streams: int):
        super().__init__()
        self.logits_of_identity = 8.0 * torch.eye(streams) - 8.0

    def forward(self, logits: Tensor) -> Tensor:
        for _ in range(20):  # in logarithms, where nothing overflows and no sum is 0
            logits = torch.log_softmax(torch.log_softmax(logits, -2), -1)
        return torch.exp(logits)


class Permutations(MixingMatrix):
    """``sum_k softmax(Q)_k P_k`` over all permutation matrices, Q ``(n!)``."""

    name = "permutations"

    def __init__(self, streams: int):
        super().__init__()
        if streams > 5:
            raise self.refuse(streams, "at most 5")
        self.orders = list(itertools.permutations(range(streams)))  # the identity first
        self.logits_of_identity = torch.tensor([0.0] + [-8.0] * (len(self.orders) - 1))

    def forward(self, logits: Tensor) -> Tensor:
        share = torch.softmax(logits, -1)
        # made here, not kept: a buffer outside the state would be lost by to_empty()
        rows = torch.eye(len(self.orders[0]), dtype=share.dtype, device=share.device).unbind()
        permuted = torch.stack([rows[k] for order in self.orders for k in order])
        matrices = permuted.unflatten(0, (len(self.orders), -1))
        return (share[..., None, None] * matrices).sum(-3)


class Kronecker(MixingMatrix):
    """The Kronecker product of ``[[p, 1 - p], [1 - p, p]]``, p the first of softmax(Q_k), Q
    ``(log2 n, 2)``.
    """

    name = "kronecker"

    def __init__(self, streams: int):
        super().__init__()
        if streams < 2 or streams & (streams - 1):
            raise self.refuse(streams, "a power of 2")
        self.logits_of_identity = torch.tensor([[0.0, -8.0]] * int(math.log2(streams)))

    def forward(self, logits: Tensor) -> Tensor:
        share = torch.softmax(logits, -1)
        factors = torch.stack([share, share.flip(-1)], -2).unbind(-3)
        matrix = factors[0]
        for factor in factors[1:]:
            blocks = matrix[..., :, None, :, None] * factor[..., None, :, None, :]
            matrix = blocks.flatten(-2).flatten(-3, -2)
        return matrix


class Quaternions(MixingMatrix):
    """The rotation ``x -> p x q`` of four streams, p and q the rows of Q ``(2, 4)`` over their
    lengths.
    """

    name = "quaternions"
    rows_sum_to_one = columns_sum_to_one = False

    def __init__(self, streams: int):
        super().__init__()
        if streams != 4:
            raise self.refuse(streams, "4")
        self.logits_of_identity = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2)

    def forward(self, logits: Tensor) -> Tensor:
        p, q = F.normalize(logits, dim=-1).unbind(-2)
        return product(_left(p), _right(q))


class Cayley(MixingMatrix):
    """Nearly the rotation ``(I - a W / 2)^-1 (I + a W / 2)``, ``W = Q - Q^T``, Q ``(n, n)``.

    It takes two steps ``Y = I + a W (I + Y) / 2`` from ``I + a W``, with a = 0.1.
    """

    name = "cayley"
    rows_sum_to_one = columns_sum_to_one = False
    step = 0.1

    def __init__(self, streams: int):
        super().__init__()
        self.logits_of_identity = torch.zeros(streams, streams)

    def forward(self, logits: Tensor) -> Tensor:
        skew = logits - logits.transpose(-1, -2)
        identity = torch.eye(logits.size(-1), dtype=logits.dtype, device=logits.device)
        matrix = identity + self.step * skew
        for _ in range(2):
            matrix = identity + self.step / 2 * product(skew, identity + matrix)
        return matrix


MATRICES = {each.name: each for each in (Sinkhorn, Permutations, Kronecker, Quaternions, Cayley)}


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the wider of their types, which autocast would narrow."""
    wider = torch.promote_types(a.dtype, b.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(wider) @ b.to(wider)


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
