"""Write the tables of all rules into docs/studies/rivals-table.md and lm-rivals-table.md.

    python experiments/page_tables.py          # rewrites the tables
    python experiments/page_tables.py --check  # names the lines that are out of date, status 1

They are made of results/rivals.csv and results/lm_rivals.csv, of the rows with every seed that was
planned; differences from pre-norm are those of results/forest_rivals.csv and forest_lm_rivals.csv
(``forest.py``). On a page, a table is below the line ``<!-- page_tables.py: NAME -->``.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

import pandas

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.tools.report.reading import Line, read_rows
from fairseq_rskip.tools.report.sweep import listed

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- page_tables.py: {} -->"
DECIMALS = 3


def finished(name: str) -> dict[str, Line]:
    """The rows of results/NAME.csv with every planned seed, by label, the lowest loss first."""
    rows = read_rows(ROOT / "results" / f"{name}.csv")
    whole = [line for line in rows.values() if line.is_whole]
    return {line.row: line for line in sorted(whole, key=shown_mean)}


def shown_mean(line: Line) -> float:
    """The mean as the page has it."""
    return round(line.mean, DECIMALS)


def ranks_of(lines: list[Line]) -> pandas.Series:
    """The rank of each row, by its label, among ``lines``; equal means share one."""
    return pandas.Series({line.row: shown_mean(line) for line in lines}).rank()


def to_pre_norm(name: str) -> dict[str, str]:
    """Label -> the difference from pre-norm with its interval, of results/forest_NAME.csv."""
    forest = pandas.read_csv(ROOT / "results" / f"forest_{name}.csv")
    return {
        row["row"]: interval(row["difference"], (row["low"], row["high"]))
        for _, row in forest.iterrows()
    }


def translation() -> list[list[str]]:
    """The header and a line for each rule in translation."""
    pre_norm = to_pre_norm("rivals")
    lines = [
        [
            "",
            "y",
            "valid loss, bits",
            "to pre-norm (95 %)",
            "to 1xSkip+LN (95 %)",
            "p, Holm",
            "learning rate",
        ]
    ]
    for label, row in finished("rivals").items():
        line = [label, row.equation, loss(row), pre_norm.get(label, "")]
        lines.append([*line, difference(row), p_value(row), rate(row)])
    return lines


def language_model() -> list[list[str]]:
    """The header and a line for each rule in the language model; ranks are among rules in both."""
    here, there = finished("lm_rivals"), finished("rivals")
    both = [label for label in here if label in there]
    ranks = ranks_of([here[label] for label in both])
    ranks_there = ranks_of([there[label] for label in both])
    pre_norm = to_pre_norm("lm_rivals")

    lines = [
        [
            "",
            "language model, bits",
            "rate",
            "to pre-norm (95 %)",
            "to 1xSkip+LN (95 %)",
            "p, Holm",
            "rank",
            "translation, bits",
            "rank",
        ]
    ]
    for label in both:
        row = here[label]
        line = [label, loss(row), rate(row), pre_norm.get(label, "")]
        line += [difference(row), p_value(row), f"{ranks[label]:g}"]
        line += [f"{shown_mean(there[label]):.{DECIMALS}f}", f"{ranks_there[label]:g}"]
        lines.append(line)
    return lines


def loss(row: Line) -> str:
    return f"{shown_mean(row):.{DECIMALS}f} ± {row.deviation:.{DECIMALS}f}"


def difference(row: Line) -> str:
    """The difference from the baseline with its interval; "" in the baseline's own row."""
    if row.difference is None or row.interval is None:
        return ""
    return interval(row.difference, row.interval)


def interval(middle: float, ends: tuple[float, float]) -> str:
    """``middle`` with the two ends of its interval."""
    low, high = ends
    return f"{signed(middle)} ({signed(low)} to {signed(high)})"


def signed(value: float) -> str:
    return f"{value:+.{DECIMALS}f}".replace("-", "−")


def p_value(row: Line) -> str:
    if not row.p_holm:
        return ""
    p = float(row.p_holm)
    return f"{p:.3f}" if p >= 0.001 else "below 0.001"


def rate(row: Line) -> str:
    return listed(row.chosen).removeprefix("lr ")


# page -> the name of its table, and what makes it
PAGES: dict[str, tuple[str, Callable[[], list[list[str]]]]] = {
    "docs/studies/rivals-table.md": ("translation", translation),
    "docs/studies/lm-rivals-table.md": ("language model", language_model),
}


def in_markdown(lines: list[list[str]]) -> list[str]:
    """The header, a rule below it, and the other lines."""
    header, *rows = (f"| {' | '.join(line)} |" for line in lines)
    return [header, "|---" * len(lines[0]) + "|", *rows]


def replaced(page: str, name: str, table: list[str]) -> str:
    """The text ``page`` with ``table`` in place of the one below its mark. Raises ``UserError``."""
    lines = page.split("\n")
    mark = MARK.format(name)
    if mark not in lines:
        raise UserError(f"the page has no line {mark}")
    start = lines.index(mark) + 2  # a blank line after the mark
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:start], *table, *lines[end:]])


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()

    stale = []
    for file, (name, make) in PAGES.items():
        path = ROOT / file
        before = path.read_text("utf-8")
        after = replaced(before, name, in_markdown(make()))
        if options.check:
            for line in difflib.ndiff(before.splitlines(), after.splitlines()):
                if line[0] in "+-":  # a line of the new table, or of the page alone
                    stale.append(f"{file}: {line}")
        else:
            write_text(path, after)
    for line in stale:
        print_line(f"out of date: {line}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
