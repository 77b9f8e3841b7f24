"""Ctrl-C and SIGTERM as a question that a loop asks between two iterations, so that what it saves is whole."""

import contextlib
import signal
from types import FrameType
from typing import Any, Dict, Iterator, Optional


class Interrupted(Exception):
    """The run was stopped by ``signal`` and has saved its state; the message is one line for the user."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.exit_status = 128 + number


class Stop:
    """``signal`` is the number of the signal that came, None before; the second one acts as it always does."""

    def __init__(self) -> None:
        self.signal: Optional[int] = None
        self.previous: Dict[int, Any] = {}

    def note(self, number: int, frame: Optional[FrameType]) -> None:
        self.signal = number
        self.restore()

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_signal(active: bool) -> Iterator[Stop]:
    """A ``Stop`` that Ctrl-C and SIGTERM set, while the block runs; nothing changes unless ``active``."""
    stop = Stop()
    if active:
        stop.previous = {number: signal.signal(number, stop.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        stop.restore()
