#!/usr/bin/env python3
"""Unpack an archive into a folder, and write nowhere else.

    unpack.py ARCHIVE FOLDER [--only GLOB ...]

ARCHIVE is .tar, .tar.gz, .tgz, .zip or .gz (one file). A * in GLOB matches any letters, / included. Files get their
names when the whole archive has proved sound. Links, devices and names that lead out of FOLDER are refused.
"""

import argparse
import gzip
import os
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Dict, Iterator, List, NamedTuple, Optional, Set

from checksums import mistaken_content
from download import megabytes, need_space
from errors import UserError, status_of
from tqdm import tqdm

ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip", ".gz")
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)
_LINK = "a symbolic link"
_TAR_KINDS = {tarfile.SYMTYPE: _LINK, tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a fifo"}
_TAR_KINDS.update({tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"})


class Member(NamedTuple):
    """``size``: 0 if the archive does not say; ``fault``: what it is, unless a file; ``content``: read it at once."""

    name: str
    size: int = 0
    fault: str = ""
    content: Optional[IO[bytes]] = None


def ending_of(archive: Path) -> str:
    """Which of ``ENDINGS`` the name has, the longest one. Raises ``UserError``."""
    name = archive.name.lower()
    ending = max((ending for ending in ENDINGS if name.endswith(ending)), key=len, default="")
    if not ending:
        raise UserError(f"{archive}: not the name of an archive; {', '.join(ENDINGS)} are accepted")
    return ending


def tar_members(raw: IO[bytes]) -> Iterator[Member]:
    """All but folders, in one pass. tarfile gives the bytes only: no file is made, no link followed by it."""
    with tarfile.open(fileobj=raw, mode="r|") as tar:
        for member in tar:
            tar.members = []  # it would keep every header
            if member.isdir():
                check_name(member.name)
            elif member.isfile() and not member.issparse():
                yield Member(member.name, member.size, "", tar.extractfile(member))
            else:
                yield Member(member.name, 0, _TAR_KINDS.get(member.type, "not a regular file"))
        # tarfile takes a bad header for the end; and gzip's own checksum comes last.
        for chunk in iter(lambda: tar.fileobj.read(1 << 20), b""):
            if chunk.strip(b"\0"):
                raise tarfile.ReadError("a bad header, or data after the end")


def zip_members(file: IO[bytes]) -> Iterator[Member]:
    """All but folders."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                check_name(info.filename)
            elif info.flag_bits & 1:
                yield Member(info.filename, 0, "encrypted")
            elif kind in (0, stat.S_IFREG):
                with archive.open(info) as content:
                    yield Member(info.filename, info.file_size, "", content)
            else:
                yield Member(info.filename, 0, _LINK if kind == stat.S_IFLNK else "not a regular file")


def check_name(name: str) -> str:
    """``name`` as a path below the folder, "" for the folder itself. Raises ``UserError`` for one that leads out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise UserError(f"refused: member {name!r} leads out of the folder")
    return "/".join(parts)


def selected(members: Iterator[Member], only: Set[str]) -> Iterator[Member]:
    """The members to unpack, with their checked names. Raises ``UserError`` for a bad member, or a glob without any."""
    links, matched, count = set(), set(), 0
    for member in members:
        name = check_name(member.name)
        if member.fault == _LINK:
            links.add(name)
        globs = {glob for glob in only if fnmatchcase(name, glob)}
        if only and not globs:
            continue
        if member.fault or not name:
            raise UserError(f"refused: member {member.name!r} is {member.fault or 'the folder itself'}")
        if links.intersection(map(str, Path(name).parents)):
            raise UserError(f"refused: member {member.name!r} goes through a symbolic link")
        matched |= globs
        count += 1
        yield member._replace(name=name)
    if only - matched or not count:
        raise UserError(f"no member matches {', '.join(sorted(only - matched)) or '*'}")


def extract(archive: Path, scratch: Path, only: Set[str]) -> Dict[str, int]:
    """Write the members to unpack below ``scratch``; returns the size of each. Raises ``UserError``."""
    ending, sizes = ending_of(archive), {}
    look = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}  # None: only on a terminal
    with open(archive, "rb") as file:
        bar = tqdm.wrapattr(file, "read", total=archive.stat().st_size, desc=archive.name, **look)
        with bar as raw:
            if ending == ".zip":
                members = zip_members(file)
            elif ending == ".gz":
                members = iter([Member(archive.name[: -len(ending)], content=gzip.GzipFile(fileobj=raw))])
            else:
                members = tar_members(raw if ending == ".tar" else gzip.GzipFile(fileobj=raw))
            try:
                for member in selected(members, only):
                    need_space(scratch.parent, member.size)
                    sizes[member.name] = write(member, scratch / member.name)
            except _DAMAGE as error:
                raise UserError(f"{archive}: damaged, truncated, or not an archive ({error})") from None
            except (UserError, RuntimeError) as error:  # RuntimeError: what zipfile does not support
                raise UserError(f"{archive}: {error}") from None
    return sizes


def write(member: Member, path: Path) -> int:
    """Write one member; returns its size. What reads it raises, where it is shorter than the archive says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        shutil.copyfileobj(member.content, file, 1 << 20)
        return file.tell()


def unpack(archive: Path, folder: Path, only: List[str]) -> Dict[str, int]:
    """Unpack what matches one of the globs ``only`` (everything, if empty); returns the size of each file.

    Raises ``UserError`` for what cannot or must not be unpacked; then nothing has been.
    """
    ending_of(archive)
    if not archive.is_file():
        raise UserError(f"{archive}: no such file")
    mistaken = mistaken_content(archive, archive.name)
    if mistaken:
        raise UserError(f"{archive}: {mistaken} in place of an archive")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".unpacking.{archive.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        sizes = extract(archive, scratch, set(only))
        base = os.path.realpath(folder)
        for name in sizes:
            if os.path.commonpath([os.path.realpath((folder / name).parent), base]) != base:
                raise UserError(f"{archive}: refused: a link in {folder} leads member {name!r} out of it")
        for name in sizes:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sizes


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=[], metavar="GLOB", help="unpack only what matches one of these")
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> int:
    """Unpack, as the command line does; returns the exit status, errors are one line on stderr."""
    options = parse(argv)

    def unpack_all():
        for name, size in unpack(options.archive, options.folder, options.only).items():
            shown = name if name.isprintable() else repr(name)
            print(f"unpacked {shown}, {megabytes(size)}")

    return status_of(unpack_all, f"{options.archive}: {options.folder}")


if __name__ == "__main__":
    sys.exit(main())
