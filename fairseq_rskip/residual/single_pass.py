"""mHC whose branches read with the weights of the block before."""

from typing import Any

import torch
from torch import Tensor

from .hyper import mixed, updated
from .manifold import ManifoldConstrained
from .registry import register


@register("single_pass_mhc")
class SinglePass(ManifoldConstrained):
    """Single-pass mHC ``H_{l+1} = R_l H_l + w_l F_l(G(p_{l-1} H_l))``: p, R and w of block l are
    those of mHC, made of H_l, but its branch reads with the p of the block before.

    The first branch reads x, and the stack's output is ``p_l H_{l+1}`` of its last block l, so that
    every p is used. The stream is (r, H), of n + 1 tensors: block l returns ``r = p_l H_{l+1}``,
    which the next branch reads. Parameters and options are those of :class:`.ManifoldConstrained`.
    DeepSeek-AI 2026, "DeepSeek-V4.1-Flash: Pushing the Limits of KV Cache Compression", arXiv
    2609.19969, Eq. 6, whose text we read in two copies. The authors want a kernel that reads H
    once; this is the equation, without such a kernel. Neither end of the stack is in that section:
    both are those of code NVIDIA-NeMo/Automodel, a port of the authors' code, where the first p is
    one-hot on n equal rows, and a norm follows the output.

    The initial values are those of our mHC. b_pre is one block ahead: each branch reads the stream
    at first that it reads in mHC. The section has no initial values; in ports of the model phi is
    drawn, b is 0 and alpha 1, and 1e-6 is added to p and in the steps of Sinkhorn and Knopp. With
    constant p that sum to 1, H is that of mHC with each p one block later; other sums differ in the
    first block, by a factor that G divides out but for eps.
    """

    @property
    def reads(self) -> int:
        """The stream that the next block's branch reads initially: as in mHC."""
        return self.place.block_number % self.n

    @property
    def widths(self) -> tuple[int, int]:
        width = 1 + self.n
        return 1 if self.first else width, 1 if self.last else width

    def without_gradient(self) -> tuple[str, ...]:
        # of the last block's streams it returns a weighted mean, not the sum
        return super().without_gradient() if self.first else ()

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        if self.first:
            read, h = x, torch.stack([x] * self.n, -2)
        else:
            read = self.tensor(x, 0)
            h = x.narrow(-1, self.dim, self.n * self.dim).unflatten(-1, [self.n, self.dim])
        p, matrix, writing = self.weights(h)
        return read, (h, matrix, writing, p)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        h, matrix, writing, p = carried
        h = updated(h, matrix, writing, f_x)
        read = mixed(p, h)
        return read if self.last else torch.cat([read, h.flatten(-2)], -1)
