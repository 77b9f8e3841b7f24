"""The recursive skip whose number of steps adapts: the future work of Liu et al. 2020."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..norms import KeepsStatistics, at_least_float32, is_recomputed
from ..ops import reference
from . import options as opt
from .base import skips
from .profile import Profiled, hooked, without_gradients
from .weighted import RSkip

SHARPNESS = 3.0  # of the start: mixture and halting put about 0.9 of the weight on the starting lambda


class ASkip(
    KeepsStatistics,
    Profiled,
    RSkip,
    kind="askip",
    skip_lambda=opt.option(2.0, "λ at the start", "positive", affects_output=False),
    adapt=opt.option("fraction", "how askip adapts λ", choices=("fraction", "mixture", "halting", "gradient")),
    max_steps=opt.option(4, "K, askip's largest λ", "count", short="K"),
    halt_cost=opt.option(
        0.0, "τ, what a step costs in the loss where --skip-adapt halting", "fraction", affects_output=False
    ),
    lambda_lr=opt.option(1.0, "multiplies the learning rate of λ", "positive", short="lr"),
):
    """Adaptive recursive skip, ``y = sum_k p_k * y_k``. The y_1 ... y_K are the steps of Eq. 4; F is computed once.

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
    lambda, a, u and b under Adam, and in train_cifar.py; fairseq-train's SGD would square it. With one-hot p, y
    equals the y of rskip at that lambda, bit for bit if one implementation computes both; by default torch computes
    rskip of lambda 1.
    """

    statistics = ("mean_steps",)

    @property
    def steps(self) -> int:
        return int(self.options.max_steps)

    def setup(self) -> None:
        super().setup()
        self.mode, self.lr_multiplier = self.options.adapt, float(self.options.lambda_lr)
        self.wants_profile = self.mode == "gradient"
        start = float(self.options.skip_lambda)
        if not 1.0 <= start <= self.steps:
            raise ValueError(f"skip_lambda={start!r}: expected a number from 1 to max_steps={self.steps} for askip")
        if self.options.halt_cost and self.mode != "halting":
            raise ValueError(f"halt_cost={self.options.halt_cost!r}: expected 0 with adapt {self.mode!r}")
        self.cost: Tensor | None = None
        self.register_buffer("start", self._start(start))
        self.used = round(start) if self.wants_profile else self.steps  # a number that Python may loop to
        self.register_load_state_dict_post_hook(_read_start)
        if self.mode != "gradient":
            self.moved = nn.Parameter(torch.zeros(1 if self.mode == "fraction" else self.start.numel()))
        if self.mode == "halting":
            self.direction = nn.Parameter(torch.zeros(self.dim))
            self.register_buffer("mean_steps", self._mean_steps(self.start))

    def _start(self, value: float) -> Tensor:
        """Where lambda (fraction, gradient), a (mixture) or b (halting) starts, for lambda = ``value``."""
        k = torch.arange(1.0, self.steps + 1)
        if self.mode == "mixture":
            return -SHARPNESS * (k - value).abs()
        if self.mode == "halting":
            return SHARPNESS * (2.0 * (k[:-1] - value) + 1.0).clamp(-1.0, 1.0)
        return torch.tensor(value if self.mode == "fraction" else float(round(value)))

    def _mean_steps(self, b: Tensor) -> Tensor:
        """``sum_k k p_k`` of halting at u = 0."""
        p = reference.halting(b.new_zeros(self.steps, 1), b, b.new_zeros(1))
        return (torch.arange(1.0, self.steps + 1) * p).sum()

    def learned_value(self) -> Tensor:
        """lambda, a or b as it is now: the start plus what was learned, at ``lambda_lr`` times the learning rate."""
        start = at_least_float32(self.start)
        return start if self.mode == "gradient" else start + self.lr_multiplier * at_least_float32(self.moved)

    def effective_lambda(self) -> float:
        """``sum_k k * p_k``; of halting its running mean over the tokens of about the last hundred updates."""
        if self.mode == "halting":
            return float(self.mean_steps)
        k = torch.arange(1.0, self.steps + 1, device=self.start.device)
        return float((k * self.weights(None).detach().float()).sum())

    def weights(self, ys: Tensor | None) -> Tensor:
        """p, of shape ``(K,)``, or ``(K, ..., 1)`` where halting looks at the y_k in ``ys``, ``(K, ..., dim)``."""
        value = self.learned_value()
        if self.mode == "mixture":
            return value.softmax(0)
        if self.mode == "halting":
            return reference.halting(at_least_float32(ys), value, self._direction()).unsqueeze(-1)
        inside = value + (value.clamp(1.0, self.steps) - value).detach()  # beyond an end, the gradient leads back
        k = torch.arange(1.0, self.steps + 1, device=value.device)
        below = inside.detach().floor().clamp(1.0, max(self.steps - 1.0, 1.0))
        share = inside - below
        return (k == below) * (1.0 - share) + (k == below + 1.0) * share

    def _direction(self) -> Tensor:
        return self.lr_multiplier * at_least_float32(self.direction)

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        ys: list[Tensor] = []
        for norm in self.norms_in_use():
            ys.append(norm(ys[-1] + x if ys else z, padding_mask))
        if self.mode == "gradient":
            return ys[-1]
        if self.mode != "halting":
            return weigh(self.weights(None), ys).to(x.dtype)
        axis = self.channel_dim
        p = self.weights(torch.stack([y.movedim(axis, -1) for y in ys]))
        self._count(p, padding_mask)
        return weigh([share.movedim(-1, axis) for share in p], ys).to(x.dtype)

    def norms_in_use(self) -> list[Any]:
        return list(self.post)[: self.used]

    def _output(self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None) -> Tensor:
        y = super()._output(x, f_x, carried, padding_mask)
        if self.mode == "gradient" and self.training and torch.is_grad_enabled():
            # DistributedDataParallel waits for a gradient of every parameter: zeros for norms that are not in use
            unused = [p.sum() for norm in list(self.post)[self.used :] for p in norm.parameters()]
            return y + 0.0 * torch.stack(unused).sum().to(y.dtype) if unused else y
        return y

    def _fused(self, rows: Any, scales: Any, norm: Any, padding_mask: Tensor | None) -> Tensor:
        if self.mode == "gradient":
            return super()._fused(rows, scales, norm, padding_mask)
        if self.mode != "halting":
            return ops.skip_mix(*rows, self.weights(None), None, *scales, *norm)[0]
        y, p = ops.skip_mix(*rows, self.learned_value(), self._direction(), *scales, *norm)
        self._count(p.unsqueeze(-1), padding_mask)
        return y

    def _count(self, p: Tensor, padding_mask: Tensor | None) -> None:
        """In training note what halting costs: E[k] at each position, 0 where padded, for the loss, and its mean."""
        if not self.training:
            return
        k = torch.arange(1.0, self.steps + 1, device=p.device).view(-1, *[1] * (p.dim() - 1))
        expected = (k * p).sum(0).squeeze(-1)
        kept = torch.ones_like(expected) if padding_mask is None else padding_mask.logical_not().to(expected.dtype)
        self.cost = expected * kept if self.options.halt_cost else None
        if is_recomputed():
            return
        with torch.no_grad():
            mean = (expected * kept).sum() / kept.sum().clamp(min=1.0)
            self.mean_steps.lerp_(mean.to(self.mean_steps.dtype), 0.01)

    @classmethod
    def profile(cls, skips: Any, model: nn.Module, loss: Any, shortcuts: Any) -> dict[str, float]:
        """``loss`` is called once for each lambda, all skip connections at that lambda."""
        ratios: dict[str, dict[int, float]] = {name: {} for name in skips}
        for k in range(1, max(skip.steps for skip in skips.values()) + 1):
            with without_gradients(model), torch.enable_grad():
                for skip in skips.values():
                    skip.freeze(min(k, skip.steps))
                for name, (x, y) in gradient_norms(skips, loss, shortcuts).items():
                    ratios[name][k] = x / y if y else math.inf
        model.zero_grad(set_to_none=True)
        for name, skip in skips.items():
            tried = {k: r for k, r in ratios[name].items() if k <= skip.steps and 0 < r < math.inf}
            # without a positive and finite ratio lambda stays at its start
            skip.freeze(min(tried, key=lambda k: abs(math.log(tried[k]))) if tried else int(skip.start))
        return {name: float(skip.start) for name, skip in skips.items()}

    def freeze(self, steps: int) -> None:
        """Let lambda be ``steps``, of adapt="gradient"."""
        self.start.fill_(steps)
        self.used = steps

    def mismatch(self, noted: dict[str, Any] | None) -> str:
        # the state of an rskip with these options fits, see upgrade; rskip of lambda 1 notes itself as xskip
        if noted and (noted["kind"] == "rskip" or (noted["kind"], noted.get("skip_lambda")) == ("xskip", 1)):
            own = self.rule()
            noted = {**own, **{name: noted[name] for name in own if name in noted and name != "kind"}}
        return super().mismatch(noted)

    def upgrade(self, state: dict[str, Tensor], prefix: str) -> None:
        """Also convert an rskip's state to one of this skip at its lambda; further steps keep their initial values."""
        super().upgrade(state, prefix)
        own = self.state_dict()
        steps = sum(name.startswith(f"{prefix}post.") and name.endswith(".weight") for name in state)
        if not steps or f"{prefix}start" in state or steps > self.steps:
            return
        own["start"] = self._start(float(steps))
        if self.mode == "halting":
            own["mean_steps"] = self._mean_steps(own["start"])
        for name, value in own.items():
            if f"{prefix}{name}" not in state:
                state[f"{prefix}{name}"] = value.clone()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cost": None}  # a copy has no part in the last forward pass


def _read_start(skip: ASkip, _incompatible: Any) -> None:
    if skip.mode == "gradient":
        skip.used = int(skip.start)


def weigh(p: Any, values: list[Tensor]) -> Tensor:
    """``sum_k p_k values_k``, one by one, which keeps the memory format."""
    shares = [share.reshape(-1) if share.dim() == 0 else share for share in p]  # (1,) widens a half value, () does not
    return functools.reduce(torch.add, (share * value for share, value in zip(shares, values)))


def gradient_norms(watched: dict[str, nn.Module], loss: Any, shortcuts: dict[str, nn.Module]) -> dict[str, list[float]]:
    """Module name -> the norms of the gradients at the block's input x and output y."""
    norms = {name: [0.0, 0.0] for name in watched}

    def see(name: str, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        ends = [module is shortcuts.get(name, module), module is watched[name]]
        x = args[0] if args else kwargs["x"]
        for end, tensor in enumerate((x, y)):
            if ends[end] and tensor.requires_grad:
                tensor.register_hook(lambda gradient, end=end: norms[name].__setitem__(end, float(gradient.norm())))

    register = nn.Module.register_forward_hook
    with hooked(watched, register, see), hooked(shortcuts, register, see):
        loss().backward()
    return norms


def lambdas(model: nn.Module) -> dict[str, float]:
    """Module name -> lambda as it is now, of every skip connection below ``model`` whose lambda adapts."""
    return {name: skip.effective_lambda() for name, skip in skips(model).items() if isinstance(skip, ASkip)}


def halting(model: nn.Module) -> list[ASkip]:
    """The skip connections below ``model`` whose :func:`halting_cost` belongs into the loss."""
    return [skip for skip in skips(model).values() if isinstance(skip, ASkip) and skip.options.halt_cost]


def halting_cost(skips: list[ASkip], reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The mean over ``skips``, which all halt, of tau times E[k] in the last training forward pass, reduced over
    positions. A second call returns None until the next such pass."""
    costs = [skip.options.halt_cost * reduce(skip.cost) for skip in skips if skip.cost is not None]
    for skip in skips:
        skip.cost = None
    return torch.stack(costs).sum() / len(skips) if costs else None
