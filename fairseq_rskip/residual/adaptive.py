"""The recursive skip whose number of steps adapts: the future work of Liu et al. 2020.

``y = sum_k p_k * y_k``, where y_1 ... y_K are the steps of Eq. 4 and F is computed once. Four rules
differ in p; the kind askip chooses among them by its option ``adapt``.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..norms import at_least_float32
from ..option_error import OptionError
from .base import Common, SkipConnection, skips
from .options import Choice, Count, Fraction, Positive
from .registry import register
from .weighted import BranchScale, Recursive

SHARPNESS = 3.0  # initially mixture and halting put about 0.9 of the weight on the initial λ

InitialLambda = Annotated[float, Positive("the initial λ", affects="start")]
Adapt = Literal["fraction", "mixture", "halting", "gradient"]
MaxSteps = Annotated[int, Count("K, askip's largest λ", short="K")]
HaltCost = Annotated[float, Fraction("τ, loss penalty per step (halting only)", affects="training")]

RULES: dict[str, type["AdaptiveSkip"]] = {}


def adapts(adapt: Adapt) -> Callable[[type["AdaptiveRule"]], Any]:
    """A decorator that makes a class the rule of askip for ``adapt``."""

    def add(rule: type["AdaptiveRule"]) -> type["AdaptiveRule"]:
        rule.adapt = adapt
        RULES[adapt] = rule
        return rule

    return add


@register("askip")
class AdaptiveSkip(Recursive):
    """Adaptive recursive skip ``y = sum_k p_k * y_k``: the base of four rules, named by ``adapt``.

    ========= ======================================================================================
    fraction  one learned lambda in [1, K]: :class:`.FractionSkip`
    mixture   K learned weights: :class:`.MixtureSkip`
    halting   every position its own: :class:`.HaltingSkip`
    gradient  an integer for each skip, chosen once before training: :class:`.GradientSkip`
    ========= ======================================================================================

    The initial lambda is ``skip_lambda``; halting and mixture are within 0.3 of it. With one-hot p,
    y equals the y of rskip at that lambda, bit for bit if one implementation computes both; by
    default torch computes rskip of lambda 1. Build it as ``create_skip("askip", dim, adapt=...)``
    or by the class of the rule.
    """

    adapt: ClassVar[str] = ""  # the rule's name; the base has none
    start: Tensor

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
        if adapt != self.adapt:
            raise ValueError(
                f'{type(self).__name__}: expected create_skip("askip", {dim}, adapt={adapt!r})'
            )
        if halt_cost and adapt != "halting":
            raise OptionError("halt_cost", halt_cost, "0", {"adapt": adapt})
        super().__init__(
            dim,
            skip_lambda=skip_lambda,
            branch_scale=branch_scale,
            adapt=adapt,
            max_steps=max_steps,
            halt_cost=halt_cost,
            **common,
        )
        initial = float(skip_lambda)
        if not 1.0 <= initial <= self.steps:
            accepted = f"a number from 1 to {self.steps}"
            raise OptionError("skip_lambda", skip_lambda, accepted, {"max_steps": self.steps})
        self.register_buffer("start", self._start(initial).to(**self.factory))
        self.set_up()

    @classmethod
    def options_class(cls) -> type[SkipConnection]:
        return AdaptiveSkip

    @classmethod
    def variant(cls, options: dict[str, Any]) -> tuple[type[SkipConnection], dict[str, Any]]:
        options = dict(options)
        adapt = options.pop("adapt", "fraction")
        if not isinstance(adapt, str) or adapt not in RULES:
            raise OptionError("adapt", adapt, f"one of {', '.join(RULES)} for askip")
        return RULES[adapt], options

    @property
    def steps(self) -> int:
        return int(self.options.max_steps)

    def counts(self) -> Tensor:
        """1 ... K."""
        return torch.arange(1.0, self.steps + 1, device=self.start.device)

    def _start(self, value: float) -> Tensor:
        """The initial value of what is learned, for lambda = ``value``."""
        raise NotImplementedError

    def set_up(self) -> None:
        """Make the rule's parameters and what else it needs, at the end of the constructor."""
        raise NotImplementedError

    def effective_lambda(self) -> float:
        """``sum_k k * p_k``."""
        raise NotImplementedError

    def share_of_steps(self, ys: Tensor) -> Tensor:
        """p of the y_k in ``ys``, ``(K, ..., dim)``: of shape ``(K,)`` or ``(K, ...)``."""
        raise NotImplementedError

    def coefficients(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps = self.step_coefficients(x, f_x, padding_mask)
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        a, b, c = (torch.stack(parts) for parts in zip(*steps))
        ys = a * x + b * f_x + c

        axis = -1 if self.channel_dim == -1 else 2  # the features, in ys
        p = self.share_of_steps(ys.movedim(axis, -1)).detach()
        p = p.unsqueeze(axis) if p.dim() > 1 else p.view(-1, *[1] * x.dim())

        a, b, c = ((p * part).sum(0).to(x.dtype).expand_as(x) for part in (a, b, c))
        return a, b, c

    def ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        a, b, _ = self.coefficients(x, f_x, padding_mask)
        return a / b

    def constants(self) -> dict[str, float]:
        return {
            "lambda": self.effective_lambda(),
            "alpha": self.branch_scale,
            "K": float(self.steps),
            **super().constants(),
        }

    def mismatch(self, stored: dict[str, Any] | None) -> str:
        # the state of an rskip with these options fits, see upgrade; rskip of lambda 1 stores
        # itself as xskip
        if stored is not None and _is_recursive(stored):
            own = self.rule()
            stored = {name: stored.get(name, value) for name, value in own.items()}
            stored["kind"] = own["kind"]
        return super().mismatch(stored)

    def upgrade(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert an rskip's state to one of this skip at its lambda.

        Further steps keep their initial values.
        """
        gains = [name for name in state if name.startswith(f"{prefix}post.") and ".weight" in name]
        if not gains or f"{prefix}start" in state or len(gains) > self.steps:
            return
        own = {**self.state_dict(), **self.state_at(float(len(gains)))}
        for name, value in own.items():
            state.setdefault(f"{prefix}{name}", value.clone())

    def state_at(self, value: float) -> dict[str, Tensor]:
        """The buffers of a skip whose lambda is ``value``."""
        return {"start": self._start(value)}


class AdaptiveRule(AdaptiveSkip):
    """The constructor of the four rules: the class says what ``adapt`` is."""

    adapt: ClassVar[Adapt]

    def __init__(
        self,
        dim: int,
        *,
        skip_lambda: InitialLambda = 2.0,
        branch_scale: BranchScale = 1.0,
        max_steps: MaxSteps = 4,
        halt_cost: HaltCost = 0.0,
        **common: Unpack[Common],
    ):
        super().__init__(
            dim,
            skip_lambda=skip_lambda,
            branch_scale=branch_scale,
            adapt=self.adapt,
            max_steps=max_steps,
            halt_cost=halt_cost,
            **common,
        )


def _is_recursive(rule: dict[str, Any]) -> bool:
    """Whether a stored rule is rskip's."""
    return rule["kind"] == "rskip" or (rule["kind"] == "xskip" and rule.get("skip_lambda") == 1)


def lambdas(model: nn.Module) -> dict[str, float]:
    """Module name -> the current lambda, of every skip connection of ``model`` that adapts it."""
    return {
        name: skip.effective_lambda()
        for name, skip in skips(model).items()
        if isinstance(skip, AdaptiveSkip)
    }
