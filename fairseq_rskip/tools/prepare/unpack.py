"""Unpack a .tar, .tar.gz or .tgz into a folder, and write nowhere else.

A * in GLOB matches any letters, / included. Links, devices and names that lead out of FOLDER are refused, as is an
archive that is damaged, cut off or followed by something else. After an error FOLDER holds what came before it.
"""

import gzip
import posixpath
import sys
import tarfile
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

from fairseq_rskip.console import Parser
from fairseq_rskip.errors import RESUME, UserError, exit_status


def extract(tar: tarfile.TarFile, folder: Path, only: list[str]) -> None:
    """Unpack the files that match one of the globs ``only``. Raises ``UserError`` for what must not be unpacked, and
    for a glob that nothing matches."""
    written, matched = set(), set()
    for member in tar:
        if member.name.startswith("/") or ".." in member.name.split("/"):
            raise UserError(f"refused: member {member.name!r} leads out of the folder")
        name = posixpath.normpath(member.name)
        globs = {glob for glob in only if fnmatchcase(name, glob)}
        if member.isdir() or not globs:
            continue
        if not member.isreg():
            kind = "a link" if member.issym() or member.islnk() else "a device"
            raise UserError(f"refused: member {name!r} is {kind}, no regular file")
        if name in written:
            raise UserError(f"refused: member {name!r} is listed twice")
        tar.extract(member, folder, filter="data")
        written.add(name)
        matched |= globs
        print(f"unpacked {name if name.isprintable() else repr(name)}, {member.size:,} bytes")
    if set(only) - matched:
        raise UserError(f"no member matches {', '.join(sorted(set(only) - matched))}")


def unpack(archive: Path, folder: Path, only: list[str]) -> None:
    """``extract`` in one pass over ``archive``, all of whose bytes are checked. Raises ``UserError``, ``OSError``."""
    if not hasattr(tarfile, "data_filter"):
        raise UserError("this Python's tarfile checks nothing: 3.9.17, 3.10.12, 3.11.4 or newer is needed")
    # GzipFile, unlike tarfile's own reader, compares gzip's checksum
    opener = open if archive.suffix == ".tar" else gzip.open
    try:
        with opener(archive, "rb") as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
            extract(tar, folder, only)
            # tarfile takes a bad header for the end, and gzip's checksum comes last
            if any(chunk.strip(b"\0") for chunk in iter(lambda: tar.fileobj.read(1 << 20), b"")):
                raise tarfile.ReadError("a bad header, or data after the end")
    except UserError as error:
        raise UserError(f"{archive}: {error}") from None
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{archive}: damaged, truncated, or not an archive ({error})") from None
    except OSError as error:
        error.filename = error.filename or str(folder)  # a failed write does not know where
        raise


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="GLOB", help="unpack only what matches one of these"
    )
    options = parser.parse_args(argv)
    unpack(options.archive, options.folder, options.only)


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
