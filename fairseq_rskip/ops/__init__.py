"""The recursive skip and its norms as one operator; :mod:`.dispatch` chooses what computes it."""

from . import reference
from .dispatch import in_use, is_transformed, kernel, should_fuse, skip_mix, skip_norm

__all__ = [
    "in_use",
    "is_transformed",
    "kernel",
    "reference",
    "should_fuse",
    "skip_mix",
    "skip_norm",
]
