"""The report as Markdown, LaTeX and HTML: one data frame of text for each table, and templates/ for what is around."""

import base64
import os
import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional
from urllib.parse import quote

import pandas as pd
from pandas.io.formats.style import Styler

from fairseq_rskip.analysis.figures import DPI
from fairseq_rskip.errors import UserError

from . import conditions
from .numbers import Line, Result, mean_of
from .significance import LEVEL

TEMPLATES = Path(__file__).resolve().parent / "templates"
MINUS = "\u2212"
TEXT = ("column", "row", "equation")  # headers of what is no number
LATEX = {
    **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    **{sign: f"{{{sign}}}" for sign in "[]*"},  # after \\ they would be its arguments
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''"},
    **{"<": "$<$", ">": "$>$", "|": "$|$", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u00d7": r"$\times$"},
    **{"\u2299": r"$\odot$", "\u00b7": r"$\cdot$", "\u2026": r"\ldots{}", "\u2013": "--", "\u2014": "---"},
    **{"\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "''", "\u00a0": "~", "\u221e": r"$\infty$"},
    **{"\u2264": r"$\leq$", "\u2265": r"$\geq$", "\u00b2": "$^2$", "\u03b1": r"$\alpha$", "\u03b2": r"$\beta$"},
    **{"\u03b3": r"$\gamma$", "\u03b5": r"$\epsilon$", "\u03bb": r"$\lambda$", "\u03bc": r"$\mu$"},
    **{"\u03c3": r"$\sigma$", "\u03c4": r"$\tau$", "\u03c9": r"$\omega$", "\u0394": r"$\Delta$", "\u03a3": r"$\Sigma$"},
    "\u221a": r"$\surd$",
}
CSS = {"best": "font-weight: bold;", "missing": "font-style: italic;"}
ENDS = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
ENDS.update(variable_end_string=">>", comment_start_string="<#", comment_end_string="#>")


class Tables(NamedTuple):
    """A table in the three formats; LaTeX's has short words where there is no number, ``notes`` say them in full."""

    md: str
    html: str
    tex: str
    notes: List[str]
    long_notes: List[str]


def make(result: Result) -> Tables:
    """The table of ``result``; a column of which no row has anything is left out."""
    paper = _headers(result)["paper"]
    text, short = (pd.DataFrame([_texts(result, line, narrow) for line in result.lines]) for narrow in (False, True))
    kept = [name for name in text if text[name].any()]
    marks = pd.DataFrame([_marks(result, line) for line in result.lines]).reindex(columns=kept, fill_value="")
    text, short = text[kept], short[kept].rename(columns={paper: paper.partition(" (")[0]})
    for frame in (text, short):
        if "column" in kept:
            frame["column"] = frame["column"].mask(frame["column"].duplicated(), "")
    latex_table = _latex_table(short, marks.set_axis(short.columns, axis=1))
    notes = _notes(result.lines, partial=True) + _untested(result.lines)
    tables = _markdown_table(text, marks), _html_table(text, marks), latex_table
    return Tables(*tables, notes, _notes(result.lines, partial=False))


def _headers(result: Result) -> Dict[str, str]:
    """The names of columns that depend on the table."""
    source = "paper" if result.table.source else "reported"
    bases = sorted({line.baseline for line in result.lines if line.baseline})
    baseline = bases[0] if len(bases) == 1 else "its baseline"
    baseline = f"({baseline})" if " + " in baseline else baseline  # Table 3's "x + F"
    paper = source if result.whole else f"{source} ({conditions.papers(result)})"
    return {"paper": paper, "minus_paper": f"ours {MINUS} {source}", "minus_baseline": f"ours {MINUS} {baseline}"}


def _texts(result: Result, line: Line, narrow: bool) -> Dict[str, str]:
    """A line of the table by its headers; ``narrow`` for LaTeX."""
    names, digits = _headers(result), digits_of(result.table.metric)
    ours = spread(line.mean, line.deviation, digits)
    if not line.values:
        ours = (line.states if narrow else line.missing) if line.planned or line.missing else "quoted"
    is_base = any(line.label == other.baseline for other in result.lines if other.column == line.column)
    return {
        "column": line.column,
        "row": line.label,
        "equation": line.equation,
        "ours": ours,
        "n": count(line),
        **{name: _also(line, name) for name in result.table.also},
        "chosen": conditions.options(line.chosen),
        names["paper"]: "" if line.paper is None else f"{line.paper:.{digits}f}",
        names["minus_paper"]: signed(line.minus_paper, digits),
        names["minus_baseline"]: signed(line.minus_baseline, digits)
        or ("baseline" if is_base and not line.baseline else ""),
        "p": _p_values(line, line.comparison.p, False) or line.comparison.reason,
        "p, Holm": _p_values(line, line.adjusted, True),
    }


def _marks(result: Result, line: Line) -> Dict[str, str]:
    """Classes of the line's cells that are not plain numbers."""
    is_base = any(line.label == other.baseline for other in result.lines if other.column == line.column)
    missing = "missing" + (" long" if len(line.missing) > 32 else "")
    return {
        "row": "label baseline" if is_base else "label",
        "ours": missing if not line.values else "best" if line.best else "",
        _headers(result)["paper"]: "best" if line.best_paper else "",
        "p": "missing" if line.comparison.reason else "",
    }


def digits_of(metric: str) -> int:
    """After the point: rules differ by hundredths of a loss."""
    return 3 if "loss" in metric else 2


def spread(mean: Optional[float], deviation: Optional[float], digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" \u00b1 {deviation:.{digits}f}")


def _also(line: Line, name: str) -> str:
    mean = mean_of(line, name)
    values = [metrics["values"].get(name) for metrics in line.metrics.values()]
    return spread(mean, pd.Series(values).std() if mean is not None and len(values) > 1 else None, digits_of(name))


def count(line: Line) -> str:
    """How many seeds are finished, and of how many where that is not all."""
    if not line.planned:
        return ""
    return str(line.planned) if len(line.values) == line.planned else f"{len(line.values)} of {line.planned}"


def signed(value: Optional[float], digits: int) -> str:
    """``value`` with its sign; "" for None."""
    if value is None:
        return ""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def _p_values(line: Line, p: Dict[str, float], mark: bool) -> str:
    """One after the other, in the order of the seeds, which are named where the row has several."""
    told = []
    for seed in sorted(p, key=lambda seed: int(seed or 0)):
        name = f"seed {seed}: " if seed and len(line.values) > 1 else ""
        value = "< 0.001" if p[seed] < 0.001 else f"{p[seed]:.3f}"
        told.append(f"{name}{value}{' *' if mark and p[seed] < LEVEL else ''}")
    return ", ".join(told)


def _notes(lines: List[Line], partial: bool) -> List[str]:
    """What is missing in rows that have a value of some seeds (``partial``), or have none and say why only in short."""
    rows: Dict[str, List[str]] = {}
    for line in lines:
        if line.missing and bool(line.values) == partial and (partial or line.missing != line.states):
            rows.setdefault(line.missing, []).append(line.label + (f" / {line.column}" if line.column else ""))
    return [f"{', '.join(labels)}: {missing}." for missing, labels in rows.items()]


def _untested(lines: List[Line]) -> List[str]:
    """The seeds of tested rows that could not be tested."""
    return [
        f"{line.label}{f' / {line.column}' if line.column else ''}: seed {seed} not tested: {reason}."
        for line in lines
        for seed, reason in line.comparison.untested.items()
    ]


def _markdown_table(text: pd.DataFrame, marks: pd.DataFrame) -> str:
    escaped = text.map(markdown)
    for name in text:
        wrap = marks[name].map(lambda mark: "**" if "best" in mark else "*" if "missing" in mark else "")
        escaped[name] = (wrap + escaped[name] + wrap).where(escaped[name] != "", "")
    sides = ["left" if name in TEXT else "right" for name in text]
    return escaped.rename(columns=markdown).to_markdown(index=False, disable_numparse=True, colalign=sides)


def _html_table(text: pd.DataFrame, marks: pd.DataFrame) -> str:
    """Head and body of the table, without pandas' own classes and with row headers."""
    numbers = pd.DataFrame({name: "" if name in TEXT else "number " for name in text}, index=text.index)
    style = Styler(text.map(_plain), uuid="table", cell_ids=False).hide(axis=0).set_td_classes(numbers + marks)
    body = re.search(r"<thead>.*</tbody>", style.format(escape="html").to_html(), re.DOTALL)[0]
    body = re.sub(r'class="data row\d+ col\d+ ?', 'class="', body)
    body = re.sub(r'<td class="(label.*?)" >(.*?)</td>', r'<th scope="row" class="\1">\2</th>', body)
    return re.sub(r'<th class="col_heading[^"]*" >(.*)</th>', _header_cell, body)


def _header_cell(found: "re.Match[str]") -> str:
    number = "" if found[1] in TEXT else ' class="number"'
    return f'<th scope="col"{number}>{found[1]}</th>'


def _latex_table(text: pd.DataFrame, marks: pd.DataFrame) -> str:
    sides = "".join("l" if name in TEXT else "r" for name in text)
    escaped = text.map(latex).rename(columns=latex)
    css = marks.map(lambda mark: next((css for name, css in CSS.items() if name in mark), ""))
    style = escaped.style.hide(axis=0).apply(lambda _: css.to_numpy(), axis=None)
    return style.to_latex(hrules=True, convert_css=True, column_format=sides).rstrip()


class Raw(str):
    """Text that is to be printed as it is."""


def latex(text: Any) -> Raw:
    """One line of text for LaTeX; letters that it lacks stay, which inputenc or XeLaTeX may know."""
    return text if isinstance(text, Raw) else Raw("".join(LATEX.get(sign, sign) for sign in _line(text)))


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


def _breakable(text: Any) -> Any:
    """Text for HTML that may be broken after the strokes of sacreBLEU's signatures, not within their words."""
    from markupsafe import Markup, escape

    return Markup("|<wbr>").join(map(escape, _plain(text).split("|")))


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


def render(name: str, context: Dict[str, Any]) -> str:
    """Fill the template ``report.<name>.j2``; ``name`` is md, tex or html. Raises ``UserError`` without Jinja2."""
    try:
        import jinja2
    except ImportError:
        raise UserError("reports need Jinja2: pip install Jinja2") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATES)),
        undefined=jinja2.StrictUndefined,
        autoescape=name == "html",
        finalize={"md": markdown, "tex": latex, "html": _html}[name],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(ENDS if name == "tex" else {}),
    )
    environment.filters.update(
        raw=Raw, breakable=_breakable, link=_data_link, width=_width, anchor=_anchor, relative=_relative
    )
    text = environment.get_template(f"report.{name}.j2").render(context)
    return re.sub(r"\n{3,}", "\n\n", text)
