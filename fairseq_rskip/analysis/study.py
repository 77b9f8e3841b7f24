"""Models under study, the examples that all of them see, and one value for each of their blocks as text and figure."""

import contextlib
import dataclasses
import io
import itertools
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..residual import SkipConnection
from ..safe_load import CheckpointError
from ..tools.average import diverged
from .figures import aligned, label_text, style

CALIBRATION = 10  # batches
SIDES = ("encoder", "decoder")  # counted, and drawn, apart
PANELS = ("", *SIDES)  # the stages of a ResNet share one


class Source(NamedTuple):
    """One MODEL of the command line: a loaded checkpoint, or the options of a fresh network."""

    label: str
    path: str = ""
    state: Optional[Dict[str, Any]] = None
    fresh: Tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.label} ({self.path or 'fresh:' + ' '.join(self.fresh)})"


class Place(NamedTuple):
    """A residual block: its module's name, its number from 1, and the stage or the side of the model it is in."""

    name: str
    index: int
    group: str


@dataclasses.dataclass
class Study:
    """``models``, label -> network in evaluation mode on the device, and what ``batches()`` gives, the same for all.

    ``losses(model, batch)`` is one loss for each example; ``group(name, skip)`` says in which group a block is: a
    side of a Transformer, which is counted by itself, or a stage of a ResNet. ``data`` describes the examples in words,
    ``only`` names the one group that is shown, if not all are.
    """

    models: Dict[str, nn.Module]
    batches: Callable[[], Iterator[Any]]
    batch_size: int
    examples: int
    data: str
    losses: Callable[[nn.Module, Any], Tensor]
    group: Callable[[str, SkipConnection], str]
    only: str = ""

    @property
    def batch_count(self) -> int:
        return -(-self.examples // self.batch_size)

    def places(self) -> Dict[str, List[Place]]:
        """The residual blocks of every model, in order. Raises ``UserError`` for a model that has none to show."""
        found = {label: self._places(model) for label, model in self.models.items()}
        for label, places in found.items():
            if not places:
                raise UserError(f"{label} has no skip connection of fairseq_rskip, so there is nothing to measure")
        return found

    def _places(self, model: nn.Module) -> List[Place]:
        counts: Dict[str, int] = {}
        found = []
        for name, skip in model.named_modules():
            if isinstance(skip, SkipConnection):
                group = self.group(name, skip)
                counts[_side(group)] = counts.get(_side(group), 0) + 1
                found.append(Place(name, counts[_side(group)], group))
        return [place for place in found if self.only in ("", place.group)]


def fit(model: nn.Module, weights: Dict[str, Tensor], source: Source) -> None:
    """Load ``weights`` into ``model``; they must be the same in name and shape, and finite.

    Raises ``CheckpointError`` that names checkpoint and parameter.
    """
    own = model.state_dict()
    for name in list(own) + list(weights):
        if name not in weights:
            raise CheckpointError(f"{source} lacks {name}, which its settings call for")
        if name not in own:
            raise CheckpointError(f"{source} has {name}, which its settings do not call for")
        here, there = tuple(own[name].shape), tuple(weights[name].shape)
        if here != there:
            raise CheckpointError(f"{source} has {name} of shape {there}: expected {here} by its settings and the data")
        if diverged(name, weights[name]):
            raise CheckpointError(f"{source} has values in {name} that are not finite: its training diverged")
    model.load_state_dict(weights)


def calibrate(model: nn.Module, batches: Iterator[Any], forward: Callable[[nn.Module, Any], Any]) -> None:
    """Set the running statistics of a fresh network's batch norms, which it would be useless without in evaluation.

    Means over the first ``CALIBRATION`` batches in training mode; nothing else changes.
    """
    norms = [module for module in model.modules() if hasattr(module, "running_mean")]
    momenta = [norm.momentum for norm in norms]
    if not norms:
        return
    model.train()
    for number, batch in enumerate(itertools.islice(batches, CALIBRATION)):
        for norm in norms:
            norm.momentum = 1 / (number + 1)
        forward(model, batch)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
    model.eval()


def parsed(source: Source, parse: Callable[[], Any]) -> Any:
    """What ``parse()`` returns. Where argparse ends the program instead, its last line becomes a ``UserError``."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse()
    except SystemExit:
        reason = (said.getvalue().strip().splitlines() or ["expected options of a network, and no -h"])[-1]
    except UserError as error:
        reason = str(error)
    raise UserError(f"{source}: {reason.partition('error: ')[2] or reason}")


def choose(available: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of the numbers 0 to ``available``, at random, in ascending order; all of them if there are fewer."""
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[:wanted].sort().values


def device_of(name: str) -> torch.device:
    """The device that ``--device`` names. Raises ``UserError`` for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU that torch can use; expected auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


Values = Mapping[str, Mapping[str, float]]  # label of the model -> name of the block -> value


def table(places: Mapping[str, Sequence[Place]], values: Values, title: str) -> str:
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


def draw_blocks(axis: Any, panel: str, places: Mapping[str, Sequence[Place]], values: Values, errors: Values) -> None:
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
