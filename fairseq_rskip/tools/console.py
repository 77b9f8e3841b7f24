"""What every command line shares: mistakes in one line, number types, and printing that outlives its reader."""

import argparse
import math
import sys
from typing import Any, Callable, NoReturn, Optional

from fairseq_rskip.errors import discard_output


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations and reports a mistake in one line."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; -h lists the options\n")


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


def print_line(line: str, stream: str = "stdout", bar: Optional[Any] = None) -> None:
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
