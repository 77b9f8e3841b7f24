"""Who uses depth? Each design's gain from more layers at one size.

``python experiments/depthbench.py results/depthbench.csv`` reads the report of ``depthbench.yaml``
and applies the test that docs/studies/depthbench.md registers. It writes
results/depthbench_gains.csv, each design's loss at each depth minus that at the fewest layers, by
seed with its 95 % interval, and the figure results/depthbench.png and .pdf. A choice of the
learning rate at the end of its sweep is named. A depth whose sweep has not ended is in neither: a
sentence says whether its lowest loss lies between those of the depths beside it.
"""

from pathlib import Path
from typing import Any

import pandas

from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import make_folder
from fairseq_rskip.tools.report.reading import Line, by_row, read_report
from fairseq_rskip.tools.report.sweep import choices_at_an_end
from fairseq_rskip.tools.significance import SeedModel

RESULTS = Path(__file__).resolve().parents[1] / "results"


def gains(designs: dict[str, dict[str, Line]]) -> list[dict[str, Any]]:
    """Each design's loss at each depth, and its difference from that at its fewest layers.

    ``designs`` has the lines of the report, the depths in its order.
    """
    rows = []
    for design, depths in designs.items():
        model = SeedModel({depth: line.values for depth, line in depths.items()})
        first = next(iter(depths))
        for depth, line in depths.items():
            row: dict[str, Any] = {
                "design": design,
                "depth": depth,
                "seeds": len(line.values),
                "loss": line.mean,
            }
            tested = None if depth == first else model.difference(depth, first)
            if tested is not None:
                row |= {"difference": tested.value, "low": tested.low, "high": tested.high}
            rows.append(row)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each design: whether its deepest model is better than its shallowest."""
    sentences = []
    for design in dict.fromkeys(row["design"] for row in rows):
        mine = [row for row in rows if row["design"] == design]
        best = min(mine, key=lambda row: row["loss"])
        last = mine[-1]
        if "difference" not in last:
            said = "open, one depth or one seed"
        else:
            interval = f"{last['difference']:.3f} bits ({last['low']:.3f} to {last['high']:.3f})"
            said = f"open: {last['depth']} minus {mine[0]['depth']} {interval}"
            if last["high"] < 0:
                said = f"gains from depth: {last['depth']} minus {mine[0]['depth']} {interval}"
            elif last["low"] > 0:
                said = f"loses by depth: {last['depth']} minus {mine[0]['depth']} {interval}"
        sentences.append(f"{design}: {said}; best at {best['depth']}, {best['loss']:.3f} bits")
    return sentences


def between(report: list[Line]) -> list[str]:
    """A sentence for each design at each depth whose sweep has not ended.

    The losses are the lowest of the sweep's seed.
    """
    lowest: dict[str, dict[str, float]] = {}
    for line in report:
        results = [result for result in line.results if result is not None]
        if results:
            lowest.setdefault(line.row, {})[line.column] = min(results)
    ended = {(line.row, line.column) for line in report if line.values}

    sentences = []
    for design, losses in lowest.items():
        depths = list(losses)
        for above, depth, below in zip(depths, depths[1:], depths[2:]):
            if (design, depth) in ended:
                continue
            ends = (losses[above], losses[below])
            where = "between" if min(ends) <= losses[depth] <= max(ends) else "outside"
            beside = f"{above} ({ends[0]:.3f}) and {below} ({ends[1]:.3f})"
            sentences.append(f"{design}, {depth}: {losses[depth]:.3f}, {where} {beside}")
    return sentences


def draw(rows: list[dict[str, Any]], stem: Path) -> None:
    """The figure: each design's loss against depth; a hollow point is of one seed."""
    figure, (axis,) = figures.new_figure(width=7, height=4.5)
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    for number, design in enumerate(dict.fromkeys(row["design"] for row in rows)):
        mine = [row for row in rows if row["design"] == design]
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        at = [depths.index(row["depth"]) for row in mine]
        losses = [row["loss"] for row in mine]
        line = "-" if number < len(figures.COLOURS) else "--"
        axis.plot(at, losses, line, color=colour, linewidth=1, label=design)
        faces = [colour if row["seeds"] > 1 else "white" for row in mine]
        axis.scatter(at, losses, s=12, c=faces, edgecolors=colour, linewidths=1, zorder=3)
    axis.set_xticks(range(len(depths)), depths)
    axis.set_xlabel("depth, at one size")
    axis.set_ylabel("validation loss, bits")
    axis.legend(fontsize=6)
    figures.save(figure, stem)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("report", metavar="REPORT.csv", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    report = read_report(options.report)
    designs = by_row(report)
    if not designs:
        raise UserError(f"{options.report}: no row has a value")
    rows = gains(designs)
    table = pandas.DataFrame(rows).round(4)
    make_folder(options.output)
    filled = table.astype(object).where(table.notna(), None)  # a cell without a number is empty
    figures.write_csv(options.output / "depthbench_gains.csv", filled.to_dict("records"))
    draw(rows, options.output / "depthbench")
    print_line(table.to_markdown(index=False, floatfmt=".3f"))
    print_line("\n".join([*choices_at_an_end(report), *verdicts(rows), *between(report)]))


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
