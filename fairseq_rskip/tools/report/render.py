"""The report as Markdown, LaTeX and HTML: templates/ says what stands where, what is printed is escaped for each."""

import base64
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict
from urllib.parse import quote

from fairseq_rskip.analysis.figures import DPI
from fairseq_rskip.errors import UserError

TEMPLATES = Path(__file__).resolve().parent / "templates"

LATEX = {
    **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    **{sign: f"{{{sign}}}" for sign in "[]*"},  # after \\ they would be its arguments
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''"},
    **{"<": "$<$", ">": "$>$", "|": "$|$", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u00d7": r"$\times$"},
    **{"\u2299": r"$\odot$", "\u00b7": r"$\cdot$", "\u2026": r"\ldots{}", "\u2013": "--", "\u2014": "---"},
    **{"\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "''", "\u00a0": "~", "\u221e": r"$\infty$"},
    **{"\u2264": r"$\leq$", "\u2265": r"$\geq$", "\u00b2": "$^2$", "\u03b1": r"$\alpha$", "\u03b2": r"$\beta$"},
    **{"\u03b3": r"$\gamma$", "\u03b5": r"$\epsilon$", "\u03bb": r"$\lambda$", "\u03bc": r"$\mu$"},
    **{"\u03c3": r"$\sigma$", "\u03c4": r"$\tau$", "\u0394": r"$\Delta$", "\u03a3": r"$\Sigma$"},
}
ENDS = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
ENDS.update(variable_end_string=">>", comment_start_string="<#", comment_end_string="#>")


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


def html(text: Any) -> Any:
    """Text for HTML; Jinja2 escapes it."""
    return _plain(text) if type(text) is str else text


def breakable(text: Any) -> Any:
    """Text for HTML that may be broken after the strokes of sacreBLEU's signatures, not within their words."""
    from markupsafe import Markup, escape

    return Markup("|<wbr>").join(map(escape, _plain(text).split("|")))


def data_link(path: Path, kind: str) -> Raw:
    """The file as a ``data:`` link."""
    return Raw(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")


def width(path: Path) -> int:
    """How wide to show a PNG file of 150 dots an inch, in CSS's pixels of 96 an inch."""
    with open(path, "rb") as file:
        return round(int.from_bytes(file.read(20)[16:], "big") * 96 / DPI)


def render(name: str, context: Dict[str, Any]) -> str:
    """Fill the template ``report.<name>.j2``; ``name`` is md, tex or html. Raises ``UserError`` without Jinja2."""
    try:
        import jinja2
    except ImportError:
        raise UserError("reports need Jinja2: pip install Jinja2") from None
    escapes: Dict[str, Callable[[Any], Any]] = {"md": markdown, "tex": latex, "html": html}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(TEMPLATES)),
        undefined=jinja2.StrictUndefined,
        autoescape=name == "html",
        finalize=escapes[name],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **(ENDS if name == "tex" else {}),
    )
    environment.filters.update(
        raw=Raw,
        breakable=breakable,
        cell=markdown,
        tex=latex,
        link=data_link,
        width=width,
        anchor=_anchor,
        relative=_relative,
    )
    text = environment.get_template(f"report.{name}.j2").render(context)
    return re.sub(r"\n{3,}", "\n\n", text)


def _anchor(name: str) -> Raw:
    """A name for an HTML id, or a LaTeX label, that needs no escape."""
    return Raw(re.sub(r"[^A-Za-z0-9.-]", "-", name))


def _relative(path: Path, folder: Path) -> Raw:
    """The way from ``folder`` to a file, as a link's target."""
    return Raw(quote(os.path.relpath(path, folder)))
