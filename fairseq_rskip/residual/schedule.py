"""Rules whose weight of the branch grows with the number of updates."""

from typing import Annotated, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .base import Common
from .options import Integer, all_norms
from .place import Place
from .registry import KINDS, register
from .weighted import Weighted

Warmup = Annotated[
    int,
    Integer(
        "T: updates until the branch counts in full (prores: times the layer)",
        short="T",
        most=10_000_000,
    ),
]


class Scheduled(Weighted):
    """``y = G(x + min(1, t / warmup) * F)`` at update t, the buffer ``updates``.

    A loop that never calls :meth:`set_num_updates` trains without the branch: without a call, the
    first forward pass in training at t = 0 warns.
    """

    updates: Tensor

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.warmup = float(self.options.warmup)
        self.counts_updates = False  # whether set_num_updates was called
        self.loaded_updates = 0  # of the state that was loaded
        zero = torch.zeros((), dtype=torch.int64, device=self.factory["device"])
        self.register_buffer("updates", zero)

    def set_num_updates(self, updates: int) -> None:
        """Set t, which does not fall below that of a state that was loaded.

        A training that starts from a trained model and counts from 0 (--finetune-from-model) would
        else lose its branches. Raises ``ValueError`` below 0.
        """
        if updates < 0:
            raise ValueError(f"updates={updates}: expected 0 or more")
        self.updates.fill_(max(updates, self.loaded_updates))
        self.counts_updates = True

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state, prefix, *arguments)
        if f"{prefix}updates" in state and not self.updates.is_meta:
            self.loaded_updates = int(self.updates)

    def missing_setup(self) -> str:
        if self.counts_updates or self.loaded_updates > 0:
            return super().missing_setup()
        return "the branch is left out at update 0; call set_num_updates(n) before each update"

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        updates = self.updates.view(1).to(torch.promote_types(x.dtype, torch.float32))
        return 1.0, (updates / self.warmup).clamp(max=1.0)

    def constants(self) -> dict[str, float]:
        return {"T": self.warmup, **super().constants()}


@register("prores", also=("progressive residual warm-up", "ProRes"))
class ProRes(Scheduled):
    """Progressive residual warm-up, ``y = x + min(1, t / (T * l)) * F(G(x))`` at update t in layer
    l.

    l counts from 1; T is ``warmup``; encoder and decoder count for themselves. Chen et al. 2026,
    "Progressive Residual Warmup for Language Model Pretraining", arXiv 2603.05369, its linear
    schedule on pre-norm, as in code dandingsky/ProRes.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    needs_place = True

    def __init__(self, dim: int, *, warmup: Warmup = 1000, **common: Unpack[Common]):
        super().__init__(dim, warmup=warmup, **common)
        self.layer = self.place.index + 1
        self.warmup *= self.layer

    def constants(self) -> dict[str, float]:
        constants = super().constants()
        return {**constants, "T": self.warmup / self.layer, "l": float(self.layer)}


@register("branchnorm", also=("BranchNorm",))
class BranchNorm(Scheduled):
    """BranchNorm, ``y = LN(x + min(1, t / T) * F)`` at update t, post-norm from update T on.

    T is ``warmup``. Liu et al. 2023, "BranchNorm: Robustly Scaling Extremely Deep Transformers",
    arXiv 2305.02790. We had no copy of the paper: ProRes' paper (footnote 3) says the ramp is
    linear, the same in each layer; T's default is ours.
    """

    norms = all_norms(without=("none",))

    def __init__(self, dim: int, *, warmup: Warmup = 4000, **common: Unpack[Common]):
        super().__init__(dim, warmup=warmup, **common)


def last_ramp(kind: str, layers: int, warmup: int | None = None) -> int:
    """The update from which on every branch of ``layers`` layers has its full weight.

    ``warmup`` is T, by default the rule's own; 0 for a rule without a ramp.
    """
    rule = KINDS.get(kind)
    if rule is None or not issubclass(rule, Scheduled):
        return 0
    options = {} if warmup is None else {"warmup": warmup}
    last = rule(1, place=Place(index=layers - 1, depth=layers), **options)
    return round(last.warmup)
