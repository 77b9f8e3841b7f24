"""Archives of published corpora: fetched once, resumed, checked before they are used, and unpacked.

pooch starts a file again when a transfer breaks off; an archive of WMT'14 has up to 2.6 GB, so
ours are resumed.
"""

import fnmatch
import hashlib
import http.client
import lzma
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from tqdm import tqdm

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import make_folder

STALL = 30.0  # seconds without a byte after which a transfer is given up
DELAY = 2.0  # seconds before the next try
TRIES = 4  # in a row that bring no more than there has been
FINAL = (401, 403, 404, 405)  # HTTP statuses that another try would not change
# what the readers of archives raise; RuntimeError of a member that is encrypted
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)
CANNOT_RESUME = 416  # HTTP: the range that was asked for is not in the file
BLOCK = 1 << 20  # bytes that are read at a time
ROW = re.compile(
    r"(?P<name>[^/.\t][^/\t]*)\t(?P<size>\d+|-)\t"
    r"(?P<kind>sha256|git-blob|md5):(?P<digits>[0-9a-f]+)\t(?P<urls>.+)"
)
DIGITS = {"sha256": 64, "git-blob": 40, "md5": 32}


class Archive(NamedTuple):
    """A file with its checksum, ``digits`` of ``kind`` (a key of ``DIGITS``), and its URLs.

    ``size`` is in bytes, 0 where the list has none.
    """

    name: str
    size: int
    kind: str
    digits: str
    urls: list[str]


def read_list(path: Path, source: str = "") -> list[Archive]:
    """The archives of a list in data-prep/archives.

    ``source``, a folder or a URL, replaces the URLs of the list. Raises ``UserError``.
    """
    if not path.is_file():
        raise UserError(f"there is no list of archives {path}")
    if source and "://" not in source and not Path(source).is_dir():
        raise UserError(f"--from {source}: expected a folder or a URL")
    try:
        rows = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"the list of archives {path} is no UTF-8 text") from None
    archives = []
    for row in rows:
        if not row or row.startswith("#"):
            continue
        match = ROW.fullmatch(row)
        if not match or len(match["digits"]) != DIGITS[match["kind"]]:
            raise UserError(
                f"{path}: expected a name, a size or -, sha256:, git-blob: or md5: with all "
                f"digits, and URLs, separated by tabs: {row}"
            )
        urls = match["urls"].split("\t")
        if source:
            urls = [f"{source.rstrip('/')}/{match['name']}"]
        size = 0 if match["size"] == "-" else int(match["size"])
        archives.append(Archive(match["name"], size, match["kind"], match["digits"], urls))
    return archives


def checksum(kind: str, path: Path) -> str:
    """The digits that sha256sum, md5sum or ``git hash-object`` (git-blob) prints for a file."""
    if kind == "git-blob":
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    else:
        digest = hashlib.new(kind)
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def fetch(archive: Archive, folder: Path, corpus: str) -> None:
    """Put ``archive`` into ``folder``, checked; a file with another checksum is kept as NAME.bad.

    A part that an earlier call left is resumed. Raises ``UserError`` with the reason for each URL.
    """
    file = folder / archive.name
    part = folder / f"{archive.name}.part"
    bad = folder / f"{archive.name}.bad"
    if file.exists():
        if checksum(archive.kind, file) == archive.digits:
            print_line(f"{corpus}: {archive.name}: up to date, {archive.kind} checked")
            return
        file.replace(bad)

    urls = list(archive.urls)
    if _size(part):
        urls *= 2  # a part of another file has a wrong checksum at the end: then a second round

    problems = []
    for url in urls:
        try:
            _fetch_part(archive, url, part)
        except OSError as error:
            problems.append(f"{url}: {_reason(error)}")
            continue
        if checksum(archive.kind, part) == archive.digits:
            part.replace(file)
            print_line(f"{corpus}: {archive.name}: fetched, {archive.kind} checked")
            return
        problems.append(f"{url}: wrong checksum{_about(part, archive)}")
        part.replace(bad)

    advice = (
        f"the same command resumes; --from FOLDER takes {archive.name} from a folder of archives "
        "that you have"
    )
    if all("://" not in url for url in archive.urls):
        advice = f"expected the whole {archive.name} as it was published"
    raise UserError(f"cannot fetch {archive.name}; {'; '.join(problems)}; {advice}")


def _fetch_part(archive: Archive, url: str, part: Path) -> None:
    """Complete ``part`` from ``url``, a URL or a local path. Raises ``OSError``."""
    if "://" not in url:
        _copy(Path(url), part)
        return
    if part.exists() and part.stat().st_nlink > 1:
        part.unlink()  # a link to your own archive, which a download must not write into
    complete = _size(part) and checksum(archive.kind, part) == archive.digits
    if not complete:
        download(url, part)


def download(url: str, part: Path) -> None:
    """Append the missing bytes of ``url`` to ``part``.

    Raises ``OSError`` when ``TRIES`` in a row bring no more than the best try of this call: a
    server that cannot resume begins again each time.
    """
    tries = TRIES
    most = 0  # a part that an earlier call left may be of another file
    while True:
        problem = _try(url, part)
        if problem is None:
            return
        if _size(part) > most:
            tries, most = TRIES, _size(part)
        else:
            tries -= 1
        if tries == 0:
            raise problem
        time.sleep(DELAY)


def _try(url: str, part: Path) -> OSError | None:
    """Transfer once; a problem that another try may not have is returned.

    Raises ``OSError`` for others: what the server says for good, and errors of the disk.
    """
    try:
        _transfer(url, part)
    except urllib.error.HTTPError as error:
        if error.code in FINAL:
            raise
        if error.code == CANNOT_RESUME:
            part.unlink(missing_ok=True)
        return error
    except http.client.HTTPException as error:
        return OSError(f"{type(error).__name__} {error}")
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        return error
    return None


def _transfer(url: str, part: Path) -> None:
    """Append the missing bytes to ``part``; write all if the server cannot resume."""
    have = _size(part)
    headers = {"User-Agent": "fairseq_rskip"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=STALL) as response:
        resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        expected = int(length) if length else None
        received = 0
        with (
            open(part, "ab" if resumed else "wb") as file,
            tqdm(desc=part.stem, total=expected, unit="B", unit_scale=True, disable=None) as bar,
        ):
            while block := response.read1(BLOCK):
                file.write(block)
                file.flush()
                received += len(block)
                bar.update(len(block))
    if expected is not None and received < expected:
        raise ConnectionError(f"the transfer ended after {received:,} of {expected:,} bytes")


def unpack(path: Path, pattern: str, folder: Path) -> None:
    """Extract the members of a tar or zip file whose names match ``pattern`` into ``folder``.

    Raises ``UserError``.
    """
    count = 0
    try:
        for name, file in _members(path, pattern):
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts:
                raise UserError(
                    f"cannot unpack {path.name}: its member {name} leads out of the folder"
                )
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as output:
                shutil.copyfileobj(file, output, BLOCK)
            count += 1
    except DAMAGED as error:
        raise UserError(f"cannot unpack {path.name}: {error}") from None
    if count == 0:
        raise UserError(f"cannot unpack {path.name}: it has no member {pattern}")


def _members(path: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in an archive whose name matches ``pattern``."""
    if path.suffix in (".zip", ".whl"):
        yield from _members_of_zip(path, pattern)
    else:
        yield from _members_of_tar(path, pattern)


def _members_of_zip(path: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and fnmatch.fnmatchcase(name, pattern):
                with archive.open(name) as file:
                    yield name, file


def _members_of_tar(path: Path, pattern: str) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.isfile() and fnmatch.fnmatchcase(member.name, pattern):
                yield member.name, archive.extractfile(member)


def check_space(archives: Iterable[Archive], folder: Path) -> None:
    """Raise ``UserError`` if the disk has no room for the downloads that ``folder`` lacks."""
    missing = 0
    for archive in archives:
        downloaded = "://" in archive.urls[0]
        if downloaded and archive.size and not (folder / archive.name).exists():
            missing += max(0, archive.size - _size(folder / f"{archive.name}.part"))
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise UserError(
            f"the archives need another {missing / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB free"
        )


def fetch_all(archives: Sequence[Archive], folder: Path, corpus: str) -> None:
    """Put every archive into ``folder``. Raises ``UserError``."""
    missing = [
        archive.name
        for archive in archives
        if not (folder / archive.name).exists() and _is_missing(archive)
    ]
    if missing:
        where = Path(archives[0].urls[0]).parent
        raise UserError(
            f"{where} lacks {', '.join(missing)}; expected the archives of {corpus} as they were "
            f"published: {', '.join(archive.name for archive in archives)}"
        )
    make_folder(folder)
    check_space(archives, folder)
    for archive in archives:
        fetch(archive, folder, corpus)


def _is_missing(archive: Archive) -> bool:
    """Whether the archive is to come from a folder that does not have it."""
    return all("://" not in url and not Path(url).exists() for url in archive.urls)


def _copy(source: Path, part: Path) -> None:
    """``source`` as ``part``: a second name of the same file where the system allows it."""
    part.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), part)
    except OSError:
        shutil.copyfile(source, part)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _about(part: Path, archive: Archive) -> str:
    """What a file with a wrong checksum may be, in brackets; "" where nothing is known."""
    if _is_web_page(part):
        return " (a web page)"
    if archive.size and _size(part) != archive.size:
        return f" ({_size(part):,} of {archive.size:,} bytes)"
    return ""


def _is_web_page(path: Path) -> bool:
    with open(path, "rb") as file:
        return re.search(rb"<html|<!doctype", file.read(99), re.IGNORECASE) is not None


def _reason(error: OSError) -> str:
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        error = error.reason  # without "<urlopen error ...>"
    return " ".join(str(error).split())
