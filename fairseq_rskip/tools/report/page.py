"""The report as Markdown, LaTeX and HTML: each table as text, which templates/ sets, and tabulate in Markdown."""

import base64
import os
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
from tabulate import tabulate

from fairseq_rskip.analysis.figures import DPI
from fairseq_rskip.tools.reproduce.runs import BROKEN, DONE

from .conditions import papers_data
from .numbers import Line, Result, options
from .significance import LEVEL

TEMPLATES = Path(__file__).resolve().parent / "templates"
MINUS = "\u2212"
TEXT = ("column", "row", "equation")  # headers of what is no number
LISTED = 8  # so many rows that lack runs are named
LATEX = str.maketrans(  # quotation marks, dashes and accents need nothing: LaTeX reads UTF-8
    {
        **{sign: f"\\{sign}" for sign in "{}$&#%_"},
        **{sign: f"{{{sign}}}" for sign in "[]*"},  # after \\ they would be its arguments
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''"},
        **{"<": "$<$", ">": "$>$", "|": "$|$", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u00d7": r"$\times$"},
        **{"\u2299": r"$\odot$", "\u221e": r"$\infty$", "\u221a": r"$\surd$", "\u2264": r"$\leq$", "\u2265": r"$\geq$"},
        **{"\u03b1": r"$\alpha$", "\u03b2": r"$\beta$", "\u03b3": r"$\gamma$", "\u03b5": r"$\epsilon$"},
        **{"\u03bb": r"$\lambda$", "\u03bc": r"$\mu$", "\u03c3": r"$\sigma$", "\u03c4": r"$\tau$"},
        **{"\u03c9": r"$\omega$", "\u0394": r"$\Delta$", "\u03a3": r"$\Sigma$", "\u2016": r"$\Vert$"},
    }
)
STARS = {"best": "**", "missing": "*", "": ""}
LATEX_TAGS = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
LATEX_TAGS.update(variable_end_string=">>", comment_start_string="<#", comment_end_string="#>")


class Cell(NamedTuple):
    """What stands in a table; ``mark`` is "best", "missing" for what is no value, or ""."""

    text: str
    mark: str = ""


class Shown(NamedTuple):
    """A table as text: a cell for each header in every row; ``bases`` are the rows that others are compared with."""

    headers: list[str]
    rows: list[list[Cell]]
    bases: list[bool]

    @property
    def sides(self) -> list[str]:
        return ["left" if name in TEXT else "right" for name in self.headers]

    def markdown(self) -> "Raw":
        rows = [[f"{STARS[cell.mark]}{markdown(cell.text)}{STARS[cell.mark]}" for cell in row] for row in self.rows]
        headers = list(map(markdown, self.headers))
        return Raw(tabulate(rows, headers, tablefmt="pipe", colalign=self.sides, disable_numparse=True))


def show(result: Result) -> Shown:
    """The table of ``result``; a header of which no row has anything is left out, a column's name stands once."""
    texts = [_texts(result, line) for line in result.lines]
    headers = [name for name in texts[0] if any(text[name] for text in texts)]
    rows, column = [], None
    for line, text in zip(result.lines, texts):
        text["column"] = "" if line.cell.column == column else line.cell.column
        column = line.cell.column
        marks = {
            "ours": "best" if line.best else "" if line.values else "missing",
            "p": "missing" if line.comparison.reason else "",
            paper_header(result): "best" if line.best_paper else "",
        }
        rows.append([Cell(text[name], marks.get(name, "")) for name in headers])
    return Shown(headers, rows, [line.is_base for line in result.lines])


def paper_header(result: Result) -> str:
    """What the column of the paper's values is called."""
    source = "paper" if result.table.source else "reported"
    return source if result.whole else f"{source} (full scale, {papers_data(result)})"


def _texts(result: Result, line: Line) -> dict[str, str]:
    """A line of the table by its headers."""
    table, cell, bases = result.table, line.cell, {each.baseline for each in result.lines if each.baseline}
    digits = digits_of(table.metric)
    base = bases.pop() if len(bases) == 1 else "its baseline"
    base = f"({base})" if " + " in base else base  # Table 3's "x + F"
    minus_base = "baseline" if line.is_base and not line.baseline else signed(line.minus_baseline, digits)
    unfinished = line.state if line.planned or line.missing else "quoted"
    return {
        "column": cell.column,
        "row": cell.row,
        "equation": line.equation,
        "ours": spread(list(line.values.values()), digits) or unfinished,
        "n": count(line),
        **{name: spread(line.other(name), digits_of(name)) for name in table.also},
        "chosen": options(line.chosen),
        paper_header(result): "" if cell.reported is None else f"{cell.reported:.{digits}f}",
        f"ours {MINUS} {'paper' if table.source else 'reported'}": signed(line.minus_paper, digits),
        f"ours {MINUS} {base}": minus_base,
        "p": _p_values(line, line.comparison.p, False) or line.comparison.reason,
        "p, Holm": _p_values(line, line.adjusted, True),
    }


def digits_of(metric: str) -> int:
    """After the point: rules differ by hundredths of a loss."""
    return 3 if "loss" in metric else 2


def spread(values: list[float], digits: int) -> str:
    """The mean of ``values``, and their standard deviation if there are several."""
    mean = f"{statistics.fmean(values):.{digits}f}" if values else ""
    return mean + (f" \u00b1 {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def count(line: Line) -> str:
    """How many seeds are finished, and of how many where that is not all."""
    if not line.planned:
        return ""
    return str(line.planned) if len(line.values) == line.planned else f"{len(line.values)} of {line.planned}"


def signed(value: float | None, digits: int) -> str:
    """``value`` with its sign; "" for None."""
    if value is None:
        return ""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def _p_values(line: Line, p: Mapping[str, float], mark: bool) -> str:
    """One after the other, in the order of the seeds, which are named where the row has several."""
    found = []
    for seed, value in sorted(p.items(), key=lambda pair: int(pair[0] or 0)):
        name = f"seed {seed}: " if seed and len(line.values) > 1 else ""
        text = "< 0.001" if value < 0.001 else f"{value:.3f}"
        found.append(f"{name}{text}{' *' if mark and value < LEVEL else ''}")
    return ", ".join(found)


def idle(result: Result) -> list[str]:
    """A sentence for each column of which rows have no run yet: how many, and which if they are few."""
    found, rows = [], sum(row.run for row in result.table.rows)
    for column, labels in result.idle.items():
        told = f"{len(labels)} of {rows} rows"
        told += f" ({', '.join(labels)})" if len(labels) <= LISTED else ""
        told += "; the baseline is one of them: nothing is compared" if result.table.baseline in labels else ""
        told = f"all {rows} rows" if len(labels) == rows else told
        found.append(f"Not run yet{f', {column}' if column else ''}: {told}.")
    return found


def record(result: Result, line: Line) -> dict[str, Any]:
    """A row of the CSV file, with every digit."""
    table, plan, others = result.table, result.plan, {name: line.other(name) for name in result.table.also}
    tested = "over seeds" if result.test == "welch" else "on the test set"
    swept = [(options(t.swept), t.state if t.value is None else repr(t.value)) for t in line.outcome.trials]
    return {
        "plan": plan.name,
        "table": table.name,
        "column": line.cell.column,
        "row": line.cell.row,
        "equation": line.equation,
        "metric": table.metric,
        "papers_experiment": result.whole and bool(table.source),
        "data": " / ".join(result.data),
        "scale": plan.scale,
        "length": result.length,
        "changed": options({**plan.changed, **plan.stand_in}),
        "outdated": str(line.cell) in result.outdated,
        "swept": "; ".join(map(": ".join, swept)),
        "chosen": options(line.chosen),
        "seeds_planned": line.planned,
        "seeds_done": len(line.values),
        "values_by_seed": by_seed(line.values),
        "mean": line.mean,
        "standard_deviation": line.deviation,
        **{name: statistics.fmean(values) if values else None for name, values in others.items()},
        "state": line.missing or ("done" if line.values else "quoted"),
        "paper": line.cell.reported,
        "papers_data": table.columns[line.cell.column].data or table.data,
        "ours_minus_paper": line.minus_paper,
        "baseline": line.baseline,
        "ours_minus_baseline": line.minus_baseline,
        "test": tested if line.comparison.p else line.comparison.reason,
        "untested": "; ".join(f"seed {seed}: {reason}" for seed, reason in line.comparison.untested.items()),
        "p": by_seed(line.comparison.p),
        "p_holm": by_seed(line.adjusted),
    }


def by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())


def notes(lines: list[Line]) -> list[str]:
    """What the table has no room for: why seeds are missing, rows with the same reason together, or not tested."""
    rows: dict[str, list[str]] = {}
    for line in lines:
        if line.missing and (line.values or line.missing != line.state):
            rows.setdefault(line.missing, []).append(str(line.cell))
    untested = [(line.cell, seed, why) for line in lines for seed, why in line.comparison.untested.items()]
    missing = []
    for why, labels in rows.items():
        few = len(labels) <= LISTED or BROKEN in why
        missing.append(f"{', '.join(labels) if few else f'{len(labels)} of these rows'}: {why}.")
    return [*missing, *(f"{cell}: seed {seed} not tested: {why}." for cell, seed, why in untested)]


def progress(results: list[Result]) -> str:
    """How many tables there are, and how many of their runs are finished, or in another state, as a sentence."""
    outcomes = [line.outcome for result in results for line in result.lines]
    states = {run.folder: each.states[seed].name for each in outcomes for seed, run in each.runs.items()}
    counts = Counter({"finished": 0, BROKEN: 0})
    counts.update("finished" if name == DONE else name for name in states.values())
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{_counted(len(results), 'table')}, {_counted(len(states), 'run')}: {listed}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class Raw(str):
    """Text that is to be printed as it is."""


def latex(text: Any) -> Raw:
    """One line of text for LaTeX; letters that it lacks stay, which inputenc or XeLaTeX may know."""
    return text if isinstance(text, Raw) else Raw(_line(text).translate(LATEX))


def markdown(text: Any) -> Raw:
    """One line of text for GitHub's Markdown, in and out of tables."""
    if isinstance(text, Raw):
        return text
    return Raw(re.sub(r"([\\`*_\[\]|$~#])", r"\\\1", _line(text)).replace("&", "&amp;").replace("<", "&lt;"))


def _line(text: Any) -> str:
    """``text`` on one line, without surrounding space."""
    return " ".join(_plain(text).split())


def _plain(text: Any) -> str:
    """``text`` without line breaks, a terminal's colours and other control characters."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text))
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", text)


def _html(text: Any) -> Any:
    """Text for HTML; Jinja2 escapes it."""
    return _plain(text) if type(text) is str else text


def _data_link(path: Path, kind: str) -> Raw:
    """The file as a ``data:`` link."""
    return Raw(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")


def _width(path: Path) -> int:
    """How wide to show a PNG file of 150 dots an inch, in CSS's pixels of 96 an inch."""
    with open(path, "rb") as file:
        return round(int.from_bytes(file.read(20)[16:], "big") * 96 / DPI)


def _anchor(name: str) -> Raw:
    """A name for an HTML id, or a LaTeX label, that needs no escape."""
    return Raw(re.sub(r"[^A-Za-z0-9.-]", "-", name))


def _relative(path: Path, folder: Path) -> Raw:
    """The way from ``folder`` to a file, as a link's target."""
    return Raw(quote(os.path.relpath(path, folder)))


def render(name: str, context: dict[str, Any]) -> str:
    """Fill the template ``report.<name>.j2``; ``name`` is md, tex or html."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATES)),
        undefined=jinja2.StrictUndefined,
        autoescape=name == "html",
        finalize={"md": markdown, "tex": latex, "html": _html}[name],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(LATEX_TAGS if name == "tex" else {}),
    )
    environment.filters.update(raw=Raw, link=_data_link, width=_width, anchor=_anchor, relative=_relative)
    return re.sub(r"\n{3,}", "\n\n", environment.get_template(f"report.{name}.j2").render(context))
