"""One file over curl: resumed, retried, with a progress bar.

curl writes into a pipe and this process into the file, so that a killed run leaves no curl behind that still writes.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Dict, Optional, Tuple

from errors import UserError
from tqdm import tqdm

RETRY_DELAY = 1.0  # seconds before the first retry; doubled each time
_PASSING = {16, 18, 35, 52, 55, 56, 92}  # curl's exit codes for a connection that broke or stalled
_PASSING_HTTP = {408, 425, 429, 500, 502, 503, 504}
_PROGRESS = 1 << 20  # an attempt that gained this many bytes does not count as a retry


class SourceError(Exception):
    """One URL did not give the file. ``passing``: trying again may help. ``restart``: the server cannot resume."""

    def __init__(self, message: str, passing: bool = False, restart: bool = False, connected: bool = True):
        super().__init__(message)
        self.passing, self.restart, self.connected = passing, restart, connected


def megabytes(size: int) -> str:
    """A size for people: "3 bytes", "0.6 MB", "2,595.1 MB"."""
    return f"{size:,} bytes" if size < 50_000 else f"{size / 1e6:,.1f} MB"


def need_space(folder: Path, size: int) -> None:
    """Raises ``UserError`` if the disk has less than ``size`` bytes free."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"no space in {folder}: {megabytes(size)} needed, {megabytes(free)} free")


def curl_error(code: int, stderr: str, stall: float) -> SourceError:
    """What went wrong, from curl's exit code and its message."""
    said = re.sub(r"^curl: \(\d+\) ", "", stderr.strip().splitlines()[-1]) if stderr.strip() else f"curl exit {code}"
    if code == 22:
        number = re.search(r"error: (\d{3})", said)
        status = int(number.group(1)) if number else 0
        return SourceError(f"HTTP {status or said}", status in _PASSING_HTTP, restart=status == 416)
    if code == 28 and ("slow" in said.lower() or "speed" in said.lower()):
        return SourceError(f"stalled: next to no data for {stall:g} s", passing=True)
    return SourceError(said, code in _PASSING, restart=code == 33, connected=code not in (5, 6, 7))


class Curl:
    """curl with this run's options. ``stall``: seconds of next to no data after which a transfer is given up.

    Raises ``UserError`` if curl is not installed.
    """

    def __init__(self, stall: float = 30, retries: int = 3):
        path = shutil.which("curl")
        if path is None:
            raise UserError("curl is not installed: install it, or take the archives from a folder with --from DIR")
        limits = ["--connect-timeout", "20", "--speed-limit", "100", "--speed-time", str(max(1, round(stall)))]
        self._command = [path, "-fsSL", "--globoff", *limits]
        self._stall, self._retries = stall, retries

    def ask(self, url: str) -> Dict[str, str]:
        """The header fields that ``url`` answers HEAD with, names in lower case; empty where HEAD is refused.

        Raises ``SourceError`` if there is no connection at all.
        """
        done = subprocess.run([*self._command, "-I", url], capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            error = curl_error(done.returncode, done.stderr.decode(errors="replace"), self._stall)
            if error.connected:
                return {}
            raise error
        answers = done.stdout.decode("latin-1").replace("\r\n", "\n").strip().split("\n\n")  # one for each redirect
        fields = (line.partition(":") for line in answers[-1].splitlines())
        return {name.strip().lower(): value.strip() for name, _, value in fields}

    def get(self, url: str, part: Path, size: Optional[int]) -> None:
        """Append what is missing to ``part``. Raises ``SourceError`` when the retries are used up.

        ``size`` is what to expect, if known. A server that cannot resume makes ``part`` start anew.
        """
        tries = 0
        while True:
            before = part.stat().st_size
            try:
                return self._append(url, part, size)
            except SourceError as error:
                if error.restart and before:
                    os.truncate(part, 0)
                    continue
                if not error.passing:
                    raise
                tries = 1 if part.stat().st_size - before >= _PROGRESS else tries + 1
                if tries > self._retries:
                    raise
                time.sleep(RETRY_DELAY * 2 ** (tries - 1))

    def _append(self, url: str, part: Path, size: Optional[int]) -> None:
        start = part.stat().st_size
        look = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}  # None: only on a terminal
        bar = tqdm(desc=part.stem, total=size, initial=start, **look)
        resume = ["-C", str(start)] if start else []
        with tempfile.TemporaryFile() as stderr, open(part, "ab", buffering=0) as file, bar:
            curl = subprocess.Popen(
                [*self._command, *resume, url], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
            )
            try:
                for chunk in iter(lambda: curl.stdout.read1(1 << 18), b""):
                    write_all(file, chunk)
                    bar.update(len(chunk))
                os.fsync(file.fileno())
                code = curl.wait()
            finally:
                curl.kill()
                curl.wait()
                curl.stdout.close()
            stderr.seek(0)
            said = stderr.read().decode(errors="replace")
        if code == 18:
            got = f"{part.stat().st_size:,}{f' of {size:,}' if size else ''} bytes"
            raise SourceError(f"truncated: the connection was closed after {got}", passing=True)
        if code:
            raise curl_error(code, said, self._stall)


def write_all(file, chunk: bytes) -> None:
    """Write to an unbuffered file, which may take a part at a time."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def validator_of(answer: Dict[str, str]) -> Tuple[Optional[int], str]:
    """The length that a server's answer promises, and what tells its version of a file from others ("" if nothing)."""
    length = answer.get("content-length", "")
    version = answer.get("etag") or answer.get("last-modified") or ""
    return (int(length) or None if length.isdigit() else None), (f"{length} {version}" if version else "")
