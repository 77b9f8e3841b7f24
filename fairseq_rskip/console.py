"""What every command line shares: mistakes in one line, number types, progress, printing that outlives its reader."""

import argparse
import contextlib
import io
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from fairseq_rskip.errors import UserError, discard_output

Item = TypeVar("Item")
LINES_EVERY = 20.0  # seconds between lines of progress, where there is no terminal


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations and reports a mistake in one line."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; -h lists the options\n")


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options, without dashes, as words of a command line; one that is true has no value, a false one is left out."""
    given = {f"--{name}": value for name, value in options.items() if value is not False}
    return [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]


def checked(parse: Callable[..., Any], *arguments: Any) -> Any:
    """What another command line's ``parse`` returns. Raises ``UserError`` with its message where that would exit."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse(*arguments)
    except SystemExit:
        message = (said.getvalue().split("\n")[-2:-1] or ["expected options, and no -h"])[0]
        raise UserError(re.sub(r"^.*?error: (argument )?|[ ;(]*-h lists the options\)?$", "", message)) from None


def whole_number(least: int) -> Callable[[str], int]:
    """A type for argparse: integers from ``least`` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return convert


def finite(text: str) -> float:
    """A type for argparse: any number but infinity and NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def between(least: float, below: float, open_below: bool = False) -> Callable[[str], float]:
    """A type for argparse: numbers from ``least`` on (above it, if ``open_below``) that are less than ``below``."""

    def convert(text: str) -> float:
        value = finite(text)
        if not (least < value < below if open_below else least <= value < below):
            start = "above" if open_below else "of at least"
            end = f" and below {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g}{end}")
        return value

    return convert


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line of text for each of ``rows``, whose cells, as many in each, stand flush left in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def print_line(line: str, stream: str = "stdout", bar: Any | None = None) -> None:
    """Print ``line`` to ``stdout`` or ``stderr``, above tqdm's ``bar`` if there is one; nothing where nobody reads, so
    that ``train_cifar.py | head`` does not cost the training."""
    file = getattr(sys, stream)
    try:
        if bar is None:
            print(line, file=file, flush=True)
        else:
            bar.write(line, file=file)
            file.flush()
    except BrokenPipeError:
        discard_output(file)


class Progress:
    """How many of ``total`` are done, on stderr: a bar on a terminal, else a line every ``LINES_EVERY`` seconds."""

    def __init__(self, total: int, label: str, unit: str):
        from tqdm import tqdm

        quiet = not sys.stderr.isatty()
        self.bar = tqdm(desc=label, total=total, unit=unit, dynamic_ncols=True, leave=False, disable=quiet)
        self.total, self.label, self.done, self.shown = total, label, 0, time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_error: object) -> None:
        self.bar.close()

    def advance(self) -> None:
        """One more."""
        self.done += 1
        self.bar.update()
        if self.bar.disable and time.monotonic() - self.shown > LINES_EVERY:
            self.shown = time.monotonic()
            print_line(f"{self.label}: {self.done:,} of {self.total:,}", "stderr")


def progress(items: Iterable[Item], total: int, label: str, unit: str = "batch") -> Iterator[Item]:
    """``items``, of which there are ``total``, with a ``Progress``."""
    with Progress(total, label, unit) as shown:
        for item in items:
            yield item
            shown.advance()
