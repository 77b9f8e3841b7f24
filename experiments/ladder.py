"""Does the order of rules hold from one rung of the ladder to the next?

``python experiments/ladder.py results/ladder.csv`` reads the report of ``ladder.yaml`` and applies
the test that docs/studies/ladder.md registers. It writes results/ladder_sides.csv, each rule's
difference from pre-norm on each rung by seed with its 95 % interval, and the figure
results/ladder.png and .pdf. For a rule with one seed on a rung a difference has no interval: it
counts as one beyond ``MANY`` residual standard deviations of the rung below; for a rule whose seeds
scatter more there than the model allows, or if pre-norm's do, beyond as many of its own. There is a
verdict when every registered rule has its seeds on every rung.

Further reports, such as results/gpu/ladder.csv, add the seeds that the ones before them lack; for a
seed in both it says how far the two are apart. ``--rates`` reads the report of
``ladder-rates.yaml``: is the rate that a rung takes from the first one right?
"""

import dataclasses
import itertools
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import pandas
from scipy import stats

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import make_folder
from fairseq_rskip.tools.report.reading import Line, by_column, read_report
from fairseq_rskip.tools.report.sweep import choices_at_an_end
from fairseq_rskip.tools.significance import SeedModel

BASELINE = "pre-norm"
MANY = 4.0  # residual standard deviations, of a difference without an interval
HOLDS = 0.8  # the least Spearman's ρ between neighbouring rungs, over the registered rules
# from the smallest to the largest -> the seeds that are registered
RUNGS = {"0.1 M": 3, "0.5 M": 3, "1.8 M": 1}
REGISTERED = (
    BASELINE,
    "post-norm",
    "2rSkip+LN",
    "Keel",
    "fixed angle",
    "Attention residuals, blocks",
    "Hyper-connections",
)
WORSE = 2.0  # residual standard deviations by which another rate shows the transferred one wrong
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


def check(rungs: Rungs) -> None:
    """Raise ``UserError`` for a rung without the baseline."""
    for rung, rows in rungs.items():
        if BASELINE not in rows:
            raise UserError(f"rung {rung!r} has no row {BASELINE!r} with a result")


def join(rungs: Rungs, further: Rungs) -> list[str]:
    """Add to ``rungs`` the rows and seeds of ``further`` that they lack; a sentence for each seed
    in both.
    """
    sentences = []
    for rung, rows in further.items():
        for row, line in rows.items():
            known = rungs.setdefault(rung, {}).get(row)
            if known is None:
                rungs[rung][row] = line
                continue
            for seed in sorted(known.values.keys() & line.values.keys()):
                again = line.values[seed] - known.values[seed]
                sentences.append(f"{row}, {rung}, seed {seed}, trained again: {again:+.3f}")
            values = {**line.values, **known.values}
            rungs[rung][row] = dataclasses.replace(known, values=values)
    return sentences


def fit(rungs: Rungs) -> dict[str, SeedModel]:
    """Each rung's model of rule + seed."""
    models = {}
    for rung, rows in rungs.items():
        models[rung] = SeedModel({row: line.values for row, line in rows.items()})
    return models


def sides(models: dict[str, SeedModel]) -> list[Side]:
    """Each rule's difference from the baseline on each rung."""
    compared = []
    below = None  # the model of the rung below
    for rung, model in models.items():
        for row in model.values:
            if row != BASELINE:
                compared.append(_side(rung, row, model, below))
        if model.residuals.deviation is not None:
            below = model
    return [side for side in compared if side is not None]


def _side(rung: str, row: str, model: SeedModel, below: SeedModel | None) -> Side | None:
    """The difference on one rung; None without a seed in common."""
    tested = model.difference(row, BASELINE)
    seeds = model.shared_seeds(row, BASELINE)
    if tested is not None:
        return Side(rung, row, tested.value, tested.low, tested.high, len(seeds), tested.side)
    if not seeds:
        return None
    difference = statistics.fmean(model.differences(row, BASELINE).values())
    side = 0
    if below is not None and abs(difference) > MANY * _deviation(below, row):
        side = -1 if difference < 0 else 1
    return Side(rung, row, difference, None, None, len(seeds), side)


def _deviation(model: SeedModel, row: str) -> float:
    """The standard deviation of a run of the rule: the model's, or its own where that is larger and
    the model leaves the rule or the baseline out; infinite where the model does not know it.
    """
    differences = list(model.differences(row, BASELINE).values()) if row in model.values else []
    if model.residuals.deviation is None or len(differences) < 2:
        return math.inf
    if not {row, BASELINE} & {*model.scattered}:
        return model.residuals.deviation
    return max(model.residuals.deviation, statistics.stdev(differences) / math.sqrt(2))


def missing(rungs: Rungs) -> list[str]:
    """What the registered test lacks: rules with too few seeds on a rung."""
    lacks = []
    for rung, seeds in RUNGS.items():
        absent = []
        for row in REGISTERED:
            line = rungs.get(rung, {}).get(row)
            if line is None or len(line.values) < seeds:
                absent.append(row)
        if absent:
            which = "all rules" if len(absent) == len(REGISTERED) else ", ".join(absent)
            lacks.append(f"{which} on rung {rung}")
    return lacks


def wrong_rates(rungs: Rungs, models: dict[str, SeedModel], report: list[Line]) -> list[str]:
    """A sentence for each line of ladder-rates.yaml: is the rung better at that rate?"""
    sentences = []
    for line in report:
        rung = line.column.partition(",")[0]
        transferred = rungs.get(rung, {}).get(line.row)
        if line.column == rung or transferred is None or not line.values:
            continue
        deviation = models[rung].residuals.deviation
        shared = line.values.keys() & transferred.values.keys()
        if not shared:
            continue
        change = statistics.fmean(line.values[seed] - transferred.values[seed] for seed in shared)
        limit = math.inf if deviation is None else WORSE * deviation
        said = "the transferred rate is wrong" if change < -limit else "no better"
        sentences.append(f"{line.row}, {line.column} the rate: {change:+.3f} bits, {said}")
    return sentences


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
    """For neighbouring rungs: their names, Spearman's ρ of the registered rules' means, and how
    many of them are on both.
    """
    correlations = []
    for (below, first), (above, second) in itertools.pairwise(rungs.items()):
        rows = [row for row in REGISTERED if row in first and row in second]
        means = []
        for rung in (first, second):
            means.append([rung[row].mean for row in rows])
        if len(rows) > 2:
            rho = float(stats.spearmanr(*means).statistic)
            correlations.append((f"{below} and {above}", rho, len(rows)))
    return correlations


def verdict(
    changed: list[str], correlations: list[tuple[str, float, int]], lacks: list[str]
) -> str:
    """The answer to the registered question, or what it lacks."""
    if changed:
        answer = f"the order does not hold: {'; '.join(changed)}"
    elif correlations and all(rho >= HOLDS for _, rho, _ in correlations):
        answer = "the order holds: no rule changes sides"
    else:
        answer = "open: no rule changes sides, and the ranks agree too little"
    if lacks:
        return f"no verdict yet, without {'; '.join(lacks)}; so far {answer}"
    return answer


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
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figures.save(figure, stem)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path, nargs="+")
    parser.add_argument("--rates", metavar="CSV", type=Path, help="report of ladder-rates.yaml")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    first, *others = options.report
    report = read_report(first)
    rungs = by_column(report)
    for path in others:
        for sentence in join(rungs, by_column(read_report(path))):
            print_line(sentence)
    rungs = {rung: rungs[rung] for rung in dict.fromkeys([*RUNGS, *rungs]) if rung in rungs}
    check(rungs)
    models = fit(rungs)
    compared = sides(models)
    table = pandas.DataFrame(compared)
    make_folder(options.output)
    figures.write_csv(options.output / "ladder_sides.csv", table.round(4).to_dict("records"))
    draw(compared, list(rungs), options.output / "ladder")
    print_line(table.drop(columns="side").to_markdown(index=False, floatfmt=".3f"))
    correlations = rank_correlations(rungs)
    for names, rho, rows in correlations:
        print_line(f"{names}: Spearman's ρ = {rho:.2f}, {rows} rules")
    for rung, model in models.items():
        if model.scattered:
            print_line(f"{rung}: {', '.join(model.scattered)} scatter more than the model allows")
    sentences = choices_at_an_end(report)
    if options.rates:
        sentences += wrong_rates(rungs, models, read_report(options.rates))
    registered = [side for side in compared if side.row in REGISTERED]
    lacks = missing(rungs)
    print_line("\n".join([*sentences, verdict(changes(registered), correlations, lacks)]))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
