"""How far each skip connection turns x, and the two paths of its gradient, measured in a run.

A skip connection sends x to y on two paths: directly, and through its branch. On the way back the
gradient at x is the sum of what the two paths return, by the skip and by the branch. docs/depth.md
says what the depth of a stack asks of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import at_least_float32
from ..residual import SkipConnection
from ..residual.hooks import hooked
from .probe import Call, Watch
from .skip_log import BRANCH_OVER_SKIP, COS_GRADIENTS, COS_X_F, COS_Y_X

OF_POSITIONS = (
    COS_Y_X,  # the cosine of y and x, mean over positions
    COS_X_F,  # the cosine of x and F(x), mean over positions
)
QUANTITIES = (
    *OF_POSITIONS,
    COS_GRADIENTS,  # the cosine of the gradients that reach x by the skip and by the branch
    BRANCH_OVER_SKIP,  # the norm of the gradient by the branch over that by the skip
)
POSITIONS = "positions"  # of a pass, padding left out


class PathProbe(Watch):
    """Measures :data:`QUANTITIES` of every skip connection below ``model`` during a ``with`` block.

        with PathProbe(model) as probe:
            criterion(model(x)).backward()
        probe.means()["decoder.layers.3.final_skip"]["skip_cos_gradients"]

    Within the block the skip gets a view of x, whose gradient is the skip's alone: outputs and
    gradients stay the same bit for bit. Rules that carry several tensors have no y and x of one
    shape and are left out. Of a rule whose skip reads x in ``prepare``, as ``fractional``, only the
    cosines of x are measured.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.skips = {name: skip for name, skip in self.skips.items() if skip.widths == (1, 1)}

    def __enter__(self) -> "PathProbe":
        super().__enter__()
        register = nn.Module.register_forward_pre_hook
        self.hooks.enter_context(hooked(self.skips, register, self.give_view))
        return self

    def give_view(self, name: str, skip: SkipConnection, args: Any, kwargs: Any) -> Any:
        """Replace x, the first argument or by name, by a view of it."""
        x = args[0] if args else kwargs["x"]
        view = x.view_as(x)
        measured: dict[str, Tensor] = {}
        self.passes[name].append(measured)
        if view.requires_grad:
            gradients = Gradients(measured)
            self.hooks.callback(view.register_hook(gradients.by_skip).remove)
            self.hooks.callback(x.register_hook(gradients.at_x).remove)
        if args:
            return (view, *args[1:]), kwargs
        return (), {**kwargs, "x": view}

    @torch.no_grad()
    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        measured = self.passes[name][-1]
        measured[COS_Y_X] = mean_cosine(skip, call.y, call.x, call.mask)
        measured[COS_X_F] = mean_cosine(skip, call.x, call.f_x, call.mask)
        measured[POSITIONS] = count_positions(skip, call)

    def means(self) -> dict[str, dict[str, float]]:
        """Block -> quantity -> its mean over the passes so far, of those that were measured.

        That of the cosines of x is over the positions of all passes.
        """
        means: dict[tuple[str, str], Tensor] = {}
        for name in self.skips:
            by_quantity = self.values(name)
            for quantity in QUANTITIES:
                if quantity not in by_quantity:
                    continue
                values = by_quantity[quantity].double()
                if quantity in OF_POSITIONS:
                    positions = by_quantity[POSITIONS]
                    means[name, quantity] = (positions * values).sum() / positions.sum()
                else:
                    means[name, quantity] = values.mean()

        by_block: dict[str, dict[str, float]] = {name: {} for name in self.skips}
        if means:
            numbers = torch.stack([*means.values()]).tolist()  # one wait for the device
            for (name, quantity), number in zip(means, numbers):
                by_block[name][quantity] = number
        return by_block


class Gradients:
    """The two gradients of one pass through one skip connection."""

    def __init__(self, measured: dict[str, Tensor]):
        self.measured = measured
        self.skip: Tensor | None = None

    def by_skip(self, gradient: Tensor) -> None:
        self.skip = at_least_float32(gradient.detach())

    def at_x(self, gradient: Tensor) -> None:
        """Measure x's gradient, which is complete when both paths have returned theirs.

        Autograd calls this after :meth:`by_skip`, if the skip has read the view.
        """
        if self.skip is None:
            return
        branch = at_least_float32(gradient.detach()) - self.skip
        norms = self.skip.norm() * branch.norm()
        self.measured[COS_GRADIENTS] = (self.skip * branch).sum() / norms
        self.measured[BRANCH_OVER_SKIP] = branch.norm() / self.skip.norm()


def mean_cosine(skip: SkipConnection, a: Tensor, b: Tensor, padding_mask: Tensor | None) -> Tensor:
    """The cosine of a and b over the features, its mean over the positions that are not padded."""
    cosines = torch.cosine_similarity(
        at_least_float32(a), at_least_float32(b), dim=skip.channel_dim
    )
    if padding_mask is None:
        return cosines.mean()
    unpadded = padding_mask.logical_not()
    return torch.where(unpadded, cosines, 0.0).sum() / unpadded.sum()


def count_positions(skip: SkipConnection, call: Call) -> Tensor:
    """The number of positions of a pass that are not padded, in float64."""
    if call.mask is not None:
        return call.mask.logical_not().sum().double()
    count = call.x.numel() // call.x.size(skip.channel_dim)
    return torch.tensor(count, dtype=torch.float64, device=call.x.device)
