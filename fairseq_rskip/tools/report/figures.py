"""The figure of a table: every row's mean and standard deviation over seeds, beside the paper's where that is fair."""

import textwrap
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from fairseq_rskip.analysis import figures

from . import conditions
from .numbers import Line, Result

PAPER_COLOUR = "0.45"
REMARK_COLOUR = "#8a4b00"
PANELS = 3  # side by side; more columns of a table share one


class Figure(NamedTuple):
    """A figure on disk, ``<stem>.png``, ``.pdf`` and ``.csv``; ``about`` is its caption, ``alt`` what it shows.

    ``problem`` says why it could not be drawn, then ``command`` is what was tried.
    """

    stem: Path
    title: str
    about: str
    alt: str
    problem: str = ""
    command: str = ""

    def file(self, ending: str) -> Path:
        """The file that ends so: .png, .pdf or .csv."""
        return self.stem.with_name(self.stem.name + ending)


def draw(result: Result, stem: Path) -> Path:
    """Write the table's figure and its CSV; returns ``stem``. Raises ``UserError``."""
    whole = result.whole
    stem = figures.check_stem(stem)
    drawn = [(title, [line for line in lines if _has_value(line, whole)]) for title, lines in result.groups]
    pairs = drawn = [(title, lines) for title, lines in drawn if lines]
    if len(pairs) > PANELS:
        pairs = [("", [line._replace(label=f"{title}, {line.label}") for title, lines in pairs for line in lines])]
    tallest = max(len(lines) for _, lines in pairs)
    width = 6.5 if len(pairs) == 1 else 3.4
    said = textwrap.wrap(conditions.remark(result), round(13 * width * len(pairs)))
    figure, axes = figures.new_figure(len(pairs), width=width, height=1.5 + 0.34 * tallest + 0.18 * len(said))
    if said:
        figure.suptitle(figures.label_text("\n".join(said)), fontsize="small", color=REMARK_COLOUR)
    for axis, (title, lines) in zip(axes, pairs):
        _panel(axis, lines, whole)
        axis.set_title(figures.label_text(title))
        axis.set_xlabel(figures.label_text(_unit(lines, result.table.metric)))
    known = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(known.values(), known, loc="outside lower right", ncols=3, fontsize="small", frameon=False)
    figures.write_csv(stem.with_name(stem.name + ".csv"), [_row(line, result) for _, lines in drawn for line in lines])
    figures.save(figure, stem)
    return stem


def _has_value(line: Line, whole: bool) -> bool:
    return bool(line.values) or (whole and line.paper is not None)


def _panel(axis: Any, lines: List[Line], whole: bool) -> None:
    """Rows from top to bottom; a small point a seed, a large one with its bar for their mean."""
    for place, line in enumerate(lines):
        if len(line.values) > 1:
            seeds = list(line.values.values())
            axis.plot(seeds, [place] * len(seeds), "o", color=figures.COLOURS[0], alpha=0.35, markersize=4)
        if whole and line.paper is not None:
            axis.plot([line.paper], [place], "D", color=PAPER_COLOUR, mfc="none", zorder=3)
    places = dict(enumerate(lines))
    several = [(line.mean, place, line.deviation) for place, line in places.items() if line.deviation is not None]
    one = [(line.mean, place) for place, line in places.items() if len(line.values) == 1]
    if several:
        _ours(axis, several, "ours, mean \u00b1 s.d.")
    if one:
        axis.plot(*zip(*one), "o", color=figures.COLOURS[0], mfc="none", label="ours, one seed")
    if whole and any(line.paper is not None for line in lines):
        axis.plot([], [], "D", color=PAPER_COLOUR, mfc="none", label="paper")
    axis.set_yticks(range(len(lines)), [figures.label_text(line.label) for line in lines])
    axis.set_ylim(len(lines) - 0.5, -0.5)


def _ours(axis: Any, points: List[Tuple[float, int, float]], label: str) -> None:
    means, places, bars = zip(*points)
    axis.errorbar(means, places, xerr=bars, fmt="o", color=figures.COLOURS[0], capsize=3, label=label)


def _unit(lines: List[Line], metric: str) -> str:
    return next(filter(None, (conditions.unit(line, metric) for line in lines)), metric)


def _row(line: Line, result: Result) -> Dict[str, Any]:
    return {
        "papers_experiment": result.whole,
        "data": " / ".join(result.data),
        "scale": result.plan.scale,
        "length": " / ".join(result.length),
        "column": line.column,
        "row": line.label,
        "mean": line.mean,
        "standard_deviation": line.deviation,
        "values": " ".join(map(repr, line.values.values())),
        "paper": line.paper if result.whole else None,
    }
