"""Build a wheel of fairseq 0.12.2 for Python 3.10 to 3.14, torch 2.6 or newer and numpy 2, in a checkout.

pip downloads the archive from PyPI, the patches in patches/ are applied, pip builds the wheel in build isolation. The
wheel is cached; a second call prints its path at once. Only the path goes to stdout:
pip install "$(python -m fairseq_rskip.tools.build_fairseq)". Before the build nothing else need be installed.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_bytes

VERSION = "0.12.2"
SDIST = f"fairseq-{VERSION}.tar.gz"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
PACKAGE = Path(__file__).resolve().parent.parent
PATCHES = PACKAGE.parent / "patches"
# file of the package -> its copy's name in the wheel's package fairseq
COPIES = {"compat.py": "_today.py", "errors.py": "errors.py", "safe_load.py": "safe_load.py"}


def series() -> list[Path]:
    """The patches in the order in which they apply."""
    lines = (PATCHES / "series").read_text(encoding="utf-8").splitlines()
    return [PATCHES / line for line in lines if line and not line.startswith("#")]


def wheel_version() -> str:
    """``0.12.2+rskip.h<hash>``; the hash covers everything that the wheel is made from."""
    digest = hashlib.sha256(SHA256.encode())
    for path in [Path(__file__).resolve(), *series(), *(PACKAGE / name for name in COPIES)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{VERSION}+rskip.h{digest.hexdigest()[:10]}"


def missing_packages() -> list[str]:
    """The Debian packages that a build needs and that are not installed."""
    compilers = [os.environ.get("CXX", "c++").split(" ")[0], "g++"]
    compiler = [] if any(map(shutil.which, compilers)) else ["g++"]
    header = Path(sysconfig.get_path("include"), "Python.h").exists()
    return compiler + ([] if header else [f"python{sys.version_info.major}.{sys.version_info.minor}-dev"])


def run_pip(arguments: list[str], purpose: str) -> None:
    """Run pip with its output held back; raise ``UserError`` with the end of that output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = pip.wait(timeout=10)
                break
            print_line(f"  {time.monotonic() - began:.0f} seconds", "stderr")
        log.seek(0)
        last = b"\n".join(log.read().splitlines()[-40:]).decode(errors="replace")
    if status:
        raise UserError(f"pip cannot {purpose} (exit status {status}); its last lines:\n{last}")


def fetch(folder: Path) -> Path:
    """PyPI's archive, downloaded by pip, which compares the hash before it looks inside."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"fairseq=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", "fairseq", "--require-hashes", "-r", str(requirement), "-d", str(folder)]
    run_pip(["download", *options], f"download {SDIST}")
    return folder / SDIST


def apply_patch(patch: Path, root: Path) -> None:
    """Apply ``patch`` to the tree at ``root``; raise ``UserError`` unless every hunk fits exactly where it says.

    The program ``patch`` would have to be installed, and looks for places where a hunk fits better.
    """
    _, *parts = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, body in zip(parts[::2], parts[1::2]):
        lines = (root / name).read_text(encoding="utf-8").split("\n") if (root / name).exists() else []
        _, *hunks = re.split(r"^@@ -(\d+).*\n", body, flags=re.MULTILINE)
        for start, hunk in reversed(list(zip(hunks[::2], hunks[1::2]))):  # the last first: numbers above it stay true
            changes = hunk.removesuffix("\n").split("\n")
            before, after = ([line[1:] for line in changes if line[:1] != sign] for sign in "+-")
            place = slice(int(start) - 1, int(start) - 1 + len(before))
            if lines[place] != before:
                raise UserError(f"{patch.name} does not apply exactly: {name}, line {start}")
            lines[place] = after
        (root / name).write_text("\n".join(lines), encoding="utf-8")


def build(folder: Path) -> Path:
    """The finished wheel, inside ``folder``."""
    if packages := " ".join(missing_packages()):
        raise UserError(f"building fairseq needs system packages; on Debian or Ubuntu: apt-get install {packages}")
    print_line(f"downloading {SDIST} from the package index", "stderr")
    with tarfile.open(fetch(folder)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python 3.11.2 has none
        tar.extractall(folder)
    root = folder / f"fairseq-{VERSION}"
    for patch in series():
        apply_patch(patch, root)
    for name, copy in COPIES.items():
        shutil.copyfile(PACKAGE / name, root / "fairseq" / copy)
    (root / "fairseq" / "version.txt").write_text(wheel_version() + "\n", encoding="utf-8")
    print_line(f"building the wheel of fairseq {wheel_version()} (half a minute)", "stderr")
    run_pip(["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(folder), str(root)], "build the wheel")
    return next(folder.glob("fairseq-*.whl"))


def cached_wheel() -> Path:
    """Where the wheel for this interpreter is kept: ``$RSKIP_CACHE``, else a folder below ``$XDG_CACHE_HOME``."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = f"{version}-{version}{sys.abiflags}-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    return Path(os.environ.get("RSKIP_CACHE") or Path(caches, "fairseq_rskip"), f"fairseq-{wheel_version()}-{tags}.whl")


def run(argv: list[str] | None) -> None:
    parser = Parser(prog="python -m fairseq_rskip.tools.build_fairseq", description=__doc__)
    parser.add_argument("--missing", action="store_true", help="only print the Debian packages that a build lacks")
    options, wheel = parser.parse_args(argv), cached_wheel().absolute()
    if options.missing:
        print(*([] if wheel.exists() else missing_packages()))
        return
    if not wheel.exists():
        with tempfile.TemporaryDirectory(prefix="fairseq-build-") as folder:
            built = build(Path(folder))
            wheel.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(wheel, built.read_bytes())
    print(wheel)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 and the wheel's path on stdout, or 1 and one line (plus pip's own, if pip failed) on stderr."""
    return exit_status(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
