"""Every rule's difference from pre-norm with its 95 % interval, sorted: one figure for a report.

``python experiments/forest.py results/rivals.csv rivals`` reads a report's values by seed, fits
rule + seed (as ``seed_differences.py``) and writes results/forest_rivals.png, .pdf and .csv.
Colours are the families of the rules. Negative is better than pre-norm. Rules whose seeds scatter
have an open marker and an interval of their own. A rule that is more than a bit behind has its
numbers at the right edge.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.models.architectures import FAMILIES, arch_configs
from fairseq_rskip.models.flat_config import SkipLanguageModelConfig, SkipTransformerConfig
from fairseq_rskip.tools.experiments import plan
from fairseq_rskip.tools.report.reading import read_rows
from fairseq_rskip.tools.significance import SeedModel

RESULTS = Path(__file__).resolve().parents[1] / "results"
BASELINE = "pre-norm"
WORST = 1.0  # bits: a rule further behind is written at the edge of the figure


def family_of_rows(table: str) -> dict[str, str]:
    """Row -> the family of its rule, a key of ``FAMILIES``, by the kind of its architecture.

    A row whose architecture depends on the column has none.
    """
    family_of = {}
    for family, variants in FAMILIES.items():
        for skip in variants.values():
            family_of[skip["skip_kind"]] = family
    kinds = {}
    for base in (SkipTransformerConfig, SkipLanguageModelConfig):
        for arch, config in arch_configs(base):
            kinds[arch] = str(config().skip_kind)

    (planned,) = plan.make_tables([table])
    families = {}
    for row in planned.rows:
        if isinstance(row.arch, str) and row.arch in kinds:
            families[row.label] = family_of[kinds[row.arch]]
    return families


def differences(report: Path) -> pandas.DataFrame:
    """A line for each rule but the baseline, the best first, equal ones by name.

    Only rows with two seeds or more count. Raises ``UserError`` for a report of several columns.
    """
    lines = read_rows(report)
    rows = {row: line.values for row, line in lines.items() if len(line.values) > 1}
    if BASELINE not in rows:
        raise UserError(f"the report has no row {BASELINE!r} with two seeds or more")
    model = SeedModel(rows)
    tests = []
    for row in rows:
        if row == BASELINE:
            continue
        tested = model.difference(row, BASELINE)
        if tested is None:
            continue
        test = {"row": row, "difference": tested.value, "low": tested.low, "high": tested.high}
        tests.append({**test, "scattered": row in model.scattered})
    if not tests:
        raise UserError(f"the report has no row beside {BASELINE!r} that shares two seeds with it")
    table = pandas.DataFrame(tests)
    # the last digits, which the processor decides, decide no order
    return table.iloc[np.lexsort((table["row"], table["difference"].round(9)))]


def colour_of(family: str | None) -> str:
    """The colour of a key of ``FAMILIES``; grey for a rule of none."""
    if family is None:
        return "grey"
    return figures.COLOURS[[*FAMILIES].index(family)]


def draw(table: pandas.DataFrame, families: dict[str, str]) -> Any:
    """The figure: a line for each rule, from the best at the top."""
    figure, (axis,) = figures.new_figure(width=7, height=0.17 * len(table) + 2)
    for height, (_, line) in enumerate(table[::-1].iterrows()):
        colour = colour_of(families.get(line["row"]))
        if line["difference"] >= WORST:
            text = f"{line['difference']:+.2f} ({line['low']:+.2f} to {line['high']:+.2f}) →"
            place = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "center"}
            axis.text(0.99, height, text, color=colour, fontsize=7, **place)
            continue
        axis.plot([line["low"], line["high"]], [height, height], color=colour, linewidth=1.2)
        axis.plot(line["difference"], height, **marker(colour, line["scattered"]))
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(table)), table["row"][::-1], fontsize=7)
    axis.set_ylim(-1, len(table))
    axis.set_xlabel("validation loss minus pre-norm's, bits")

    drawn = {families.get(row) for row in table["row"]}
    for family in FAMILIES:
        if family in drawn:
            axis.plot([], [], label=family, **marker(colour_of(family)))
    if table["scattered"].any():
        axis.plot([], [], label="seeds scatter: own interval", **marker("grey", is_open=True))
    figure.legend(fontsize=7, title="rules", title_fontsize=7, ncols=2, loc="outside upper center")
    return figure


def marker(colour: str, is_open: bool = False) -> dict[str, Any]:
    """matplotlib's options of a rule's marker."""
    fill = "white" if is_open else colour
    return {"color": colour, "mfc": fill, "marker": "o", "linestyle": "none", "markersize": 4}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path)
    parser.add_argument("table", metavar="TABLE", help="the table's name, for the rules' families")
    options = parser.parse_args()

    table = differences(options.report)
    stem = RESULTS / f"forest_{options.report.stem}"
    figures.write_csv(Path(f"{stem}.csv"), table.round(4).to_dict("records"))
    figures.save(draw(table, family_of_rows(options.table)), stem)
    ahead = (table["high"] < 0).sum()
    behind = (table["low"] > 0).sum()
    print_line(
        f"{len(table)} rules: {ahead} ahead of {BASELINE}, {behind} behind, by their intervals"
    )
    beyond = table[table["difference"] >= WORST]["row"]
    if len(beyond):
        print_line(f"at the edge, more than {WORST:g} bit behind: {', '.join(beyond)}")


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
