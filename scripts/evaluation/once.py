"""Files that take long to make are made once: a key beside them says from what."""

import json
import os
from pathlib import Path
from typing import Callable, Dict

from evaluation.text import InputError, whole_file


def key_path(path: Path) -> Path:
    return path.with_name(path.name + ".key")


def is_made(path: Path, key: Dict) -> bool:
    """Whether ``path`` was made from ``key``, completely."""
    try:
        return path.is_file() and json.loads(key_path(path).read_text(encoding="utf-8")) == key
    except (OSError, ValueError):
        return False


def make(path: Path, key: Dict, write: Callable[[Path], None]) -> None:
    """Have ``write`` make the file under a temporary name; it and its key appear when that has gone well.

    Raises ``InputError`` if the place cannot be written to, and what ``write`` raises.
    """
    with whole_file(path) as temporary:
        write(temporary)
        _forget(path)
    with whole_file(key_path(path)) as temporary:
        temporary.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")


def _forget(path: Path) -> None:
    """Killed between the two renames, we must not leave an old key beside a new file."""
    try:
        os.unlink(key_path(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"cannot replace {path}: {error.strerror}") from None
