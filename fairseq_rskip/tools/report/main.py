"""Write the report of tables: Markdown, CSV and one self-contained page."""

import base64
import logging
from pathlib import Path
from typing import Any

import jinja2

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import print_line, to_argv
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools import analyze
from fairseq_rskip.tools.experiments.changes import Changes, changes_of
from fairseq_rskip.tools.experiments.records import UNSCORED, Experiment, Result, dashed
from fairseq_rskip.tools.experiments.results import collect, ready, state
from fairseq_rskip.tools.experiments.run_folder import CHECKPOINTS, RECORD, read_record, trained
from fairseq_rskip.tools.experiments.tasks import TASKS

from . import csv_records
from . import tables as page
from .comparison import compare, power
from .sweep import listed

TITLES = {"curves": "Learning curves", "course": "x:F, branch, gradient norm and λ during training"}
TITLES |= {
    "gradients": "Gradient norm at the output of every block",
    "ratio": "x:F in the output of every block",
}


def write_report(tables: list[Experiment], output: Path, with_figures: bool = True) -> None:
    """Write report.html, report.md, report.csv and figures/ of ``tables`` into OUTPUT/report.

    The runs are below ``output``. The tables are printed. A report that is there is kept where this
    one would have no value though ``output`` has finished runs, as after a change of the text.
    """
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    folder = output / "report"
    with locked(folder, wait=True):
        parts = _parts(tables, output, with_figures)
        unseen = _unseen(tables, parts, output)
        is_kept = bool(unseen) and (folder / "report.csv").exists()
        if not is_kept:
            _write(folder, parts)
    if unseen:
        print_line(f"warning: {unseen}", "stderr")
    for part in parts:
        for warning in part["warnings"]:
            print_line(f"warning: {warning}", "stderr")
        print_line(f"{part['heading']}\n{part['frame'].to_string(index=False)}")
    if is_kept:
        print_line(f"warning: this has no value: the report in {folder} is kept", "stderr")
    else:
        print_line(f"{folder}/report.html, report.md and report.csv")


def _write(folder: Path, parts: list[dict[str, Any]]) -> None:
    """Write report.html, report.md and report.csv into ``folder``."""
    template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["png"] = lambda path: base64.b64encode(path.read_bytes()).decode()
    write_text(folder / "report.html", environment.from_string(template).render(parts=parts))
    write_text(folder / "report.md", "\n\n".join(map(_markdown, parts)) + "\n")
    records = [record for part in parts for record in part["records"]]
    names = dict.fromkeys(name for record in records for name in record)
    write_csv(
        folder / "report.csv", [{name: record.get(name) for name in names} for record in records]
    )


def _parts(experiments: list[Experiment], output: Path, with_figures: bool) -> list[dict[str, Any]]:
    """What the report says of each table that has a row to show.

    A line names the others. Raises ``UserError`` where no table has one.
    """
    parts = []
    empty = []
    for experiment in experiments:
        results = [collect(experiment, cell, output) for cell in experiment.cells]
        lines = compare(experiment, results)
        if lines:
            parts.append(_part(experiment, lines, output, with_figures))
        else:
            empty.append(f"{experiment.path}: no row of these is run or has a published value")
    if not parts:
        raise UserError("\nerror: ".join(empty))
    for line in empty:
        print_line(f"warning: {line}", "stderr")
    return parts


def _unseen(tables: list[Experiment], parts: list[dict[str, Any]], output: Path) -> str:
    """One line where the folder has finished runs and the report has none of them, or ""."""
    if any(record["seeds_done"] for part in parts for record in part["records"]):
        return ""
    runs = [run for table in tables for run in ready(table, output)]
    trained_only = sum(state(run).kind == UNSCORED for run in runs)
    if trained_only:
        return (
            f"{trained_only} of these runs are trained, and not evaluated as this report says: "
            "rskip run with the same file evaluates them"
        )
    folders = [record.parent for record in output.glob(f"runs/*/*/{RECORD}")]
    finished = sum(bool(trained(read_record(folder))) for folder in folders)
    if not finished:
        return ""
    return (
        f"none of these runs is done, but {finished} others below {output}/runs are: of other "
        "tables or seeds, or of these rows before their settings or their text changed"
    )


def _part(
    experiment: Experiment, lines: list[Result], output: Path, with_figures: bool
) -> dict[str, Any]:
    """What a report says of one table, whose rows are ``lines``."""
    table = experiment.table
    changes = changes_of(experiment)
    name = changes.name(experiment)

    warnings = page.warnings(lines)
    if not changes.are_none:
        whole = "published" if table.source else "whole"
        warnings.insert(0, f"Not the {whole} experiment: {in_words(changes)}.")

    notes = page.notes(experiment, lines)
    notes += [power(lines, column, experiment.metric) for column in experiment.columns]
    examples = []
    for line in lines:
        first = next(iter(line.records.values()), {}).get("examples")
        if first:
            examples.append((str(line.cell), first))
    shown = page.frame(experiment, lines)
    texts = ("column", "row", "equation")
    figures = []
    if with_figures:
        figures = _figures(experiment, name, lines, output / "report" / "figures")
    return {
        "name": name,
        "heading": name if experiment.title == experiment.name else f"{name}: {experiment.title}",
        "title": experiment.title,
        "metric": experiment.metric,
        "source": table.source,
        "note": table.note,
        "warnings": warnings,
        "frame": shown,
        "sides": ["left" if column in texts else "right" for column in shown],
        "bases": [line.is_baseline for line in lines],
        "legend": page.legend(experiment, lines, shown),
        "notes": list(filter(None, notes)),
        "sweeps": page.sweeps(experiment, lines),
        "facts": page.facts(experiment, lines),
        "figures": figures,
        "examples": examples,
        "records": csv_records.records(experiment, lines),
    }


def in_words(changes: Changes) -> str:
    """The changes in words."""
    words = []
    if changes.data:
        words.append(changes.data)
    if changes.length != 1:
        words.append(f"{changes.length:g} times the length")
    if changes.options:
        words.append(listed(changes.options))
    return ", ".join(words)


def _markdown(part: dict[str, Any]) -> str:
    """The part as Markdown."""
    shown = part["frame"].map(page.markdown).rename(columns=page.markdown)
    table = shown.to_markdown(index=False, colalign=part["sides"], disable_numparse=True)
    legend = [f"{name}: {text}." for name, text in part["legend"].items()]
    lines = [part["source"], part["note"], *part["warnings"], *legend]
    lines += [*part["notes"], *part["sweeps"]]

    facts = [f"{name}: {value}" for name, value in part["facts"].items()]
    for row, examples in part["examples"]:
        for example in examples:
            facts += [f"{row}, {name}: {text}" for name, text in example.items()]
    bullets = "\n".join(f"- {page.markdown(fact)}" for fact in facts)

    blocks = [f"# {page.markdown(part['heading'])}", table]
    blocks += [page.markdown(line) for line in lines if line]
    blocks.append(bullets)
    for figure in part["figures"]:
        if not figure["problem"]:
            blocks.append(f"![{figure['title']}]({figure['link']})")
    return "\n\n".join(blocks)


def _figures(
    experiment: Experiment, name: str, lines: list[Result], folder: Path
) -> list[dict[str, Any]]:
    """Return what ``rskip analyze`` draws of the finished runs.

    That is the figure that the table names, and learning curves.
    """
    table = experiment.table
    finished: dict[tuple[Path, ...], Result] = {}  # rows that are the same trainings, drawn once
    for line in lines:
        if line.values:
            finished.setdefault(tuple(folder for folder, _ in line.runs_and_values), line)
    if not finished:
        return []

    drawn = []
    for kind in dict.fromkeys(filter(None, (table.figure, "curves"))):
        models = []
        for line in finished.values():
            models += _models(line, kind, TASKS[experiment.task].weights)
        options = table.figure_options if kind == (table.figure or "curves") else {}
        stem, problem = folder / f"{name}-{kind}", ""
        try:
            analyze.run([kind, "--output", str(stem), *to_argv(dashed(options)), *models])
        except (UserError, OSError, ImportError) as error:
            problem = str(error).split("\n")[0]
        path = stem.with_name(f"{stem.name}.png")
        drawn.append(
            {
                "title": TITLES[kind],
                "path": path,
                "link": f"figures/{path.name}",
                "problem": problem,
            }
        )
    return drawn


def _models(line: Result, kind: str, weights: tuple[str, ...]) -> list[str]:
    """Return what a figure is drawn of, NAME=PATH.

    That is the logs of all runs of a row, or the weights of the first.
    """
    of_logs = kind in ("curves", "course")
    runs = [line.runs[seed] for seed in line.values]
    label = str(line.cell).replace("=", ":")
    models = []
    for run in runs if of_logs else runs[:1]:
        averaged = f"{run.evaluation}/averaged.pt"
        names = (CHECKPOINTS,) if of_logs else (averaged, *weights)
        there = [run.folder / name for name in names if (run.folder / name).exists()]
        models.append(f"{label}={[*there, run.folder][0]}")
    return models
