"""Figure 3: the norm of the loss gradient at the output y of every residual block.

The mean over examples of the Frobenius norm of dL_i/dy_i, where L_i is the loss of example i alone: cross entropy of an
image; of a sentence the mean cross entropy of its target's tokens, teacher-forced, without label smoothing. Models run
in evaluation mode, so that examples do not see each other.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..console import print_line
from . import figures
from .figures import Row
from .probe import SkipProbe
from .study import Quantity, Study, draw, estimate, table

NORM = Quantity("gradient_norm", "standard_error", "gradient norm at y", scale="log")


def gradient_norms(
    model: nn.Module, batches: Iterable[Any], losses: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """``||dL_i / dy_i||`` of each example i at the output y of every skip connection below ``model``, by its name.

    ``losses(model, batch)`` gives one loss L_i for each example, shape ``(examples,)``; the model is in evaluation
    mode. Norms are taken in float64: in deep stacks with lambda other than 1 their squares leave fp32's range.
    """
    with SkipProbe(model, ratio=False, dtype=torch.float64) as probe:
        for batch in batches:
            losses(model, batch).sum().backward()
            model.zero_grad(set_to_none=True)
    norms = {name: block.y_grad_norm for name, block in probe.blocks.items()}
    return {name: values.cpu() for name, values in norms.items() if values is not None}


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print a table, write ``stem``'s CSV and its figure."""

    def measure(label: str, model: nn.Module, places: list[Row]) -> list[Row]:
        norms = gradient_norms(model, study.show_batches(label), study.losses)
        if bad := [name for name, values in norms.items() if not values.isfinite().all()]:
            where = f"{len(bad)} of {len(norms)} blocks, the last of them {bad[-1]}"
            print_line(f"note: {label}: the gradient is not finite at {where}", "stderr")
        shown = [norms[place["block"]] for place in places]
        columns = (NORM.column, NORM.error, "examples")
        return [dict(zip(columns, (*estimate(values), len(values)))) for values in shown]

    rows = study.measure(measure, stem)
    print(table(rows, NORM.column, f"{NORM.title}, mean over {study.data}"))
    figures.save(draw(rows, [NORM], study.data), stem)
    print(f"written to {stem}.csv, {stem}.png and {stem}.pdf")
