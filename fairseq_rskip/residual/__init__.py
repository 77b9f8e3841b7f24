"""Every skip connection and its equation; ``create_skip(kind, dim, **options)`` builds one.

``x`` is the block's input, ``F`` the output of its weighted branch, ``G`` a normalisation of
:mod:`fairseq_rskip.norms`. One file per family; ``KINDS`` is name -> class. Only torch is needed.
"""

from .base import Common, SkipConnection, create_skip, skips
from .branch_weights import BranchWeights, Weight
from .place import Place
from .profile import initialise_from_batch
from .registry import KINDS, register
from .stack import skip_stack

# isort: off
# each registers its kinds, in this order
from .weighted import ConstantSkip, RSkip, Weighted, WSkip, XSkip
from . import adaptive  # noqa: F401
from . import angle, gates, hyper, manifold, unmixed, single_pass, placement, routing  # noqa: F401
from . import branch_weight, scaled, admin, initial_weights, schedule, ngpt  # noqa: F401
from . import streams  # noqa: F401
from . import own_rules
# isort: on

PLAIN = {"kind": "xskip", "skip_lambda": 1.0, "norm": "none"}  # y = x + F

__all__ = [
    "KINDS",
    "PLAIN",
    "BranchWeights",
    "Common",
    "ConstantSkip",
    "Place",
    "RSkip",
    "SkipConnection",
    "WSkip",
    "Weight",
    "Weighted",
    "XSkip",
    "create_skip",
    "initialise_from_batch",
    "register",
    "skip_stack",
    "skips",
]

own_rules.load()  # they import the names above
