"""Figures in one style, as PNG and PDF, with the CSV behind each.

``stem`` is a path without its ending: ``save(figure, stem)`` writes ``<stem>.png`` and
``<stem>.pdf``. Nothing here touches pyplot's global state, and equal figures are equal files.
matplotlib is imported where something is drawn.
"""

import csv
import logging
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..console import in_columns
from ..errors import UserError
from ..files import writing

ENDINGS = (".png", ".pdf", ".csv")
DPI = 150
# Okabe and Ito's colours without yellow, which is hard to see on white, and three more; the first
# two differ most.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#7A5FD0",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
LINES = ("-", "--", ":", "-.")
SAME_LINE = 7  # Okabe and Ito's seven colours are solid lines, the next ones dashed
# Without these a file would hold the time and the version of matplotlib that wrote it.
METADATA = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
Row = dict[str, Any]  # column -> value, in a line of a CSV file
SIZES: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def check_stem(path: Any) -> Path:
    """``path`` without an ending of ``ENDINGS``; makes its folder, before a long computation.

    Raises ``UserError`` if files cannot be written there, ``ModuleNotFoundError`` without
    matplotlib.
    """
    import matplotlib  # noqa: F401

    path = Path(path)
    stem = path.with_suffix("") if path.suffix.lower() in ENDINGS else path
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=stem.parent).close()
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            reason = "it is no folder"
        raise UserError(f"cannot write into {stem.parent}: {reason}") from None
    return stem


def new_figure(
    columns: int = 1, width: float = 5.5, height: float = 4.0, rows: int = 1
) -> tuple[Any, list[Any]]:
    """A figure of ``rows`` x ``columns`` panels, each ``width`` x ``height`` inches, and its axes,
    row by row."""
    for library in ("fontTools", "matplotlib"):  # fairseq turns every logger on, to stdout
        logging.getLogger(library).setLevel(logging.WARNING)
    import matplotlib.figure

    with matplotlib.rc_context(SIZES):
        size = (columns * width, rows * height)
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes:
            axis.grid(alpha=0.3)
    return figure, axes


def style(number: int) -> dict[str, Any]:
    """Colour, marker and line style of the ``number``-th line, from 0."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number // SAME_LINE % len(LINES)],
        "markersize": 4,
        "linewidth": 1.2,
    }


def scale_values(axis: Any, values: Iterable[float]) -> None:
    """Make the axis logarithmic if all finite values are positive and span a decade.

    Its numbers are shown without powers of ten.
    """
    from matplotlib.ticker import LogLocator

    finite = [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) >= 10 * min(finite):
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    else:
        axis.ticklabel_format(axis="y", style="plain", useOffset=False)


def label_text(text: str) -> str:
    """``text`` as it is, for a legend.

    matplotlib sets ``$...$`` as formulas and hides labels that begin with ``_``.
    """
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def write(
    stem: Path, rows: Sequence[Row], figure: Any, table: Sequence[Sequence[str]], about: str
) -> None:
    """Write a study's CSV and figure; print its table, the files' names and ``about``."""
    write_csv(Path(f"{stem}.csv"), rows)
    save(figure, stem)
    print("\n".join(in_columns(table)))
    print(f"{stem}.png, .pdf and .csv: {about}")


def save(figure: Any, stem: Path) -> None:
    """Write ``<stem>.png`` (150 dpi) and ``<stem>.pdf``, each the old one or the new one.

    Raises ``UserError``.
    """
    import matplotlib

    with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType: text in the PDF stays text
        for ending, metadata in METADATA.items():
            with writing(Path(f"{stem}{ending}")) as file:
                figure.savefig(file, format=ending[1:], dpi=DPI, metadata=metadata)


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows whose columns have the values of ``wanted``."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as a CSV file whose columns are the keys of the first.

    Numbers read back as exactly what they were. None is an empty cell. Raises ``UserError`` if
    there are no rows, or if it cannot be written.
    """
    if not rows:
        raise UserError(f"{path}: nothing to write, no finished run was found")
    with writing(Path(path), "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
