"""Builds a wheel of fairseq 0.12.2 that runs today (entry point: scripts/build_fairseq.py).

It runs before anything is installed, so it needs nothing but Python and the program ``patch``.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_atomically

VERSION = "0.12.2"
SDIST = f"fairseq-{VERSION}.tar.gz"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
PACKAGE = Path(__file__).resolve().parent.parent
PATCHES = PACKAGE.parent / "patches"
# file of the package -> its copy's name in the wheel's package fairseq
COPIES = {"compat.py": "_today.py", "errors.py": "errors.py", "safe_load.py": "safe_load.py"}

DESCRIPTION = f"""Build a wheel of fairseq {VERSION} that runs on Python 3.9-3.13, torch >= 2.1 and current numpy.

Fetches PyPI's {SDIST} with pip, checks its sha256, applies patches/ and builds the wheel in build isolation.
The wheel is cached; a second call prints the cached path at once.
Only the wheel's path goes to stdout, so: pip install "$(python scripts/build_fairseq.py)"."""


def series() -> list[Path]:
    """The patches in the order in which they apply."""
    try:
        lines = (PATCHES / "series").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"there is no {PATCHES}; build fairseq from a checkout of fairseq_rskip") from None
    return [PATCHES / line for line in lines if line and not line.startswith("#")]


def wheel_version() -> str:
    """``0.12.2+rskip.h<hash>``; the hash covers all that the wheel is made from."""
    digest = hashlib.sha256(SHA256.encode())
    for path in [Path(__file__).resolve(), *series(), *(PACKAGE / name for name in COPIES)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{VERSION}+rskip.h{digest.hexdigest()[:10]}"


def check_hash(path: Path) -> None:
    """Raise ``UserError`` unless ``path`` is the archive with the known sha256."""
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    if actual != SHA256:
        raise UserError(f"{path} is not PyPI's {SDIST}: sha256 expected {SHA256}, actual {actual}")


def run_pip(arguments: list[str], purpose: str) -> None:
    """Run pip with its output held back; raise ``UserError`` with the end of that output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        tail = "\n".join(done.stdout.decode(errors="replace").splitlines()[-40:])
        raise UserError(f"pip failed to {purpose} (exit status {done.returncode}); its last lines:\n{tail}")


def fetch(folder: Path) -> Path:
    """PyPI's archive, downloaded by pip, which compares the hash before it looks inside."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"fairseq=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", "fairseq", "--require-hashes", "-r", str(requirement), "-d", str(folder)]
    run_pip(["download", *options], f"download {SDIST}")
    return folder / SDIST


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    return folder / f"fairseq-{VERSION}"


def apply_patch(patch: Path, root: Path, *options: str) -> None:
    """Apply ``patch`` to the tree at ``root``; raise ``UserError`` unless every hunk fits where it says, exactly."""
    command = ["patch", "-p1", "-f", "-F0", *options, "-i", str(patch)]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        raise UserError("the program patch is missing; on Debian or Ubuntu: apt-get install patch") from None
    if done.returncode or re.search(r"^Hunk #.*\boffset\b", done.stdout, re.MULTILINE):
        raise UserError(f"{patch.name} does not apply exactly:\n{done.stdout.strip()}")


def check_can_compile() -> None:
    """Raise ``UserError`` where what compiles fairseq's extensions is not there."""
    if not (shutil.which(os.environ.get("CXX", "c++").split(" ")[0]) or shutil.which("g++")):
        raise UserError("fairseq needs a C++ compiler to build; on Debian or Ubuntu: apt-get install g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        raise UserError(f"fairseq needs {header} to build; on Debian or Ubuntu: apt-get install {package}")


def build(sdist: Path | None, folder: Path) -> Path:
    """The finished wheel, inside ``folder``."""
    if sdist is None:
        print_line(f"fetching {SDIST} from the package index", "stderr")
        sdist = fetch(folder)
    check_hash(sdist)
    root = unpack(sdist, folder)
    for patch in series():
        apply_patch(patch, root)
    for name, copy in COPIES.items():
        shutil.copyfile(PACKAGE / name, root / "fairseq" / copy)
    (root / "fairseq" / "version.txt").write_text(wheel_version() + "\n", encoding="utf-8")
    print_line(f"building the wheel of fairseq {wheel_version()} (about a minute)", "stderr")
    out = folder / "wheel"
    try:
        run_pip(["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out), str(root)], "build the wheel")
    except UserError as error:
        print_line(str(error), "stderr")
        check_can_compile()
        raise UserError("the wheel of fairseq could not be built; pip's last lines are above") from None
    return next(out.glob("fairseq-*.whl"))


def cached(place: Path) -> Path | None:
    return next(place.glob(f"fairseq-{wheel_version()}-*.whl"), None)


def platform() -> str:
    """The wheel's folder in the cache, which may be shared by machines and interpreters that differ."""
    return f"{sysconfig.get_config_var('SOABI') or sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def default_cache() -> Path:
    """``$RSKIP_CACHE``, else ``$XDG_CACHE_HOME/fairseq_rskip``, else ``~/.cache/fairseq_rskip``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("RSKIP_CACHE") or Path(base, "fairseq_rskip"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="build_fairseq.py", description=DESCRIPTION)
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"where wheels are kept (default: {default_cache()})")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help=f"your own copy of {SDIST} (default: fetch it)")
    parser.add_argument("--force", action="store_true", help="build even if a cached wheel exists")
    return parser.parse_args(argv)


def run(argv: list[str] | None) -> None:
    options = parse(argv)
    place = (options.cache or default_cache()).absolute() / platform()
    if options.sdist is not None:
        check_hash(options.sdist)
    if options.force or cached(place) is None:
        with tempfile.TemporaryDirectory(prefix="fairseq-build-") as folder:
            wheel = build(options.sdist, Path(folder))
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(place / wheel.name, lambda file: file.write(wheel.read_bytes()))
    print(cached(place))


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 and the wheel's path on stdout, or 1 and one line (plus pip's own, if pip failed) on stderr."""
    return exit_status(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
