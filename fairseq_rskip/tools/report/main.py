"""Write the report of tables: Markdown, CSV and one self-contained page."""

import base64
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import print_line, to_argv
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools import analyze
from fairseq_rskip.tools.experiments.changes import Changes, changes_of
from fairseq_rskip.tools.experiments.records import UNSCORED, Experiment, Result, dashed
from fairseq_rskip.tools.experiments.results import collect, ready, state
from fairseq_rskip.tools.experiments.run_folder import RECORD, read_record, trained
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.training_files import CHECKPOINTS

from . import csv_records, tables
from .comparison import compare, power
from .sweep import listed

TITLES = {"curves": "Learning curves", "course": "x:F, branch, gradient norm and λ during training"}
TITLES |= {
    "gradients": "Gradient norm at the output of every block",
    "ratio": "x:F in the output of every block",
}
TEXTS = ("column", "row", "equation")  # columns of words, which begin at the left


@dataclass(frozen=True)
class Figure:
    """A figure of a report in ``path``, or the ``problem`` with which drawing it ended."""

    title: str
    path: Path
    link: str  # from report.md
    problem: str


@dataclass(frozen=True)
class Part:
    """What a report says of one table."""

    name: str
    heading: str
    title: str
    metric: str
    source: str
    note: str
    warnings: list[str]
    frame: pandas.DataFrame  # all cells are text
    sides: list[str]  # of the text in each column: left or right
    bases: list[bool]  # whether a row is a baseline
    legend: dict[str, str]  # what each column means
    notes: list[str]
    sweeps: list[str]
    facts: dict[str, str]
    figures: list[Figure]
    examples: list[tuple[str, list[dict[str, str]]]]  # translations of each row
    records: list[dict[str, Any]]  # the rows of the CSV file


def write_report(experiments: list[Experiment], output: Path, with_figures: bool) -> None:
    """Write report.html, report.md, report.csv and figures/ of ``experiments`` into OUTPUT/report.

    The runs are below ``output``. The tables are printed. A report that is there is kept where this
    one would have no value though ``output`` has finished runs, as after a change of the text.
    """
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    folder = output / "report"
    with locked(folder, wait=True):
        parts = _parts(experiments, output, with_figures)
        unseen = _unseen(experiments, parts, output)
        is_kept = bool(unseen) and (folder / "report.csv").exists()
        if not is_kept:
            _write(folder, parts)
    if unseen:
        print_line(f"warning: {unseen}", "stderr")
    for part in parts:
        not_drawn = [f"{each.title}: {each.problem}" for each in part.figures if each.problem]
        for warning in [*part.warnings, *not_drawn]:
            print_line(f"warning: {warning}", "stderr")
        print_line(f"{part.heading}\n{part.frame.to_string(index=False)}")
    if is_kept:
        print_line(f"warning: this has no value: the report in {folder} is kept", "stderr")
    else:
        print_line(f"{folder}/report.html, report.md and report.csv")


def _write(folder: Path, parts: list[Part]) -> None:
    """Write report.html, report.md and report.csv into ``folder``."""
    template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["png"] = lambda path: base64.b64encode(path.read_bytes()).decode()
    write_text(folder / "report.html", environment.from_string(template).render(parts=parts))
    write_text(folder / "report.md", "\n\n".join(map(_markdown, parts)) + "\n")
    records = [record for part in parts for record in part.records]
    names = dict.fromkeys(name for record in records for name in record)
    write_csv(
        folder / "report.csv", [{name: record.get(name) for name in names} for record in records]
    )


def _parts(experiments: list[Experiment], output: Path, with_figures: bool) -> list[Part]:
    """What the report says of each table that has a row to show.

    A line names the others. Raises ``UserError`` where no table has one.
    """
    parts = []
    empty = []
    for experiment in experiments:
        results = [collect(experiment, cell, output) for cell in experiment.cells]
        compared = compare(experiment, results)
        if compared:
            parts.append(_part(experiment, compared, output, with_figures))
        else:
            empty.append(f"{experiment.path}: no row of these is run or has a published value")
    if not parts:
        raise UserError("\nerror: ".join(empty))
    for line in empty:
        print_line(f"warning: {line}", "stderr")
    return parts


def _unseen(experiments: list[Experiment], parts: list[Part], output: Path) -> str:
    """One line where the folder has finished runs and the report has none of them, or ""."""
    if any(record["seeds_done"] for part in parts for record in part.records):
        return ""
    runs = [run for experiment in experiments for run in ready(experiment, output)]
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


def _part(experiment: Experiment, results: list[Result], output: Path, with_figures: bool) -> Part:
    """What a report says of one table, whose rows are ``results``."""
    table = experiment.table
    changes = changes_of(experiment)
    name = changes.name(experiment)

    warnings = tables.warnings(results)
    if not changes.are_none:
        whole = "published" if table.source else "whole"
        warnings.insert(0, f"Not the {whole} experiment: {in_words(changes)}.")

    notes = tables.notes(experiment, results)
    notes += [power(results, column, experiment.metric) for column in experiment.columns]
    examples = []
    for result in results:
        first = next(iter(result.records.values()), {}).get("examples")
        if first:
            examples.append((str(result.cell), first))
    frame = tables.frame(experiment, results)
    figures = []
    if with_figures:
        figures = _figures(experiment, name, results, output / "report" / "figures")
    return Part(
        name=name,
        heading=name if experiment.title == experiment.name else f"{name}: {experiment.title}",
        title=experiment.title,
        metric=experiment.metric,
        source=table.source,
        note=table.note,
        warnings=warnings,
        frame=frame,
        sides=["left" if column in TEXTS else "right" for column in frame],
        bases=[result.is_baseline for result in results],
        legend=tables.legend(experiment, results, frame),
        notes=[note for note in notes if note],
        sweeps=tables.sweeps(experiment, results),
        facts=tables.facts(experiment, results),
        figures=figures,
        examples=examples,
        records=csv_records.records(experiment, results),
    )


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


def _markdown(part: Part) -> str:
    """The part as Markdown."""
    shown = part.frame.map(tables.markdown).rename(columns=tables.markdown)
    table = shown.to_markdown(index=False, colalign=part.sides, disable_numparse=True)
    legend = [f"{name}: {text}." for name, text in part.legend.items()]
    sentences = [part.source, part.note, *part.warnings, *legend, *part.notes, *part.sweeps]

    facts = [f"{name}: {value}" for name, value in part.facts.items()]
    for row, examples in part.examples:
        for example in examples:
            facts += [f"{row}, {name}: {text}" for name, text in example.items()]
    bullets = "\n".join(f"- {tables.markdown(fact)}" for fact in facts)

    blocks = [f"# {tables.markdown(part.heading)}", table]
    blocks += [tables.markdown(sentence) for sentence in sentences if sentence]
    blocks.append(bullets)
    for figure in part.figures:
        if figure.problem:
            problem = f"{figure.title} could not be drawn: {figure.problem}"
            blocks.append(tables.markdown(problem))
        else:
            blocks.append(f"![{figure.title}]({figure.link})")
    return "\n\n".join(blocks)


def _figures(
    experiment: Experiment, name: str, results: list[Result], folder: Path
) -> list[Figure]:
    """Return what ``rskip analyze`` draws of the finished runs.

    That is the figure that the table names, and learning curves.
    """
    table = experiment.table
    finished: dict[tuple[Path, ...], Result] = {}  # rows that are the same trainings, drawn once
    for result in results:
        if result.values:
            finished.setdefault(tuple(run for run, _ in result.runs_and_values), result)
    if not finished:
        return []

    drawn = []
    kinds = ["curves"] if table.figure in ("", "curves") else [table.figure, "curves"]
    for kind in kinds:
        models = []
        for result in finished.values():
            models += _models(result, kind, TASKS[experiment.task].weights)
        options = table.figure_options if kind == kinds[0] else {}
        stem, problem = folder / f"{name}-{kind}", ""
        try:
            analyze.run([kind, "--output", str(stem), *to_argv(dashed(options)), *models])
        except (UserError, OSError, ImportError) as error:
            problem = str(error).split("\n")[0]
        path = stem.with_name(f"{stem.name}.png")
        drawn.append(Figure(TITLES[kind], path, f"figures/{path.name}", problem))
    return drawn


def _models(result: Result, kind: str, weights: tuple[str, ...]) -> list[str]:
    """Return what a figure is drawn of, NAME=PATH.

    That is the logs of all runs of a row, or the weights of the first.
    """
    runs = [result.runs[seed] for seed in result.values]
    label = str(result.cell).replace("=", ":")
    if kind in ("curves", "course"):
        return [f"{label}={_first_existing(run.folder, (CHECKPOINTS,))}" for run in runs]
    first = runs[0]
    names = (f"{first.evaluation}/averaged.pt", *weights)
    return [f"{label}={_first_existing(first.folder, names)}"]


def _first_existing(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of ``names`` in ``folder`` that there is, else the folder."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    return folder
