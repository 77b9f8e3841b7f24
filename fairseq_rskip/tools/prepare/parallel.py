"""One function over every line of a file, in several processes, with bounded memory, in order."""

import contextlib
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any

CHUNK = 1000  # lines that a process gets at a time
WAITING = 16  # chunks that are read for each process at a time, which bounds the memory
Make = Callable[..., Callable[[str], str]]
Mapper = Callable[[Iterable[str]], Iterator[list[str]]]


def all_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def mapper(make: Make, arguments: tuple[Any, ...], workers: int) -> Iterator[Mapper]:
    """A function from lines to lists of ``make(*arguments)(line)``, in order; ``make`` is called in each process."""
    function = make(*arguments)  # here first: workers inherit its imports, and its errors are reported
    if workers == 1:
        yield lambda lines: ([function(line) for line in chunk] for chunk in chunks(lines))
        return
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(make, arguments)) as pool:

        def mapped(lines: Iterable[str]) -> Iterator[list[str]]:
            waiting = chunks(lines)  # Executor.map reads all of its input first
            while block := list(itertools.islice(waiting, WAITING * workers)):
                yield from pool.map(_run, block)

        yield mapped


def chunks(lines: Iterable[str]) -> Iterator[list[str]]:
    """``CHUNK`` lines at a time."""
    lines = iter(lines)
    return iter(lambda: list(itertools.islice(lines, CHUNK)), [])


def _start(make: Make, arguments: tuple[Any, ...]) -> None:
    global _function
    _function = make(*arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run(chunk: list[str]) -> list[str]:
    return [_function(line) for line in chunk]
