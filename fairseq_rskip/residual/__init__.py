"""Every skip connection, its equation, and one way to build it: ``SkipConnection(dim, kind=..., **options)``.

``x`` is the block's input, ``F`` the output of its weighted branch, ``G`` a normalisation of
:mod:`fairseq_rskip.norms`. One file per family; ``KINDS`` is name -> class. Torch is all that is needed.
"""

from .base import KINDS, SkipConnection, skips
from .place import Branch, Place, Weight
from .weighted import ConstantSkip, RSkip, Weighted, WSkip, XSkip  # isort: split

from . import adaptive, gates, hyper, placement, scaled, streams  # noqa: F401  (each registers its kinds)

PLAIN = {"kind": "xskip", "skip_lambda": 1.0, "norm": "none"}  # y = x + F

__all__ = ["KINDS", "PLAIN", "Branch", "ConstantSkip", "Place", "RSkip", "SkipConnection", "WSkip"]
__all__ += ["Weight", "Weighted", "XSkip", "skips"]
