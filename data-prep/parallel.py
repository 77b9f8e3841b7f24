"""One function over every line of a file, in as many processes as asked for, with bounded memory, in order."""

import collections
import concurrent.futures
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait

import lines
from tqdm import tqdm

CHUNK = 1000  # lines a process gets at a time
WAITING = 4  # chunks a process may have ahead: what bounds the memory


def all_cores():
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def transform(source, target, make, arguments, workers):
    """Write ``make(*arguments)(line)`` for every line of ``source`` to ``target``, which appears when it is complete.

    ``make`` is called once in each of the ``workers`` processes. Raises what ``lines.read`` and the function raise.
    """
    with lines.writing(target) as output, tqdm(
        desc=os.path.basename(target), unit=" lines", unit_scale=True, disable=None
    ) as bar:
        for results in _mapped(_chunks(lines.read(source)), make, arguments, workers):
            output.writelines(result + "\n" for result in results)
            bar.update(len(results))


def _chunks(items):
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _mapped(chunks, make, arguments, workers):
    """The chunks' results in order. ``Executor.map`` would read the whole corpus before the first result."""
    if workers == 1:
        function = make(*arguments)
        for chunk in chunks:
            yield [function(line) for line in chunk]
        return
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=_start, initargs=(make, arguments)) as pool:
        # Ctrl-C is for the parent, which ends its workers: they are forked with the signal blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool.submit(int).result()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        pending = collections.deque()
        try:
            for chunk in chunks:
                pending.append(pool.submit(_run, chunk))
                if len(pending) >= WAITING * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _start(make, arguments):
    global _function
    _function = make(*arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    """A killed parent cannot tell its workers to stop, and they would wait for work for ever."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run(chunk):
    return [_function(line) for line in chunk]
