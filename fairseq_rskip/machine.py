"""What a run computes with: memory, the operator of the skip connections, versions and the processor."""

import contextlib
import ctypes
import logging
import os
import platform
import re
from pathlib import Path
from typing import Any


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory; does nothing elsewhere.

    A step on a CPU frees tens of megabytes of activations, and would fault in those pages again at the next.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(option, value)


def load_operator() -> None:
    """Load the CPU operator of the skip connections; where it is not built yet, say so and build it.

    A run computes with one operator from its start: torch's operators differ from it in the last bits.
    """
    from .ops import in_use

    logging.basicConfig(format="%(message)s")
    logging.getLogger("fairseq_rskip.ops").setLevel(logging.INFO)
    in_use()


def surroundings(device: Any, processes: int) -> dict[str, dict[str, Any]]:
    """The ``versions`` of what computes, and the ``machine`` that a speed depends on."""
    import torch

    from . import __version__

    versions = {"fairseq_rskip": __version__, "python": platform.python_version(), "torch": torch.__version__}
    machine = {"device": processor(), "processes": processes}
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda
        machine["device"] = torch.cuda.get_device_name(device)
    else:
        machine.update(threads=torch.get_num_threads(), cores=os.cpu_count())
    return {"versions": versions, "machine": machine}


def processor() -> str:
    """The processor's name, family and model, as Linux has them."""
    file = Path("/proc/cpuinfo")
    known = dict(re.findall(r"^(.+?)\s*: (.*)$", file.read_text("utf-8"), re.M)) if file.exists() else {}
    name = known.get("model name", platform.machine())
    return f"{name} family {known['cpu family']} model {known['model']}" if "cpu family" in known else name
