"""What ``reproduce.py report`` does: every plan's table with its figures, as Markdown, LaTeX, HTML and CSV."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools.console import print_line
from fairseq_rskip.tools.report import analyses, conditions, figures, grid, model, ordering, render
from fairseq_rskip.tools.report.figures import Figure
from fairseq_rskip.tools.report.grid import Grid
from fairseq_rskip.tools.report.paired import PairedTests
from fairseq_rskip.tools.report.significance import LEVEL
from fairseq_rskip.tools.reproduce import plans, tables
from fairseq_rskip.tools.reproduce.plans import Plan
from fairseq_rskip.tools.reproduce.results import TableResult, collect
from fairseq_rskip.tools.reproduce.tables import Table

FORMATS = ("md", "tex", "html")
DEFAULT = Path("runs/paper")


@dataclass(frozen=True)
class Part:
    """What the report says of one plan."""

    name: str
    table: Table
    warning: str
    data: str
    papers: str
    conditions: List[Tuple[str, str]]
    grid: Grid
    orderings: List[str]
    test: str
    figures: List[Figure]


def write_report(options: argparse.Namespace) -> int:
    """Write report.md, .tex, .html and .csv and the figures of all plans in ``options.output``; returns 0.

    Raises ``UserError`` for a table that there is not, a plan that cannot be read, or a folder not to be written to.
    """
    known = tables.load_all(options.experiments)
    for name in options.tables:
        if name not in known:
            raise UserError(f"no table named {name!r}; there are {', '.join(known)}")
    wanted = [name for name in known if not options.tables or name in options.tables]
    made = plans.load_all(options.output)
    for plan in made:
        if plan.table not in known:
            print_line(f"warning: {plan.name} is left out: {options.experiments} has no table {plan.table!r}", "stderr")
    folder = (options.to.expanduser() if options.to else options.output / "report").resolve()
    with locked(folder, wait=True):
        _write(options, folder, [(plan, known[plan.table]) for name in wanted for plan in made if plan.table == name])
    return 0


def _write(options: argparse.Namespace, folder: Path, asked: List[Tuple[Plan, Table]]) -> None:
    """The report of the plans ``asked`` for, and of the tables that have none."""
    tests = PairedTests(folder / "significance.json", options.test, options.resamples or 0)
    parts, records = [], []
    for plan, table in asked:
        part, rows = _part(options, folder, plan, table, tests)
        parts.append(part)
        records += rows
    csv = folder / "report.csv"
    if records:
        write_csv(csv, records)
    else:
        csv.unlink(missing_ok=True)
    context = {
        "parts": parts,
        "idle": _idle(options, {plan.table for plan, _ in asked}),
        "extra": [] if options.no_figures else analyses.found(options.output / "figures"),
        "csv": csv if records else None,
        "definitions": definitions(),
        "folder": folder,
    }
    for name in FORMATS:
        write_text(folder / f"report.{name}", render.render(name, context))
    tables = f"{len(parts)} table{'s' * (len(parts) != 1)} of {options.output}"
    print_line(f"{tables}: {folder}/report.html, .md, .tex and .csv")


def _part(
    options: argparse.Namespace, folder: Path, plan: Plan, table: Table, tests: PairedTests
) -> Tuple[Part, List[Dict[str, Any]]]:
    """What there is to say of ``plan``, and its rows of the CSV file."""
    result = collect(plan, table, options.output)
    groups = model.build(result, tests)
    drawn = [] if options.no_figures else _figures(options, result, groups, folder / "figures")
    part = Part(
        name=plan.name,
        table=table,
        warning=conditions.warning(result),
        data=conditions.data(result),
        papers=conditions.papers(result),
        conditions=conditions.describe(result, groups),
        grid=grid.make(result, groups),
        orderings=[text for group in groups for text in [ordering.describe(group, table, tests)] if text],
        test=_test(groups, table, tests),
        figures=drawn,
    )
    return part, grid.records(result, groups)


def _figures(options: argparse.Namespace, result: TableResult, groups: List[model.Group], folder: Path) -> List[Figure]:
    """What is drawn of a table with finished runs: for a figure of the paper that first."""
    table = result.table
    if not any(line.values for group in groups for line in group.lines):
        return []
    stem = figures.draw(result, groups, folder / result.plan.name)
    about = "Large points: means and standard deviations over seeds; small ones: the seeds; open ones: one seed."
    own = Figure(stem, f"{table.metric} of every row", about, f"{table.title}: the values of the table")
    drawn = analyses.draw(result, groups, folder, options.examples, print_line)
    return [*drawn[:1], own, *drawn[1:]] if table.figure else [own, *drawn]


def _test(groups: List[model.Group], table: Table, tests: PairedTests) -> str:
    """Which test the p-values are of, "" where there are none."""
    lines = [line for group in groups for line in group.lines if line.comparison.p]
    if not lines:
        return ""
    if table.task == "images":
        return f"p: Welch's t-test over seeds, two-sided (scipy {scipy.__version__})."
    seeds = ", one for each seed in common" if any(len(line.comparison.p) > 1 for line in lines) else ""
    chance = "its chance is in the test sentences, not in the seeds"
    return f"p: {tests}, of {table.metric} on the same test set{seeds}; {chance}."


def _idle(options: argparse.Namespace, planned: Any) -> List[Tuple[Table, str]]:
    """The tables without a plan, each with the command that would run it."""
    where = "" if options.output == DEFAULT.resolve() else f" --output {shlex.quote(str(options.output))}"
    if options.experiments != tables.FOLDER:
        where += f" --experiments {shlex.quote(str(options.experiments))}"
    return [
        (table, f"python scripts/reproduce.py run {shlex.quote(name)}{where}")
        for name, table in tables.load_all(options.experiments).items()
        if name not in planned and (not options.tables or name in options.tables)
    ]


def definitions() -> List[str]:
    """What the columns mean."""
    return [
        "ours: mean \u00b1 sample standard deviation over the seeds that are finished; n: how many those are.",
        "paper: as reported there; ours \u2212 paper stands only where data, length and options are the paper's.",
        "ours \u2212 a row: the difference of the means of finished seeds, to the baseline row in the same column.",
        "p: of that difference, not corrected for the number of rows;"
        f" p, Holm: corrected for it, with * where it is below {LEVEL}.",
        "The best value of a column is bold, the paper's among the paper's. The baseline's row is marked.",
        "A row that is the same network as another one shows the same runs.",
    ]
