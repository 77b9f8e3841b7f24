"""Kinds that differ in where the norm is; for sequences only, as a PreAct-ResNet's branch starts with its own norm."""

import math
from typing import Any

from torch import Tensor

from . import options as opt
from .weighted import ALPHA, ConstantSkip, skip_lambda


class _PlacedNorm(ConstantSkip, norm=opt.ROW_NORM, slots=("pre",), for_images=False):
    """The kinds below, whose norms treat every row on its own."""


class PreLN(_PlacedNorm, kind="preln", skip_lambda=skip_lambda(1.0), branch_scale=ALPHA):
    """Pre-norm ``y = lambda * x + alpha * F(G(x))``; lambda = alpha = 1 is fairseq's ``--encoder-normalize-before``."""


class OutLN(_PlacedNorm, kind="outln", slots=("branch",)):
    """Output norm ``y = x + G(F(x))``: the same for any scale of F, up to eps. OLMo 2's reordered norm has RMSNorm
    (``norm="rms"``) and also normalises queries and keys, which this does not."""


class PeriLN(_PlacedNorm, kind="periln", slots=("pre", "branch")):
    """Peri-LN ``y = x + G'(F(G(x)))`` (Kim et al., 2025), without the paper's optional norm of the embeddings;
    CogView's sandwich norm came before it (Ding et al., 2021). Two norms of one sort, each with its own parameters."""


class LNScale(_PlacedNorm, kind="lnscale"):
    """LayerNorm scaling ``y = x + F(G(x) / sqrt(l))`` (Sun et al., 2025), l the layer's number from 1.

    All sublayers of a layer share l, as in the authors' code; encoder and decoder count for themselves.
    """

    def setup(self) -> None:
        self.pre_scale = 1.0 / math.sqrt(self.place.index + 1)

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, carried = super().prepare(x)
        return h * self.pre_scale, carried


_SHARE = opt.option(
    0.25, "a: the share of the layers, from the first on, that are post-norm; the rest is pre-norm", "fraction"
)


class MixLN(_PlacedNorm, kind="mixln", post_share=_SHARE):
    """Mix-LN (Li et al., 2025): post-norm ``y = G(x + F(x))`` in the first ``floor(a * N)`` of N layers, then pre-norm.

    a is ``post_share``, 0.25 in the paper; N counts the layers of this side. a = 0 is pre-norm, a = 1 post-norm.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        # 0.29 * 100 is 28.999999999999996
        post_layers = math.floor(self.options.post_share * self.place.depth + 1e-9)
        return ("post",) if self.place.index < post_layers else ("pre",)


class Keel(_PlacedNorm, kind="keel"):
    """Keel ``y = G'(L * x + F(G(x)))``, in the first layer pre-norm, ``y = x + F(G(x))``: Chen and Wei 2026,
    "Post-LayerNorm Is Back: Stable, ExpressivE, and Deep", arXiv 2601.19895, Eq. 8 and section 3.1.

    Its alpha = L is the number of sublayers: here those of this side, which is the depth of one stream. Two norms of
    one sort; the paper's are RMSNorm without a bias (``norm="rms"``).
    """

    @property
    def slots(self) -> tuple[str, ...]:
        return ("pre", "post") if self.place.index > 0 else ("pre",)

    def setup(self) -> None:
        self.skip_scale = float(self.place.num_blocks) if self.place.index > 0 else 1.0
