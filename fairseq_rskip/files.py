"""Write files whole: a kill, a full disk or a power cut leaves the old or the new one, no part."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import UserError

PART = ".part"  # suffix of an unfinished file
LOCK = ".lock"


@contextlib.contextmanager
def writing(path: Path, mode: str = "wb", **how: Any) -> Iterator[IO[Any]]:
    """A file beside ``path`` to fill in the block (``mode``, ``how``: as for ``open``).

    When the block ends well, the file is synced to disk and renamed, otherwise it is removed.
    Raises ``UserError``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with open(part, mode, **how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # torch's writer raises RuntimeError on a full disk; another one is the block's own
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        other = getattr(error, "filename", None)
        if other and str(other) != str(part):  # the block could not read another file
            raise
        raise UserError(f"cannot write {path}: {_reason(error)}") from None
    finally:
        if part.exists():
            part.unlink()
    _sync_folder(path.parent)


def why_no_file(path: Path) -> str:
    """ "is a folder", "is a pipe or a device" or "does not exist"; "" for a file."""
    if path.is_file():
        return ""
    if path.is_dir():
        return "is a folder"
    return "is a pipe or a device" if path.exists() else "does not exist"


def cache_folder() -> Path:
    """Where the package keeps what it builds: ``$RSKIP_CACHE``, else ``fairseq_rskip`` below
    ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises ``UserError`` for a user without a home folder.
    """
    chosen = os.environ.get("RSKIP_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fairseq_rskip")
    except RuntimeError:  # such as a container's user who is in no list of users
        raise UserError(
            "this user has no home folder for what is built once: set RSKIP_CACHE to a folder"
        ) from None


def make_folder(folder: Path) -> None:
    """Make ``folder``, if it is not there. Raises ``UserError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(folder: Path, error: OSError) -> UserError:
    """The error for a folder in which nothing can be made."""
    return UserError(f"cannot write into {folder}: {_reason(error)}")


def remove_parts(folder: Path) -> None:
    """Remove the files that a killed process left unfinished in ``folder``.

    The caller holds the folder's lock.
    """
    for part in folder.glob(f".*{PART}"):
        part.unlink()


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK, wait: bool = False) -> Iterator[IO[str] | None]:
    """Make ``folder`` and hold the lock ``name`` in it during the block.

    Yields the open file, or None if another process holds the lock; with ``wait`` it waits instead.
    Raises ``UserError`` where nothing can be written.

    The system releases the lock when this process and all that inherited the file's descriptor have
    ended. The file stays: removing it would be a race. filelock is no replacement: a child cannot
    inherit its lock, and fairseq-train must hold the folder when only its parent was killed.
    """
    make_folder(folder)
    how = fcntl.LOCK_EX
    if not wait:
        how |= fcntl.LOCK_NB
    with _opened(folder, name) as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            yield None
        else:
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
            yield file


def _opened(folder: Path, name: str) -> IO[str]:
    try:
        return open(folder / name, "a")
    except OSError as error:
        raise cannot_write(folder, error) from None


def lock_holder(folder: Path, name: str = LOCK) -> str:
    """``process 1234``, which holds the lock ``name`` in ``folder``, for a message."""
    pid = (folder / name).read_text().strip()
    return f"process {pid}" if pid.isdecimal() else "another process"


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` as the whole content of ``path``."""
    with writing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as the whole content of ``path``."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write ``value``, indented."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append ``record`` to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; a last line that a kill cut off is left out."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write ``records`` as the whole content of ``path``."""
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def _reason(error: BaseException) -> str:
    if not isinstance(error, OSError) and error.__context__:
        error = error.__context__
    first_line = str(error).strip().split("\n")[0]
    return getattr(error, "strerror", None) or first_line[:150]


def _sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system can."""
    try:
        handle = os.open(str(folder), os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
