"""Figure 3: the norm of the loss gradient at the output y of every residual block.

It is the mean over examples of the Frobenius norm of dL_i/dy_i, where L_i is the loss of example i
alone: cross entropy of an image; of a sentence the mean cross entropy of its target's tokens,
teacher-forced, without label smoothing. Models run in evaluation mode, so that examples do not see
each other.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import figures
from .figures import Row
from .probe import SkipProbe
from .study import Quantity, Study, estimate

NORM = Quantity("gradient_norm", "standard_error", "gradient norm at y", scale="log")


def gradient_norms(
    model: nn.Module, batches: Iterable[Any], losses: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """Skip connection of ``model`` -> ``||dL_i / dy_i||`` of each example i at its output y.

    ``losses(model, batch)`` gives one loss L_i for each example, shape ``(examples,)``; the model
    is in evaluation mode. Norms are taken in float64: in deep stacks with lambda other than 1 their
    squares leave fp32's range.
    """
    with SkipProbe(model, ratio=False, dtype=torch.float64) as probe:
        for batch in batches:
            losses(model, batch).sum().backward()
            model.zero_grad(set_to_none=True)
    norms = {}
    for name in probe.skips:
        measured = probe.values(name)
        if "y_grad_norm" in measured:
            norms[name] = measured["y_grad_norm"].cpu()
    return norms


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print a table, write ``stem``'s CSV and its figure."""
    rows: list[Row] = []
    for label, model, places in study.with_places():
        norms = gradient_norms(model, study.show_batches(label), study.losses)
        for place in places:
            of_examples = norms[place["block"]]
            mean, error = estimate(of_examples)
            columns = {NORM.column: mean, NORM.error: error, "examples": len(of_examples)}
            rows.append({**place, **columns})
        figures.write_csv(Path(f"{stem}.csv"), rows)
    study.show(rows, [NORM], stem)
