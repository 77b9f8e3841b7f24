"""Skip connections that keep more than one tensor: what they share, and those that keep two, B2T, ResiDual and x0.

What a kind keeps travels in the stream itself, ``(seq_len, batch, n * dim)``: tensor k is the channels from k * dim to
(k + 1) * dim, and tensor 0 is what the branch reads. The first block of a stack takes one tensor and the last returns
one, so that a model needs to know nothing of it. In the docstrings x_0 is what enters the stack.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import Norm
from . import options as opt
from .base import SkipConnection


class StreamSkip(SkipConnection):
    """``x`` is ``(..., widths[0] * dim)``, y ``(..., widths[1] * dim)``."""

    for_images = False

    def setup(self) -> None:
        self.first = self.place.block_number == 1
        self.last = self.place.block_number == self.place.num_blocks
        self.widths = self.stream_widths()

    def stream_widths(self) -> tuple[int, int]:
        """The number of tensors that this place takes and returns."""
        return 1 if self.first else 2, 1 if self.last else 2

    def tensor(self, x: Tensor, k: int) -> Tensor:
        """Tensor k of a stream: a view of shape ``(..., dim)``."""
        return x.narrow(-1, k * self.dim, self.dim)

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        """The tensor that the branch reads before ``pre``, and what :meth:`prepare` carries to the sum."""
        return self.tensor(x, 0), None

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, carried = self.current(x)
        return super().prepare(h)[0], carried


class B2T(StreamSkip, kind="b2t", norm=opt.SOME_NORM):
    """Bottom-to-top connection ``x_k = G(x_{k-1} + F_k)``, in a layer's last block ``y = G(x_0 + x_{k-1} + F_k)``.

    x_0 is the input of the *layer*: the window of this kind is a layer, which takes and returns one tensor; between its
    blocks the stream is (x_k, x_0). A layer of one block is plain post-norm. Takase et al. 2022, "B2T Connection:
    Serving Stability and Performance in Deep Transformers"; code takase/b2t_connection, which also scales
    every weight of a layer by 1/sqrt(layers) at the start: the paper's connection has no such factor, nor has this.
    Where the last branch is zero the layer is recursive, rSkip+LN with lambda = 2.
    """

    def stream_widths(self) -> tuple[int, int]:
        return 1 if self.place.position == 0 else 2, 1 if self.place.position == self.place.sublayers - 1 else 2

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        z = self.tensor(x, 0) + f_x
        return z + self.tensor(x, 1) if self.widths == (2, 1) else z

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        z = super()._normalise(z, x, padding_mask)
        return z if self.widths[1] == 1 else torch.cat([z, self.tensor(x, self.widths[0] - 1)], -1)


class ResiDual(StreamSkip, kind="residual_dual", norm=opt.SOME_NORM):
    """Dual residual ``x_k = G_k(x_{k-1} + F_k)``, ``r_k = r_{k-1} + F_k``, r_0 = x_0; at the end ``y = x_K + G(r_K)``.

    F_k is a function of x_{k-1}; the stream is (x_k, r_k), and only the stack's last block owns a second norm. Xie et
    al. 2023, "ResiDual: Transformer with Dual Residual Connections"; code microsoft/ResiDual. That code has
    eps 1e-7 in the last norm, and scales for fp16 that it leaves at 1; here all norms have one eps. A stack of one
    block returns 2 G(x + F).
    """

    def _post_norms(self, make: Any) -> list[Norm]:
        last = self.place.block_number == self.place.num_blocks
        return [make() for _ in range(2 if last else 1)]

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        """Both sums, x + F and r + F; they are one in the first block."""
        return torch.cat([self.tensor(x, k) + f_x for k in range(self.widths[0])], -1)

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        y, dual = self.post[0](self.tensor(z, 0), padding_mask), self.tensor(z, self.widths[0] - 1)
        return y + self.post[1](dual, padding_mask) if self.last else torch.cat([y, dual], -1)


class X0(StreamSkip, kind="x0", norm=opt.WITHOUT_BATCH):
    """Scaled stream with the stack's input mixed back in: ``y = r * x + F(G(x)) + s * x_0``.

    r and s are learned scalars of each block, ``r`` and ``s`` of shape (1,), 1 and 0 at the start, where the stack is
    pre-norm. The stream is (x, x_0). karpathy/nanochat, ``nanochat/gpt.py`` (``resid_lambdas``, ``x0_lambdas``), no
    paper: it has one pair for each layer, applied before the layer's first block; here each block has its own, applied
    after its branch.
    """

    slots = ("pre",)

    def setup(self) -> None:
        super().setup()
        self.r = nn.Parameter(torch.ones(1))
        self.s = nn.Parameter(torch.zeros(1))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x0 = self.tensor(x, self.widths[0] - 1)
        y = self.r * self.tensor(x, 0) + f_x + self.s * x0
        return y if self.last else torch.cat([y, x0], -1)
