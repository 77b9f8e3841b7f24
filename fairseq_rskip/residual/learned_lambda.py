"""The adaptive recursive skip with learned weights of its steps."""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import RecursiveMixture, at_least_float32
from .adaptive import SHARPNESS, AdaptiveRule, adapts


class LearnedSteps(AdaptiveRule):
    """The rules whose p is learned, as ``start + moved`` of the parameter ``moved``."""

    post_class = RecursiveMixture
    post: RecursiveMixture
    moved: nn.Parameter

    def learned_value(self) -> Tensor:
        """The initial value plus what was learned."""
        return at_least_float32(self.start) + at_least_float32(self.moved)


class SharedWeights(LearnedSteps):
    """The rules whose p, :meth:`weights`, is the same at every position."""

    def weights(self) -> Tensor:
        """p, of shape ``(K,)``."""
        raise NotImplementedError

    def share_of_steps(self, ys: Tensor) -> Tensor:
        return self.weights()

    def effective_lambda(self) -> float:
        return float((self.counts() * self.weights().detach().float()).sum())

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        scales = (self.skip_scale, self.branch_scale)
        y, _ = self.post(x, f_x, self.weights(), None, *scales, padding_mask)
        return y


@adapts("fraction")
class FractionSkip(SharedWeights):
    """One learned lambda in [1, K]: ``p_k = max(0, 1 - |lambda - k|)``.

    So y is y_k at an integer, and ``dy/dlambda = y_{k+1} - y_k``.
    """

    def set_up(self) -> None:
        self.moved = self.new_parameter(torch.zeros(1))

    def _start(self, value: float) -> Tensor:
        return torch.tensor(value)

    def weights(self) -> Tensor:
        value = self.learned_value()
        # straight-through clamp
        inside = value + (value.clamp(1.0, self.steps) - value).detach()
        below = inside.detach().floor().clamp(1.0, max(self.steps - 1.0, 1.0))
        share = inside - below
        k = self.counts()
        return (k == below) * (1.0 - share) + (k == below + 1.0) * share


@adapts("mixture")
class MixtureSkip(SharedWeights):
    """``p = softmax(a)``, a of shape ``(K,)`` learned; the effective lambda is ``sum_k k p_k``."""

    def set_up(self) -> None:
        self.moved = self.new_parameter(torch.zeros(self.steps))

    def _start(self, value: float) -> Tensor:
        k = torch.arange(1.0, self.steps + 1)
        return -SHARPNESS * (k - value).abs()

    def weights(self) -> Tensor:
        return self.learned_value().softmax(0)
