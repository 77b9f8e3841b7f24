"""The CPU operator: its C++ source beside this file, compiled once for a machine into the user's cache, and loaded.

The cache is ``~/.cache/fairseq_rskip`` (below ``$XDG_CACHE_HOME`` where that is set), with a folder for each source,
compiler, torch and processor. ``$CXX`` names another compiler, ``$RSKIP_MARCH`` an instruction set other than native.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from ..errors import UserError, exit_status
from ..files import locked, write_atomically

SOURCE = Path(__file__).with_name("recursive_skip.cpp")
HEADER = SOURCE.with_name("rows.h")
LIBRARY = "recursive_skip.so"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = "-O3 -fno-math-errno -fno-trapping-math -fPIC -shared -w".split()
logger = logging.getLogger(__name__)


def load() -> Path:
    """Load the library, building it first where it is not in the cache; returns its path.

    Raises ``UserError``, one line, where that is not possible.
    """
    path = build()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise UserError(f"cannot load {path}: {error}") from None
    return path


def build() -> Path:
    """The library's path, building it where it is not in the cache; processes that do so at once wait for one.

    Raises ``UserError`` without a compiler, for a cache that cannot be written, or with the compiler's first error.
    """
    command = _command()
    path = _folder(command) / LIBRARY
    if path.exists():
        return path
    try:
        with locked(path.parent, wait=True):
            if not path.exists():
                logger.info("building the CPU operator of the skip connections, once for this machine: half a minute")
                _compile(command, path)
    except OSError as error:
        raise UserError(f"cannot write {path.parent}: {error.strerror}") from None
    return path


def is_built() -> bool:
    """Whether :func:`load` finds the library. Raises ``UserError`` without a compiler."""
    return (_folder(_command()) / LIBRARY).exists()


def build_in_background() -> subprocess.Popen:
    """A process that builds the library and outlives this one; where it fails, the reason is on its stderr."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / LIBRARY
        run = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if run.returncode != 0:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines() or ["?"]
            raise UserError(f"{command[0]} fails with status {run.returncode}: {lines[0]}")
        write_atomically(path, lambda file: file.write(made.read_bytes()))


def _command() -> list[str]:
    """The compiler's command line, without its output."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise UserError(f"no C++ compiler, none of {', '.join(names)}, is installed")
    root = Path(torch.__file__).parent
    command = [
        compiler,
        f"-march={os.environ.get('RSKIP_MARCH') or 'native'}",
        *FLAGS,
        f"-std=c++{20 if _torch_version() >= (2, 9) else 17}",
    ]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for include in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(root / include)]
    command += [str(SOURCE), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    return command + _threads(root / "lib")


def _threads(folder: Path) -> list[str]:
    """torch's own OpenMP, the one that its wheel brings: a second would start threads of its own."""
    own = sorted(folder.glob("libgomp*.so*"))
    return ["-fopenmp", *map(str, own[:1])]


def _torch_version() -> tuple:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _folder(command: list[str]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    flags = [part for part in command if os.sep not in part]  # not where torch, the compiler and the source are
    parts = [*flags, version, torch.__version__, sysconfig.get_config_var("SOABI") or "", _processor()]
    parts += [path.read_text(encoding="utf-8") for path in (SOURCE, HEADER)]
    return base / "fairseq_rskip" / f"ops-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _processor() -> str:
    """What the processor can do, since the library is compiled for it alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "".join(sorted(set(flags))) or platform.processor()


if __name__ == "__main__":
    sys.exit(exit_status(lambda: print(build())))
