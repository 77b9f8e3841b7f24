"""Write the report of tables: Markdown, CSV and one self-contained page."""

import argparse
import base64
import logging
from pathlib import Path
from typing import Any

import jinja2
import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import print_line
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools.experiments.plan import collect, described
from fairseq_rskip.tools.experiments.records import Table
from fairseq_rskip.tools.significance import TESTS

from . import figures, page
from .compare import PAIRED, compare, power, test_of


def write_report(tables: list[Table], options: argparse.Namespace) -> None:
    """Write report.html, report.md, report.csv and figures/ of ``tables``, and print their tables."""
    for name in ("fontTools", "sacrebleu"):
        logging.getLogger(name).setLevel(logging.WARNING)
    folder = options.output / "report"
    with locked(folder, wait=True):
        parts = [_part(table, options, folder) for table in tables]
        template = Path(__file__).with_name("report.html.j2").read_text("utf-8")
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters["png"] = lambda path: base64.b64encode(path.read_bytes()).decode()
        write_text(folder / "report.html", environment.from_string(template).render(parts=parts))
        write_text(folder / "report.md", "\n\n".join(map(_markdown, parts)) + "\n")
        records = [record for part in parts for record in part["records"]]
        names = dict.fromkeys(name for record in records for name in record)
        write_csv(folder / "report.csv", [{name: record.get(name) for name in names} for record in records])
    for part in parts:
        print_line(f"{part['name']}: {part['table'].title}\n{part['frame'].to_string(index=False)}")
    print_line(f"{folder}/report.html, report.md and report.csv")


def _part(table: Table, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a report says of one table."""
    name, scale, data, changed = described(table)
    lines = compare(table, [collect(table, cell, options.output) for cell in table.cells])
    differs = ", ".join(filter(None, [data, f"{scale:g} of the length" * (scale != 1), page.listed(changed)]))
    notes = [*page.notes(table, lines), power(lines, table.metric)]
    test = f"Welch's t-test, two-sided, over seeds (scipy {scipy.__version__})"
    if test_of(table) in PAIRED:
        test = f"{TESTS[PAIRED[test_of(table)][0]]}; it covers the choice of test sentences, not of seeds"
    notes += [f"p: {test}. Bold: the best, if Holm's p of the difference is below 0.05."] * any(x.p for x in lines)
    first = [(str(x.cell), next(iter(x.records.values()), {}).get("examples")) for x in lines]
    return {
        "name": name,
        "table": table,
        "warning": f"Not the {'published' if table.source else 'whole'} experiment: {differs}." if differs else "",
        "frame": (shown := page.frame(table, lines)),
        "sides": ["left" if column in ("column", "row", "equation") else "right" for column in shown],
        "bases": [line.is_baseline for line in lines],
        "notes": list(filter(None, notes)),
        "facts": page.facts(table, lines),
        "figures": [] if options.no_figures else figures.draw(table, name, lines, folder / "figures"),
        "examples": [(row, examples) for row, examples in first if examples],
        "records": [page.record(table, line) for line in lines],
    }


def _markdown(part: dict[str, Any]) -> str:
    shown = part["frame"].map(page.markdown).rename(columns=page.markdown)
    table = shown.to_markdown(index=False, colalign=part["sides"], disable_numparse=True)
    lines = [part["table"].source, part["table"].note, part["warning"], *part["notes"]]
    listed = [f"{name}: {value}" for name, value in part["facts"].items()]
    listed += [f"{row}, {k}: {v}" for row, found in part["examples"] for each in found for k, v in each.items()]
    drawn = [f"![{figure.title}]({figure.link})" for figure in part["figures"] if not figure.problem]
    title = f"# {page.markdown(part['name'])}: {page.markdown(part['table'].title)}"
    facts = "\n".join(f"- {page.markdown(each)}" for each in listed)
    return "\n\n".join([title, table, *map(page.markdown, filter(None, lines)), facts, *drawn])
