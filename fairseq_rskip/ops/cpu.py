"""The CPU operator: its C++ source beside this file, compiled once for a machine into the user's
cache, and loaded.

The cache (:func:`.files.cache_folder`) has a folder for each source, compiler, torch and processor.
``$CXX`` names another compiler, ``$RSKIP_MARCH`` an instruction set other than native.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from ..errors import UserError
from ..files import cache_folder, locked, write_bytes

SOURCES = [Path(__file__).with_name(name) for name in ("recursive_skip.cpp", "rows.h")]
COMPILERS = ("g++", "c++", "clang++")
# Without fused multiply-add, whose use would depend on what the compiler inlines: a row's bits must
# not depend on its place.
FLAGS = "-O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared -fopenmp -w".split()
BUILD = "python -m fairseq_rskip.ops"
logger = logging.getLogger(__name__)


def load(build_it: bool = False) -> str:
    """Load the library and return where it is; ``build_it``: build it first if necessary.

    Raises as :func:`build`, and ``UserError`` for a library that is not built.
    """
    path = build() if build_it else library_path(compile_command())
    if not path.exists():
        raise UserError(f"it is not built yet; {BUILD} builds it, once for this machine")
    torch.ops.load_library(str(path))
    return f"built at {path}"


def build() -> Path:
    """The library's path; builds it where it is not in the cache.

    Processes that do so at once wait for one of them. Raises ``UserError`` without a compiler or
    with the compiler's first error, ``OSError`` for a cache that cannot be written.
    """
    command = compile_command()
    path = library_path(command)
    if path.exists():
        return path
    with locked(path.parent, wait=True), tempfile.TemporaryDirectory() as folder:
        if not path.exists():
            logger.info(
                "building the CPU operator of the skip connections, once for this machine: "
                "half a minute"
            )
            write_bytes(path, _compiled(command, Path(folder) / path.name))
    return path


def _compiled(command: list[str], path: Path) -> bytes:
    """Run the compiler with ``path`` as its output; the bytes of that file.

    Raises ``UserError`` with the compiler's first error.
    """
    run = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
    if run.returncode != 0:
        lines = run.stderr.splitlines() or ["?"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise UserError(f"{command[0]} fails with status {run.returncode}: {first}")
    return path.read_bytes()


def compile_command() -> list[str]:
    """The compiler's command line, without its output. Raises ``UserError`` without a compiler."""
    chosen = shlex.split(os.environ.get("CXX", ""))  # such as "ccache g++"
    names = chosen[:1] or COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise UserError(f"no C++ compiler, none of {', '.join(names)}, is installed")

    root = Path(torch.__file__).parent
    march = os.environ.get("RSKIP_MARCH") or "native"
    torch_version = tuple(map(int, torch.__version__.split(".")[:2]))
    standard = 20 if torch_version >= (2, 9) else 17
    flags = [f"-march={march}", *FLAGS, f"-std=c++{standard}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    for include in ("include", "include/torch/csrc/api/include"):
        flags += ["-isystem", str(root / include)]

    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    # the OpenMP that torch's wheel brings: a second would start threads of its own
    libraries += sorted(map(str, (root / "lib").glob("libgomp*.so*")))[:1]
    return [compiler, *chosen[1:], *flags, str(SOURCES[0]), *libraries]


def library_path(command: list[str]) -> Path:
    """The path of ``command``'s output in the cache.

    Its key has the processor's features: the code depends on them.
    """
    is_flag = [part.startswith("-march") for part in command]
    compiler = command[: is_flag.index(True)]  # with the words of its own, such as "ccache g++"
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    # not the paths of torch, the compiler and the source
    flags = [part for part in command if os.sep not in part]
    parts = [*flags, version, torch.__version__, sysconfig.get_config_var("SOABI") or ""]
    parts += _processor()
    parts += [path.read_text(encoding="utf-8") for path in SOURCES]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"ops-{key}" / "recursive_skip.so"


def _processor() -> list[str]:
    """The lines of /proc/cpuinfo that name the processor and its features."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return [f"model name {platform.processor()}"]
    lines = info.read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
