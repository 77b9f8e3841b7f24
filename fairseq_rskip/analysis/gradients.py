"""Figure 3: the norm of the loss gradient at the output y of every residual block.

The mean over examples of the Frobenius norm of dL_i/dy_i, where L_i is the loss of example i alone: cross entropy of an
image; of a sentence the mean cross entropy of its target's tokens, teacher-forced, without label smoothing. Models run
in evaluation mode, so that examples do not see each other.
"""

import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..tools.console import print_line, progress
from . import figures
from .probe import SkipProbe
from .study import Place, Study, draw_blocks, panels, table

EXAMPLES = 10_000  # as in the paper


class Estimate(NamedTuple):
    """The mean of a quantity over examples, its standard error, and their number."""

    mean: float
    sem: float
    examples: int


def estimate(values: Tensor) -> Estimate:
    """Of one value an example; the standard error of a single example is NaN."""
    values = values.double()
    count = values.numel()
    sem = float(values.std() / count**0.5) if count > 1 else float("nan")
    return Estimate(float(values.mean()), sem, count)


def gradient_norms(
    model: nn.Module, batches: Iterable[Any], losses: Callable[[nn.Module, Any], Tensor]
) -> Dict[str, Estimate]:
    """Mean over examples of ``||dL_i / dy_i||`` at the output y of every skip connection below ``model``.

    Args:
        model: run in evaluation mode, in which examples do not see each other: no dropout, constant batch statistics.
            It is left in the mode it was in, without gradients.
        batches: whatever ``losses`` takes.
        losses: ``losses(model, batch)`` gives one loss L_i for each example of the batch, shape ``(examples,)``.

    Returns the name of each skip connection -> its estimate, in the order of ``model.named_modules()``. Norms are taken
    in float64: in stacks with lambda other than 1 gradients leave the range in which fp32 can square them.

    Raises ``UserError`` for a model without skip connections, or no examples.
    """
    norms: Dict[str, List[Tensor]] = {}
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with SkipProbe(model, ratio=False, dtype=torch.float64) as probe:
                if not probe.blocks:
                    raise UserError("the model has no skip connection of fairseq_rskip")
                losses(model, batch).sum().backward()
            model.zero_grad(set_to_none=True)
            for name, block in probe.blocks.items():
                if block.y_grad_norm is not None:
                    norms.setdefault(name, []).append(block.y_grad_norm.cpu())
    finally:
        model.train(training)
    if not norms:
        raise UserError("there are no examples to take gradients of")
    return {name: estimate(torch.cat(found)) for name, found in norms.items()}


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print a table, write ``stem``'s CSV after each of them and its figure."""
    places = study.places()
    found: Dict[str, Dict[str, Estimate]] = {}
    for label, model in study.models.items():
        found[label] = gradient_norms(model, progress(study.batches(), study.batch_count, label), study.losses)
        _warn(label, found[label])
        done = {name: places[name] for name in found}
        figures.write_csv(stem.with_name(f"{stem.name}.csv"), rows(done, found))  # what is done is not lost
    means = {label: {name: e.mean for name, e in blocks.items()} for label, blocks in found.items()}
    print(table(places, means, f"gradient norm at y, mean over {study.data}"))
    figures.save(draw(places, found, study), stem)
    print(f"written to {stem}.csv, {stem}.png and {stem}.pdf")


def rows(places: Dict[str, List[Place]], found: Dict[str, Dict[str, Estimate]]) -> List[Dict[str, Any]]:
    """One row a model and block."""
    return [
        {
            "model": label,
            "block": place.name,
            "index": place.index,
            "group": place.group,
            "gradient_norm": found[label][place.name].mean,
            "standard_error": found[label][place.name].sem,
            "examples": found[label][place.name].examples,
        }
        for label, shown in places.items()
        for place in shown
    ]


def draw(places: Dict[str, List[Place]], found: Dict[str, Dict[str, Estimate]], study: Study) -> Any:
    """The figure: a panel for a ResNet, one each for encoder and decoder; bars are standard errors."""
    sides = panels(places)
    figure, axes = figures.new_figure(columns=len(sides))
    means = {label: {name: e.mean for name, e in blocks.items()} for label, blocks in found.items()}
    errors = {label: {name: e.sem for name, e in blocks.items()} for label, blocks in found.items()}
    for axis, side in zip(axes, sides):
        draw_blocks(axis, side, places, means, errors)
        axis.set_yscale("log")
    axes[0].set_ylabel("gradient norm at y")
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"Mean over {study.data}", fontsize="medium")
    return figure


def _warn(label: str, blocks: Dict[str, Estimate]) -> None:
    bad = [name for name, value in blocks.items() if not math.isfinite(value.mean)]
    if bad:
        where = f"{len(bad)} of {len(blocks)} blocks, the last of them {bad[-1]}"
        print_line(f"note: {label}: the gradient is not finite at {where}", "stderr")
