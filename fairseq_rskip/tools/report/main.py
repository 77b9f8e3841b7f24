"""What ``reproduce.py report`` does: every plan's table with its figures, as Markdown, LaTeX, HTML and CSV."""

import argparse
import shlex
from pathlib import Path
from typing import Any

import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools.reproduce import loading, plans
from fairseq_rskip.tools.reproduce.main import warn
from fairseq_rskip.tools.reproduce.tables import Table

from . import conditions, figures, numbers, page
from .numbers import Result
from .significance import LEVEL, PairedTests

FORMATS = ("md", "tex", "html")
DEFAULT = Path("runs/paper")
PAPER = "Liu et al. 2020"
DEFINITIONS = [
    "ours: mean \u00b1 sample standard deviation over the seeds that are finished; n: how many those are.",
    "paper: as reported there; ours \u2212 paper stands only where data, length and options are the paper's.",
    "ours \u2212 a row: the difference of the means of finished seeds, to the baseline row in the same column.",
    "p: of that difference, not corrected for the number of rows; p, Holm: corrected for how many have been run, with"
    f" * where it is below {LEVEL}.",
    "chosen: the values of a sweep that did best on the held-out set.",
    "The best value of a column is bold, the paper's among the paper's. The baseline's row is marked.",
    "A row that is the same network as another one shows the same runs.",
]


def write_report(options: argparse.Namespace) -> None:
    """Write report.md, .tex, .html and .csv and the figures of all plans in ``options.output``.

    Raises ``UserError`` for a table of which nothing was run, a plan that cannot be read, or a folder not to be
    written to; nothing is written then.
    """
    made = plans.load_all(options.output)
    extra = figures.found(options.output / "figures")
    if not made and not extra:
        raise UserError(f"nothing has been run in {options.output}; expected the --output of a run")
    run = list(dict.fromkeys(plan.table.name for plan in made))
    listed = _tables(options)
    idle = {name: table for name, table in listed.items() if name not in run}
    for name in options.tables:
        if name not in run and name not in idle:
            raise UserError(f"no table named {name!r}; there are {', '.join([*run, *idle])}")
    order = [*listed, *run]
    made = sorted(made, key=lambda plan: order.index(plan.table.name))
    folder = (options.to.expanduser() if options.to else options.output / "report").resolve()
    with locked(folder, wait=True):
        tests = PairedTests(folder / "significance.json", options.test or "", options.resamples or 0)
        made = [plan for plan in made if plan.table.name in (options.tables or run)]
        results = [numbers.build(plan, plans.current_table(plan, warn), options.output, tests) for plan in made]
        parts = [_part(options, folder, result, tests) for result in results]
        context = {
            "parts": parts,
            "progress": page.progress(results),
            "heading": _heading([result.table for result in results]),
            "papers": _are_papers([result.table for result in results]),
            "idle": [(t, _command(options, t)) for name, t in idle.items() if name in (options.tables or idle)],
            "extra": [] if options.no_figures else extra,
            "csv": _write_records(results, folder / "report.csv"),
            "definitions": DEFINITIONS,
            "folder": folder,
        }
        for name in FORMATS:
            write_text(folder / f"report.{name}", page.render(name, context))
    tables = f"{len(parts)} table{'s' * (len(parts) != 1)} of {options.output}"
    print_line(f"{tables}: {folder}/report.html, .md, .tex and .csv")


def _part(options: argparse.Namespace, folder: Path, result: Result, tests: PairedTests) -> dict[str, Any]:
    """What the templates say of one plan."""
    orderings = [numbers.ordering(result, column, tests) for column in result.table.columns]
    remarks = [*page.idle(result), *page.notes(result.lines), *orderings, *conditions.sweeps(result)]
    remarks += [_test(result, tests), numbers.power(result)]
    return {
        "name": result.plan.name,
        "table": result.table,
        "warning": conditions.warning(result),
        "remark": conditions.not_it(result),
        "data": conditions.data(result),
        "conditions": conditions.describe(result),
        "settings": conditions.settings(result),
        "shown": page.show(result),
        "remarks": list(filter(None, remarks)),
        "figures": [] if options.no_figures else figures.draw(result, folder / "figures", options.examples),
    }


def _test(result: Result, tests: PairedTests) -> str:
    """Which test the p-values are of; "" where there are none."""
    tested = [line.comparison.p for line in result.lines if line.comparison.p]
    if not tested:
        return ""
    if result.test == "welch":
        return f"p: Welch's t-test over seeds, two-sided (scipy {scipy.__version__})."
    seeds = ", one for each seed in common" if max(map(len, tested)) > 1 else ""
    chance = "its chance is in the test sentences, not in the seeds"
    return f"p: {tests.name(result.test)}, of {result.table.metric} on the same test set{seeds}; {chance}."


def _write_records(results: list[Result], path: Path) -> Any:
    """Every number, as CSV; returns ``path``, or None where there is none."""
    records = [page.record(result, line) for result in results for line in result.lines]
    if not records:
        path.unlink(missing_ok=True)
        return None
    keys = dict.fromkeys(key for record in records for key in record)
    write_csv(path, [{key: record.get(key) for key in keys} for record in records])
    return path


def _heading(tables: list[Table]) -> str:
    """Of the whole report: the paper's only where all tables are."""
    if _are_papers(tables):
        return "The paper's tables from these runs"
    return tables[0].title if len(tables) == 1 else "Tables from these runs"


def _are_papers(tables: list[Table]) -> bool:
    return all(table.source.startswith(PAPER) for table in tables)


def _tables(options: argparse.Namespace) -> dict[str, Table]:
    """The tables of --experiments, by name."""
    if options.experiments == loading.FOLDER and not loading.FOLDER.is_dir():  # installed without the repository
        return {}
    return loading.load_all(options.experiments, warn)


def _command(options: argparse.Namespace, table: Table) -> str:
    """What would run ``table``."""
    words = ["rskip", "reproduce", "run", table.name]
    words += ["--output", str(options.output)] if options.output != DEFAULT.resolve() else []
    words += ["--experiments", str(options.experiments)] if options.experiments != loading.FOLDER else []
    return shlex.join(words)
