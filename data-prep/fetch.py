#!/usr/bin/env python3
"""Fetch the archives of a list into a folder, each checked before it gets its name.

    fetch.py LIST FOLDER [--from DIR-or-URL] [--lock FILE]

LIST has a row for each archive, tab-separated: name, size in bytes or -, checksum (sha256:…, git-blob:…, md5:…) or -,
one or more URLs, which are tried in order. A download that was cut off goes on where it stopped. Where LIST pins no
checksum, the first download's sha256 is recorded in the lock file and checked ever after.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Optional
from urllib.parse import quote

import download
from checksums import URL, Archive, checksum_of, mistaken_content, read_list, read_table, replace_text, write_table
from download import Curl, SourceError, megabytes, need_space
from errors import UserError, status_of

_LOCK_HEADING = "name, size, sha256 of archives at their first download; a row removed here is recorded anew"


class Mismatch(Exception):
    """A file that is not what the list or the lock says; the message says how."""


class Fetcher:
    """Fetches archives into ``folder``; ``lock`` and ``folder/.verified`` remember what was seen."""

    def __init__(self, folder: Path, lock: Path, mirror: Optional[str], curl_options: Dict):
        self.folder, self.lock = folder, lock
        self._seen = folder / ".verified"
        self._locked = read_table(lock, columns=3)
        self._verified = self._read_verified()
        self._base = mirror if mirror and URL.fullmatch(mirror) else None
        self._mirror = Path(mirror) if mirror and not self._base else None
        self._curl_options, self._curl = curl_options, None

    def _read_verified(self) -> Dict[str, List[str]]:
        try:
            return read_table(self._seen, columns=4)
        except UserError:  # only saves time: without it, files are read again
            return {}

    def check_mirror(self, archives: List[Archive]) -> None:
        """Raises ``UserError`` that lists every archive that neither the folder nor the mirror folder holds."""
        if self._mirror is None:
            return
        if not self._mirror.is_dir():
            raise UserError(f"--from {self._mirror}: neither a folder nor an http://, https:// or file:// URL")
        names = [a.name for a in archives if not (self._mirror / a.name).is_file()]
        names = [name for name in names if not (self.folder / name).is_file()]
        if names:
            raise UserError(f"--from {self._mirror} lacks {', '.join(names)}")

    def check_space(self, archives: List[Archive]) -> None:
        """Raises ``UserError`` if what is still to be downloaded, as far as sizes are listed, does not fit the disk."""
        if self._mirror is not None:
            return
        need = 0
        for archive in archives:
            path, part = self.folder / archive.name, self._part(archive)
            if archive.size and not path.exists():
                need += archive.size - (part.stat().st_size if part.exists() else 0)
        need_space(self.folder, need)

    def fetch(self, archive: Archive) -> str:
        """Have ``archive`` in the folder, checked; returns what happened, for the user. Raises ``UserError``."""
        path = self.folder / archive.name
        if path.exists():
            if self._unchanged(archive):
                return "up to date"
            try:
                return f"up to date, {self._accept(archive, path, path)}"
            except Mismatch as error:
                print(f"{archive.name}: the file in {self.folder} is not it ({error}), {self._aside(path, path)}")
        return self._copy(archive, path) if self._mirror else self._download(archive, path)

    def _unchanged(self, archive: Archive) -> bool:
        stat = (self.folder / archive.name).stat()
        expected = archive.checksum or self._locked.get(archive.name, ["", "?"])[1]
        return self._verified.get(archive.name) == [str(stat.st_size), str(stat.st_mtime_ns), expected]

    def _accept(self, archive: Archive, found: Path, path: Path) -> str:
        """Check ``found``, then give it its name; returns how it was checked. Raises ``Mismatch``."""
        size = found.stat().st_size
        locked = None if archive.checksum else self._locked.get(archive.name)
        expected = archive.checksum or (locked[1] if locked else None)
        expected_size = archive.size if archive.size is not None else int(locked[0]) if locked else None
        kind = expected.partition(":")[0] if expected else "sha256"
        got = checksum_of(found, kind) if expected_size in (None, size) else None
        content = mistaken_content(found, archive.name) if got != expected else None
        by = f" by {self.lock}" if locked else ""
        if content:
            raise Mismatch(f"{content} in place of the archive")
        if got is None:
            kind = "truncated: " if size < expected_size else ""
            raise Mismatch(f"{kind}{size:,} bytes, expected {expected_size:,}{by}")
        if expected and got != expected:
            raise Mismatch(f"wrong checksum: expected {expected}{by}, got {got}")
        if not expected:
            self._locked[archive.name] = [str(size), got]
            write_table(self.lock, {**read_table(self.lock, columns=3), archive.name: [str(size), got]}, _LOCK_HEADING)
        if found != path:
            os.replace(found, path)
        self._remember(path, got)
        if archive.checksum:
            return f"{kind} checked"
        return f"sha256 checked against the lock {self.lock}" if locked else f"sha256 recorded in {self.lock}"

    def _remember(self, path: Path, checksum: str) -> None:
        stat = path.stat()
        self._verified[path.name] = [str(stat.st_size), str(stat.st_mtime_ns), checksum]
        try:
            write_table(self._seen, self._verified, "name, size, mtime, checksum of archives that were verified")
        except OSError as error:  # only saves time
            print(f"note: cannot write {self._seen}: {error.strerror}", file=sys.stderr)

    def _aside(self, found: Path, path: Path) -> str:
        bad = path.with_name(f"{path.name}.bad")
        os.replace(found, bad)
        return f"kept aside as {bad.name}"

    def _copy(self, archive: Archive, path: Path) -> str:
        source, copy = self._mirror / archive.name, self.folder / f".{archive.name}.copy"
        copy.unlink(missing_ok=True)
        try:
            try:
                os.link(source.resolve(), copy)
                how = "linked"
            except OSError:  # another file system, or one without hard links
                need_space(self.folder, source.stat().st_size)
                shutil.copyfile(source, copy)
                how = "copied"
            checked = self._accept(archive, copy, path)
        except Mismatch as error:
            raise UserError(f"{source}: {error}") from None
        finally:
            copy.unlink(missing_ok=True)
        return f"{how} from {self._mirror}, {megabytes(path.stat().st_size)}, {checked}"

    def _part(self, archive: Archive) -> Path:
        return self.folder / f"{archive.name}.part"

    def _download(self, archive: Archive, path: Path) -> str:
        urls = archive.urls if not self._base else [f"{self._base.rstrip('/')}/{quote(archive.name)}"]
        self._curl = self._curl or Curl(**self._curl_options)
        part, answers = self._part(archive), []
        for url in urls:
            part.touch()
            try:
                checked = self._try(archive, url, part, path)
                self._version_note(part).unlink(missing_ok=True)
                return f"fetched, {megabytes(path.stat().st_size)}, {checked}"
            except Mismatch as error:
                answers.append(f"{url}: {error}, {self._aside(part, path)}")
            except SourceError as error:
                answers.append(f"{url}: {error}")
                if part.stat().st_size == 0:
                    part.unlink()
        if part.exists():
            answers[-1] += f" ({megabytes(part.stat().st_size)} kept, the same command goes on from there)"
        raise UserError(f"cannot fetch {archive.name}: {'; '.join(answers)}")

    def _try(self, archive: Archive, url: str, part: Path, path: Path) -> str:
        """One URL; a resumed part that turns out wrong (its beginning may be of another file) is fetched afresh."""
        resumed = self._resume(archive, url, part)
        try:
            return self._accept(archive, part, path)
        except Mismatch:
            if not resumed:
                raise
        os.truncate(part, 0)
        self._resume(archive, url, part)
        return self._accept(archive, part, path)

    def _resume(self, archive: Archive, url: str, part: Path) -> bool:
        """Complete ``part``; returns whether it began with bytes of an earlier attempt."""
        size, pinned = archive.size, archive.checksum or archive.name in self._locked
        if size is None or not pinned:
            size, version = download.validator_of(self._curl.ask(url))
            size = archive.size if size is None else size
            if not pinned:
                self._same_version(part, version)
        begun = part.stat().st_size
        if size is None or begun < size:
            need_space(self.folder, (size or 0) - begun)
            self._curl.get(url, part, size)
        return begun > 0

    def _same_version(self, part: Path, version: str) -> None:
        """Start anew unless the part is of this very version of the file: no checksum would tell a mixture later."""
        note = self._version_note(part)
        known = note.read_text(encoding="utf-8") if note.exists() else ""
        if not version or version != known:
            os.truncate(part, 0)
            replace_text(note, version)

    def _version_note(self, part: Path) -> Path:
        return part.with_name(f".{part.name}.version")


@contextlib.contextmanager
def only_run(folder: Path):
    """Keeps other runs away from ``folder``; a killed run keeps nobody away. Raises ``UserError``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another run is fetching into {folder}: wait for it") from None
    except OSError as error:  # a file system without locks
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise
    try:
        yield
    finally:
        os.close(descriptor)


def parse(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, metavar="LIST", help="the archives, a tab-separated file")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the archives go")
    parser.add_argument("--from", dest="mirror", metavar="DIR-or-URL", help="take the archives from here instead")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="recorded checksums (FOLDER/../checksums.lock)")
    parser.add_argument("--stall", type=float, default=30, metavar="S", help="give up after S seconds of silence (30)")
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="retries after passing errors (3)")
    options = parser.parse_args(argv)
    if options.mirror is not None and not options.mirror.strip():
        parser.error("--from needs a folder or a URL")
    return options


def fetch_all(options: argparse.Namespace) -> None:
    """What the command line asks for. Raises ``UserError`` and ``OSError``."""
    folder = options.folder
    archives = read_list(options.list)
    folder.mkdir(parents=True, exist_ok=True)
    lock = options.lock or folder.absolute().parent / "checksums.lock"
    fetcher = Fetcher(folder, lock, options.mirror, {"stall": options.stall, "retries": options.retries})
    fetcher.check_mirror(archives)
    with only_run(folder):
        fetcher.check_space(archives)
        for archive in archives:
            print(f"{archive.name}: {fetcher.fetch(archive)}", flush=True)


def main(argv: Optional[List[str]] = None) -> int:
    """Fetch, as the command line does; returns the exit status, errors are one line on stderr."""
    options = parse(argv)
    return status_of(lambda: fetch_all(options), options.folder)


if __name__ == "__main__":
    sys.exit(main())
