"""Every rule's difference from pre-norm with its 95 % interval, sorted: one figure for a report.

``python experiments/forest.py results/rivals.csv rivals`` reads a report's values by seed, fits
rule + seed (as ``seed_differences.py``) and writes results/forest_rivals.png, .pdf and .csv.
Colours are the families of the rules. Negative is better than pre-norm. Rules that scatter, with an
interval of their own, have an open marker.
"""

import argparse
import logging
from pathlib import Path

import pandas

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.models._presets import FAMILIES, VARIANTS, family_of
from fairseq_rskip.tools.experiments import plan
from fairseq_rskip.tools.significance import SeedModel

RESULTS = Path(__file__).resolve().parents[1] / "results"
BASELINE = "pre-norm"
WORST = 1.0  # bits: what lies beyond is written at the edge of the figure


def values_by_seed(report: pandas.DataFrame) -> dict[str, dict[int, float]]:
    """Row -> seed -> value, of the rows with two seeds or more.

    Raises ``UserError`` for a row with several lines, of a report of several columns.
    """
    rows: dict[str, dict[int, float]] = {}
    for _, line in report.dropna(subset="values_by_seed").iterrows():
        pairs = [each.split(":") for each in str(line["values_by_seed"]).split()]
        if line["row"] in rows:
            raise UserError(
                f"the report has several lines for the row {line['row']!r}: expected the report of "
                "one table with --columns NAME"
            )
        if len(pairs) > 1:
            rows[line["row"]] = {int(seed): float(value) for seed, value in pairs}
    return rows


def family_of_rows(table: str) -> dict[str, str]:
    """Row -> the family of its rule, a key of ``FAMILIES``, by its architecture in the file.

    A row whose architecture depends on the column has none.
    """
    (planned,) = plan.make_tables([table])
    families = {}
    for row in planned.rows:
        if not isinstance(row.arch, str):
            continue
        arch = row.arch.removeprefix("transformer_").removeprefix("lm_")
        if arch in VARIANTS:
            families[row.label] = family_of(VARIANTS[arch]["skip_kind"])
    return families


def differences(rows: dict[str, dict[int, float]]) -> pandas.DataFrame:
    """A line for each rule but the baseline, the best first."""
    if BASELINE not in rows:
        raise UserError(f"the report has no row {BASELINE!r} with two seeds or more")
    model = SeedModel(rows)
    lines = []
    for row in rows:
        if row == BASELINE:
            continue
        found = model.difference(row, BASELINE)
        if found is None:
            continue
        line = {"row": row, "difference": found.value, "low": found.low, "high": found.high}
        lines.append({**line, "scattered": row in model.scattered})
    return pandas.DataFrame(lines).sort_values("difference")


def draw(table: pandas.DataFrame, families: dict[str, str], stem: Path) -> None:
    """The figure: a line for each rule, from the best at the top."""
    shown = table[table["difference"] < WORST]
    figure, (axis,) = figures.new_figure(width=7, height=0.17 * len(shown) + 1.2)
    names = [*FAMILIES]
    labelled = set()
    for height, (_, line) in enumerate(shown[::-1].iterrows()):
        family = families.get(line["row"], "")
        colour = figures.COLOURS[names.index(family)] if family in names else "grey"
        label = FAMILIES.get(family) if family not in labelled else None
        labelled.add(family)
        axis.plot([line["low"], line["high"]], [height, height], color=colour, linewidth=1.2)
        fill = "white" if line["scattered"] else colour
        axis.plot(line["difference"], height, "o", color=colour, mfc=fill, ms=4, label=label)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(shown)), shown["row"][::-1], fontsize=7)
    axis.set_ylim(-1, len(shown))
    axis.set_xlabel("validation loss minus pre-norm's, bits")
    axis.legend(fontsize=7, title="rules", title_fontsize=7, loc="upper right")
    figures.save(figure, stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path)
    parser.add_argument("table", metavar="TABLE", help="the table's name, for the rules' families")
    options = parser.parse_args()
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # fairseq turns every logger on

    table = differences(values_by_seed(pandas.read_csv(options.report)))
    stem = RESULTS / f"forest_{options.report.stem}"
    figures.write_csv(stem.with_suffix(".csv"), table.round(4).to_dict("records"))
    draw(table, family_of_rows(options.table), stem)
    ahead = (table["high"] < 0).sum()
    behind = (table["low"] > 0).sum()
    print_line(
        f"{len(table)} rules: {ahead} ahead of {BASELINE}, {behind} behind, by their intervals"
    )
    beyond = table[table["difference"] >= WORST]["row"]
    if len(beyond):
        print_line(f"not shown, more than {WORST:g} bits behind: {', '.join(beyond)}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
