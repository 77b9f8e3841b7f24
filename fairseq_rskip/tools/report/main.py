"""What ``reproduce.py report`` does: every plan's table with its figures, as Markdown, LaTeX, HTML and CSV."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Tuple

import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools.console import print_line
from fairseq_rskip.tools.reproduce import loading, plans
from fairseq_rskip.tools.reproduce.main import warn
from fairseq_rskip.tools.reproduce.tables import Table

from . import analyses, conditions, figures, numbers, ordering, page
from .figures import Figure
from .numbers import Result
from .paired import PairedTests
from .significance import LEVEL

FORMATS = ("md", "tex", "html")
DEFAULT = Path("runs/paper")
PAPER = "Liu et al. 2020"


@dataclass(frozen=True)
class Part:
    """What the report says of one plan."""

    name: str
    table: Table
    warning: str
    remark: str
    data: str
    papers: str
    conditions: List[Tuple[str, str]]
    settings: List[str]
    tables: page.Tables
    remarks: List[str]
    figures: List[Figure]


def write_report(options: argparse.Namespace) -> None:
    """Write report.md, .tex, .html and .csv and the figures of all plans in ``options.output``.

    Raises ``UserError`` for a table of which nothing was run, a plan that cannot be read, or a folder not to be
    written to; nothing is written then.
    """
    made = plans.load_all(options.output)
    if not made and not analyses.found(options.output / "figures"):
        raise UserError(f"nothing has been run in {options.output}; expected the --output of reproduce.py run")
    idle = _idle(options, {plan.table.name for plan in made})
    run = list(dict.fromkeys(plan.table.name for plan in made))
    for name in options.tables:
        if name not in run and name not in [table.name for table, _ in idle]:
            raise UserError(f"no table named {name!r}; there are {', '.join(run + [table.name for table, _ in idle])}")
    order = list(loading.paths(options.experiments)) if idle else []
    made = sorted(made, key=lambda plan: order.index(plan.table.name) if plan.table.name in order else len(order))
    folder = (options.to.expanduser() if options.to else options.output / "report").resolve()
    with locked(folder, wait=True):
        _write(options, folder, [plan for plan in made if plan.table.name in (options.tables or run)], idle)


def _write(options: argparse.Namespace, folder: Path, made: List[plans.Plan], idle: List[Tuple[Table, str]]) -> None:
    """The report of the plans ``made``, and of the tables that have none."""
    tests = PairedTests(folder / "significance.json", options.test or "", options.resamples or 0)
    results = [numbers.build(plan, plans.current_table(plan, warn), options.output, tests) for plan in made]
    parts = [_part(options, folder, result, tests) for result in results]
    records = [record for result in results for record in numbers.records(result)]
    csv = folder / "report.csv"
    if records:
        keys = dict.fromkeys(key for record in records for key in record)
        write_csv(csv, [{key: record.get(key) for key in keys} for record in records])
    else:
        csv.unlink(missing_ok=True)
    context = {
        "parts": parts,
        "heading": _heading(parts),
        "idle": [pair for pair in idle if not options.tables or pair[0].name in options.tables],
        "extra": [] if options.no_figures else analyses.found(options.output / "figures"),
        "csv": csv if records else None,
        "definitions": DEFINITIONS,
        "folder": folder,
    }
    for name in FORMATS:
        write_text(folder / f"report.{name}", page.render(name, context))
    tables = f"{len(parts)} table{'s' * (len(parts) != 1)} of {options.output}"
    print_line(f"{tables}: {folder}/report.html, .md, .tex and .csv")


def _part(options: argparse.Namespace, folder: Path, result: Result, tests: PairedTests) -> Part:
    """What there is to say of one plan."""
    drawn = [] if options.no_figures else _figures(options, result, folder / "figures")
    orderings = [ordering.describe(result, column, tests) for column in result.table.columns]
    return Part(
        name=result.plan.name,
        table=result.table,
        warning=conditions.warning(result),
        remark="" if result.whole else conditions.not_it(result),
        data=conditions.data(result),
        papers=conditions.papers(result),
        conditions=conditions.describe(result),
        settings=conditions.settings(result),
        tables=page.make(result),
        remarks=[*filter(None, orderings), *conditions.sweeps(result), *_tests(result, tests)],
        figures=drawn,
    )


def _tests(result: Result, tests: PairedTests) -> List[str]:
    """Which test the p-values are of, and what it could find; nothing where there are no values."""
    tested = [line for line in result.lines if line.comparison.p]
    found = []
    if tested and result.test == "welch":
        found = [f"p: Welch's t-test over seeds, two-sided (scipy {scipy.__version__})."]
    elif tested:
        seeds = ", one for each seed in common" if any(len(line.comparison.p) > 1 for line in tested) else ""
        chance = "its chance is in the test sentences, not in the seeds"
        found = [f"p: {tests.name(result.test)}, of {result.table.metric} on the same test set{seeds}; {chance}."]
    return [*found, *filter(None, [numbers.power(result)])]


def _figures(options: argparse.Namespace, result: Result, folder: Path) -> List[Figure]:
    """What is drawn of a table with finished runs: for a figure of the paper that first."""
    table = result.table
    if not any(line.values for line in result.lines):
        return []
    stem = figures.draw(result, folder / result.plan.name)
    about = "Large points: means and standard deviations over seeds; small ones: the seeds; open ones: one seed."
    own = Figure(stem, f"{table.metric} of every row", about, f"{table.title}: the values of the table")
    drawn = analyses.draw(result, folder, options.examples)
    return [*drawn[:1], own, *drawn[1:]] if table.figure else [own, *drawn]


def _heading(parts: List[Part]) -> str:
    """Of the whole report: the paper's only where all tables are."""
    if all(part.table.source.startswith(PAPER) for part in parts):
        return "The paper's tables from these runs"
    return parts[0].table.title if len(parts) == 1 else "Tables from these runs"


def _idle(options: argparse.Namespace, planned: Any) -> List[Tuple[Table, str]]:
    """The tables of --experiments without a plan, each with the command that would run it."""
    if options.experiments == loading.FOLDER and not loading.FOLDER.is_dir():  # installed without the repository
        return []
    where = "" if options.output == DEFAULT.resolve() else f" --output {shlex.quote(str(options.output))}"
    if options.experiments != loading.FOLDER:
        where += f" --experiments {shlex.quote(str(options.experiments))}"
    return [
        (table, f"python scripts/reproduce.py run {shlex.quote(name)}{where}")
        for name, table in loading.load_all(options.experiments, warn).items()
        if name not in planned
    ]


DEFINITIONS = [
    "ours: mean \u00b1 sample standard deviation over the seeds that are finished; n: how many those are.",
    "paper: as reported there; ours \u2212 paper stands only where data, length and options are the paper's.",
    "ours \u2212 a row: the difference of the means of finished seeds, to the baseline row in the same column.",
    f"p: of that difference, not corrected for the number of rows; p, Holm: corrected for it, with * where it is below"
    f" {LEVEL}.",
    "chosen: the values of a sweep that did best on the held-out set.",
    "The best value of a column is bold, the paper's among the paper's. The baseline's row is marked.",
    "A row that is the same network as another one shows the same runs.",
]
