"""The recursive skip and its norms as one operator; :mod:`.dispatch` chooses what computes it."""

from .dispatch import in_use, is_transformed, should_fuse, skip_mix, skip_norm

__all__ = [
    "in_use",
    "is_transformed",
    "should_fuse",
    "skip_mix",
    "skip_norm",
]
