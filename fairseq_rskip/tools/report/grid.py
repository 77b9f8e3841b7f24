"""A table as cells of text, ready to print in any format, and as rows of a CSV file with every digit."""

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from fairseq_rskip.tools.report import conditions
from fairseq_rskip.tools.report.model import Group, Line
from fairseq_rskip.tools.report.significance import LEVEL
from fairseq_rskip.tools.reproduce.results import TableResult

MINUS = "\u2212"
FAMILIES = {"images": "over seeds", "translation": "on the test set"}


@dataclass(frozen=True)
class Cell:
    """``short`` is for narrow pages, in place of ``text``; ``missing`` marks a reason where a number should be."""

    text: str
    bold: bool = False
    missing: bool = False
    number: bool = True
    short: str = ""


@dataclass(frozen=True)
class Row:
    cells: List[Cell]
    baseline: bool


@dataclass(frozen=True)
class Section:
    """The rows of one column of the table; ``title`` is "" where there is but one."""

    title: str
    rows: List[Row]


@dataclass(frozen=True)
class Grid:
    """``short_headers`` and ``long_notes`` are for narrow pages; without the notes short cells do not say enough."""

    headers: List[str]
    short_headers: List[str]
    sections: List[Section]
    notes: List[str]
    long_notes: List[str]


def make(result: TableResult, groups: List[Group]) -> Grid:
    """The table in cells; a column of which no row has anything is left out."""
    headers = _headers(result, groups)
    bases = [{line.baseline for line in group.lines} for group in groups]
    cells = [[_cells(line, line.label in base) for line in group.lines] for group, base in zip(groups, bases)]
    used = [any(row[i].text for rows in cells for row in rows) for i in range(len(headers))]
    sections = []
    for group, rows in zip(groups, cells):
        kept = [[cell for cell, use in zip(row, used) if use] for row in rows]
        is_base = [any(line.label == other.baseline for other in group.lines) for line in group.lines]
        sections.append(Section(group.title, [Row(*pair) for pair in zip(kept, is_base)]))
    shown = [name for name, use in zip(headers, used) if use]
    short = ["paper" if name.startswith("paper (") else name for name in shown]
    notes = _notes(groups, partial=True) + _untested(groups)
    return Grid(shown, short, sections, notes, _notes(groups, partial=False))


def _headers(result: TableResult, groups: List[Group]) -> List[str]:
    paper = "paper"
    if not result.whole:
        paper = f"paper ({conditions.papers(result)})"
    bases = sorted({line.baseline for group in groups for line in group.lines if line.baseline})
    baseline = bases[0] if len(bases) == 1 else "its baseline"
    if " + " in baseline:  # Table 3's "x + F"
        baseline = f"({baseline})"
    ours = f"ours {MINUS} "
    return ["row", "equation", "ours", "n", paper, f"{ours}paper", f"{ours}{baseline}", "p", "p, Holm"]


def _cells(line: Line, is_baseline: bool) -> List[Cell]:
    return [
        Cell(line.label, number=False),
        Cell(line.equation, number=False),
        _ours(line),
        Cell(count(line)),
        Cell("" if line.reported is None else f"{line.reported:.2f}", bold=line.best_reported),
        Cell(signed(line.minus_paper)),
        Cell(signed(line.minus_baseline) or ("baseline" if is_baseline and not line.baseline else "")),
        Cell(_p_values(line, line.comparison.p, False) or line.comparison.reason, missing=not line.comparison.p),
        Cell(_p_values(line, line.adjusted, True)),
    ]


def _ours(line: Line) -> Cell:
    if line.values:
        spread = "" if line.deviation is None else f" \u00b1 {line.deviation:.2f}"
        return Cell(f"{line.mean:.2f}{spread}", bold=line.best)
    if line.planned or line.missing:
        return Cell(line.missing, missing=True, short=line.states)
    return Cell("quoted", missing=True)


def count(line: Line) -> str:
    """How many seeds are finished, and of how many where that is not all."""
    if not line.planned:
        return ""
    return str(line.planned) if len(line.values) == line.planned else f"{len(line.values)} of {line.planned}"


def signed(value: Optional[float]) -> str:
    """Two digits after the point, with the sign; "" for None."""
    if value is None:
        return ""
    text = f"{value:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def _p_values(line: Line, p: Mapping[str, float], mark: bool) -> str:
    """One after the other, in the order of the seeds, which are named where the row has several."""
    told = []
    for seed in sorted(p, key=lambda seed: int(seed or 0)):
        name = f"seed {seed}: " if seed and len(line.values) > 1 else ""
        told.append(f"{name}{_p_value(p[seed])}{' *' if mark and p[seed] < LEVEL else ''}")
    return ", ".join(told)


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _notes(groups: List[Group], partial: bool) -> List[str]:
    """What is missing in rows that have a value of some seeds (``partial``), or have none and say why only in short."""
    rows: Dict[str, List[str]] = {}
    for line in (line for group in groups for line in group.lines):
        if line.missing and bool(line.values) == partial and (partial or line.missing != line.states):
            rows.setdefault(line.missing, []).append(line.label + (f" / {line.column}" if line.column else ""))
    return [f"{', '.join(labels)}: {missing}." for missing, labels in rows.items()]


def _untested(groups: List[Group]) -> List[str]:
    """The seeds of tested rows that could not be tested."""
    return [
        f"{line.label}{f' / {line.column}' if line.column else ''}: seed {seed} not tested: {reason}."
        for group in groups
        for line in group.lines
        for seed, reason in line.comparison.untested.items()
    ]


def records(result: TableResult, groups: List[Group]) -> List[Dict[str, Any]]:
    """One row a cell of the table."""
    return [_record(result, group, line) for group in groups for line in group.lines]


def _record(result: TableResult, group: Group, line: Line) -> Dict[str, Any]:
    table, plan = result.table, result.plan
    return {
        "plan": plan.name,
        "table": table.name,
        "column": group.title,
        "row": line.label,
        "equation": line.equation,
        "metric": table.metric,
        "papers_experiment": result.whole,
        "data": " / ".join(result.data),
        "scale": plan.scale,
        "length": " / ".join(result.length),
        "changed": conditions.options({**plan.changed, **plan.stand_in}),
        "outdated": " / ".join(filter(None, [line.label, group.title])) in result.outdated,
        "seeds_planned": line.planned,
        "seeds_done": len(line.values),
        "values_by_seed": _by_seed(line.values),
        "mean": line.mean,
        "standard_deviation": line.deviation,
        "state": line.missing or ("done" if line.values else "quoted"),
        "paper": line.reported,
        "papers_data": group.data,
        "ours_minus_paper": line.minus_paper,
        "baseline": line.baseline,
        "ours_minus_baseline": line.minus_baseline,
        "test": FAMILIES[table.task] if line.comparison.p else line.comparison.reason,
        "untested": "; ".join(f"seed {seed}: {reason}" for seed, reason in line.comparison.untested.items()),
        "p": _by_seed(line.comparison.p),
        "p_holm": _by_seed(line.adjusted),
    }


def _by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())
