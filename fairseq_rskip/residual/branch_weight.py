"""Rules that weigh the branch by a learned value: ``y = G(x + weight * F)``."""

from typing import Annotated

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .base import Common, SkipConnection
from .options import Real, all_norms
from .registry import register
from .weighted import WEIGHT_HELP, InitialWeight, Weighted


class BranchWeight(Weighted):
    """``y = G(x + weight * F)`` with one learned weight."""

    weight: nn.Parameter

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        return 1.0, self.per_channel(self.weight)


@register("skipinit", also=("SkipInit",))
class SkipInit(BranchWeight):
    """SkipInit, ``y = x + a * F`` with one learned scalar a per block, initially 0, and no norm.

    De and Smith 2020, "Batch Normalization Biases Residual Blocks Towards the Identity Function in
    Deep Networks". A ResNet's branch also has no batch norm; scalar biases take its place, as in
    Fixup. The authors' code has a bias per channel and starts the classifier at zero; here the
    classifier keeps torch's initial values.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    replaces_batch_norm = True

    def __init__(self, dim: int, *, init: InitialWeight = 0.0, **common: Unpack[Common]):
        super().__init__(dim, init=init, **common)
        self.weight = self.new_parameter(torch.full((1,), float(init)))


@register("rezero", also=("ReZero",))
class ReZero(BranchWeight):
    """ReZero, ``y = x + a * F`` with one learned scalar a per layer, initially 0.

    All sublayers of a layer share it. Bachlechner et al. 2020, "ReZero is All You Need". A ResNet
    has batch norms in its branches, as there.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()

    def __init__(self, dim: int, *, init: InitialWeight = 0.0, **common: Unpack[Common]):
        super().__init__(dim, init=init, **common)
        self.weight = self.new_parameter(torch.full((1,), float(init)))

    def share_with(self, first: SkipConnection) -> None:
        if isinstance(first, ReZero):
            self.weight = first.weight


@register("layerscale", also=("LayerScale", "CaiT"))
class LayerScale(BranchWeight):
    """LayerScale, ``y = x + gamma * F(G(x))``, gamma learned for each feature.

    Touvron et al. 2021, "Going deeper with Image Transformers". gamma, of shape ``(dim,)``, starts
    at ``init``, or without it by depth: at 0.1 up to 18 layers, 1e-5 up to 24 and 1e-6 beyond (the
    paper; the authors' code has 1e-5 at 36 layers, too). gamma = 1 is pre-norm. A ResNet's branch
    has its own batch norm.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(
        self,
        dim: int,
        *,
        init: Annotated[float | None, Real(WEIGHT_HELP, affects="start")] = None,
        **common: Unpack[Common],
    ):
        super().__init__(dim, init=init, **common)
        value = self._by_depth() if init is None else float(init)
        self.weight = self.new_parameter(torch.full((dim,), value))

    def _by_depth(self) -> float:
        self.require_place()
        if self.place.depth <= 18:
            return 0.1
        return 1e-5 if self.place.depth <= 24 else 1e-6


@register("learned_scalar")
class LearnedScalar(BranchWeight):
    """Learned scale, ``y = G(x + a * F)`` with one scalar a per block, initially 1.

    It is the learned form of :class:`.Scaled`, and SkipInit's equation with the plain skip as its
    initial value (De and Smith 2020).
    """

    default_norm = "none"

    def __init__(self, dim: int, *, init: InitialWeight = 1.0, **common: Unpack[Common]):
        super().__init__(dim, init=init, **common)
        self.weight = self.new_parameter(torch.full((1,), float(init)))
