"""Figure 3 of Liu et al. (2020): the norm of the loss gradient at the output y of every residual block."""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from .probe import SkipProbe


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
