"""Fetch the archives of a list into a folder, each checked before it gets its name.

LIST has a row for each archive, tab-separated: name, size in bytes or -, checksum (sha256:…, git-blob:… or md5:…), one
or more URLs, which are tried in order. A download that was cut off is resumed.

curl downloads: pooch has neither resume nor mirrors. The retries are ours, because curl's own --retry first cuts the
file back to what it held before the attempt.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import quote

from fairseq_rskip import files
from fairseq_rskip.console import Parser
from fairseq_rskip.errors import RESUME, UserError, exit_status

ROW = re.compile(
    r"([^/.\t][^/\t]*)\t(-|[0-9]+)\t(sha256:[0-9a-f]{64}|git-blob:[0-9a-f]{40}|md5:[0-9a-f]{32})"
    r"((?:\t(?:https?|ftp|file)://\S+)+)"
)
URL = re.compile(r"(https?|ftp|file)://\S+")
CURL = ("curl", "-fL", "--globoff", "-C", "-", "-w", "%{http_code}", "--connect-timeout", "20", "--speed-limit", "100")
STALL = 30  # seconds of next to no data after which an attempt is given up
RETRIES, RETRY_DELAY = 3, 1.0  # attempts in a row that gain nothing; seconds before the second, doubled each time
BROKEN = {16, 18, 28, 35, 52, 55, 56, 92}  # curl's exit codes for a connection that broke, stalled or timed out
BUSY = {"408", "425", "429", "500", "502", "503", "504"}  # HTTP statuses that may pass


class Archive(NamedTuple):
    """One row of a list; ``size`` in bytes, None if not known."""

    name: str
    size: int | None
    checksum: str
    urls: Sequence[str]


def read_list(path: Path) -> list[Archive]:
    """The archives of a list. Raises ``UserError`` naming the row that is malformed."""
    archives: list[Archive] = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        row = ROW.fullmatch(line)
        if not row:
            raise UserError(
                f"{path} line {number}: expected, separated by tabs, a name without '/', its size or '-', sha256:,"
                " git-blob: or md5: with all digits, and http://, https://, ftp:// or file:// URLs"
            )
        name, size, checksum, urls = row.groups()
        if any(name == archive.name for archive in archives):
            raise UserError(f"{path} line {number}: {name} is listed twice")
        archives.append(Archive(name, None if size == "-" else int(size), checksum, tuple(urls.split())))
    if not archives:
        raise UserError(f"{path} lists no archive")
    return archives


def checksum_of(path: Path, kind: str) -> str:
    """``kind:digits`` of a file; "git-blob" is what ``git hash-object`` prints: SHA-1 of a header and the content."""
    digest = hashlib.new("sha1" if kind == "git-blob" else kind)
    if kind == "git-blob":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def fault(path: Path, archive: Archive) -> str | None:
    """How a file differs from the archive; None if it does not."""
    size = path.stat().st_size
    got = checksum_of(path, archive.checksum.partition(":")[0]) if archive.size in (None, size) else ""
    if got == archive.checksum:
        return None
    with open(path, "rb") as file:
        if file.read(512).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
            return "a web page (HTML) in place of the archive"
    if got:
        return f"wrong checksum: expected {archive.checksum}, got {got}"
    return f"{'truncated: ' if size < archive.size else ''}{size:,} bytes, expected {archive.size:,}"


def megabytes(size: int) -> str:
    """A size for people: "3 bytes", "0.6 MB", "2,595.1 MB"."""
    return f"{size:,} bytes" if size < 50_000 else f"{size / 1e6:,.1f} MB"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _aside(path: Path, archive: Archive) -> str:
    os.replace(path, path.with_name(f"{archive.name}.bad"))
    return f"kept aside as {archive.name}.bad"


def attempt(url: str, part: Path, lock: IO[str]) -> tuple[int, str, str]:
    """One run of curl, appending to ``part``: its exit code, the HTTP status, what went wrong in words.

    curl inherits ``lock``: one that outlives its killed parent keeps the next run from writing to the same file.
    """
    terminal = sys.stderr.isatty()
    done = subprocess.run(
        [*CURL, "--progress-bar" if terminal else "-sS", "--speed-time", str(STALL), "-o", part, url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if terminal else subprocess.PIPE,
        pass_fds=[lock.fileno()],
        restore_signals=False,  # where the size of files is limited, curl reports an error
    )
    code, status = done.returncode, done.stdout.decode()[-3:]
    words = (done.stderr or b"").decode(errors="replace").strip().splitlines()
    if code == 23:
        free = shutil.disk_usage(part.parent).free
        raise UserError(f"cannot write {part} (disk full?), {megabytes(free)} are free there; what is complete is kept")
    known = {
        18: f"truncated: the connection was closed after {_size(part):,} bytes",
        22: f"HTTP {status}",
        28: f"timed out, or next to no data for {STALL} s",
    }
    return code, status, known.get(code) or re.sub(r"^curl: \(\d+\) ", "", words[-1] if words else f"curl: exit {code}")


def download(url: str, part: Path, lock: IO[str]) -> str | None:
    """Append to ``part`` what it lacks, as long as trying again may help; returns what is wrong, if anything is."""
    failures = 0
    while True:
        begun = _size(part)
        code, status, message = attempt(url, part, lock)
        if code == 0:
            return None
        if begun and (code == 33 or status == "416"):  # this server cannot resume, or not from here
            part.unlink()
            continue
        failures = 1 if _size(part) > begun else failures + 1
        if failures > RETRIES or not (code in BROKEN or status in BUSY):
            return message
        time.sleep(RETRY_DELAY * 2 ** (failures - 1))


def fetch(archive: Archive, folder: Path, urls: Sequence[str], lock: IO[str]) -> None:
    """Download ``archive`` into ``folder`` from the first URL that has it. Raises ``UserError``."""
    part, answers = folder / f"{archive.name}.part", []
    for url in urls:
        begun = _size(part)
        wrong = None if begun and begun == archive.size else download(url, part, lock)
        if not wrong and begun and fault(part, archive):  # it may have begun as another file
            part.unlink()
            wrong = download(url, part, lock)
        if not wrong:
            wrong = fault(part, archive)
            if not wrong:
                os.replace(part, folder / archive.name)
                return
            wrong += f", {_aside(part, archive)}"
        answers.append(f"{url}: {wrong}")
    if _size(part):
        answers.append(f"{megabytes(_size(part))} kept, the same command resumes from there")
    raise UserError(f"cannot fetch {archive.name}: {'; '.join(answers)}")


def copy(archive: Archive, folder: Path, mirror: Path) -> str:
    """Link or copy ``archive`` from the folder ``mirror``; returns which. Raises ``UserError``."""
    source, path = mirror / archive.name, folder / archive.name
    wrong = fault(source, archive)
    if wrong:
        raise UserError(f"{source}: {wrong}")
    try:
        os.link(source.resolve(), path)
        return "linked"
    except OSError:  # another file system, or one without hard links
        with open(source, "rb") as file:
            files.write_atomically(path, lambda target: shutil.copyfileobj(file, target, 1 << 20))
        return "copied"


def have(archive: Archive, folder: Path, mirror: str | None, lock: IO[str]) -> str:
    """Have ``archive`` in ``folder``, checked; returns how it came there. Raises ``UserError``."""
    path = folder / archive.name
    if path.exists():
        wrong = fault(path, archive)
        if not wrong:
            return "up to date"
        print(f"{archive.name}: the file in {folder} is not it ({wrong}), {_aside(path, archive)}")
    if mirror and not URL.fullmatch(mirror):
        return f"{copy(archive, folder, Path(mirror))} from {mirror}, {megabytes(_size(path))}"
    fetch(archive, folder, [f"{mirror.rstrip('/')}/{quote(archive.name)}"] if mirror else archive.urls, lock)
    return f"fetched, {megabytes(_size(path))}"


def check(archives: list[Archive], folder: Path, mirror: str | None) -> None:
    """Raises ``UserError`` if a mirror folder lacks archives, or the disk the space for what must be downloaded."""
    missing = [archive for archive in archives if not (folder / archive.name).exists()]
    if mirror and not URL.fullmatch(mirror):
        if not Path(mirror).is_dir():
            raise UserError(f"--from {mirror}: neither a folder nor an http://, https://, ftp:// or file:// URL")
        lacking = [archive.name for archive in missing if not Path(mirror, archive.name).is_file()]
        if lacking:
            raise UserError(f"--from {mirror} lacks {', '.join(lacking)}")
    elif missing:
        if not shutil.which("curl"):
            raise UserError("curl is not installed: install it, or take the archives from a folder with --from DIR")
        needed = sum((archive.size or 0) - _size(folder / f"{archive.name}.part") for archive in missing)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(f"no space in {folder}: {megabytes(needed)} needed, {megabytes(free)} free")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("list", type=Path, metavar="LIST", help="the archives, a tab-separated file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the archives go")
    parser.add_argument("--from", dest="mirror", metavar="DIR-or-URL", help="take the archives from here instead")
    options = parser.parse_args(argv)
    archives = read_list(options.list)
    options.folder.mkdir(parents=True, exist_ok=True)
    check(archives, options.folder, options.mirror)
    with files.locked(options.folder) as lock:
        if lock is None:
            raise UserError(f"another run is still downloading into {options.folder}: wait for it")
        for archive in archives:
            how = have(archive, options.folder, options.mirror, lock)
            print(f"{archive.name}: {how}, {archive.checksum.partition(':')[0]} checked", flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
