"""Command lines whose mistakes are one line."""

import argparse
import math


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations and reports a mistake in one line."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message):
        self.exit(2, f"error: {message}; -h lists the options\n")


def whole_number(least: int):
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
