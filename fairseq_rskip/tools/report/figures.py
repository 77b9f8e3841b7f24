"""The figures of a report: a table's values beside the paper's, and what analyze.py draws of its finished runs."""

import json
import shlex
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import as_words, print_line
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.cached import is_made, key_path
from fairseq_rskip.tools.reproduce.execution import last_error
from fairseq_rskip.tools.reproduce.tables import tool
from fairseq_rskip.tools.reproduce.translation import CHECKPOINTS, EVALUATION

from . import conditions
from .numbers import Line, Result, different
from .page import record

ANALYZE = tool("analyze.py", "analyze")
PAPER = {"marker": "D", "linestyle": "", "color": "0.45", "markerfacecolor": "none", "zorder": 3}
OURS = {"marker": "o", "linestyle": "", "color": figures.COLOURS[0]}
REMARK_COLOUR = "#8a4b00"
PANELS = 3  # side by side; more columns of a table share one
CURVES = "curves"
OF_LOGS = (CURVES, "course")
TITLES = {
    "gradients": "Gradient norm at the output of every residual block",
    "ratio": "x:F in the output of every residual block, and effective scale",
    CURVES: "Learning curves",
    "course": "x:F, branch, gradient norm and λ in the course of a training",
}
WEIGHTS = (f"{EVALUATION}/averaged.pt", f"{CHECKPOINTS}/checkpoint_best.pt", f"{CHECKPOINTS}/checkpoint_last.pt")


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


def draw(result: Result, folder: Path, examples: int | None) -> list[Figure]:
    """What is drawn of a table with finished runs: its values, the figure that its file names, and curves.

    A figure of the paper comes first. ``examples`` is analyze.py's option. Raises ``UserError``.
    """
    table = result.table
    if not any(line.values for line in result.lines):
        return []
    stem = folder / result.plan.name
    about = "Large points: means and standard deviations over seeds; small ones: the seeds; open ones: one seed."
    values = Figure(stem, f"{table.metric} of every row", about, f"{table.title}: the values of the table")
    draw_values(result, stem)
    names = dict.fromkeys(filter(None, (table.figure, CURVES)))
    drawn = [analyse(result, name, folder, examples) for name in names]
    return [*drawn[:1], values, *drawn[1:]] if table.figure else [values, *drawn]


def draw_values(result: Result, stem: Path) -> None:
    """Every row's mean and standard deviation over seeds, beside the paper's where that is fair, and the CSV."""
    whole, stem = result.whole, figures.check_stem(stem)
    drawn = [line for line in result.lines if line.values or (whole and line.cell.reported is not None)]
    panels: dict[str, list[Line]] = {}
    for line in drawn:
        panels.setdefault(line.cell.column, []).append(line)
    if len(panels) > PANELS:
        panels = {"": drawn}
    width = 6.5 if len(panels) == 1 else 3.4
    said = textwrap.wrap(conditions.warning(result), round(13 * width * len(panels)))
    height = 1.5 + 0.34 * max(map(len, panels.values())) + 0.18 * len(said)
    figure, axes = figures.new_figure(len(panels), width=width, height=height)
    if said:
        figure.suptitle(figures.label_text("\n".join(said)), fontsize="small", color=REMARK_COLOUR)
    for axis, (title, lines) in zip(axes, panels.items()):
        _panel(axis, lines, whole)
        labels = [", ".join(filter(None, [line.cell.column if not title else "", line.cell.row])) for line in lines]
        axis.set_yticks(range(len(lines)), list(map(figures.label_text, labels)))
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.set_title(figures.label_text(title))
        units = [conditions.unit(line, result.table.metric) for line in lines]
        axis.set_xlabel(figures.label_text(next(filter(None, units), result.table.metric)))
    known = {label: mark for axis in axes for mark, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(known.values(), known, loc="outside lower right", ncols=3, fontsize="small", frameon=False)
    shown = [dict(record(result, line), **({} if whole else {"paper": None})) for line in drawn]
    figures.write_csv(stem.with_name(stem.name + ".csv"), shown)
    figures.save(figure, stem)


def _panel(axis: Any, lines: list[Line], whole: bool) -> None:
    """Rows from top to bottom; a small point a seed, a large one with its bar for their mean."""
    means, places, bars, ones, papers = [], [], [], [], []
    for place, line in enumerate(lines):
        if len(line.values) > 1:
            axis.plot(list(line.values.values()), [place] * len(line.values), **OURS, alpha=0.35, markersize=4)
            means, places, bars = [*means, line.mean], [*places, place], [*bars, line.deviation]
        elif line.values:
            ones.append((line.mean, place))
        if whole and line.cell.reported is not None:
            papers.append((line.cell.reported, place))
    if means:
        axis.errorbar(means, places, xerr=bars, **OURS, capsize=3, label="ours, mean \u00b1 s.d.")
    if ones:
        axis.plot(*zip(*ones), **OURS, markerfacecolor="none", label="ours, one seed")
    if papers:
        axis.plot(*zip(*papers), **PAPER, label="paper")


def analyse(result: Result, name: str, folder: Path, examples: int | None) -> Figure:
    """The figure that ``analyze.py NAME`` draws of the finished runs, again only when runs or options have changed.

    What reads logs takes every seed, those of a row under the same label; what needs weights the first of each row.
    """
    lines = different(result.lines)
    options = dict(result.table.figure_options) if name == result.table.figure else {}
    if name in OF_LOGS:
        models = [f"{_label(line)}={_existing(run, [CHECKPOINTS])}" for line in lines for run in line.folders]
    else:
        options.update({"examples": examples} if examples else {})
        models = [f"{_label(line)}={_existing(line.folders[0], WEIGHTS)}" for line in lines]
    about = "All finished seeds." if name in OF_LOGS else "The first finished seed of each row."
    alt = f"{TITLES[name]}: {', '.join(map(_label, lines))}"
    figure = Figure(folder / f"{result.plan.name}-{name}", TITLES[name], about, alt)
    command = [*ANALYZE, name, "--output", str(figure.stem), *as_words(options), *models]
    key = {"command": command[1:], "results": json.dumps([line.metrics for line in lines])}
    picture, log = figure.file(".png"), figure.file(".log")
    if is_made(picture, key) and all(figure.file(ending).exists() for ending in figures.ENDINGS):
        return figure
    key_path(picture).unlink(missing_ok=True)
    print_line(f"drawing {figure.stem.name} (what it says goes to {log})")
    with open(log, "wb") as output:
        output.write(f"== {shlex.join(command)}\n".encode())
        output.flush()
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        problem = last_error(log, 0)
        print_line(f"{figure.stem.name} could not be drawn: {problem}")
        return figure._replace(problem=problem, command=shlex.join(command))
    write_json(key_path(picture), key)
    return figure


def _label(line: Line) -> str:
    """What the row is called on the figure; analyze.py ends a label at the first "="."""
    return str(line.cell).replace("=", ":")


def _existing(folder: Path, names: Sequence[str]) -> Path:
    return next((folder / name for name in names if (folder / name).exists()), folder)


def found(folder: Path) -> list[Figure]:
    """The figures that somebody has put into ``folder`` with analyze.py."""
    about = "figures/{}, made with analyze.py by hand; its conditions are not recorded here."
    pictures = sorted(folder.glob("*.png"))
    return [Figure(path.with_name(path.stem), path.stem, about.format(path.name), path.name) for path in pictures]
