"""Read the ``report.csv`` that :mod:`.tables` wrote: its lines, by row and by column."""

import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError

EXPECTED = "expected the report.csv of rskip run (of an earlier commit? write it again)"
NEEDED = ("column", "row", "metric", "seeds_planned", "values_by_seed")


@dataclass(frozen=True)
class Line:
    """A line of a report: a row of its table in a column.

    Attributes:
        values: seed -> value of the metric; {} without a finished run.
        planned: number of seeds that are planned.
        chosen: option -> the value that the sweep chose; {} without a sweep.
        swept: the combinations of options that the sweep tried.
        results: what they gave, with the sweep's seed; None where there is no value.
        difference: the mean minus that of the baseline, on the seeds of both, by the linear model.
        interval: its 95 % interval.
        p_holm: its p after Holm's correction, as text: tests of sentences have one for each seed.
    """

    row: str
    column: str
    equation: str
    metric: str
    values: dict[int, float]
    planned: int
    chosen: dict[str, Any]
    swept: list[dict[str, Any]]
    results: list[float | None]
    difference: float | None
    interval: tuple[float, float] | None
    p_holm: str

    @property
    def is_whole(self) -> bool:
        """Whether every seed that was planned has a value."""
        return len(self.values) == self.planned > 0

    @property
    def mean(self) -> float:
        """The mean of the values. Raises ``StatisticsError`` without one."""
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float:
        """The sample standard deviation over seeds. Raises ``StatisticsError`` below two."""
        return statistics.stdev(self.values.values())


def read_report(path: Path) -> list[Line]:
    """The lines of a report in their order. Raises ``UserError`` for a file that is no report."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            lines = [] if missing else [_line(cells) for cells in reader]
    except (csv.Error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a report ({error}): {EXPECTED}") from None
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}: {EXPECTED}")
    if not lines:
        raise UserError(f"{path} has no rows")
    return lines


def _line(cells: dict[str, str]) -> Line:
    """One line, from its text by column.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError`` where the text is not
    that of a report.
    """
    interval = None
    if cells.get("low") and cells.get("high"):
        interval = (float(cells["low"]), float(cells["high"]))
    difference = cells.get("ours_minus_baseline")
    values = json.loads(cells["values_by_seed"])
    swept = json.loads(cells.get("swept", "[]"))
    return Line(
        row=cells["row"],
        column=cells["column"],
        equation=cells.get("equation", ""),
        metric=cells["metric"],
        values={int(seed): float(value) for seed, value in values.items()},
        planned=int(cells["seeds_planned"]),
        chosen=json.loads(cells.get("chosen", "{}")),
        swept=[trial["options"] for trial in swept],
        results=[_number(trial.get("result")) for trial in swept],
        difference=float(difference) if difference else None,
        interval=interval,
        p_holm=cells.get("p_holm", ""),
    )


def _number(result: Any) -> float | None:
    """``result``, unless it says why there is none."""
    return float(result) if isinstance(result, int | float) else None


def read_rows(path: Path) -> dict[str, Line]:
    """The lines of a report by row. Raises ``UserError`` unless each row has one."""
    rows: dict[str, Line] = {}
    for line in read_report(path):
        if line.row in rows:
            raise UserError(
                f"{path} has several lines for the row {line.row!r}: expected one for each, as in "
                "the report of one table with --columns NAME"
            )
        rows[line.row] = line
    return rows


def by_column(lines: Iterable[Line]) -> dict[str, dict[str, Line]]:
    """Column -> row -> line, of the lines with a value.

    Raises ``UserError`` for two lines of one row and column, as in a report of several tables.
    """
    columns: dict[str, dict[str, Line]] = {}
    for line in lines:
        if not line.values:
            continue
        rows = columns.setdefault(line.column, {})
        if line.row in rows:
            raise UserError(
                f"the report has two lines for the row {line.row!r} in the column "
                f"{line.column!r}: expected the report of one table"
            )
        rows[line.row] = line
    return columns


def by_row(lines: Iterable[Line]) -> dict[str, dict[str, Line]]:
    """Row -> column -> line, of the lines with a value. Raises as :func:`by_column`."""
    by_label: dict[str, dict[str, Line]] = {}
    for column, rows in by_column(lines).items():
        for label, line in rows.items():
            by_label.setdefault(label, {})[column] = line
    return by_label
