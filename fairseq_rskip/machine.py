"""The machine of a run: memory, the operator of the skip connections, versions, the processor."""

import contextlib
import ctypes
import importlib.util
import logging
import os
import platform
import re
import runpy
from pathlib import Path
from typing import Any

from .errors import UserError


def all_cores() -> int:
    """The number of cores that this process may use; of all, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_cores() -> None:
    """Have OpenMP's threads sleep soon where they wait, unless the environment says how they wait.

    Entry points call it before torch is imported. By default a thread spins for long, which takes
    the core from other processes: on two busy cores (AMD EPYC family 25) a training was 2 to 7
    times as slow, on idle ones as fast.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"  # turns of the loop in which a thread waits


# glibc's settings that keep freed memory: the number of malloc.h, the variable of the environment
_KEEP = (
    (-4, "MALLOC_MMAP_MAX_", 0),
    (-1, "MALLOC_TRIM_THRESHOLD_", 2**31 - 1),
    (-2, "MALLOC_TOP_PAD_", 2**26),
)


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the rest of the process; does nothing elsewhere.

    A step on a CPU frees tens of megabytes of activations, and would fault in those pages again at
    the next: that takes a third of a Transformer's training step. The process then holds the most
    memory that it ever used.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for number, _, value in _KEEP:
            mallopt(number, value)


def memory_variables() -> dict[str, str]:
    """The environment of a command that is to keep freed memory, as this process's own may say."""
    return {name: os.environ.get(name, str(value)) for _, name, value in _KEEP}


def load_operator() -> None:
    """Load the CPU operator of the skip connections; build it, and say so, if it is not built yet.

    Commands that train call this before the first forward pass: what computes then does so for
    the whole process.
    """
    from .ops import in_use

    logging.basicConfig(format="%(message)s")
    logging.getLogger("fairseq_rskip.ops").setLevel(logging.INFO)
    in_use(build=True)


def device_of(name: str) -> Any:
    """Return the ``torch.device`` that ``--device`` names: ``auto``, ``cpu`` or ``cuda``.

    ``auto`` is a GPU if there is one. Raises ``UserError`` for a GPU that is not there.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise UserError("--device cuda: there is no GPU that torch can use; expected auto or cpu")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def surroundings(device: Any, processes: int) -> dict[str, dict[str, Any]]:
    """The ``versions`` of what computes, and the ``machine`` that a speed depends on."""
    import torch

    from .version import __version__

    versions: dict[str, str | None] = {
        "fairseq_rskip": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    machine = {"device": processor(), "processes": processes}
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda
        machine["device"] = torch.cuda.get_device_name(device)
    else:
        machine.update(threads=torch.get_num_threads(), cores=os.cpu_count())
    return {"versions": versions, "machine": machine}


def fairseq_version() -> str:
    """The version of the installed fairseq, of any distribution, read without importing it."""
    package = importlib.util.find_spec("fairseq")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'fairseq'", name="fairseq")
    folder = Path(package.submodule_search_locations[0])
    return runpy.run_path(str(folder / "version.py"))["__version__"]


def processor() -> str:
    """The processor's name, family and model, as Linux has them."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.machine()
    known = dict(re.findall(r"^(.+?)\s*: (.*)$", file.read_text("utf-8"), re.M))
    name = known.get("model name", platform.machine())
    if "cpu family" in known:
        name += f" family {known['cpu family']} model {known['model']}"
    return name
