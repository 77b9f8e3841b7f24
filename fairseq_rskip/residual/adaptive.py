"""The recursive skip whose number of steps adapts: what Liu et al. 2020 leave to future work ("adaptively determine the
value of lambda, maybe in terms of the gradient distribution")."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..norms import KeepsStatistics, at_least_float32, channels_in_front
from ..ops import reference
from . import options as opt
from .paper import RSkip

MODES = ("fraction", "mixture", "halting", "gradient")
SHARPNESS = 3.0  # of the start: mixture and halting put about 0.9 of the weight on the starting lambda


class ASkip(KeepsStatistics, RSkip):
    """Adaptive recursive skip, ``y = sum_k p_k * y_k`` over the steps y_1 ... y_K of Eq. 4; F is computed once.

    ========= ====================================================================================================
    fraction  one learned lambda in [1, K]: ``p_k = max(0, 1 - |lambda - k|)``, so that y is y_k at an integer and
              ``dy/dlambda = y_{k+1} - y_k``
    mixture   ``p = softmax(a)``, a of shape ``(K,)`` learned; the effective lambda is ``sum_k k * p_k``
    halting   every position its own: ``h_k = sigmoid(u . y_k + b_k)``, ``p_k = h_k prod_{j<k} (1 - h_j)`` and p_K the
              rest, u of shape ``(dim,)`` and b of ``(K - 1,)`` learned; ``halt_cost`` times the mean of ``sum_k k p_k``
              over tokens is added to the loss (Graves 2016; Banino et al. 2021)
    gradient  an integer for each skip, chosen once before training so that a block neither grows nor shrinks the norm
              of the gradient on its way back, ``|dL/dx_l| / |dL/dx_{l+1}|`` nearest 1, then frozen
    ========= ====================================================================================================

    All start at ``skip_lambda``, halting and mixture within 0.3 of it. ``lambda_lr`` multiplies the learning rate of
    lambda, a, u and b under Adam, and in train_cifar.py; fairseq-train's SGD would square it. At one-hot p, y is
    rskip's of that lambda, bit for bit where one implementation computes both: by default torch computes rskip of
    lambda 1. Shapes and errors as in :class:`SkipConnection`; TorchScript is refused.
    """

    kind = "askip"
    learns = True
    statistics = ("mean_steps",)

    @dataclasses.dataclass(frozen=True)
    class Options(RSkip.Options):
        skip_lambda: float = opt.option(2.0, "λ at the start", "positive", in_rule=False)
        adapt: str = opt.option("fraction", "how askip adapts λ", choices=MODES, short="")
        max_steps: int = opt.option(4, "K, askip's largest λ", "count", short="K")
        halt_cost: float = opt.option(
            0.0, "τ, what a step costs in the loss where --skip-adapt halting", "fraction", in_rule=False
        )
        lambda_lr: float = opt.option(1.0, "multiplies the learning rate of λ", "positive", short="lr")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.mode, self.most, self.speed = self.options.adapt, self.steps(), float(self.options.lambda_lr)
        start = float(self.options.skip_lambda)
        if not 1.0 <= start <= self.most:
            raise ValueError(f"skip_lambda={start!r}: expected a number from 1 to max_steps={self.most} for askip")
        if self.options.halt_cost and self.mode != "halting":
            raise ValueError(f"halt_cost={self.options.halt_cost!r}: expected 0 with adapt {self.mode!r}")
        self.cost: Tensor | None = None
        self.register_buffer("start", self._start(start))
        self.frozen = round(start)  # of gradient, start as a number that Python may loop to
        self.register_load_state_dict_post_hook(_read_start)
        if self.mode == "fraction":
            self.moved = nn.Parameter(torch.zeros(()))
        elif self.mode == "mixture":
            self.moved = nn.Parameter(torch.zeros(self.most))
        elif self.mode == "halting":
            self.moved = nn.Parameter(torch.zeros(self.most - 1))
            self.direction = nn.Parameter(torch.zeros(self.dim))
            self.register_buffer("mean_steps", self._mean_steps(self.start))

    def _start(self, value: float) -> Tensor:
        """Where lambda (fraction, gradient), a (mixture) or b (halting) starts, for lambda = ``value``."""
        k = torch.arange(1.0, self.most + 1)
        if self.mode == "mixture":
            return -SHARPNESS * (k - value).abs()
        if self.mode == "halting":
            return SHARPNESS * (2.0 * (k[:-1] - value) + 1.0).clamp(-1.0, 1.0)
        return torch.tensor(value if self.mode == "fraction" else float(round(value)))

    def _mean_steps(self, b: Tensor) -> Tensor:
        """``sum_k k p_k`` of halting at u = 0."""
        p = reference.halting(b.new_zeros(self.most, 1), b, b.new_zeros(1))
        return (torch.arange(1.0, self.most + 1) * p).sum()

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError("askip cannot be scripted: train and generate with the model itself, or script an rskip")

    def steps(self) -> int:
        return int(self.options.max_steps)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.effective_lambda(), "alpha": self.f_scale, "K": float(self.most)}

    def position(self) -> Tensor:
        """lambda, a or b as it is now: the start plus what was learned, at ``lambda_lr`` times the learning rate."""
        start = at_least_float32(self.start)
        return start if self.mode == "gradient" else start + self.speed * at_least_float32(self.moved)

    def effective_lambda(self) -> float:
        """``sum_k k * p_k``; of halting its running mean over the tokens of about the last hundred updates."""
        if self.mode == "halting":
            return float(self.mean_steps)
        k = torch.arange(1.0, self.most + 1, device=self.start.device)
        return float((k * self.weights(None).detach().float()).sum())

    def weights(self, steps: Tensor | None) -> Tensor:
        """p, of shape ``(K,)``, or ``(K, ..., 1)`` where halting looks at the ``steps``, ``(K, ..., dim)``."""
        value = self.position()
        if self.mode == "mixture":
            return value.softmax(0)
        if self.mode == "halting":
            return reference.halting(at_least_float32(steps), value, self._direction()).unsqueeze(-1)
        inside = value + (value.clamp(1.0, self.most) - value).detach()  # beyond an end, the gradient leads back
        k = torch.arange(1.0, self.most + 1, device=value.device)
        below = inside.detach().floor().clamp(1.0, max(self.most - 1.0, 1.0))
        share = inside - below
        return (k == below) * (1.0 - share) + (k == below + 1.0) * share

    def _direction(self) -> Tensor:
        return self.speed * at_least_float32(self.direction)

    def recurse(self, y: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if self.mode == "gradient":
            return self._steps(y, x, padding_mask, self.frozen)[-1]
        return self._weighed(torch.stack(self._steps(y, x, padding_mask, self.most)), padding_mask).to(x.dtype)

    @torch.jit.unused
    def fused(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        taken = self.operator_takes(x, f_x, list(self.norms)[: self.frozen if self.mode == "gradient" else self.most])
        if taken is None:
            return None
        if self.mode == "gradient":
            y = ops.kernel(*taken.rows, self.x_scale, self.f_scale, *taken.norm)
        elif self.mode == "halting":
            y, p = ops.skip_mix(
                *taken.rows, self.position(), self._direction(), self.x_scale, self.f_scale, *taken.norm
            )
            self._count(p.unsqueeze(-1), padding_mask)
        else:
            y, _ = ops.skip_mix(*taken.rows, self.weights(None), None, self.x_scale, self.f_scale, *taken.norm)
        return y if self.channel_dim == -1 else channels_in_front(y, x)

    def forward(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, f_x, padding_mask)
        if self.mode == "gradient" and self.training and torch.is_grad_enabled():
            # DistributedDataParallel waits for a gradient of every parameter: zeros for norms that are not in use
            unused = [p.sum() for norm in list(self.norms)[self.frozen :] for p in norm.parameters()]
            return y + 0.0 * torch.stack(unused).sum().to(y.dtype) if unused else y
        return y

    def _weighed(self, steps: Tensor, padding_mask: Tensor | None) -> Tensor:
        """``sum_k p_k y_k`` of the steps, ``(K, ..., dim)``."""
        p = self.weights(steps)
        if self.mode == "halting":
            self._count(p, padding_mask)
        p = p if p.dim() > 1 else p.view(-1, *[1] * (steps.dim() - 1))
        return (p * steps).sum(0)

    def _steps(self, z: Tensor, x: Tensor, padding_mask: Tensor | None, count: int) -> list[Tensor]:
        """y_1 ... y_count of Eq. 4 from the first sum z on."""
        found: list[Tensor] = []
        for step, norm in enumerate(self.norms):
            if step < count:
                found.append(norm(found[-1] + x if step > 0 else z, padding_mask))
        return found

    def _count(self, p: Tensor, padding_mask: Tensor | None) -> None:
        """In training note what halting costs: E[k] at each position, 0 where padded, for the loss, and its mean."""
        if not self.training:
            return
        k = torch.arange(1.0, self.most + 1, device=p.device).view(-1, *[1] * (p.dim() - 1))
        expected = (k * p).sum(0).squeeze(-1)
        kept = torch.ones_like(expected) if padding_mask is None else padding_mask.logical_not().to(expected.dtype)
        self.cost = expected * kept if self.options.halt_cost else None
        with torch.no_grad():
            mean = (expected * kept).sum() / kept.sum().clamp(min=1.0)
            self.mean_steps.lerp_(mean.to(self.mean_steps.dtype), 0.01)

    def mismatch(self, noted: dict[str, Any] | None) -> str:
        """The state of an rskip with these options fits: :meth:`adopt` makes it one of this skip."""
        # rskip of lambda 1 notes itself as xskip
        if noted and (noted["kind"] == "rskip" or (noted["kind"], noted.get("skip_lambda")) == ("xskip", 1)):
            own = self.rule()
            noted = {**own, **{name: noted[name] for name in own if name in noted and name != "kind"}}
        return super().mismatch(noted)

    def take_cost(self) -> tuple[float, Tensor | None]:
        """tau and E[k] at each position of the last forward pass in training, 0 where padded; once, then None."""
        cost, self.cost = self.cost, None
        return float(self.options.halt_cost), cost

    def candidates(self) -> int:
        return self.most if self.mode == "gradient" else 0

    def choose(self, ratios: dict[int, float]) -> None:
        """Freeze the lambda whose ratio of gradient norms, lambda -> ratio, is nearest 1 (by factors).

        Where no ratio is positive and finite lambda stays at its start.
        """
        finite = {k: ratio for k, ratio in ratios.items() if ratio > 0 and math.isfinite(ratio)}
        self.freeze(min(finite, key=lambda k: abs(math.log(finite[k]))) if finite else int(self.start))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cost": None}  # a copy has no part in the last forward pass

    def freeze(self, steps: int) -> None:
        """Let lambda be ``steps``, of adapt="gradient"."""
        self.start.fill_(steps)
        self.frozen = steps

    def adopt(self, state: dict[str, Tensor], prefix: str) -> None:
        """Make an rskip's state, in place, one of this skip at that lambda; the further steps start afresh."""
        own = self.state_dict()
        found = sum(name.startswith(f"{prefix}norms.") and name.endswith(".weight") for name in state)
        if not found or f"{prefix}start" in state or found > self.most:
            return
        own["start"] = self._start(float(found))
        if self.mode == "halting":
            own["mean_steps"] = self._mean_steps(own["start"])
        for name, value in own.items():
            if f"{prefix}{name}" not in state:
                state[f"{prefix}{name}"] = value.clone()

    def coefficients(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self.check(x, f_x, padding_mask)
        x, f_x = (self._rows(at_least_float32(tensor)) for tensor in (x, f_x))
        maps = [torch.stack(each) for each in zip(*self.coefficients_by_step(x, f_x, padding_mask))]
        weights = torch.zeros(self.most, device=x.device)
        if self.mode == "gradient":
            weights[self.frozen - 1] = 1.0
        else:
            weights = self.weights(maps[0] * x + maps[1] * f_x + maps[2]).detach()
        weights = weights if weights.dim() > 1 else weights.view(-1, *[1] * x.dim())
        return tuple(self._unrow((weights * each).sum(0)) for each in maps)

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x:F in y, the quotient of the :meth:`coefficients`. Returns ``x``'s shape, at least fp32."""
        a, b, _ = self.coefficients(x, f_x, padding_mask)
        return a / b


def _read_start(skip: ASkip, _incompatible: Any) -> None:
    if skip.mode == "gradient":
        skip.frozen = int(skip.start)
