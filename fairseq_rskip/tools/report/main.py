"""Write the report of tables: Markdown, CSV and one self-contained page."""

import argparse
import base64
import logging
from pathlib import Path
from typing import Any

import jinja2
import scipy

from fairseq_rskip.analysis.figures import write_csv
from fairseq_rskip.console import as_words, checked, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_text
from fairseq_rskip.tools import analyze
from fairseq_rskip.tools.experiments.plan import collect, described
from fairseq_rskip.tools.experiments.records import Result, Table, dashed
from fairseq_rskip.tools.experiments.tasks import CHECKPOINTS, TASKS
from fairseq_rskip.tools.significance import PAIRED

from . import tables as page
from .tables import compare, power, test_of

TITLES = {"curves": "Learning curves", "course": "x:F, branch, gradient norm and λ during training"}
TITLES |= {"gradients": "Gradient norm at the output of every block", "ratio": "x:F in the output of every block"}


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
        print_line(f"{part['heading']}\n{part['frame'].to_string(index=False)}")
    print_line(f"{folder}/report.html, report.md and report.csv")


def _part(table: Table, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a report says of one table."""
    name, scale, data, changed = described(table)
    lines = compare(table, [collect(table, cell, options.output) for cell in table.cells])
    differs = ", ".join(filter(None, [data, f"{scale:g} of the length" * (scale != 1), page.listed(changed)]))
    notes = [*page.notes(table, lines), *(power(lines, column, table.metric) for column in table.columns)]
    test = f"Welch's t-test, two-sided, over seeds (scipy {scipy.__version__})"
    if test_of(table) == "randomisation":
        test = f"{PAIRED}; it covers the choice of test sentences, not of seeds"
    notes += [f"p: {test}. Bold: the best, if Holm's p of the difference is below 0.05."] * any(x.p for x in lines)
    first = [(str(x.cell), next(iter(x.records.values()), {}).get("examples")) for x in lines]
    return {
        "name": name,
        "heading": name if table.title == table.name else f"{name}: {table.title}",
        "table": table,
        "warning": f"Not the {'published' if table.source else 'whole'} experiment: {differs}." if differs else "",
        "frame": (shown := page.frame(table, lines)),
        "sides": ["left" if column in ("column", "row", "equation") else "right" for column in shown],
        "bases": [line.is_baseline for line in lines],
        "notes": list(filter(None, notes)),
        "facts": page.facts(table, lines),
        "figures": [] if options.no_figures else _figures(table, name, lines, folder / "figures"),
        "examples": [(row, examples) for row, examples in first if examples],
        "records": [page.record(table, line) for line in lines],
    }


def _markdown(part: dict[str, Any]) -> str:
    shown = part["frame"].map(page.markdown).rename(columns=page.markdown)
    table = shown.to_markdown(index=False, colalign=part["sides"], disable_numparse=True)
    lines = filter(None, [part["table"].source, part["table"].note, part["warning"], *part["notes"]])
    listed = [f"{name}: {value}" for name, value in part["facts"].items()]
    listed += [f"{row}, {k}: {v}" for row, examples in part["examples"] for each in examples for k, v in each.items()]
    drawn = ["![{title}]({link})".format(**figure) for figure in part["figures"] if not figure["problem"]]
    facts = "\n".join(f"- {page.markdown(each)}" for each in listed)
    return "\n\n".join([f"# {page.markdown(part['heading'])}", table, *map(page.markdown, lines), facts, *drawn])


def _figures(table: Table, name: str, lines: list[Result], folder: Path) -> list[dict[str, Any]]:
    """What ``rskip analyze`` draws of the finished runs: the figure that the table names, and learning curves."""
    drawn, lines = [], list({tuple(line.folders): line for line in reversed(lines) if line.values}.values())[::-1]
    for kind in dict.fromkeys(filter(None, (table.figure, "curves"))) if lines else ():
        of_logs = kind in ("curves", "course")  # the others need weights
        names, models = (CHECKPOINTS,) if of_logs else TASKS[table.task].weights, []
        for line in lines:
            for run in line.folders if of_logs else line.folders[:1]:
                model = next((run / each for each in names if (run / each).exists()), run)
                models.append(f"{str(line.cell).replace('=', ':')}={model}")
        options = table.figure_options if kind == (table.figure or "curves") else {}
        stem, problem = folder / f"{name}-{kind}", ""
        try:
            checked(analyze.run, [kind, "--output", str(stem), *as_words(dashed(options)), *models])
        except (UserError, OSError, ImportError) as error:
            problem = str(error).split("\n")[0]
        path = stem.with_name(f"{stem.name}.png")
        drawn.append({"title": TITLES[kind], "path": path, "link": f"figures/{path.name}", "problem": problem})
    return drawn
