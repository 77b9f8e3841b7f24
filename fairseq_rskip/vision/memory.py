"""Keeping freed memory in the process while training on a CPU."""

import ctypes
import sys

# of malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Ask glibc not to return freed memory to the system; does nothing elsewhere.

    A step frees its activations, tens of megabytes, and would fault those pages in anew at the next.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26)):
        mallopt(option, value)
