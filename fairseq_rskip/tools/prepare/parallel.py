"""One function over every line of a file, in as many processes as asked for, with bounded memory, in order."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any

CHUNK = 1000  # lines a process gets at a time
WAITING = 16  # chunks that are read for a process at a time: what bounds the memory
Function = Callable[[str], str]


def all_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def mapper(
    make: Callable[..., Function], arguments: tuple[Any, ...], workers: int
) -> Iterator[Callable[[Iterable[str]], Iterator[list[str]]]]:
    """A function from lines to lists of ``make(*arguments)(line)``, in order; ``make`` is called in each process."""
    function = make(*arguments)  # here first: its imports are then the workers' too, and its errors are told
    if workers == 1:
        yield lambda lines: ([function(line) for line in chunk] for chunk in chunks(lines))
        return
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=_start, initargs=(make, arguments)) as pool:
        # Ctrl-C is for the parent, which ends its workers: they are forked with the signal blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool.submit(int).result()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield lambda lines: _mapped(pool, WAITING * workers, chunks(lines))


def chunks(lines: Iterable[str]) -> Iterator[list[str]]:
    """``CHUNK`` lines at a time."""
    lines = iter(lines)
    return iter(lambda: list(itertools.islice(lines, CHUNK)), [])


def _mapped(pool: concurrent.futures.Executor, ahead: int, waiting: Iterator[list[str]]) -> Iterator[list[str]]:
    """``Executor.map`` alone would read the whole corpus before the first result; this reads ``ahead`` chunks."""
    while block := list(itertools.islice(waiting, ahead)):
        yield from pool.map(_run, block)


def _start(make: Callable[..., Function], arguments: tuple[Any, ...]) -> None:
    global _function
    _function = make(*arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot stop its workers, and they would wait for work for ever."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run(chunk: list[str]) -> list[str]:
    return [_function(line) for line in chunk]
