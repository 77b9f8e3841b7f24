"""Progress on stderr: a bar on a terminal, elsewhere a line from time to time."""

import sys
import time
from typing import Iterable, Iterator, TypeVar

Item = TypeVar("Item")
LINES_EVERY = 20.0  # seconds


def progress(items: Iterable[Item], total: int, label: str, unit: str = "batch") -> Iterator[Item]:
    """``items``, of which there are ``total``, while showing how many are done."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(items, desc=label, total=total, unit=unit, dynamic_ncols=True, leave=False)
            return
    shown = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - shown > LINES_EVERY:
            shown = time.monotonic()
            print(f"{label}: {number} of {total}", file=sys.stderr, flush=True)
        yield item


def note(line: str) -> None:
    """A remark on stderr."""
    print(f"note: {line}", file=sys.stderr, flush=True)
