"""The options of a sweep: as text in a report, and the ends of their values."""

from collections.abc import Iterable, Mapping
from typing import Any

from fairseq_rskip.tools.report.reading import Line

Options = Mapping[str, Any]


def listed(options: Options) -> str:
    """Names and values in a row: ``lr 0.1, skip-lambda 2``."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def choices_at_an_end(report: Iterable[Line]) -> list[str]:
    """A sentence for each option of a report's lines of which an end of its sweep was chosen."""
    sentences = []
    for line in report:
        for option in ends(line.swept, line.chosen):
            choice = f"{option} {line.chosen[option]}"
            sentences.append(f"{line.row}, {line.column}: {choice} is an end of the sweep")
    return sentences


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
