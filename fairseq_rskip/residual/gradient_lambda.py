"""The adaptive recursive skip whose λ is chosen once, by the gradients of one batch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import RecursiveNorm
from .adaptive import AdaptiveRule, adapts
from .profile import Profiled, hooked, without_gradients


@adapts("gradient")
class GradientSkip(Profiled, AdaptiveRule):
    """An integer lambda for each skip, chosen once before training, then frozen.

    A block then neither grows nor shrinks the norm of the gradient on its way back:
    ``|dL/dx_l| / |dL/dx_{l+1}|`` is nearest 1.
    """

    post: RecursiveNorm

    def set_up(self) -> None:
        self.is_initialised = False
        self.used = round(float(self.options.skip_lambda))  # a Python int: avoids a device sync
        self.register_load_state_dict_post_hook(_read_used)

    def _start(self, value: float) -> Tensor:
        return torch.tensor(float(round(value)))

    def effective_lambda(self) -> float:
        return float(self.start)

    def share_of_steps(self, ys: Tensor) -> Tensor:
        return (self.counts() == self.start).to(ys.dtype)

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        scales = (self.skip_scale, self.branch_scale)
        y = self.post(x, f_x, *scales, padding_mask, steps=self.used)
        unused = [p for norm in list(self.post)[self.used :] for p in norm.parameters()]
        if unused and self.training and torch.is_grad_enabled():
            # DistributedDataParallel waits for a gradient of every parameter: zeros for unused
            # norms
            return y + 0.0 * torch.stack([p.sum() for p in unused]).sum().to(y.dtype)
        return y

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
            distances = {
                k: abs(math.log(ratio))
                for k, ratio in ratios[name].items()
                if k <= skip.steps and 0 < ratio < math.inf
            }
            # without a positive and finite ratio lambda stays as it was
            nearest = min(distances, key=distances.__getitem__, default=int(skip.start))
            skip.freeze(nearest)
        return {name: float(skip.start) for name, skip in skips.items()}

    def freeze(self, steps: int) -> None:
        """Let lambda be ``steps``."""
        self.start.fill_(steps)
        self.used = steps


def _read_used(skip: GradientSkip, _incompatible: Any) -> None:
    skip.used = int(skip.start)


def gradient_norms(
    watched: dict[str, nn.Module], loss: Any, shortcuts: dict[str, nn.Module]
) -> dict[str, list[float]]:
    """Module name -> the norms of the gradients at the block's input x and output y."""
    norms = {name: [0.0, 0.0] for name in watched}

    def watch(tensor: Tensor, name: str, end: int) -> None:
        def write(gradient: Tensor) -> None:
            norms[name][end] = float(gradient.norm())

        if tensor.requires_grad:
            tensor.register_hook(write)

    def see(name: str, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
        if module is shortcuts.get(name, module):
            watch(args[0] if args else kwargs["x"], name, 0)
        if module is watched[name]:
            watch(y, name, 1)

    register_hook = nn.Module.register_forward_hook
    with hooked(watched, register_hook, see), hooked(shortcuts, register_hook, see):
        loss().backward()
    return norms
