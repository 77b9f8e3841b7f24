"""One value a block and model: as text, and drawn over the blocks."""

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from analysing.columns import aligned
from analysing.study import Place
from fairseq_rskip.analysis.figures import label_text, style

SIDES = ("encoder", "decoder")  # counted, and drawn, apart
PANELS = ("", *SIDES)  # the stages of a ResNet share one
Values = Mapping[str, Mapping[str, float]]  # label of the model -> name of the block -> value


def text(places: Mapping[str, Sequence[Place]], values: Values, title: str) -> str:
    """A table: a row a block, a column a model, and the mean over the blocks shown."""
    rows: Dict[tuple, Dict[str, float]] = {}
    for label, shown in places.items():
        for place in shown:
            name = place.name if place.group in SIDES else f"{place.group} block {place.index}"
            row = (PANELS.index(_side(place.group)), place.group, place.index, name)
            rows.setdefault(row, {})[label] = values[label][place.name]
    cells = [[title, *places]]
    cells += [[row[-1], *(_number(rows[row].get(label)) for label in places)] for row in sorted(rows)]
    means = [sum(values[label][p.name] for p in shown) / len(shown) for label, shown in places.items()]
    cells.append(["mean over blocks", *map(_number, means)])
    return aligned(cells)


def panels(places: Mapping[str, Sequence[Place]]) -> List[str]:
    """What gets a panel of its own."""
    sides = {_side(place.group) for shown in places.values() for place in shown}
    return [panel for panel in PANELS if panel in sides]


def draw(axis: Any, panel: str, places: Mapping[str, Sequence[Place]], values: Values, errors: Values) -> None:
    """A line a model over the blocks of one panel; ``errors`` are its bars."""
    for number, (label, shown) in enumerate(places.items()):
        mine = [place for place in shown if _side(place.group) == panel]
        if not mine:
            continue
        heights = [values[label][place.name] for place in mine]
        bars = [errors[label][place.name] for place in mine]
        axis.errorbar([place.index for place in mine], heights, yerr=bars, label=label_text(label), **style(number))
    boundaries = {_boundaries(shown) for shown in places.values()}
    if len(boundaries) == 1:  # else the networks differ in depth, and so in where their stages begin
        for boundary in boundaries.pop():
            axis.axvline(boundary, color="0.6", linewidth=0.8, zorder=0)
    axis.set_xlabel(f"residual block{' of the ' + panel if panel else ''}")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _boundaries(shown: Sequence[Place]) -> Tuple[float, ...]:
    """Between which blocks a ResNet's stage ends."""
    pairs = zip(shown, shown[1:])
    return tuple(b.index - 0.5 for a, b in pairs if a.group != b.group and a.group not in SIDES)


def _side(group: str) -> str:
    return group if group in SIDES else ""


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
