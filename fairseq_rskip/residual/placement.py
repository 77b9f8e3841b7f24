"""Kinds that differ in where the norm is.

They are for sequences only, as the branches of a PreAct-ResNet begin with a norm of their own.
"""

import math
from typing import Annotated

from torch import Tensor
from typing_extensions import Unpack

from .base import Common
from .options import Between, all_norms
from .registry import register
from .weighted import BranchScale, ConstantSkip, SkipLambda


class PlacedNorm(ConstantSkip):
    """The kinds below, whose norms treat every row on its own."""

    norms = all_norms(without=("none", "batch"))
    slots: tuple[str, ...] = ("pre",)
    for_images = False


@register("preln", also=("pre-norm", "pre-LN"))
class PreLN(PlacedNorm):
    """Pre-norm ``y = lambda * x + alpha * F(G(x))``.

    lambda = alpha = 1 is fairseq's ``--encoder-normalize-before``.
    """

    def __init__(
        self,
        dim: int,
        *,
        skip_lambda: SkipLambda = 1.0,
        branch_scale: BranchScale = 1.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, skip_lambda=skip_lambda, branch_scale=branch_scale, **common)
        self.skip_scale = float(skip_lambda)
        self.branch_scale = float(branch_scale)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.skip_scale, "alpha": self.branch_scale, **super().constants()}


@register("outln", also=("output norm", "reordered norm", "res-post-norm", "OLMo 2"))
class OutLN(PlacedNorm):
    """Output norm ``y = x + G(F(x))``: the same for any scale of F, up to eps.

    OLMo 2's reordered norm ("2 OLMo 2 Furious", arXiv 2501.00656) has RMSNorm (``norm="rms"``) and
    also normalises queries and keys, which this does not.
    """

    slots = ("branch",)


@register("periln", also=("Peri-LN", "Sandwich-LN", "sandwich norm"))
class PeriLN(PlacedNorm):
    """Peri-LN ``y = x + G'(F(G(x)))``, two norms of the same type, each with its own parameters.

    Kim et al. 2025, "Peri-LN: Revisiting Normalization Layer in the Transformer Architecture",
    arXiv 2502.02732; its optional norm of the embeddings is left out. CogView's sandwich norm came
    before it (Ding et al. 2021, arXiv 2105.13290).
    """

    slots = ("pre", "branch")


@register("lnscale", also=("LayerNorm scaling", "LNS", "curse of depth"))
class LNScale(PlacedNorm):
    """LayerNorm scaling ``y = x + F(G(x) / sqrt(l))``, l the layer's number.

    Sun et al. 2025, "The Curse of Depth in Large Language Models", arXiv 2502.05795; code
    lmsdss/LayerNorm-Scaling. l counts from 1. All sublayers of a layer share l, as in the authors'
    code; encoder and decoder count for themselves.
    """

    needs_place = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.pre_scale = 1.0 / math.sqrt(self.place.index + 1)

    def prepare(self, x: Tensor) -> tuple[Tensor, None]:
        h, _ = super().prepare(x)
        return h * self.pre_scale, None

    def constants(self) -> dict[str, float]:
        return {"1/sqrt(l)": self.pre_scale, **super().constants()}


@register("mixln", also=("Mix-LN",))
class MixLN(PlacedNorm):
    """Mix-LN: post-norm ``y = G(x + F(x))`` in the first layers, then pre-norm.

    Post-norm are the first ``floor(a * N)`` of N layers. a is ``post_share``, 0.25 in the paper; N
    counts the layers of this side. a = 0 is pre-norm, a = 1 post-norm. Li et al. 2025, "Mix-LN:
    Unleashing the Power of Deeper Layers by Combining Pre-LN and Post-LN", arXiv 2412.13795; code
    pixeli99/MixLN.
    """

    needs_place = True

    def __init__(
        self,
        dim: int,
        *,
        post_share: Annotated[
            float,
            Between(
                "a: the share of the layers, from the first on, that are post-norm; "
                "the rest is pre-norm"
            ),
        ] = 0.25,
        **common: Unpack[Common],
    ):
        super().__init__(dim, post_share=post_share, **common)

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        # 0.29 * 100 is 28.999999999999996
        post_layers = math.floor(self.options.post_share * self.place.depth + 1e-9)
        return ("post",) if self.place.index < post_layers else ("pre",)

    def constants(self) -> dict[str, float]:
        return {"a": float(self.options.post_share), **super().constants()}


@register("keel")
class Keel(PlacedNorm):
    """Keel ``y = G'(L * x + F(G(x)))``, in the first layer pre-norm, ``y = x + F(G(x))``.

    Chen and Wei 2026, "Post-LayerNorm Is Back: Stable, ExpressivE, and Deep", arXiv 2601.19895, Eq.
    8 and section 3.1. Its alpha = L is the number of sublayers: here those of this side, which is
    the depth of one stream. Two norms of the same type; the paper's are RMSNorm without a bias
    (``norm="rms"``).
    """

    needs_place = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.skip_scale = float(self.place.num_blocks) if self.place.index > 0 else 1.0

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("pre", "post") if self.place.index > 0 else ("pre",)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.skip_scale, **super().constants()}
