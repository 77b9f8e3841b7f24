"""Admin: a learned weight of the skip whose initial value comes from one batch."""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .base import Common
from .hooks import hooked, inputs_of_call, restoring_state
from .options import Choice, all_norms
from .profile import Profiled
from .registry import register
from .weighted import Weighted


@register("admin")
class Admin(Profiled, Weighted):
    """Admin, ``y = LN(omega * x + F)``, omega of shape ``(dim,)`` and learned.

    Liu et al. 2020, "Understanding the Difficulty of Training Transformers".

    omega is initialised from one batch, block after block: omega_1 = 1 and
    ``omega_{i+1}^2 = var(omega_i * x_i) + var(F_i)`` over all unpadded elements. If x has unit
    variance, this is the paper's sum ``omega_i^2 = sum_{j<i} var(F_j)``, where F_0 is the stack's
    input, of variance 1. The authors' code also counts padding, and starts fc1 and fc2 at Xavier's;
    here they start as in fairseq. Encoder and decoder are separate chains. ``--skip-omega formula``
    has the profile-free ``sqrt((R + 1) / ln(R + 1) - 1)`` of microsoft/admin-torch, R the residual
    blocks of this side; there it is a constant by default, here it is learned.
    """

    norms = all_norms(without=("none",))

    def __init__(
        self,
        dim: int,
        *,
        omega: Annotated[
            Literal["profile", "formula"],
            Choice("initial value of admin's ω", affects="start"),
        ] = "profile",
        **common: Unpack[Common],
    ):
        super().__init__(dim, omega=omega, **common)
        self.wants_profile = omega == "profile"
        value = 1.0 if self.wants_profile else self._by_formula()
        self.weight = self.new_parameter(torch.full((dim,), value))

    def _by_formula(self) -> float:
        self.require_place()
        blocks = self.place.num_blocks + 1.0
        return math.sqrt(blocks / math.log(blocks) - 1.0)

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return self.per_channel(self.weight), 1.0

    @classmethod
    def profile(cls, skips: Any, model: nn.Module, loss: Any, shortcuts: Any) -> dict[str, float]:
        omegas: dict[str, float] = {}
        next_omega: dict[str, float] = {}  # by side

        def see(name: str, skip: Any, args: Any, kwargs: Any) -> None:
            side = skip.place.side
            omegas[name] = next_omega.get(side, 1.0)
            inputs = inputs_of_call(*args, **kwargs)
            next_omega[side] = skip.init_omega(omegas[name], *inputs)

        before_forward = nn.Module.register_forward_pre_hook
        with torch.no_grad(), restoring_state(model), hooked(skips, before_forward, see):
            loss()
        return omegas

    def init_omega(
        self, omega: float, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> float:
        """Set omega, and return the next block's."""
        self.weight.fill_(omega)
        if padding_mask is not None:
            unpadded = padding_mask.logical_not()
            x = x.movedim(self.channel_dim, -1)[unpadded]
            f_x = f_x.movedim(self.channel_dim, -1)[unpadded]
        if not x.numel():  # nothing but padding
            return omega
        variances = [part.double().var(unbiased=False) for part in (omega * x, f_x)]
        return math.sqrt(sum(variances))
