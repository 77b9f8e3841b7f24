"""Models under study and the examples they all see, whether they are ResNets or Transformers."""

import contextlib
import dataclasses
import io
import itertools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.safe_load import CheckpointError

CALIBRATION = 10  # batches


class Given(NamedTuple):
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

    ``losses(model, batch)`` is one loss for each example; ``place(name, skip)`` says in which group a block is, and
    ``numbered_by_group`` whether counting starts anew in each; ``data`` describes the examples in words.
    """

    models: Dict[str, nn.Module]
    batches: Callable[[], Iterator[Any]]
    batch_count: int
    examples: int
    data: str
    losses: Callable[[nn.Module, Any], Tensor]
    group: Callable[[str, SkipConnection], str]
    numbered_by_group: bool

    def places(self, label: str, only: str = "") -> List[Place]:
        """The residual blocks of a model in order; ``only`` keeps those of one group."""
        counts: Dict[str, int] = {}
        found = []
        for name, skip in self.models[label].named_modules():
            if isinstance(skip, SkipConnection):
                group = self.group(name, skip)
                counter = group if self.numbered_by_group else ""
                counts[counter] = counts.get(counter, 0) + 1
                found.append(Place(name, counts[counter], group))
        return [place for place in found if only in ("", place.group)]


def fit(model: nn.Module, weights: Dict[str, Tensor], given: Given) -> None:
    """Load ``weights`` into ``model``; they must be the same in name and shape, and finite.

    Raises ``CheckpointError`` that names checkpoint and parameter.
    """
    own = model.state_dict()
    for name in list(own) + list(weights):
        if name not in weights:
            raise CheckpointError(f"{given} lacks {name}, which its settings call for")
        if name not in own:
            raise CheckpointError(f"{given} has {name}, which its settings do not call for")
        here, there = tuple(own[name].shape), tuple(weights[name].shape)
        if here != there:
            raise CheckpointError(f"{given} has {name} of shape {there}: expected {here} by its settings and the data")
        if not weights[name].isfinite().all():
            raise CheckpointError(f"{given} has values in {name} that are not finite: its training diverged")
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


def parsed(given: Given, parse: Callable[[], Any]) -> Any:
    """What ``parse()`` returns. Where argparse ends the program instead, its last line becomes a ``UserError``."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return parse()
    except SystemExit:
        reason = (said.getvalue().strip().splitlines() or ["expected options of a network, and no -h"])[-1]
    except UserError as error:
        reason = str(error)
    raise UserError(f"{given}: {reason.partition('error: ')[2] or reason}")


def choose(available: int, wanted: int, seed: int) -> Tensor:
    """``wanted`` of the numbers 0 to ``available``, at random, in ascending order; all of them if there are fewer."""
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return order[:wanted].sort().values


def device_of(name: str) -> torch.device:
    """The device that ``--device`` names. Raises ``UserError`` for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no GPU that torch can use; expected auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
