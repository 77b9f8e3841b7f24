"""The recursive skip whose number of steps adapts: the future work of Liu et al. 2020.

``y = sum_k p_k * y_k``, where y_1 ... y_K are the steps of Eq. 4 and F is computed once. The option
``adapt`` of the kind askip chooses the module that computes p, one of :data:`SHARES`.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..norms import at_least_float32
from ..option_error import OptionError
from .base import Common, SkipConnection, skips
from .coefficients import Coefficients
from .gradient_lambda import OneStep, choose_steps
from .halting import Halting
from .learned_lambda import Fraction, Mixture
from .options import Between, Choice, Integer, Positive
from .profile import Profiled
from .registry import register
from .weighted import BranchScale, Recursive, is_recursive

InitialLambda = Annotated[float, Positive("the initial λ", affects="start")]
Adapt = Literal["fraction", "mixture", "halting", "gradient"]
MaxSteps = Annotated[int, Integer("K, askip's largest λ", short="K")]
HaltCost = Annotated[float, Between("τ, loss penalty per step (halting only)", affects="training")]

Shares = Fraction | Mixture | Halting | OneStep
SHARES: dict[str, type[Shares]] = {
    "fraction": Fraction,
    "mixture": Mixture,
    "halting": Halting,
    "gradient": OneStep,
}


@register("askip")
class AdaptiveSkip(Profiled, Recursive):
    """Adaptive recursive skip ``y = sum_k p_k * y_k``; ``shares`` has p, named by ``adapt``.

    ========= ======================================================================================
    fraction  one learned lambda in [1, K]: :class:`.Fraction`
    mixture   K learned weights: :class:`.Mixture`
    halting   every position its own: :class:`.Halting`
    gradient  an integer for each skip, chosen once before training: :class:`.OneStep`
    ========= ======================================================================================

    The initial lambda is ``skip_lambda``; halting and mixture are within 0.3 of it, gradient rounds
    it. With one-hot p, y equals the y of rskip at that lambda, bit for bit if one implementation
    computes both; by default torch computes rskip of lambda 1. The state dict of an rskip with at
    most K steps can be loaded.
    """

    def __init__(
        self,
        dim: int,
        *,
        skip_lambda: InitialLambda = 2.0,
        branch_scale: BranchScale = 1.0,
        adapt: Annotated[Adapt, Choice("how askip adapts λ")] = "fraction",
        max_steps: MaxSteps = 4,
        halt_cost: HaltCost = 0.0,
        **common: Unpack[Common],
    ):
        super().__init__(
            dim,
            skip_lambda=skip_lambda,
            branch_scale=branch_scale,
            adapt=adapt,
            max_steps=max_steps,
            halt_cost=halt_cost,
            **common,
        )
        if halt_cost and adapt != "halting":
            raise OptionError("halt_cost", halt_cost, "0", {"adapt": adapt})
        initial = float(skip_lambda)
        if not 1.0 <= initial <= self.steps:
            accepted = f"a number from 1 to {self.steps}"
            raise OptionError("skip_lambda", skip_lambda, accepted, {"max_steps": self.steps})
        self.wants_profile = adapt == "gradient"
        self.shares = self.new_shares(initial)

    @property
    def steps(self) -> int:
        return int(self.options.max_steps)

    def new_shares(self, initial: float) -> Shares:
        """The module that computes p, for the initial lambda ``initial``."""
        adapt, halt_cost = self.options.adapt, self.options.halt_cost
        if adapt == "halting":
            return Halting(self.steps, initial, self.dim, halt_cost, **self.factory)
        return SHARES[adapt](self.steps, initial, **self.factory)

    def effective_lambda(self) -> float:
        """``sum_k k * p_k``; of halting its running mean over tokens."""
        return self.shares.effective_lambda()

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        return self.shares.mix(self.post, x, f_x, self.branch_scale, padding_mask)

    @classmethod
    def profile(cls, skips: Any, model: nn.Module, loss: Any, shortcuts: Any) -> dict[str, float]:
        return choose_steps(skips, model, loss, shortcuts)

    def coefficients(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> Coefficients:
        steps = self.step_coefficients(x, f_x, padding_mask)
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        of_steps = Coefficients(*(torch.stack(parts) for parts in zip(*steps)))
        ys = of_steps.value(x, f_x)

        axis = -1 if self.channel_dim == -1 else 2  # the features, in ys
        p = self.shares.of_steps(ys.movedim(axis, -1)).detach()
        p = p.unsqueeze(axis) if p.dim() > 1 else p.view(-1, *[1] * x.dim())

        return Coefficients(*((p * part).sum(0) for part in of_steps)).like(x)

    def ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        a, b, _ = self.coefficients(x, f_x, padding_mask)
        return a / b

    parts = SkipConnection.parts  # of y, which several norms return together

    def constants(self) -> dict[str, float]:
        learned = super().constants().items()
        return {
            "lambda": self.effective_lambda(),
            "alpha": self.branch_scale,
            "K": float(self.steps),
            **{name.removeprefix("shares."): value for name, value in learned},
        }

    def mismatch(self, stored: dict[str, Any] | None) -> str:
        # the state of an rskip with these options fits, see upgrade; rskip of lambda 1 stores
        # itself as xskip
        if stored is not None and is_recursive(stored):
            own = self.rule()
            stored = {name: stored.get(name, value) for name, value in own.items()}
            stored["kind"] = own["kind"]
        return super().mismatch(stored)

    def upgrade(self, state: dict[str, Tensor], prefix: str, stored: dict[str, Any] | None) -> None:
        """Convert an rskip's state to one at its lambda.

        Whatever an rskip does not have, steps beyond its lambda among it, gets its initial value.
        """
        if f"{prefix}shares.start" in state:
            return
        steps = _steps_of(state, prefix, stored)
        if not 1 <= steps <= self.steps:
            return
        shares = self.new_shares(float(steps))
        initial = nn.ModuleDict({"shares": shares, "post": self.new_post(self.steps)})
        of_rskip = {f"post.{name}" for name in self.new_post(steps).state_dict()}
        device = next((value.device for value in state.values()), self.shares.start.device)
        for name, value in initial.state_dict().items():
            if name not in of_rskip:
                state[f"{prefix}{name}"] = value.to(device)


def _steps_of(state: dict[str, Tensor], prefix: str, stored: dict[str, Any] | None) -> int:
    """The lambda of an rskip's state; 0 if it is another's.

    A state without a rule, such as stock fairseq's, has a gain for each step.
    """
    if stored is not None:
        return int(stored["skip_lambda"]) if is_recursive(stored) else 0
    return sum(name.startswith(f"{prefix}post.") and ".weight" in name for name in state)


def lambdas(model: nn.Module) -> dict[str, float]:
    """Module name -> the current lambda, of every skip connection of ``model`` that adapts it."""
    return {
        name: skip.effective_lambda()
        for name, skip in skips(model).items()
        if isinstance(skip, AdaptiveSkip)
    }
