"""Skip connections that keep more than one tensor: what they share, and those that keep two, B2T, ResiDual and x0.

What a kind keeps travels in the stream itself, ``(seq_len, batch, n * dim)``: tensor k is the channels from k * dim to
(k + 1) * dim, and tensor 0 is what the branch reads. The first block of a stack takes one tensor and the last returns
one, so that a model needs to know nothing of it. In the docstrings x_0 is what enters the stack.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .base import SkipConnection


class StreamSkip(SkipConnection):
    """What kinds that keep several tensors share; ``x`` is ``(..., width_in * dim)``, y ``(..., width_out * dim)``.

    Raises :class:`SkipConnection`'s errors.
    """

    for_images = False
    spans_layers = True

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.first = self.place.number == 1
        self.last = self.place.number == self.place.blocks
        self.width_in, self.width_out = self.widths()

    def widths(self) -> tuple[int, int]:
        """How many tensors this place takes and returns."""
        return 1 if self.first else 2, 1 if self.last else 2

    def tensor(self, x: Tensor, k: int) -> Tensor:
        """Tensor k of a stream: a view of shape ``(..., dim)``."""
        return x.narrow(-1, k * self.dim, self.dim)

    def current(self, x: Tensor) -> Tensor:
        return self.tensor(x, 0)


class B2T(StreamSkip):
    """Bottom-to-top connection ``x_k = G(x_{k-1} + F_k)``, in a layer's last block ``y = G(x_0 + x_{k-1} + F_k)``.

    x_0 is the input of the *layer*: the window of this kind is a layer, which takes and returns one tensor; between its
    blocks the stream is (x_k, x_0). A layer of one block is plain post-norm. Takase et al. 2022, "B2T Connection:
    Serving Stability and Performance in Deep Transformers"; code takase/b2t_connection, which also scales
    every weight of a layer by 1/sqrt(layers) at the start: the paper's connection has no such factor, nor has this.
    Where the last branch is zero the layer is recursive, rSkip+LN with lambda = 2. Shapes as in :class:`StreamSkip`;
    raises its errors, and ``ValueError`` for norm ``none``.
    """

    kind = "b2t"
    needs_norm = True
    spans_layers = False

    def widths(self) -> tuple[int, int]:
        return 1 if self.place.position == 0 else 2, 1 if self.place.position == self.place.sublayers - 1 else 2

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        z = self.tensor(x, 0) + f_x
        return z + self.tensor(x, 1) if self.width_in > self.width_out else z

    def apply_norms(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        for norm in self.norms:
            z = norm(z, padding_mask)
        return z if self.width_out == 1 else torch.cat([z, self.tensor(x, self.width_in - 1)], -1)


class ResiDual(StreamSkip):
    """Dual residual ``x_k = G_k(x_{k-1} + F_k)``, ``r_k = r_{k-1} + F_k``, r_0 = x_0; at the end ``y = x_K + G(r_K)``.

    F_k is a function of x_{k-1}; the stream is (x_k, r_k), and only the stack's last block owns a second norm. Xie et
    al. 2023, "ResiDual: Transformer with Dual Residual Connections"; code microsoft/ResiDual. That code has
    eps 1e-7 in the last norm, and scales for fp16 that it leaves at 1; here all norms have one eps. A stack of one
    block returns 2 G(x + F). Shapes as in :class:`StreamSkip`; raises its errors, and ``ValueError`` for norm ``none``.
    """

    kind = "residual_dual"
    needs_norm = True

    def steps(self) -> int:
        return 2 if self.place.number == self.place.blocks else 1

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        """Both sums, x + F and r + F; they are one in the first block."""
        return torch.cat([self.tensor(x, k) + f_x for k in range(self.width_in)], -1)

    def apply_norms(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        dual = self.tensor(z, self.width_in - 1)
        y = self.tensor(z, 0)
        for step, norm in enumerate(self.norms):
            y = norm(y, padding_mask) if step == 0 else y + norm(dual, padding_mask)
        return y if self.width_out == 1 else torch.cat([y, dual], -1)


class X0(StreamSkip):
    """Scaled stream with the stack's input mixed back in: ``y = r * x + F(G(x)) + s * x_0``.

    r and s are learned scalars of each block, ``r`` and ``s`` of shape (1,), 1 and 0 at the start, where the stack is
    pre-norm. The stream is (x, x_0). karpathy/nanochat, ``nanochat/gpt.py`` (``resid_lambdas``, ``x0_lambdas``), no
    paper: it has one pair for each layer, applied before the layer's first block; here each block has its own, applied
    after its branch. Shapes and errors as in :class:`StreamSkip`.
    """

    kind = "x0"
    norm_stands = "before"
    learns = True

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.r = nn.Parameter(torch.ones(1))
        self.s = nn.Parameter(torch.zeros(1))

    def constants(self) -> dict[str, float]:
        return {"r": float(self.r.detach()), "s": float(self.s.detach())}

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        x0 = self.tensor(x, self.width_in - 1)
        y = self.r * self.tensor(x, 0) + f_x + self.s * x0
        return y if self.width_out == 1 else torch.cat([y, x0], -1)
