"""Learned weights of the steps, the same at every position: one λ, or one weight for each step."""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import RecursiveNorm, at_least_float32

SHARPNESS = 3.0  # initially mixture and halting put about 0.9 of the weight on the initial λ


class LearnedWeights(nn.Module):
    """p of shape ``(K,)``: :meth:`weights` computes it from ``start + moved``.

    Args:
        steps: K.
        start: the initial value of what is learned.
        factory: device and dtype, as in torch's own modules.
    """

    start: Tensor

    def __init__(self, steps: int, start: Tensor, **factory: Any):
        super().__init__()
        self.steps = steps
        self.register_buffer("start", start.to(**factory))
        self.moved = nn.Parameter(torch.zeros(start.numel(), **factory))

    def learned_value(self) -> Tensor:
        """The initial value plus what was learned, at least in fp32."""
        return at_least_float32(self.start) + at_least_float32(self.moved)

    def weights(self) -> Tensor:
        """p, of shape ``(K,)``."""
        raise NotImplementedError

    def of_steps(self, ys: Tensor) -> Tensor:
        """p for the y_k in ``ys``, ``(K, ..., dim)``."""
        return self.weights()

    def effective_lambda(self) -> float:
        """``sum_k k * p_k``."""
        k = step_numbers(self.steps, self.start.device)
        return float((k * self.weights().detach().float()).sum())

    def mix(
        self,
        post: RecursiveNorm,
        x: Tensor,
        f_x: Tensor,
        branch_scale: float,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """``sum_k p_k * y_k`` of the steps of ``post``."""
        y, _ = post.mixture(x, f_x, self.weights(), None, branch_scale, padding_mask)
        return y


class Fraction(LearnedWeights):
    """One learned lambda in [1, K]: ``p_k = max(0, 1 - |lambda - k|)``.

    So y is y_k at an integer, and ``dy/dlambda = y_{k+1} - y_k``.
    """

    def __init__(self, steps: int, initial: float, **factory: Any):
        super().__init__(steps, torch.tensor(initial), **factory)

    def weights(self) -> Tensor:
        value = self.learned_value()
        # straight-through clamp
        inside = value + (value.clamp(1.0, self.steps) - value).detach()
        lower = inside.detach().floor().clamp(1.0, max(self.steps - 1.0, 1.0))
        upper_share = inside - lower
        k = step_numbers(self.steps, self.start.device)
        p = torch.where(k == lower, 1.0 - upper_share, upper_share.new_zeros(()))
        return torch.where(k == lower + 1.0, upper_share, p)


class Mixture(LearnedWeights):
    """``p = softmax(a)``, a of shape ``(K,)`` learned, initially ``-3 |k - lambda|``."""

    def __init__(self, steps: int, initial: float, **factory: Any):
        start = -SHARPNESS * (step_numbers(steps) - initial).abs()
        super().__init__(steps, start, **factory)

    def weights(self) -> Tensor:
        return self.learned_value().softmax(0)


def step_numbers(steps: int, device: torch.device | str | None = None) -> Tensor:
    """1 ... K."""
    return torch.arange(1.0, steps + 1, device=device)
