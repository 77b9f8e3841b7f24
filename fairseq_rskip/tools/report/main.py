"""Write the report of tables: Markdown, CSV and one self-contained page."""

import argparse
import logging
from pathlib import Path
from typing import Any

import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import print_line
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools.experiments.plan import described
from fairseq_rskip.tools.experiments.records import Table
from fairseq_rskip.tools.experiments.results import collect
from fairseq_rskip.tools.significance import TESTS

from . import figures, page
from .compare import KINDS, PairedTests, compare, power, test_of

LEFT = ("column", "row", "equation")


def write_report(tables: list[Table], options: argparse.Namespace) -> None:
    """Write report.html, report.md, report.csv and figures/ of ``tables``, and print their tables."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)
    folder = (options.to.expanduser() if options.to else options.output / "report").resolve()
    with locked(folder, wait=True):
        parts, records = [], []
        for table in tables:
            part, rows = _part(table, options, folder)
            parts.append(part)
            records += rows
        for ending in ("md", "html"):
            write_text(folder / f"report.{ending}", page.page(parts, ending))
        names = dict.fromkeys(key for record in records for key in record)
        write_csv(folder / "report.csv", [{name: record.get(name) for name in names} for record in records])
    for part in parts:
        print_line(f"{part['name']}: {part['table'].title}\n{part['frame'].to_string(index=False)}")
    print_line(f"{folder}/report.html, report.md and report.csv")


def _part(table: Table, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the templates say of one table, and its rows of the CSV file."""
    name, test = described(table)[0], test_of(table, options.test)
    tests = PairedTests(folder / "significance.json", test, options.resamples) if test in KINDS else None
    lines = compare(table, collect(table, options.output), tests)
    shown, drawn = page.frame(table, lines), []
    if not options.no_figures:
        drawn = figures.draw(table, name, lines, folder / "figures", options.examples)
    notes = [*page.notes(table, lines), power(lines, table.metric)]
    if any(line.p for line in lines):
        about = f"Welch's t-test, two-sided, over seeds (scipy {scipy.__version__})"
        if tests:
            about = f"{TESTS[tests.name]}, one for each seed; it covers the choice of test sentences, not of seeds"
        notes.append(f"p: {about}.")
    notes.append("Bold: the best of a column, if it differs from the baseline by Holm's p < 0.05.")
    examples = [(str(x.cell), r["examples"]) for x in lines for r in [*x.records.values()][:1] if r.get("examples")]
    part = {
        "name": name,
        "table": table,
        "warning": page.warning(table),
        "frame": shown,
        "sides": ["left" if column in LEFT else "right" for column in shown],
        "bases": [line.is_baseline for line in lines],
        "notes": list(filter(None, notes)),
        "facts": page.facts(table, lines),
        "settings": page.settings(table, lines),
        "figures": drawn,
        "examples": examples,
    }
    return part, [page.record(table, line, test) for line in lines]
