"""Skip connections that keep what every layer or every block returned: DLCL, DenseFormer and attention residuals.

The stream is (c, h_0, ..., h_k): c is what the branch reads, h what has been stored so far, which grows along the
stack. Each mixture is computed once, where its newest member is stored, by the block that stores it; its memory is
that of all members for each time that something is stored, so it grows with the square of the depth.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import Norm, at_least_float32, create_norm
from . import options as opt
from .streams import StreamSkip


class HistorySkip(StreamSkip, norm=opt.WITHOUT_BATCH):
    """``stores`` says whether something is stored after this block, ``stored`` how much was stored before it."""

    slots = ("pre",)

    def stream_widths(self) -> tuple[int, int]:
        self.stored, self.stores = self.history()
        return 1 if self.first else 1 + self.stored, 1 if self.last else 1 + self.stored + int(self.stores)

    def history(self) -> tuple[int, bool]:
        """``stored`` and ``stores``; here layers are stored, and h_0 enters the stack."""
        return self.place.index + 1, self.place.position == self.place.sublayers - 1

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """c and h_0 of x, which enters the stack."""
        return x, x

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        """c, and c with (h_0, ..., h_k)."""
        if self.first:
            c, history = self.enter(x)
        else:
            c, history = self.tensor(x, 0), x.narrow(-1, self.dim, self.stored * self.dim)
        return c.to(x.dtype), (c, history)

    def output(self, c: Tensor, f_x: Tensor) -> Tensor:
        """What the block returns, before anything is mixed."""
        return c + f_x

    def store(self, y: Tensor) -> Tensor:
        """The h that y, the newest, is stored as."""
        return y

    def mix(self, history: Tensor) -> Tensor:
        """The next c, ``(..., dim)``, of ``history``, shape ``(..., k + 1, dim)``."""
        raise NotImplementedError

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        c, history = carried or self.current(x)[1]
        y = self.output(c, f_x)
        if self.stores:
            history = torch.cat([history, self.store(y)], -1)
            y = self.mix(history.unflatten(-1, [self.stored + 1, self.dim]))
        return y if self.last else torch.cat([y, history], -1)


class DLCL(HistorySkip, kind="dlcl"):
    """Dynamic linear combination of layers: layer l, a pre-norm layer, reads ``c_l = sum_{k<l} W_lk G_k(y_k)``.

    y_k is what layer k returned, y_0 what enters the stack; the mixture after the last layer leaves it. W_l, of l
    values, starts uniform: rows sum to 1. G_k is one norm for each y_k, so that h_k = G_k(y_k) is stored. A layer's
    last block owns the row ``weight`` and ``layer_norm``, the stack's first ``first_weight`` and ``input_norm``. Wang
    et al. 2019, "Learning Deep Transformer Models for Machine Translation", of its two forms the pre-norm
    one; code wangqiangneu/dlcl, which leaves y_0 as it is where the paper's sum has LN(y_k) from k = 0 on, and
    normalises what leaves the stack once more.
    """

    def setup(self) -> None:
        super().setup()
        if self.first:
            self.input_norm = self._norm()
            self.first_weight = nn.Parameter(torch.ones(1))
        if self.stores:
            self.layer_norm = self._norm()
            self.weight = nn.Parameter(torch.full((self.stored + 1,), 1.0 / (self.stored + 1)))

    def _norm(self) -> Norm:
        return create_norm(self.options.norm, self.dim, eps=self.eps)

    def needs_final_norm(self) -> bool:
        return False  # what leaves the stack is a mixture of normalised tensors

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.input_norm(x)
        return self.first_weight * h, h

    def store(self, y: Tensor) -> Tensor:
        return self.layer_norm(y)

    def mix(self, history: Tensor) -> Tensor:
        return weighted_sum(self.weight, history)


class DenseFormer(HistorySkip, kind="denseformer"):
    """Depth-weighted average: layer l, a pre-norm layer, reads ``c_l = sum_{k<l} a_lk y_k``.

    y_k is what layer k returned, y_0 what enters the stack; the average after the last layer leaves it. a_l starts
    one-hot at its newest member, where the stack is pre-norm; n layers have n (n + 3) / 2 weights, each layer's
    ``weight`` with its last block. Pagliardini et al. 2024, "DenseFormer: Enhancing Information Flow in Transformers
    via Depth Weighted Averaging"; code epfml/DenseFormer. Without dilation and period, which save time.
    """

    def setup(self) -> None:
        super().setup()
        if self.stores:
            self.weight = nn.Parameter(torch.eye(self.stored + 1)[-1].clone())

    def mix(self, history: Tensor) -> Tensor:
        return weighted_sum(self.weight, history)


class AttentionResidual(HistorySkip, kind="attnres"):
    """Attention residuals: block l reads ``c_l = sum_{k<l} p_k v_k``, ``p = softmax_k(w_l . v_k / rms(v_k))``.

    v_k is what branch k returned, ``F_k(G(c_k))``, and v_0 what enters the stack: nothing is added up, and what leaves
    the stack is such a mixture, too. w_l, ``query`` of the block before, of shape (dim,), starts at 0, where c_l is the
    mean; the gain that the paper's RMSNorm of v_k may have is a factor of w_l. Kimi Team 2026, "Attention Residuals",
    arXiv 2603.15031, its full form (each branch is stored); code wdlctc/open-attention-residuals, which adds a recency
    bias, and in its full form stores running sums rather than the v_k.
    """

    def setup(self) -> None:
        super().setup()
        self.query = nn.Parameter(torch.zeros(self.dim))

    def history(self) -> tuple[int, bool]:
        return self.place.block_number, True

    def output(self, c: Tensor, f_x: Tensor) -> Tensor:
        return f_x

    def mix(self, history: Tensor) -> Tensor:
        values = at_least_float32(history)
        rms = (values.square().mean(-1) + self.eps).sqrt()
        share = torch.softmax((values * self.query).sum(-1) / rms, -1)
        return (values * share.unsqueeze(-1)).sum(-2).to(history.dtype)


def weighted_sum(weight: Tensor, history: Tensor) -> Tensor:
    """``sum_k weight_k history_k`` over the last dimension but one: products rather than matmul, whose type autocast
    would narrow."""
    return (history * weight.unsqueeze(-1)).sum(-2)
