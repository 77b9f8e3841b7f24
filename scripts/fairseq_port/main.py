"""The command line of the build program: fetch, check, rewrite, build, cache."""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path
from typing import List, Optional

from fairseq_port.metadata import COPIES, LOCAL_VERSION, VERSION, rewrite_tree
from fairseq_port.rules import UnknownSourceError

SDIST = f"fairseq-{VERSION}.tar.gz"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "fairseq_rskip"

DESCRIPTION = f"""Build a wheel of fairseq {VERSION} that runs on Python 3.9-3.13, torch >= 2.1 and current numpy.

Fetches PyPI's {SDIST} with pip, checks its sha256, rewrites it by rule (docs/fairseq.md lists the rules) and builds
fairseq {LOCAL_VERSION} in build isolation. The wheel is cached; a second call prints the cached path at once.
Only the wheel's path goes to stdout, so: pip install "$(python scripts/build_fairseq.py)"."""


class BuildError(Exception):
    """Something outside the rules went wrong; the message is all the user needs."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def default_cache() -> Path:
    """``$RSKIP_CACHE``, else ``$XDG_CACHE_HOME/fairseq_rskip``, else ``~/.cache/fairseq_rskip``."""
    if os.environ.get("RSKIP_CACHE"):
        return Path(os.environ["RSKIP_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fairseq_rskip"


def cache_key() -> str:
    """A hash of everything the wheel depends on: this program, our files in it, the archive and the interpreter."""
    digest = hashlib.sha256(SHA256.encode())
    for path in [HERE.parent / "build_fairseq.py", *sorted(HERE.glob("*.py")), *(PACKAGE / name for name in COPIES)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    digest.update(f"{tag} {sysconfig.get_platform()}".encode())
    return f"fairseq-{LOCAL_VERSION}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def check_hash(path: Path) -> None:
    """Raises BuildError unless ``path`` is the archive with the known sha256."""
    try:
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildError(f"cannot read {path}: {error.strerror}") from None
    if actual != SHA256:
        raise BuildError(f"{path} is not PyPI's {SDIST}: sha256 expected {SHA256}, actual {actual}")


def run_pip(arguments: List[str], purpose: str) -> None:
    """Run pip with its output held back; raises BuildError with the end of that output when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if result.returncode:
        tail = "\n".join(result.stdout.decode(errors="replace").splitlines()[-40:])
        raise BuildError(f"pip failed to {purpose} (exit status {result.returncode}); its last lines:\n{tail}")


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


def build(sdist: Optional[Path], folder: Path) -> Path:
    """The finished wheel, inside ``folder``."""
    started = time.time()
    if sdist is None:
        say(f"fetching {SDIST} from the package index")
        sdist = fetch(folder)
    check_hash(sdist)
    root = unpack(sdist, folder)
    report = rewrite_tree(root, PACKAGE)
    for rule, files in report.items():
        for name, count in sorted(files.items()):
            say(f"  {rule:20} {name}: {count}")
    say(f"building the wheel of fairseq {LOCAL_VERSION} (about a minute)")
    out = folder / "wheel"
    run_pip(["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out), str(root)], "build the wheel")
    wheels = list(out.glob("fairseq-*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"expected one wheel in {out}, found {len(wheels)}")
    say(f"built {wheels[0].name} in {time.time() - started:.0f} s")
    return wheels[0]


def store(wheel: Path, place: Path, force: bool) -> None:
    """Put the wheel into the cache in one step; unless ``force``, another build that was faster wins."""
    place.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        shutil.copy2(wheel, new)
        new.chmod(0o755)
        if force and place.exists():
            place.rename(new / "old")
            shutil.rmtree(new / "old")
        if not place.exists():
            new.rename(place)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def cached(place: Path) -> Optional[Path]:
    return next(iter(sorted(place.glob("fairseq-*.whl"))), None)


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="build_fairseq.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"where wheels are kept (default: {default_cache()})")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help=f"your own copy of {SDIST} (default: fetch it)")
    parser.add_argument("--force", action="store_true", help="build even if a cached wheel exists")
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> int:
    """Exit status 0 and the wheel's path on stdout, or 1 and one line (plus pip's own, if pip failed) on stderr."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        place = (options.cache or default_cache()).absolute() / cache_key()
        if options.force or cached(place) is None:
            with tempfile.TemporaryDirectory(prefix="fairseq-build-") as folder:
                store(build(options.sdist, Path(folder)), place, options.force)
        elif options.sdist is not None:
            check_hash(options.sdist)
    except (BuildError, UnknownSourceError) as error:
        kind = "not the source I know: " if isinstance(error, UnknownSourceError) else ""
        say(f"error: {kind}{error}")
        return 1
    print(cached(place))
    return 0
