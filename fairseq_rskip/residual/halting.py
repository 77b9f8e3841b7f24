"""Weights of the steps that every position computes for itself, and what halting late costs."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import KeepsStatistics, RecursiveNorm, at_least_float32, halting, is_recomputed
from .learned_lambda import SHARPNESS, step_numbers

LARGEST_DROP = 0.2  # how much halting before the initial λ may lower E[k] at the start


class Halting(KeepsStatistics, nn.Module):
    """Every position its own p, ``h_k = sigmoid(u . y_k + b_k)``,
    ``p_k = h_k prod_{j<k} (1 - h_j)``.

    p_K is the rest. u, ``direction`` of shape ``(dim,)``, and b, ``start + moved`` of
    ``(K - 1,)``, are learned. ``halt_cost`` times the mean of ``sum_k k p_k`` over tokens must be
    added to the loss: :func:`halting_cost` (Graves 2016; Banino et al. 2021). ``mean_steps`` is
    the running mean of ``sum_k k p_k`` over the tokens of about the last hundred updates.

    Args:
        steps: K.
        initial: the initial lambda, within 0.3 of ``sum_k k p_k`` at the start.
        dim: the number of features.
        halt_cost: the loss of a step, tau.
        factory: device and dtype, as in torch's own modules.
    """

    statistics = ("mean_steps",)
    start: Tensor
    mean_steps: Tensor

    def __init__(
        self,
        steps: int,
        initial: float,
        dim: int,
        halt_cost: float = 0.0,
        **factory: Any,
    ):
        super().__init__()
        self.steps = steps
        self.halt_cost = halt_cost
        # E[k] at each position in the last training forward pass
        self.expected_steps: Tensor | None = None
        self.tokens: Tensor | float = 1.0  # the number of positions there that are not padded
        self.register_buffer("start", initial_biases(steps, initial).to(**factory))
        self.moved = nn.Parameter(torch.zeros(steps - 1, **factory))
        self.direction = nn.Parameter(torch.zeros(dim, **factory))
        self.register_buffer("mean_steps", expected_steps(at_least_float32(self.start)))

    def biases(self) -> Tensor:
        """b, at least in fp32."""
        return at_least_float32(self.start) + at_least_float32(self.moved)

    def of_steps(self, ys: Tensor) -> Tensor:
        """p for the y_k in ``ys``, ``(K, ..., dim)``: of shape ``(K, ...)``."""
        direction = at_least_float32(self.direction)
        return halting(at_least_float32(ys), self.biases(), direction)

    def effective_lambda(self) -> float:
        """The running mean of ``sum_k k * p_k``."""
        return float(self.mean_steps)

    def mix(
        self,
        post: RecursiveNorm,
        x: Tensor,
        f_x: Tensor,
        branch_scale: float,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """``sum_k p_k * y_k`` of the steps of ``post``."""
        biases, direction = self.biases(), at_least_float32(self.direction)
        y, p = post.mixture(x, f_x, biases, direction, branch_scale, padding_mask)
        if self.training:
            self._count(p, padding_mask)
        return y

    def _count(self, p: Tensor, padding_mask: Tensor | None) -> None:
        """Note E[k] at each position, 0 where padded, for the loss, and update its running mean."""
        k = step_numbers(self.steps, p.device).view(-1, *[1] * (p.dim() - 1))
        expected = (k * p).sum(0)
        unpadded = torch.ones_like(expected)
        if padding_mask is not None:
            unpadded = padding_mask.logical_not().to(expected.dtype)
        self.expected_steps = expected * unpadded if self.halt_cost else None
        tokens = unpadded.sum()
        self.tokens = tokens.clamp(min=1.0)
        if is_recomputed():
            return
        with torch.no_grad():
            mean = (expected * unpadded).sum() / self.tokens
            share = 0.01 * (tokens > 0)  # a batch of padding alone says nothing
            self.mean_steps.lerp_(mean.to(self.mean_steps.dtype), share.to(self.mean_steps.dtype))

    def __getstate__(self) -> dict[str, Any]:
        # a copy has no part in the last forward pass
        return {**self.__dict__, "expected_steps": None, "tokens": 1.0}


def initial_biases(steps: int, initial: float) -> Tensor:
    """b of shape ``(K - 1,)`` with which, at u = 0, a position halts at about step ``initial``.

    A step from lambda on halts with probability ``sigmoid(3)``, an earlier one with h, at most
    ``sigmoid(-3)``. A position that halts j steps before lambda lowers E[k] by ``j h``, so that all
    early steps lower it by about ``h lambda (lambda - 1) / 2``: at most :data:`LARGEST_DROP`.
    """
    lost_steps = max(1.0, initial * (initial - 1.0) / 2.0)
    h = LARGEST_DROP / lost_steps
    lowest = min(-SHARPNESS, math.log(h / (1.0 - h)))

    # -1 for steps before lambda, 1 from lambda on, in between for one next to a fractional lambda
    k = torch.arange(1.0, steps)
    side = (2.0 * (k - initial) + 1.0).clamp(-1.0, 1.0)
    return torch.where(side < 0.0, -lowest * side, SHARPNESS * side)


def expected_steps(biases: Tensor) -> Tensor:
    """``sum_k k p_k`` at u = 0."""
    steps = len(biases) + 1
    p = halting(biases.new_zeros(steps, 1), biases, biases.new_zeros(1))
    return (step_numbers(steps, biases.device) * p).sum()


def halting_modules(model: nn.Module) -> list[Halting]:
    """The modules of ``model`` whose :func:`halting_cost` must be added to the loss."""
    return [
        module for module in model.modules() if isinstance(module, Halting) and module.halt_cost
    ]


def halting_cost(modules: list[Halting], reduction: str = "mean") -> Tensor | None:
    """The mean over ``modules`` of tau times E[k], to be added to the loss.

    ``reduction``, as that of the loss: "mean" over the positions that are not padded, or "sum".
    E[k] is that of the last training forward pass: call this behind each. A second call returns
    None until the next pass, and so does one behind a pass in evaluation. Raises ``ValueError`` for
    another reduction, and for a pass that kept no gradient, as in reentrant checkpointing.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: expected 'mean' or 'sum'")
    costs = []
    for module in modules:
        if module.expected_steps is None:  # no training pass since the last call
            continue
        _check_gradient(module)
        positions = module.tokens if reduction == "mean" else 1.0
        costs.append(module.halt_cost * module.expected_steps.sum() / positions)
        module.expected_steps = None
    return torch.stack(costs).sum() / len(modules) if costs else None


def _check_gradient(module: Halting) -> None:
    """Raise ``ValueError`` where the cost of the last pass would have no gradient."""
    learns = module.moved.requires_grad or module.direction.requires_grad
    kept = module.expected_steps is not None and module.expected_steps.requires_grad
    if torch.is_grad_enabled() and learns and not kept:
        raise ValueError(
            "halting_cost: the last forward pass kept no gradient, so the cost would have none: "
            "expected one without torch.no_grad() and, with torch.utils.checkpoint, "
            "use_reentrant=False"
        )
