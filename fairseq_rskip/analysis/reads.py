"""What the blocks of rules that keep earlier outputs read of them.

A mixture is ``sum_k w_k h_k`` over the h_k that are stored when it is made, h_0 being what entered
the stack. Of the weights at one position, ``|w_k| / sum |w_k|`` are the shares, and
``exp(-sum_k p_k log p_k)`` of the shares p is the effective number of outputs read: 1 where one has
all, as many as there are where all count alike. How the shares depend on the position is half the
sum of ``|p_k - mean of p_k|``, the mean over the positions of a batch: 0 where all positions read
alike, at most 1. Heads are measured one by one. All values are means over the positions of
examples, padding left out.

Mixtures of one output are left out. Verdicts need thresholds, and these are conventions: nearly
one output (``ALONE``) and nearly all alike (``ALIKE``).
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..residual import KINDS, SkipConnection, skips
from ..residual.streams import HistorySkip
from . import figures
from .figures import Row
from .probe import Call, Watch, example_mean
from .streams import as_at_the_start, moved, what_moved
from .study import Quantity, Study, estimate

NUMBER = Quantity(
    "effective_outputs",
    "effective_outputs_error",
    "effective number of outputs read",
    shows=(0.0, 2.0),
)
NEWEST = Quantity("newest", "newest_error", "the newest output's share", shows=(0.0, 1.0))
INPUT = Quantity("input", "input_error", "the share of the stack's input", shows=(0.0, 1.0))
VARIES = Quantity("varies", "varies_error", "how the shares vary by position", shows=(0.0, 0.1))
QUANTITIES = (NUMBER, NEWEST, INPUT, VARIES)
COUNT = "outputs"  # the column of how many outputs a mixture is of
ALONE = 0.9  # the newest output's share above which the others hardly count
ALIKE = 0.95  # of the outputs, the effective number above which all count alike
FIXED = 0.01  # how little the shares vary by position where they hardly do


class ReadProbe(Watch):
    """Measures, in a ``with`` block, the mixtures of every skip connection that stores outputs.

    ``shares`` is module name -> the sum over examples of the mean share of each output, and
    ``counts`` the number of those examples.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.shares: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    @torch.no_grad()
    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        if not isinstance(skip, HistorySkip):
            return
        _, carried = skip.current(call.x)
        members = skip.members(call.f_x, carried)
        if members is None or members.size(-2) == 1:
            return
        shares = shares_of(skip.weights(members).double(), members)
        mean = shares.mean(-2)  # over heads
        by_example = [example_mean(skip, each.unsqueeze(-1), call.mask) for each in mean.unbind(-1)]
        columns = torch.stack(by_example)  # (outputs, examples)
        self.shares[name] = self.shares.get(name, 0.0) + columns.sum(-1).cpu()
        self.counts[name] = self.counts.get(name, 0) + columns.size(-1)
        values = {
            NUMBER.column: torch.special.entr(shares).sum(-1).exp().mean(-1),
            NEWEST.column: mean[..., -1],
            INPUT.column: mean[..., 0],
            VARIES.column: variation(shares, call.mask).mean(-1),
        }
        self.passes[name].append(
            {
                column: example_mean(skip, value.unsqueeze(-1), call.mask).cpu()
                for column, value in values.items()
            }
        )

    def columns(self, name: str) -> Row | None:
        """The number of outputs, the means over examples and their errors at ``name``, or None."""
        measured = self.values(name)
        if not measured:
            return None
        row: Row = {COUNT: len(self.shares[name])}
        for quantity in QUANTITIES:
            row[quantity.column], row[quantity.error] = estimate(measured[quantity.column])
        return row

    def mean_shares(self, name: str) -> list[float]:
        """The mean share of each output in the mixture at ``name``, h_0's first."""
        return (self.shares[name] / self.counts[name]).tolist()


def shares_of(weights: Tensor, members: Tensor) -> Tensor:
    """The shares of ``weights``, as :meth:`.HistorySkip.weights` returns them for ``members``:
    ``(..., heads, k)`` for every position.
    """
    if weights.dim() < members.dim():  # without heads
        weights = weights.unsqueeze(-2)
    size = weights.abs()
    shares = size / size.sum(-1, keepdim=True).clamp(min=1e-300)
    return shares.expand(*members.shape[:-2], *shares.shape[-2:])


def variation(shares: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Half the sum of how far the shares ``(..., heads, k)`` are from their mean over positions."""
    positions = shares.flatten(0, -3)
    if padding_mask is not None:
        positions = positions[padding_mask.logical_not().flatten()]
    return (shares - positions.mean(0)).abs().sum(-1) / 2


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print tables and sentences, write CSVs and the figures.

    Raises ``UserError`` for a model whose rule stores no outputs.
    """
    rows: list[Row] = []
    shares: list[Row] = []
    movements: list[Row] = []
    models = study.with_places()
    for label, model, places in models:  # before anything is measured
        for place in places:
            check_measured(label, place["block"], skips(model)[place["block"]])
    for label, model, places in models:
        modules = skips(model)
        with ReadProbe(model) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        for place in places:
            name = place["block"]
            start = as_at_the_start(modules[name], study.seeds.get(label))
            movements += [{**place, **each} for each in moved(modules[name], start)]
            columns = probe.columns(name)
            if columns is None:
                continue
            rows.append({**place, **columns})
            for output, share in enumerate(probe.mean_shares(name)):
                shares.append({**place, "output": output, "share": share})
        if not figures.select(rows, model=label):
            raise UserError(f"{label}: no block reads two outputs: expected a deeper stack")
        figures.write_csv(Path(f"{stem}.csv"), rows)
    study.show(rows, QUANTITIES, stem)
    figures.write_csv(Path(f"{stem}-shares.csv"), shares)
    figures.save(draw_shares(shares), Path(f"{stem}-shares"))
    figures.write_csv(Path(f"{stem}-moved.csv"), movements)
    print(f"written to {stem}-shares.csv, .png and .pdf, and {stem}-moved.csv")
    print()
    for label in study.models:
        mine = figures.select(rows, model=label)
        print("\n".join(sentences(label, mine, figures.select(movements, model=label))))


def is_measured(rule: type[SkipConnection]) -> bool:
    """Whether the rule stores outputs and reads a mixture of them."""
    return issubclass(rule, HistorySkip)


def check_measured(label: str, block: str, skip: SkipConnection) -> None:
    """Raise ``UserError`` unless the rule of ``skip`` is measured."""
    if not is_measured(type(skip)):
        kinds = ", ".join(sorted(kind for kind, rule in KINDS.items() if is_measured(rule)))
        reason = f"{block} ({skip.kind}) reads no mixture of earlier outputs"
        raise UserError(f"{label}: {reason}: expected a rule of {kinds}")


def sentences(label: str, rows: list[Row], movements: list[Row]) -> list[str]:
    """A sentence each: how many outputs a model reads and which, by position, what was learned."""
    mean = {q.column: fmean(row[q.column] for row in rows) for q in QUANTITIES}
    least = min(rows, key=part_read)
    by_position = "all positions read alike"
    if mean[VARIES.column] >= FIXED:
        by_position = f"a position's shares differ from the mean by {mean[VARIES.column]:.0%}"
    return [
        f"{label}: a mixture reads {fmean(map(part_read, rows)):.0%} of its outputs (effective "
        f"number, mean of {len(rows)} mixtures; the fewest, {least[NUMBER.column]:.2f} of "
        f"{least[COUNT]}, at {least['block']}): {verdict(rows)}.",
        f"{label}: the newest output has {mean[NEWEST.column]:.0%} of the weights, the stack's "
        f"input {mean[INPUT.column]:.0%}; {by_position}.",
        f"{label}: {what_moved(movements)}.",
    ]


def part_read(row: Row) -> float:
    """The effective number of outputs over how many there are."""
    return row[NUMBER.column] / row[COUNT]


def verdict(rows: list[Row]) -> str:
    """What the shares say: the newest alone, all alike, or a choice."""
    if fmean(row[NEWEST.column] for row in rows) >= ALONE:
        return "nearly the newest alone, as a plain sum passes it on"
    if fmean(map(part_read, rows)) >= ALIKE:
        return "all nearly alike"
    return "some more than others"


def draw_shares(shares: list[Row]) -> Any:
    """A panel for each model and side: the share of each stored output in each mixture."""
    panels = list(dict.fromkeys((row["model"], row["group"]) for row in shares))
    figure, axes = figures.new_figure(columns=len(panels), width=4.5, height=4.0)
    for axis, (label, group) in zip(axes, panels):
        mine = figures.select(shares, model=label, group=group)
        blocks = list(dict.fromkeys(row["index"] for row in mine))
        grid = torch.full((max(row["output"] for row in mine) + 1, len(blocks)), torch.nan)
        for row in mine:
            grid[row["output"], blocks.index(row["index"])] = row["share"]
        look = {"vmin": 0.0, "vmax": 1.0, "origin": "lower", "aspect": "auto", "cmap": "viridis"}
        image = axis.imshow(grid.numpy(), **look)
        axis.grid(False)
        axis.set_xticks(range(len(blocks)), blocks)
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.set(
            title=figures.label_text(f"{label} {group}".strip()),
            xlabel="block that makes the mixture",
            ylabel="output (0: the stack's input)",
        )
    figure.colorbar(image, ax=axes, label="share of the weights")
    return figure
