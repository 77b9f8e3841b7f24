"""The options of a sweep: as text in a report, and the ends of their values."""

from collections.abc import Iterable, Mapping
from typing import Any

Options = Mapping[str, Any]


def listed(options: Options) -> str:
    """Names and values in a row: ``lr 0.1, skip-lambda 2``."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def ends(tried: Iterable[Options], chosen: Options) -> list[str]:
    """The options of which the smallest or the largest of the values in ``tried`` was chosen.

    A value beyond it may be better. Options whose values are not numbers have no ends.
    """
    points = list(tried)
    at_an_end = []
    for option, value in chosen.items():
        values = [point.get(option) for point in points]
        numbers = {number for number in values if isinstance(number, int | float)}
        if len(numbers) > 1 and value in (min(numbers), max(numbers)):
            at_an_end.append(option)
    return at_an_end
