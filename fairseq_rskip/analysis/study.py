"""Models under study, their examples, and the values of their blocks as CSV, table and figure."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..console import progress
from ..errors import UserError
from ..residual import SkipConnection, skips
from . import figures
from .figures import Row

CALIBRATION = 10  # batches
SIDES = ("encoder", "decoder")  # counted, and drawn, apart; the stages of a ResNet share a panel
# A row is a block. Its keys: "model" (label), "block" (module), "index" (from 1), "group" (stage
# or side), and a column for each measured value.


class Quantity(NamedTuple):
    """A column of the rows, that of its standard error, its name in words, its axis' scale, and
    two values that the axis always shows."""

    column: str
    error: str
    title: str
    scale: str = "linear"
    shows: tuple[float, ...] = ()


def estimate(values: Tensor) -> tuple[float, float]:
    """The mean of one value for each example, and its standard error: NaN for one example."""
    values = values.double()
    count = values.numel()
    error = float(values.std() / count**0.5) if count > 1 else math.nan
    return float(values.mean()), error


@dataclasses.dataclass
class Study:
    """Models and their examples.

    ``models`` is label -> network in evaluation mode on the device; ``batches()`` yields the same
    examples for all. ``losses(model, batch)`` is one loss for each example; ``group(name, skip)``
    is the group of a block: the stage of a ResNet, or the side of a Transformer. ``data`` describes
    the examples, ``only`` names the one group to show, if any. ``seeds`` is label -> the seed of a
    model's training, where it is known.
    """

    models: dict[str, nn.Module]
    batches: Callable[[], Iterator[Any]]
    batch_count: int
    data: str
    losses: Callable[[nn.Module, Any], Tensor]
    group: Callable[[str, SkipConnection], str]
    only: str = ""
    seeds: dict[str, int] = dataclasses.field(default_factory=dict)

    def show_batches(self, label: str) -> Iterator[Any]:
        """The batches, with progress of the model ``label``."""
        return progress(self.batches(), self.batch_count, label)

    def calibrate(self, label: str, seed: int) -> None:
        """Set a fresh network's batch statistics to means over ``CALIBRATION`` batches.

        They are spread over the examples, whose order may be that of classes or lengths.
        """
        model = self.models[label]
        norms: list[Any] = [norm for norm in model.modules() if hasattr(norm, "running_mean")]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        torch.manual_seed(seed)  # for dropout
        model.train()
        every = max(1, self.batch_count // CALIBRATION)
        spread = itertools.islice(self.batches(), 0, every * CALIBRATION, every)
        for number, batch in enumerate(spread, 1):
            for norm in norms:
                norm.momentum = 1 / number
            self.losses(model, batch)
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
        model.eval()

    def places(self, label: str) -> list[Row]:
        """The residual blocks of a model that are shown, in order.

        Raises ``UserError`` for a model that has none.
        """
        counts: collections.Counter[str] = collections.Counter()
        places: list[Row] = []
        for name, skip in skips(self.models[label]).items():
            group = self.group(name, skip)
            counts[_panel(group)] += 1
            if self.only in ("", group):
                index = counts[_panel(group)]
                places.append({"model": label, "block": name, "index": index, "group": group})
        if not places:
            raise UserError(
                f"{label} has no skip connection of fairseq_rskip, so there is nothing to measure"
            )
        return places

    def with_places(self) -> list[tuple[str, nn.Module, list[Row]]]:
        """Label, network and :meth:`places` of each model. Raises as :meth:`places`."""
        return [(label, model, self.places(label)) for label, model in self.models.items()]

    def show(
        self, rows: Sequence[Row], quantities: Sequence[Quantity], stem: Path, note: str = ""
    ) -> None:
        """Print a table of each quantity, and draw all."""
        for quantity in quantities:
            name = quantity.title.partition(",")[0]
            print(table(rows, quantity.column, f"{name}, mean over {self.data}"))
            print()
        figures.save(draw(rows, quantities, self.data, note), stem)
        print(f"written to {stem}.csv, {stem}.png and {stem}.pdf")


def draw_examples(available: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of the numbers 0 to ``available`` at random, ascending; all if there are fewer."""
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[:wanted].sort().values


def in_frame(cells: Iterable[tuple[str, str, float]], title: str) -> Any:
    """A pandas frame with a column for each model, of ``cells`` (model, line, value)."""
    import pandas

    values: dict[str, dict[str, float]] = {}
    for model, name, value in cells:
        values.setdefault(model, {})[name] = value
    return pandas.DataFrame(values).rename_axis(columns=title)


def table(rows: Sequence[Row], column: str, title: str) -> str:
    """A line for each block, a column for each model, and the mean over the blocks."""
    cells = []
    for row in rows:
        name = f"{row['group']} block {row['index']}"
        if row["group"] in SIDES:
            name = row["block"]
        cells.append((row["model"], name, row[column]))
    frame = in_frame(cells, title)
    frame.loc["mean over blocks"] = frame.mean()
    return frame.to_string(float_format="{:.4g}".format, na_rep="")


def draw(rows: Sequence[Row], quantities: Sequence[Quantity], data: str, note: str = "") -> Any:
    """A panel for each quantity, encoder and decoder apart, a line for each model.

    Bars are standard errors.
    """
    panels = [panel for panel in ("", *SIDES) if any(_panel(row["group"]) == panel for row in rows)]
    if len(quantities) == 1:  # the sides beside one another
        figure, axes = figures.new_figure(columns=len(panels), rows=1)
    else:
        figure, axes = figures.new_figure(columns=len(quantities), rows=len(panels))
    for axis, (panel, quantity) in zip(axes, itertools.product(panels, quantities)):
        _draw_panel(axis, [row for row in rows if _panel(row["group"]) == panel], quantity)
        axis.set_xlabel(f"residual block of the {panel}" if panel else "residual block")
        axis.set(ylabel=quantity.title, yscale=quantity.scale)
        _show(axis, quantity.shows)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"Mean over {data}", fontsize="medium")
    if note:
        figure.supxlabel(note, fontsize="x-small")
    return figure


def _draw_panel(axis: Any, rows: Sequence[Row], quantity: Quantity) -> None:
    boundaries = set()  # for each model, the positions at which a ResNet's stages end
    for number, label in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = figures.select(rows, model=label)
        index = [row["index"] for row in mine]
        values = [row[quantity.column] for row in mine]
        bars = [row[quantity.error] for row in mine]
        look = figures.style(number)
        axis.errorbar(index, values, yerr=bars, label=figures.label_text(label), **look)

        ends = []
        for row, after in zip(mine, mine[1:]):
            if row["group"] != after["group"]:
                ends.append(row["index"] + 0.5)
        boundaries.add(tuple(ends))

    if len(boundaries) == 1:  # networks of another depth have other stages
        for boundary in boundaries.pop():
            axis.axvline(boundary, color="0.6", linewidth=0.8, zorder=0)


def _show(axis: Any, values: tuple[float, ...]) -> None:
    """Make the values part of ``axis``'s range, so that a small difference looks small."""
    if values:
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, *values), max(high, *values))


def _panel(group: str) -> str:
    return group if group in SIDES else ""
