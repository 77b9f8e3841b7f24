"""Lists of archives, their checksums, and the tables that remember what was verified."""

import hashlib
import os
import re
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from errors import UserError

CHECKSUMS = {"sha256": 64, "git-blob": 40, "md5": 32}
URL = re.compile(r"(https?|ftp|file)://\S+")
_COLUMNS = "name, size or -, checksum or -, URL(s), separated by tabs"
_MAGIC = {".gz": (b"\x1f\x8b", "gzip"), ".tgz": (b"\x1f\x8b", "gzip"), ".zip": (b"PK", "zip")}


class Archive(NamedTuple):
    """One row of a list: ``size`` in bytes, ``checksum`` as "sha256:…", "git-blob:…" or "md5:…"; None if not known."""

    name: str
    size: Optional[int]
    checksum: Optional[str]
    urls: Tuple[str, ...]


def read_list(path: Path) -> List[Archive]:
    """The archives that a tab-separated list names. Raises ``UserError`` naming the row that is malformed."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    archives: Dict[str, Archive] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            try:
                archive = _parse(line)
                if archive.name in archives:
                    raise ValueError(f"{archive.name} is listed twice")
            except ValueError as error:
                raise UserError(f"{path} line {number}: {error}") from None
            archives[archive.name] = archive
    if not archives:
        raise UserError(f"{path} lists no archive; a row has {_COLUMNS}")
    return list(archives.values())


def _parse(line: str) -> Archive:
    cells = [cell.strip() for cell in line.split("\t")]
    if len(cells) < 4:
        raise ValueError(f"{len(cells)} column{'s'[: len(cells) != 1]} where at least 4 are needed: {_COLUMNS}")
    name, size, checksum, *urls = cells
    urls = [url for url in urls if url]
    if not name or "/" in name or "\0" in name or name.startswith(".") or name.endswith((".part", ".bad")):
        raise ValueError(f"{name!r} cannot be a file's name here: no '/', no leading '.', not ending in .part or .bad")
    if size != "-" and not re.fullmatch("[0-9]+", size):
        raise ValueError(f"the size {size!r} is neither a number of bytes nor '-'")
    if checksum != "-":
        kind, _, digest = checksum.partition(":")
        if not re.fullmatch(f"[0-9a-f]{{{CHECKSUMS.get(kind, 0)}}}", digest) or not digest:
            forms = ", ".join(f"{kind}:<{length} hex digits>" for kind, length in CHECKSUMS.items())
            raise ValueError(f"the checksum {checksum!r} is none of {forms} or '-'")
    for url in urls or [""]:
        if not URL.fullmatch(url):
            raise ValueError(f"{url!r} is not an http://, https://, ftp:// or file:// URL")
    return Archive(name, None if size == "-" else int(size), None if checksum == "-" else checksum, tuple(urls))


def checksum_of(path: Path, kind: str) -> str:
    """``kind:hexdigest`` of a file; "git-blob" is the name that git gives it: SHA-1 of a header and the content."""
    digest = hashlib.new({"git-blob": "sha1"}.get(kind, kind))
    if kind == "git-blob":
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def mistaken_content(path: Path, name: str) -> Optional[str]:
    """What a file holds, by its first bytes, if it cannot be the archive that ``name`` promises; else None."""
    with open(path, "rb") as file:
        start = file.read(1024)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    xhtml = text.startswith(b"<?xml") and b"<html" in text
    if xhtml or text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "a web page (HTML)"
    if not start:
        return "an empty file"
    magic, kind = _MAGIC.get(Path(name).suffix.lower(), (b"", ""))
    return None if start.startswith(magic) else f"something that is not {kind} data"


def replace_text(path: Path, text: str) -> None:
    """Write under a temporary name, then rename. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_table(path: Path, columns: int) -> Dict[str, List[str]]:
    """A tab-separated table by its first column; empty if there is no file. Raises ``UserError`` on a malformed row."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    table = {}
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            name, *cells = line.split("\t")
            if len(cells) != columns - 1 or not cells[0].isdigit():
                raise UserError(f"{path} line {number} is malformed: mend or delete it, or delete the file")
            table[name] = cells
    return table


def write_table(path: Path, table: Dict[str, List[str]], heading: str) -> None:
    """The reverse of ``read_table``. Raises ``OSError``."""
    rows = ("\t".join([name, *cells]) + "\n" for name, cells in sorted(table.items()))
    replace_text(path, f"# {heading}\n" + "".join(rows))
