"""The figures of a report: what ``rskip analyze`` draws of its finished runs."""

import contextlib
import io
import json
from pathlib import Path
from typing import NamedTuple

from fairseq_rskip.console import as_words
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.cached import is_made, key_path
from fairseq_rskip.tools.experiments.records import Result, Table
from fairseq_rskip.tools.experiments.tasks import CHECKPOINTS, TASKS

OF_LOGS = ("curves", "course")  # the others need weights
TITLES = {"curves": "Learning curves", "course": "x:F, branch, gradient norm and λ during training"}
TITLES |= {"gradients": "Gradient norm at the output of every block", "ratio": "x:F in the output of every block"}


class Figure(NamedTuple):
    """``path`` is its PNG file, ``link`` the way to it from the report; ``problem`` says why it could not be drawn."""

    title: str
    path: Path
    link: str
    problem: str = ""


def draw(table: Table, name: str, lines: list[Result], folder: Path) -> list[Figure]:
    """The figure that the table names, and learning curves, of the finished runs."""
    lines = list({tuple(line.folders): line for line in reversed(lines) if line.values}.values())[::-1]
    kinds = dict.fromkeys(filter(None, (table.figure, "curves"))) if lines else ()
    return [_draw(table, kind, folder / f"{name}-{kind}", lines) for kind in kinds]


def _draw(table: Table, kind: str, stem: Path, lines: list[Result]) -> Figure:
    """What ``rskip analyze KIND`` draws: of logs all seeds, of weights the first; again only when runs have changed."""
    options, models = dict(table.figure_options) if kind == table.figure else {}, []
    names = (CHECKPOINTS,) if kind in OF_LOGS else TASKS[table.task].weights
    for line in lines:
        for run in line.folders if kind in OF_LOGS else line.folders[:1]:
            model = next((run / name for name in names if (run / name).exists()), run)
            models.append(f"{str(line.cell).replace('=', ':')}={model}")
    words, path = [kind, "--output", str(stem), *as_words(options), *models], stem.with_name(f"{stem.name}.png")
    figure = Figure(TITLES[kind], path, f"figures/{path.name}")
    key = {"command": words, "results": json.dumps([list(line.records.values()) for line in lines])}
    if is_made(path, key):
        return figure
    from fairseq_rskip.tools import analyze

    key_path(path).unlink(missing_ok=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            analyze.run(words)
    except (UserError, OSError, ImportError) as error:
        return figure._replace(problem=str(error).split("\n")[0])
    write_json(key_path(path), key)
    return figure
