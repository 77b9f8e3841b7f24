"""Skip connections that keep two tensors, or what every layer or every block returned."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import Norm, at_least_float32, create_norm
from . import options as opt
from .base import SkipConnection


class StreamSkip(SkipConnection, for_images=False):
    """What a kind keeps travels in the stream: ``x`` is ``(..., widths[0] * dim)``, y ``(..., widths[1] * dim)``.

    Tensor k is the channels from k * dim to (k + 1) * dim, and tensor 0 is what the branch reads. The first block of a
    stack takes one tensor, x_0, and the last returns one, so that a model needs to know nothing of it.
    """

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

    x_0 is the input of the *layer*, which takes and returns one tensor; between its blocks the stream is (x_k, x_0). A
    layer of one block is plain post-norm. Takase et al. 2022, "B2T Connection:
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
        return torch.cat([self.tensor(x, k) + f_x for k in range(self.widths[0])], -1)

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        y, dual = self.post[0](self.tensor(z, 0), padding_mask), self.tensor(z, self.widths[0] - 1)
        return y + self.post[1](dual, padding_mask) if self.last else torch.cat([y, dual], -1)


class X0(StreamSkip, kind="x0", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """Scaled stream with the stack's input mixed back in: ``y = r * x + F(G(x)) + s * x_0``.

    r and s are learned scalars of each block, ``r`` and ``s`` of shape (1,), 1 and 0 at the start, where the stack is
    pre-norm. The stream is (x, x_0). karpathy/nanochat, ``nanochat/gpt.py`` (``resid_lambdas``, ``x0_lambdas``), no
    paper: it has one pair for each layer, applied before the layer's first block; here each block has its own, applied
    after its branch. Its x_0 is normalised, and its pairs have learning rates of their own; since March 2026 they start
    at 1.15 to 1.05 and 0.20 to 0.05 over the layers.
    """

    def setup(self) -> None:
        super().setup()
        self.r = nn.Parameter(torch.ones(1))
        self.s = nn.Parameter(torch.zeros(1))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x0 = self.tensor(x, self.widths[0] - 1)
        y = self.r * self.tensor(x, 0) + f_x + self.s * x0
        return y if self.last else torch.cat([y, x0], -1)


class SiameseNorm(StreamSkip, kind="siamesenorm", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """SiameseNorm, two streams that share their branches: ``z = F(G(G_1(x) + G_2(y)))``, ``x = G_1(x) + z / sqrt(2l)``,
    ``y = y + z`` in layer l, counted from 1: a post-norm and a pre-norm stream.

    Both start as x_0; what leaves the stack is ``G_3(x) + G_4(y)``, which the model's last norm follows. Li et al.
    2026, arXiv 2602.08064; equation and start follow code Qwen-Applications/SiameseNorm, ``deit-model-siamesenorm.py``
    (2l for two sublayers a layer; here l times the sublayers). The paper's language models have other norms on x.
    """

    def setup(self) -> None:
        super().setup()
        self.stream_scale = (self.place.sublayers * (self.place.index + 1)) ** -0.5
        names = ["x_norm", "y_norm", *(["last_x_norm", "last_y_norm"] if self.last else [])]
        for name in names:
            self.add_module(name, create_norm(self.options.norm, self.dim, eps=self.eps))

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.tensor(x, self.widths[0] - 1)
        x = self.x_norm(self.tensor(x, 0))
        return x + self.y_norm(y), (x, y)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, y = carried or self.current(x)[1]
        x, y = x + self.stream_scale * f_x, y + f_x
        return self.last_x_norm(x) + self.last_y_norm(y) if self.last else torch.cat([x, y], -1)


class HistorySkip(StreamSkip, norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """The stream is (c, h_0, ..., h_k): c is what the branch reads, h what was stored so far.

    ``stored`` is the number of tensors stored before this block, ``stores`` whether this block stores one, too. A
    mixture is computed where its newest member is stored. Memory grows with the square of the depth.
    """

    def stream_widths(self) -> tuple[int, int]:
        self.stored, self.stores = self.history()
        return 1 if self.first else 1 + self.stored, 1 if self.last else 1 + self.stored + int(self.stores)

    def history(self) -> tuple[int, bool]:
        """``stored`` and ``stores`` for a kind that stores each layer's output; h_0 is the input of the stack."""
        return self.place.index + 1, self.place.position == self.place.sublayers - 1

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        """c, and c with (h_0, ..., h_k)."""
        c, history = (x, x) if self.first else (self.tensor(x, 0), x.narrow(-1, self.dim, self.stored * self.dim))
        return c, (c, history)

    def store(self, y: Tensor) -> Tensor:
        """The tensor h to store for y, the newest output."""
        return y

    def mix(self, history: Tensor) -> Tensor:
        """The next c, ``(..., dim)``: the sum of ``history``, ``(..., k + 1, dim)``, with the weights ``weight``."""
        return (history * self.weight.unsqueeze(-1)).sum(-2)  # not matmul, whose type autocast would narrow

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        c, history = carried or self.current(x)[1]
        y = c + f_x
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
            self.input_norm = create_norm(self.options.norm, self.dim, eps=self.eps)
            self.first_weight = nn.Parameter(torch.ones(1))
        if self.stores:
            self.layer_norm = create_norm(self.options.norm, self.dim, eps=self.eps)
            self.weight = nn.Parameter(torch.full((self.stored + 1,), 1.0 / (self.stored + 1)))

    def needs_final_norm(self) -> bool:
        return False  # what leaves the stack is a mixture of normalised tensors

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        if not self.first:
            return super().current(x)
        h = self.input_norm(x)
        c = self.first_weight * h
        return c.to(x.dtype), (c, h)

    def store(self, y: Tensor) -> Tensor:
        return self.layer_norm(y)


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


_BLOCK_SIZE = opt.option(1, "branches in one member of attention residuals' history", "count", short="block")


class AttentionResidual(HistorySkip, kind="attnres", block_size=_BLOCK_SIZE):
    """Attention residuals: block l reads ``c_l = sum_{k<l} p_k v_k``, ``p = softmax_k(w_l . v_k / rms(v_k))``.

    v_k is what branch k returned, ``F_k(G(c_k))``, and v_0 what enters the stack; what leaves it is a mixture, too.
    w_l, ``query`` of the block before, of shape (dim,), starts at 0, where c_l is the mean; the gain that the paper's
    RMSNorm of v_k may have is a factor of w_l. Kimi Team 2026, "Attention Residuals",
    arXiv 2603.15031: its full form, or with ``block_size`` above 1 its block form, where the v_k of so many sublayers
    are summed, the last of them so far, as in code fla-org/flash-linear-attention; wdlctc/open-attention-residuals adds
    a recency bias, and in its full form stores running sums rather than the v_k.
    """

    def setup(self) -> None:
        super().setup()
        self.query = nn.Parameter(torch.zeros(self.dim))

    def history(self) -> tuple[int, bool]:
        before, size = self.place.block_number - 1, int(self.options.block_size)
        return 1 + math.ceil(before / size), before % size == 0

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        _, history = carried or self.current(x)[1]
        if not self.stores:  # one more branch of the last member
            f_x, history = history[..., -self.dim :] + f_x, history[..., : -self.dim]
        history = torch.cat([history, f_x], -1)
        y = self.mix(history.unflatten(-1, [-1, self.dim]))
        return y if self.last else torch.cat([y, history], -1)

    def mix(self, history: Tensor) -> Tensor:
        values = at_least_float32(history)
        rms = (values.square().mean(-1) + self.eps).sqrt()
        share = torch.softmax((values * self.query).sum(-1) / rms, -1)
        return (values * share.unsqueeze(-1)).sum(-2).to(history.dtype)
