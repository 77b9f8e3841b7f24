"""The figure of a table: every row's mean and standard deviation over seeds, beside the paper's where that is fair."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from reproduction.results import TableResult

from fairseq_rskip.analysis import figures
from reporting.model import Group, Line

PAPER_COLOUR = "0.45"
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


def draw(result: TableResult, groups: List[Group], stem: Path) -> Path:
    """Write the table's figure and its CSV; returns ``stem``. Raises ``UserError``."""
    whole = result.plan.whole
    stem = figures.check_stem(stem)
    drawn = [[line for line in group.lines if line.values or (whole and line.reported is not None)] for group in groups]
    pairs = [(group.title, lines) for group, lines in zip(groups, drawn) if lines]
    if len(pairs) > PANELS:
        pairs = [("", [replace(line, label=f"{title}, {line.label}") for title, lines in pairs for line in lines])]
    tallest = max(len(lines) for _, lines in pairs)
    width = 6.5 if len(pairs) == 1 else 3.4
    figure, axes = figures.new_figure(len(pairs), width=width, height=1.2 + 0.34 * tallest)
    for axis, (title, lines) in zip(axes, pairs):
        _panel(axis, lines, whole)
        axis.set_title(figures.label_text(title))
        axis.set_xlabel(figures.label_text(_unit(lines) or result.table.metric))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize="small", frameon=False)
    figures.write_csv(stem.with_name(stem.name + ".csv"), [_row(line, whole) for lines in drawn for line in lines])
    figures.save(figure, stem)
    return stem


def _panel(axis: Any, lines: List[Line], whole: bool) -> None:
    """Rows from top to bottom; a small point a seed, a large one with its bar for their mean."""
    for place, line in enumerate(lines):
        if line.values:
            seeds = list(line.values.values())
            axis.plot(seeds, [place] * len(seeds), "o", color=figures.COLOURS[0], alpha=0.35, markersize=4)
        if whole and line.reported is not None:
            axis.plot([line.reported], [place], "D", color=PAPER_COLOUR, mfc="none", zorder=3)
    done = [(place, line) for place, line in enumerate(lines) if line.values]
    if done:
        places, means, bars = zip(*((place, line.mean, line.deviation or 0.0) for place, line in done))
        axis.errorbar(
            means, places, xerr=bars, fmt="o", color=figures.COLOURS[0], capsize=3, label="ours, mean \u00b1 s.d."
        )
    if whole and any(line.reported is not None for line in lines):
        axis.plot([], [], "D", color=PAPER_COLOUR, mfc="none", label="paper")
    axis.set_yticks(range(len(lines)), [figures.label_text(line.label) for line in lines])
    axis.set_ylim(len(lines) - 0.5, -0.5)


def _unit(lines: List[Line]) -> str:
    return next((metrics["unit"] for line in lines for metrics in line.metrics.values() if metrics.get("unit")), "")


def _row(line: Line, whole: bool) -> Dict[str, Any]:
    return {
        "column": line.column,
        "row": line.label,
        "mean": line.mean,
        "standard_deviation": line.deviation,
        "values": " ".join(map(repr, line.values.values())),
        "paper": line.reported if whole else None,
    }
