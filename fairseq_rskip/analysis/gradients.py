"""Figure 3: the norm of the loss gradient at the output y of every residual block.

The mean over examples of the Frobenius norm of dL_i/dy_i, where L_i is the loss of example i alone: cross entropy of an
image; of a sentence the mean cross entropy of its target's tokens, teacher-forced, without label smoothing. Models run
in evaluation mode, so that examples do not see each other.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..console import print_line
from ..errors import UserError
from . import figures
from .figures import Row
from .probe import SkipProbe
from .study import Estimate, Quantity, Study, draw, estimate, table

NORM = Quantity("gradient_norm", "standard_error", "gradient norm at y", scale="log")


def gradient_norms(
    model: nn.Module, batches: Iterable[Any], losses: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Estimate]:
    """Mean over examples of ``||dL_i / dy_i||`` at the output y of every skip connection below ``model``, by its name.

    ``losses(model, batch)`` gives one loss L_i for each example, shape ``(examples,)``. The model runs in evaluation
    mode, and is left in its mode, without gradients. Norms are taken in float64: in deep stacks with lambda other than
    1 their squares leave fp32's range. Raises ``UserError`` for a model without skip connections, or no examples.
    """
    training = model.training
    model.eval()
    norms: dict[str, list[Tensor]] = {}
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
    """Measure the models of ``study``, print a table, write ``stem``'s CSV and its figure."""

    def measure(label: str, model: nn.Module, places: list[Row]) -> list[Row]:
        estimates = gradient_norms(model, study.show_batches(label), study.losses)
        bad = [name for name, value in estimates.items() if not math.isfinite(value.mean)]
        if bad:
            where = f"{len(bad)} of {len(estimates)} blocks, the last of them {bad[-1]}"
            print_line(f"note: {label}: the gradient is not finite at {where}", "stderr")
        columns = ("gradient_norm", "standard_error", "examples")
        return [dict(zip(columns, estimates[place["block"]])) for place in places]

    rows = study.measure(measure, stem)
    print(table(rows, NORM.column, f"{NORM.title}, mean over {study.data}"))
    figures.save(draw(rows, [NORM], study.data), stem)
    print(f"written to {stem}.csv, {stem}.png and {stem}.pdf")
