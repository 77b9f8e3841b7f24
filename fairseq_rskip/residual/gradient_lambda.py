"""A λ for each skip connection that is chosen once, by the gradients of one batch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import RecursiveNorm
from .hooks import hooked, restoring_state
from .learned_lambda import step_numbers


class OneStep(nn.Module):
    """An integer lambda, ``y = y_lambda``; :func:`choose_steps` chooses it before training.

    The buffer ``start`` has it for checkpoints. Later steps are not computed.

    Args:
        steps: K.
        initial: the initial lambda, which is rounded.
        factory: device and dtype, as in torch's own modules.
    """

    start: Tensor

    def __init__(self, steps: int, initial: float, **factory: Any):
        super().__init__()
        self.steps = steps
        self.chosen = round(initial)  # a Python int: avoids a device sync
        self.register_buffer("start", torch.tensor(float(self.chosen)).to(**factory))
        # ``start`` and its version when it was read; the tensor itself, as an id may be used again
        self.read: tuple[Tensor, int] | None = None

    def freeze(self, chosen: int) -> None:
        """Let lambda be ``chosen``."""
        self.start.fill_(chosen)
        self.chosen = chosen

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.read = None
        if not self.start.is_meta:
            self.chosen = self._in_start()

    def _apply(self, *arguments: Any, **options: Any) -> "OneStep":
        self.read = None
        super()._apply(*arguments, **options)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "read": None}

    def follow_start(self) -> None:
        """Choose what ``start`` says, if it was changed in place, as DDP's broadcast does, or is
        another tensor, as in ``torch.func.functional_call``.
        """
        if torch.compiler.is_compiling() or self.start.is_inference() or self.start.is_meta:
            return
        version = self.start._version
        if self.read is None or self.read[0] is not self.start or self.read[1] != version:
            self.read, self.chosen = (self.start, version), self._in_start()

    def _in_start(self) -> int:
        """Lambda; rounded, as a moving average of equal values may be a little less."""
        return round(float(self.start))

    def of_steps(self, ys: Tensor) -> Tensor:
        """p for the y_k in ``ys``, ``(K, ..., dim)``: of shape ``(K,)``, 1 at lambda."""
        return (step_numbers(self.steps, self.start.device) == self.start.round()).to(ys.dtype)

    def effective_lambda(self) -> float:
        return float(self.start)

    def mix(
        self,
        post: RecursiveNorm,
        x: Tensor,
        f_x: Tensor,
        branch_scale: float,
        padding_mask: Tensor | None,
    ) -> Tensor:
        """y of step lambda of ``post``."""
        self.follow_start()
        y = post(x, f_x, 1.0, branch_scale, padding_mask, steps=self.chosen)
        unused = [p for norm in list(post)[self.chosen :] for p in norm.parameters()]
        if unused and self.training and torch.is_grad_enabled():
            # DistributedDataParallel waits for a gradient of every parameter: zeros for unused
            # norms
            return y + 0.0 * torch.stack([p.sum() for p in unused]).sum().to(y.dtype)
        return y


def choose_steps(
    skips: dict[str, Any], model: nn.Module, loss: Any, shortcuts: dict[str, nn.Module]
) -> dict[str, float]:
    """Choose the lambda of every skip connection in ``skips``, whose ``shares`` is a OneStep.

    A block then neither grows nor shrinks the norm of the gradient on its way back:
    ``|dL/dx_l| / |dL/dx_{l+1}|`` is nearest 1. ``loss`` is called once for each lambda, all skip
    connections at that lambda. Returns module name -> lambda.
    """
    shares: dict[str, OneStep] = {name: skip.shares for name, skip in skips.items()}
    initial = {name: share.chosen for name, share in shares.items()}
    ratios: dict[str, dict[int, float]] = {name: {} for name in skips}
    for k in range(1, max(share.steps for share in shares.values()) + 1):
        with restoring_state(model), torch.enable_grad():
            for share in shares.values():
                share.freeze(min(k, share.steps))
            for name, (x, y) in gradient_norms(skips, loss, shortcuts).items():
                ratios[name][k] = x / y if y else math.inf

    for name, share in shares.items():
        distances = {
            k: abs(math.log(ratio))
            for k, ratio in ratios[name].items()
            if k <= share.steps and 0 < ratio < math.inf
        }
        # without a positive and finite ratio lambda stays as it was
        nearest = min(distances, key=distances.__getitem__, default=initial[name])
        share.freeze(nearest)
    return {name: share.effective_lambda() for name, share in shares.items()}


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

    def see_input(name: str, _module: nn.Module, args: Any, kwargs: Any, _y: Tensor) -> None:
        watch(args[0] if args else kwargs["x"], name, 0)

    def see_output(name: str, _module: nn.Module, _args: Any, _kwargs: Any, y: Tensor) -> None:
        watch(y, name, 1)

    takes_input = {**watched, **shortcuts}  # a shortcut stands before its skip connection
    register_hook = nn.Module.register_forward_hook
    with (
        hooked(takes_input, register_hook, see_input),
        hooked(watched, register_hook, see_output),
    ):
        loss().backward()
    return norms
