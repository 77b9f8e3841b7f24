"""Does the order of rules hold from one rung of the ladder to the next?

``python experiments/ladder.py results/ladder.csv`` reads the report of ``ladder.yaml`` and applies
the test that docs/studies/ladder.md registers. It writes results/ladder_sides.csv, each rule's
difference from pre-norm on each rung by seed with its 95 % interval, and the figure
results/ladder.png and .pdf. On a rung with one seed a difference has no interval: it counts as one
beyond ``MANY`` residual standard deviations of the rung below.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import pandas
from scipy import stats

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import make_folder
from fairseq_rskip.tools.report.reading import Line, by_column, read_report
from fairseq_rskip.tools.significance import SeedModel

BASELINE = "pre-norm"
MANY = 4.0  # residual standard deviations, of a difference without an interval
HOLDS = 0.8  # the least Spearman's ρ between neighbouring rungs, over at least ``FEWEST`` rules
FEWEST = 7
RESULTS = Path(__file__).resolve().parents[1] / "results"
Rungs = dict[str, dict[str, Line]]  # rung -> row -> line of the report


class Side(NamedTuple):
    """A rule's difference from pre-norm on a rung; ``side`` is -1 ahead, 1 behind, 0 unknown."""

    rung: str
    row: str
    difference: float
    low: float | None
    high: float | None
    seeds: int
    side: int


def read_rungs(path: Path) -> Rungs:
    """The rungs in the file's order. Raises ``UserError`` for one without the baseline."""
    rungs = by_column(read_report(path))
    for rung, rows in rungs.items():
        if BASELINE not in rows:
            raise UserError(f"{path}: rung {rung!r} has no row {BASELINE!r} with a result")
    return rungs


def sides(rungs: Rungs) -> list[Side]:
    """Each rule's difference from the baseline on each rung."""
    compared = []
    deviation = None  # of the residuals on the rung below
    for rung, rows in rungs.items():
        model = SeedModel({row: line.values for row, line in rows.items()})
        for row in rows:
            if row != BASELINE:
                compared.append(_side(rung, row, model, deviation))
        deviation = model.deviation or deviation
    return [side for side in compared if side is not None]


def _side(rung: str, row: str, model: SeedModel, deviation: float | None) -> Side | None:
    """The difference on one rung; None without a seed in common."""
    tested = model.difference(row, BASELINE)
    seeds = model.shared_seeds(row, BASELINE)
    if tested is not None:
        return Side(rung, row, tested.value, tested.low, tested.high, len(seeds), tested.side)
    if not seeds:
        return None
    values, baseline = model.values[row], model.values[BASELINE]
    difference = sum(values[seed] - baseline[seed] for seed in seeds) / len(seeds)
    side = 0
    if deviation is not None and abs(difference) > MANY * deviation:
        side = -1 if difference < 0 else 1
    return Side(rung, row, difference, None, None, len(seeds), side)


def changes(compared: list[Side]) -> list[str]:
    """The rules that are on one side of the baseline on a rung and on the other on a later one."""
    by_row: dict[str, list[Side]] = {}
    for side in compared:
        if side.side:
            by_row.setdefault(side.row, []).append(side)
    changed = []
    for row, known in by_row.items():
        for before, after in itertools.pairwise(known):
            if before.side != after.side:
                changed.append(f"{row} between {before.rung} and {after.rung}")
    return changed


def rank_correlations(rungs: Rungs) -> list[tuple[str, float, int]]:
    """For neighbouring rungs: their names, Spearman's ρ of the rules' means, the rules in both."""
    correlations = []
    for (below, first), (above, second) in itertools.pairwise(rungs.items()):
        rows = [row for row in first if row in second]
        means = []
        for rung in (first, second):
            means.append([rung[row].mean for row in rows])
        if len(rows) > 2:
            rho = float(stats.spearmanr(*means).statistic)
            correlations.append((f"{below} and {above}", rho, len(rows)))
    return correlations


def verdict(changed: list[str], correlations: list[tuple[str, float, int]]) -> str:
    """The answer to the registered question."""
    if changed:
        return f"the order does not hold: {'; '.join(changed)}"
    enough = [rho >= HOLDS and rows >= FEWEST for _, rho, rows in correlations]
    if enough and all(enough):
        return "the order holds: no rule changes sides"
    return "open: no rule changes sides, and the ranks agree too little or are too few"


def draw(compared: list[Side], rungs: list[str], stem: Path) -> None:
    """The figure: each rule's difference from rung to rung."""
    figure, (axis,) = figures.new_figure(width=7, height=4.5)
    rows = list(dict.fromkeys(side.row for side in compared))
    for number, row in enumerate(rows):
        points = [side for side in compared if side.row == row]
        where = [rungs.index(side.rung) + (number - len(rows) / 2) * 0.02 for side in points]
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        style = "-" if number < len(figures.COLOURS) else "--"
        values = [side.difference for side in points]
        axis.plot(where, values, style, marker="o", ms=3, color=colour, label=row, linewidth=1)
        for x, side in zip(where, points):
            if side.low is not None:
                axis.plot([x, x], [side.low, side.high], color=colour, linewidth=0.8)
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(rungs)), rungs)
    axis.set_xlabel("parameters in the blocks")
    axis.set_ylabel("validation loss minus pre-norm's, bits")
    axis.legend(fontsize=6)
    figures.save(figure, stem)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    rungs = read_rungs(options.report)
    compared = sides(rungs)
    table = pandas.DataFrame(compared)
    make_folder(options.output)
    figures.write_csv(
        options.output / "ladder_sides.csv", table.round(4).astype(object).to_dict("records")
    )
    draw(compared, list(rungs), options.output / "ladder")
    print_line(table.drop(columns="side").to_markdown(index=False, floatfmt=".3f"))
    correlations = rank_correlations(rungs)
    for names, rho, rows in correlations:
        print_line(f"{names}: Spearman's ρ = {rho:.2f}, {rows} rules")
    print_line(verdict(changes(compared), correlations))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
