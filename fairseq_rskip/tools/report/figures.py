"""The figures of a report: a table's values beside the published ones, and what ``rskip analyze`` draws of its runs."""

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import as_words, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.cached import is_made, key_path
from fairseq_rskip.tools.experiments.plan import is_whole
from fairseq_rskip.tools.experiments.records import Result, Table
from fairseq_rskip.tools.experiments.tasks import CHECKPOINTS, TASKS

from .compare import different

OF_LOGS = ("curves", "course")  # the others need weights
TITLES = {
    "gradients": "Gradient norm at the output of every residual block",
    "ratio": "x:F in the output of every residual block",
    "curves": "Learning curves",
    "course": "x:F, branch, gradient norm and λ during training",
}


class Figure(NamedTuple):
    """``path`` is its PNG file; ``problem`` says why it could not be drawn."""

    title: str
    path: Path
    link: str
    problem: str = ""


def draw(table: Table, name: str, lines: list[Result], folder: Path, examples: int | None) -> list[Figure]:
    """The values, the figure that the table names, and learning curves, of the finished runs."""
    if not any(line.values for line in lines):
        return []
    names = dict.fromkeys(filter(None, (table.figure, "curves")))
    return [_values(table, lines, folder / name), *(_analyse(table, each, name, lines, folder, examples) for each in names)]


def _values(table: Table, lines: list[Result], stem: Path) -> Figure:
    """Every mean with its standard deviation, the seeds, and the published values where they are comparable."""
    lines, whole = [line for line in lines if line.values], is_whole(table)
    stem = figures.check_stem(stem)
    drawing, (axis,) = figures.new_figure(1, width=6.5, height=1.5 + 0.34 * len(lines))
    for place, line in enumerate(lines):
        colour = {"color": figures.COLOURS[0], "marker": "o"}
        axis.plot(list(line.values.values()), [place] * len(line.values), **colour, alpha=0.35, markersize=4, linestyle="")
        axis.errorbar([line.mean], [place], xerr=[line.deviation or 0], **colour, capsize=3, linestyle="")
        if whole and line.cell.reported is not None:
            axis.plot([line.cell.reported], [place], marker="D", linestyle="", color="0.45", markerfacecolor="none")
    labels = [figures.label_text(", ".join(filter(None, [line.cell.column, line.cell.row.label]))) for line in lines]
    axis.set_yticks(range(len(lines)), labels)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlabel(figures.label_text(table.metric))
    figures.save(drawing, stem)
    return _figure(f"{table.metric}: mean \u00b1 standard deviation; small points: seeds; diamonds: published", stem)


def _analyse(table: Table, kind: str, name: str, lines: list[Result], folder: Path, examples: int | None) -> Figure:
    """What ``rskip analyze KIND`` draws: of logs all seeds, of weights the first one; only when something has changed."""
    options, models = dict(table.figure_options) if kind == table.figure else {}, []
    for line in different(lines):
        label = str(line.cell).replace("=", ":")
        if kind in OF_LOGS:
            models += [f"{label}={_existing(run, (CHECKPOINTS,))}" for run in line.folders]
        else:
            models.append(f"{label}={_existing(line.folders[0], TASKS[table.task].weights)}")
            options.update({"examples": examples} if examples else {})
    stem = folder / f"{name}-{kind}"
    command = [kind, "--output", str(stem), *as_words(options), *models]
    figure = _figure(TITLES[kind], stem)
    key = {"command": command, "results": json.dumps([list(line.records.values()) for line in lines])}
    if is_made(figure.path, key):
        return figure
    key_path(figure.path).unlink(missing_ok=True)
    from fairseq_rskip.tools import analyze

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            analyze.run(command)
    except (UserError, OSError, ImportError, SystemExit) as error:
        problem = str(error).splitlines()[0] if str(error) else said.getvalue().strip()[-200:]
        print_line(f"could not draw rskip analyze {shlex.join(command[:3])}: {problem}", "stderr")
        return figure._replace(problem=problem)
    write_json(key_path(figure.path), key)
    return figure


def _figure(title: str, stem: Path) -> Figure:
    path: Any = stem.with_name(f"{stem.name}.png")
    return Figure(title, path, f"figures/{path.name}")


def _existing(folder: Path, names: tuple[str, ...]) -> Path:
    return next((folder / name for name in names if (folder / name).exists()), folder)
