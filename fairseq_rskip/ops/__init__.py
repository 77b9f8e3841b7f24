"""The recursive skip and its norms as one operator; :mod:`.dispatch` chooses what computes it."""

from .dispatch import in_use, kernel, skip_mix, skip_norm, takes

__all__ = ["in_use", "kernel", "skip_mix", "skip_norm", "takes"]
