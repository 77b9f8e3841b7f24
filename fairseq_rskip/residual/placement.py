"""Where the normalisation stands: before the branch, on both of its sides, behind it, or after the sum in some layers.

For sequences only: PreAct-ResNet's branch starts with a batch normalisation of its own.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ..norms import NORMS, at_least_float32, create_norm
from . import options as opt
from .weighted import ConstantSkip, ScaledSkip

# batch norm has to know what is padding, which the input of a branch does not say
ROW_NORMS = tuple(name for name in NORMS if name not in ("none", "batch"))


class _PlacedNorm(ConstantSkip):
    """What the kinds below share: a norm that treats every row on its own, and a stream to be normalised at its end."""

    for_images = False
    norm_stands = "before"

    @dataclasses.dataclass(frozen=True)
    class Options(ConstantSkip.Options):
        norm: str = opt.option("layer", "normalisation G", choices=ROW_NORMS)

    def __init__(self, dim: int, kind: str | None = None, pre_norm: bool = False, **options: Any):
        super().__init__(dim, kind, **options)
        if pre_norm:
            raise ValueError(
                f"norm={self.norm_name!r}: kind {self.kind} says where its norm stands: expected no pre-norm"
            )

    def needs_final_norm(self) -> bool:
        return not self.norms


class PreLN(_PlacedNorm, ScaledSkip):
    """Pre-norm ``y = lambda * x + alpha * F(G(x))``; lambda = alpha = 1 is fairseq's ``--encoder-normalize-before``.

    Shapes and errors as in :class:`~fairseq_rskip.residual.SkipConnection`.
    """

    kind = "preln"

    @dataclasses.dataclass(frozen=True)
    class Options(_PlacedNorm.Options, ScaledSkip.Options):
        pass


class OutLN(_PlacedNorm):
    """Output norm ``y = x + G(F(x))`` (OLMo 2's reordered norm): the same for any scale of F, up to eps.

    Shapes and errors as in :class:`~fairseq_rskip.residual.SkipConnection`; the norm is the child ``branch_norm``.
    """

    kind = "outln"
    norm_stands = "branch"

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.branch_norm = create_norm(self.norm_name, dim, eps=self.eps)

    def write(self, f_x: Tensor) -> Tensor:
        return self.branch_norm(at_least_float32(f_x))  # rounded to a half type once only, after the sum

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        scale, _ = self.branch_norm.affine_map(at_least_float32(f_x))
        return torch.ones_like(scale), scale

    def offset(self, x: Tensor, f_x: Tensor) -> Tensor:
        return self._kept() * self.branch_norm.affine_map(at_least_float32(f_x))[1]


class PeriLN(OutLN):
    """Peri-LN ``y = x + G'(F(G(x)))`` (Kim et al., 2025); before them the sandwich norm of CogView (Ding et al., 2021).

    Two norms of one sort, each with its own parameters: ``pre_norm`` and ``branch_norm``. Shapes and errors as in
    :class:`~fairseq_rskip.residual.SkipConnection`.
    """

    kind = "periln"
    norm_stands = "before"


class LNScale(_PlacedNorm):
    """LayerNorm scaling ``y = x + F(G(x) / sqrt(l))`` (Sun et al., 2025), l the layer's number from 1.

    All sublayers of a layer share l, as in the authors' code; encoder and decoder count for themselves. Shapes and
    errors as in :class:`~fairseq_rskip.residual.SkipConnection`.
    """

    kind = "lnscale"

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.read_scale = 1.0 / math.sqrt(self.place.index + 1)

    def constants(self) -> dict[str, float]:
        return {"1/sqrt(l)": self.read_scale}

    def read(self, x: Tensor) -> Tensor:
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        return x * self.read_scale


class MixLN(_PlacedNorm):
    """Mix-LN (Li et al., 2025): post-norm ``y = G(x + F(x))`` in the first ``floor(a * N)`` of N layers, then pre-norm.

    a is ``post_share``, 0.25 in the paper; N counts the layers of this side. a = 0 is pre-norm, a = 1 post-norm.
    Shapes and errors as in :class:`~fairseq_rskip.residual.SkipConnection`.
    """

    kind = "mixln"

    @dataclasses.dataclass(frozen=True)
    class Options(_PlacedNorm.Options):
        post_share: float = opt.option(
            0.25, "a: the share of the layers, from the first on, that are post-norm; the rest is pre-norm", "fraction"
        )

    def _checked(self, given: dict[str, Any]) -> Any:
        options = super()._checked(given)
        post_layers = math.floor(options.post_share * self.place.depth + 1e-9)  # 0.29 * 100 is 28.999999999999996
        self.norm_stands = "after" if self.place.index < post_layers else "before"
        return options

    def constants(self) -> dict[str, float]:
        return {"a": float(self.options.post_share)}
