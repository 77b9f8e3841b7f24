"""Differences between the rows of a table whose runs share seeds, with 95 % intervals.

``python experiments/seed_differences.py TABLE --runs runs/paper`` reads the finished runs of a
table, which are results/runs.tar.xz unpacked (docs/reproduce.md), and fits rule + seed for each
column (``SeedModel``). Where a sweep was tried in several commands, ``--rates`` takes each row's
learning rate from all of them, by the lowest loss of the table's first seed. ``--without`` leaves
rows out of the model.
"""

import itertools
from collections import defaultdict
from pathlib import Path

import pandas

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.tools.experiments import plan, results
from fairseq_rskip.tools.experiments.records import Experiment
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.significance import SeedModel, detectable, holm

Values = dict[int, float]  # by seed


def planned_table(table: str, selection: plan.Selection) -> Experiment:
    """The table with the data and the options of ``selection``. Raises ``UserError``."""
    (planned,) = plan.make_tables([table], selection)
    return planned


def read_runs(planned: Experiment, runs: Path) -> dict[str, dict[str, Values]]:
    """The values of each row with a finished run, by column; the same runs count once."""
    columns: dict[str, dict[str, Values]] = defaultdict(dict)
    seen = set()
    for cell in planned.cells:
        result = results.collect(planned, cell, runs)
        if not result.values:
            continue
        if (cell.column, result.runs_and_values) in seen:
            print_line(f"{cell.row.label}: the same runs as another row, left out")
            continue
        seen.add((cell.column, result.runs_and_values))
        columns[cell.column][cell.row.label] = result.values
    return columns


def best_rates(
    table: str, selection: plan.Selection, runs: Path, rates: list[str]
) -> dict[str, dict[str, Values]]:
    """As ``read_runs``, each row at the rate of the lowest value with the sweep's seed.

    Raises ``UserError`` for a table whose values are not those that decide a sweep.
    """
    columns: dict[str, dict[str, Values]] = defaultdict(dict)
    for rate in rates:
        changes = [*selection.changes, f"lr={rate}"]
        planned = planned_table(table, selection._replace(changes=changes))
        held_out = TASKS[planned.task].held_out
        if planned.metric != held_out:
            raise UserError(
                f"--rates chooses by {held_out}, and the metric of {table} is {planned.metric}; "
                "expected another table, or a 'sweep' in it"
            )
        seed = planned.sweep_seed
        for column, rows in read_runs(planned, runs).items():
            for label, values in rows.items():
                best = columns[column].get(label)
                if seed in values and (best is None or values[seed] < best[seed]):
                    columns[column][label] = values
    return columns


def leave_out(columns: dict[str, dict[str, Values]], without: list[str]) -> None:
    """Remove the rows ``without`` from each column. Raises ``UserError`` for one in none."""
    known = {row for rows in columns.values() for row in rows}
    for row in without:
        if row not in known:
            raise UserError(f"no finished row {row!r}; expected {', '.join(sorted(known))}")
        for rows in columns.values():
            rows.pop(row, None)


def differences(column: str, rows: dict[str, Values], against: list[str]) -> pandas.DataFrame:
    """One line for each pair of rows with two seeds or more.

    With ``against``, one for each row and each of these.

    ``p_pair_alone`` is the paired t-test of the two rows, which assumes nothing about the others
    and detects less.
    """
    rows = {label: values for label, values in rows.items() if len(values) > 1}
    model = SeedModel(rows)
    pairs = itertools.combinations(rows, 2)
    if against:
        pairs = [(row, base) for base in against for row in rows if row != base]
    lines = []
    for row, base in pairs:
        difference = model.difference(row, base)
        if difference is None:
            continue
        pair = SeedModel({row: rows[row], base: rows[base]}).difference(row, base)
        seeds = len(rows[row].keys() & rows[base].keys())
        lines.append(
            {
                "column": column,
                "row": row,
                "baseline": base,
                "difference": difference.value,
                "low": difference.low,
                "high": difference.high,
                "p": difference.p,
                "p_pair_alone": pair.p if pair else None,
                "seeds": seeds,
                "rows": len(rows),
            }
        )
    table = pandas.DataFrame(lines)
    if against and lines:
        table["p_holm"] = table.groupby("baseline")["p"].transform(lambda p: holm(p.tolist()))
    return table


def describe(column: str, rows: dict[str, Values]) -> str:
    """The residual and what it lets the seeds detect, one line."""
    rows = {label: values for label, values in rows.items() if len(values) > 1}
    model = SeedModel(rows)
    if model.residuals.deviation is None:
        return f"{column or 'all'}: no two rows with two seeds"
    seeds = min(len(values) for values in rows.values())
    freedom = model.residuals.freedom
    least = detectable(model.residuals.deviation, seeds, freedom)
    line = (
        f"{column or 'all'}: {len(rows)} rows, {seeds} seeds or more; residual standard deviation "
        f"{model.residuals.deviation:.3f}, {freedom} degrees of freedom; detects {least:.3f}"
    )
    if model.scattered:
        line += (
            f"; left out, because they scatter more than the others: {', '.join(model.scattered)}"
        )
    return line


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("table", metavar="TABLE", help="a table's name, or the path of a YAML file")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), metavar="DIR")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--corpus", default="", metavar="DATA", help="other data than the table's")
    parser.add_argument("--rates", nargs="+", default=[], metavar="LR", help="choose among these")
    parser.add_argument("--without", nargs="+", default=[], metavar="ROW", help="left out")
    parser.add_argument("--against", nargs="+", default=[], metavar="ROW", help="only these pairs")
    parser.add_argument("--output", type=Path, metavar="CSV", help="also write a CSV file")
    options = parser.parse_args()

    selection = plan.Selection(corpus=options.corpus, changes=options.set)
    if options.rates:
        columns = best_rates(options.table, selection, options.runs, options.rates)
    else:
        columns = read_runs(planned_table(options.table, selection), options.runs)
    if not columns:
        raise UserError(f"{options.runs} has no finished run of {options.table}")
    for rows in columns.values():
        if unknown := [row for row in options.against if row not in rows]:
            raise UserError(f"no finished row {unknown[0]!r}; expected {', '.join(rows)}")
    leave_out(columns, options.without)

    tables = [differences(column, rows, options.against) for column, rows in columns.items()]
    result = pandas.concat(tables, ignore_index=True)
    print_line(result.round(4).to_markdown(index=False))
    for column, rows in columns.items():
        print_line(describe(column, rows))
    if options.output:
        write_text(options.output, result.to_csv(index=False))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
