"""A table of the report as text, as CSV, and the page: pandas sets tables, Jinja the page."""

import base64
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas

from fairseq_rskip.tools.experiments.plan import described, is_whole, replaced_data
from fairseq_rskip.tools.experiments.records import Result, Table, dashed
from fairseq_rskip.tools.experiments.results import at_border, read
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.significance import LEVEL

from .compare import missing

TEMPLATES = Path(__file__).resolve().parent
MINUS = "\u2212"


def frame(table: Table, lines: list[Result]) -> pandas.DataFrame:
    """The table as text; a column in which no row has anything is left out."""
    shown = pandas.DataFrame([_texts(table, line, lines) for line in lines])
    if "column" in shown:
        shown["column"] = shown["column"].mask(shown["column"].duplicated(), "")
    return shown.loc[:, (shown != "").any()]


def _texts(table: Table, line: Result, lines: list[Result]) -> dict[str, str]:
    digits, bases = digits_of(table.metric), {each.baseline for each in lines if each.baseline}
    reported = line.cell.reported
    records = [line.records[seed] for seed in line.values]
    ours = spread(list(line.values.values()), digits)
    ratio, parameters, seconds = (mean(each.get(key) for each in records) for key in ("length_ratio", "parameters", "seconds"))
    minus_paper = line.mean - reported if line.values and reported is not None and is_whole(table) else None
    return {
        "column": line.cell.column,
        "row": line.cell.row.label,
        "equation": line.cell.row.equation,
        table.metric: f"**{ours}**" if line.best else ours or missing(line)[1] or "quoted",
        "n": str(len(line.values)) + (f" of {len(line.runs)}" if len(line.values) < len(line.runs) else "") if line.runs else "",
        **{name: spread(line.also(name), digits_of(name)) for name in table.also},
        "length ratio": "" if ratio is None else f"{ratio:.3f}",
        "parameters": "" if parameters is None else f"{parameters:,.0f}",
        "minutes": "" if seconds is None else f"{seconds / 60:.1f}",
        "chosen": listed(line.chosen or {}),
        "published": "" if reported is None else f"{reported:.{digits}f}",
        f"{MINUS} published": signed(minus_paper, digits),
        f"{MINUS} {bases.copy().pop() if len(bases) == 1 else 'its baseline'}": (
            "baseline" if line.is_baseline and not line.baseline else signed(line.difference, digits)
        ),
        "p": _p_values(line, line.p, False) or line.untested.replace("needs 2 seeds", "one seed"),
        "p, Holm": _p_values(line, line.adjusted, True),
    }


def mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def digits_of(metric: str) -> int:
    """After the point: rules differ by hundredths of a loss."""
    return 3 if "loss" in metric else 2


def spread(values: list[float], digits: int) -> str:
    """The mean of ``values``, and their standard deviation if there are several."""
    text = f"{statistics.fmean(values):.{digits}f}" if values else ""
    return text + (f" \u00b1 {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def signed(value: float | None, digits: int) -> str:
    text = "" if value is None else f"{value:+.{digits}f}"
    return text.lstrip("+-") if text and float(text) == 0 else text.replace("-", MINUS)


def _p_values(line: Result, p: Mapping[str, float], mark: bool) -> str:
    """One after the other in the order of seeds, which are named; ``mark`` those below 0.05."""
    texts = {seed: "< 0.001" if value < 0.001 else f"{value:.3f}" for seed, value in p.items()}
    stars = {seed: " *" if mark and value < LEVEL else "" for seed, value in p.items()}
    return ", ".join(f"seed {seed}: {text}{stars[seed]}" if seed else text + stars[seed] for seed, text in texts.items())


def listed(options: Mapping[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def facts(table: Table, lines: list[Result]) -> dict[str, str]:
    """What the numbers were made with."""
    task = TASKS[table.task]
    metrics = [line.records[seed] for line in lines for seed in line.values]
    signatures = [each.get("signatures", {}).get(table.metric) for each in metrics]
    records = [read(folder) for line in lines for folder in line.folders]
    versions = {f"{name} {value}": 1 for each in records for name, value in each.get("versions", {}).items()}
    tried = {name: " / ".join(map(str, values)) for name, values in dashed(table.sweep).items()}
    sweep = f"{listed(tried)}; the best {task.held_out} of the first {len(table.tried)} seeds" if tried else ""
    found = {
        "metric": _each([table.metric, "lower is better" if task.metrics[table.metric] else "", *signatures], ", "),
        "data": _each(run.identity["data"] for cell in table.cells for _, run in cell.variants),
        "length of a run": length(table),
        "seeds": ", ".join(map(str, table.seeds)),
        "options of every row": listed(table.options),
        "set for every row": listed(table.changed),
        "evaluation": listed(table.evaluate),
        "sweep": sweep,
        "weights": _each(str(each.get("weights") or "").partition(":")[0] for each in metrics),
        "versions": ", ".join(versions),
        "commit": _each((each.get("git") or "")[:10] for each in records),
    }
    return {name: value for name, value in found.items() if value}


def _each(values: Iterable[Any], between: str = " / ") -> str:
    return between.join(dict.fromkeys(str(value) for value in values if value))


def length(table: Table) -> str:
    return _each(f"{run.length:,} {run.unit}" for cell in table.cells for _, run in cell.variants)


def settings(table: Table, lines: list[Result]) -> list[tuple[str, str]]:
    """What each row and column is made of."""
    found = [(name, listed(column.options)) for name, column in table.columns.items()]
    for row in dict.fromkeys(line.cell.row.label for line in lines if line.cell.run):
        cell = next(line.cell for line in lines if line.cell.row.label == row)
        arch = cell.row.arch if isinstance(cell.row.arch, str) else listed(cell.row.arch)
        found.append((row, ", ".join(filter(None, [arch, listed(cell.row.options)]))))
    return [(name, made_of) for name, made_of in found if made_of]


def notes(table: Table, lines: list[Result]) -> list[str]:
    """What the table has no room for: missing seeds, rows without runs, the values of sweeps."""
    shown, found = {(line.cell.row.label, line.cell.column) for line in lines}, []
    idle = [str(cell) for cell in table.cells if cell.run and (cell.row.label, cell.column) not in shown]
    for line in lines:
        why, short = missing(line)
        if why and (line.values or why != short):
            found.append(f"{line.cell}: {why}.")
    if idle:
        found.append(f"Not run yet: {', '.join(idle) if len(idle) < 9 else f'{len(idle)} cells'}.")
    for line in lines:
        if line.trials:
            tried = ", ".join(f"{listed(swept)}: {state if v is None else f'{v:.3f}'}" for swept, v, state in line.trials)
            chosen = f"chosen {listed(line.chosen)}" if line.chosen else "not decided yet"
            border = ", on the border of the sweep" if at_border(line) else ""
            found.append(f"Sweep of {line.cell}, {TASKS[table.task].held_out}: {tried}; {chosen}{border}.")
    return found


def warning(table: Table) -> str:
    """That these numbers are of another experiment than the file's; "" where they are not."""
    name, scale, changed = described(table)
    if is_whole(table):
        return ""
    parts = [replaced_data(table), f"{scale:g} of the length" if scale != 1 else "", listed(changed)]
    whose = "published experiment" if table.source else "file's experiment"
    return f"Not the {whose}: {', '.join(filter(None, parts))}."


def record(table: Table, line: Result, test: str) -> dict[str, Any]:
    """A row of the CSV file, with every digit."""
    name, scale, changed = described(table)
    reported, whole = line.cell.reported, is_whole(table)
    swept = [f"{listed(swept)}: {state if value is None else repr(value)}" for swept, value, state in line.trials]
    also = {metric: statistics.fmean(values) if (values := line.also(metric)) else None for metric in table.also}
    return {
        "plan": name,
        "table": table.name,
        "column": line.cell.column,
        "row": line.cell.row.label,
        "equation": line.cell.row.equation,
        "metric": table.metric,
        "papers_experiment": whole and bool(table.source),
        "data": _each(run.identity["data"] for cell in table.cells for _, run in cell.variants),
        "scale": scale,
        "length": length(table),
        "changed": listed(changed),
        "outdated": False,  # a column of earlier reports
        "swept": "; ".join(swept),
        "chosen": listed(line.chosen or {}),
        "seeds_planned": len(table.seeds) if line.cell.run else 0,
        "seeds_done": len(line.values),
        "values_by_seed": _by_seed(line.values),
        "mean": line.mean,
        "standard_deviation": line.deviation,
        **also,
        "state": missing(line)[0] or ("done" if line.values else "quoted"),
        "paper": reported,
        "papers_data": table.columns[line.cell.column].data or table.data,
        "ours_minus_paper": line.mean - reported if line.values and whole and reported is not None else None,
        "baseline": line.baseline,
        "ours_minus_baseline": line.difference,
        "test": ("over seeds" if test == "welch" else "on the test set") if line.p else line.untested,
        "untested": line.untested if line.p else "",
        "p": _by_seed(line.p),
        "p_holm": _by_seed(line.adjusted),
    }


def _by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())


def markdown(text: Any) -> str:
    """One line of text for Markdown, in and out of tables; a value that is bold stays bold."""
    return re.sub(r"([\\`_\[\]|$~#<]|(?<!\*)\*(?!\*))", r"\\\1", " ".join(str(text).split()))


def page(parts: list[dict[str, Any]], endings: str) -> str:
    """The page from its template."""
    loader = jinja2.FileSystemLoader(str(TEMPLATES))
    environment = jinja2.Environment(loader=loader, autoescape=endings == "html", trim_blocks=True, lstrip_blocks=True)
    environment.filters["png"] = lambda path: base64.b64encode(path.read_bytes()).decode()
    environment.filters["md"] = markdown
    text = environment.get_template(f"report.{endings}.j2").render(parts=parts, markdown=markdown)
    return re.sub(r"\n{3,}", "\n\n", text)
