"""The skip connections of Liu et al. 2020, "Rethinking Skip Connection with Layer Normalization in Transformers and
ResNets" (COLING): expanded, recursive and learned."""

from typing import Any

import torch
from torch import Tensor, nn

from ..norms import Norm, channels_at_end, channels_in_front
from . import options as opt
from .weighted import ConstantSkip, Weighted, branch_scale, is_hooked, skip_lambda


class XSkip(ConstantSkip, skip_lambda=skip_lambda(2.0), branch_scale=branch_scale()):
    """Expanded skip ``y = G(lambda * x + alpha * F)``: Eq. 2 without G, Eq. 3 with it; lambda < 1 contracts.

    lambda = alpha = 1 without G is the plain skip ``x + F``, with layer norm Transformer's post-norm. LN(lambda * x +
    F) is LN(x + F / lambda) with eps / lambda^2 for eps, so that LN(0.5x + F) and LN(x + 2F) of the paper's Table 3 are
    one function.
    """

    kind = "xskip"


class RSkip(
    ConstantSkip,
    norm=opt.SOME_NORM,
    skip_lambda=skip_lambda(2, "steps"),
    branch_scale=branch_scale(),
):
    """Recursive skip ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``, ``y = y_lambda``: Eq. 4.

    Each step owns its gain and bias. lambda, an integer >= 1, is the number of ``steps``; lambda = 1 is Transformer's
    post-norm.
    """

    kind = "rskip"

    def setup(self) -> None:
        self.branch_scale = float(self.options.branch_scale)

    @property
    def steps(self) -> int:
        return int(self.options.skip_lambda)

    def _post_norms(self, make: Any) -> list[Norm]:
        norms = [make() for _ in range(self.steps)]
        if len(norms) > 1 and self.channel_dim == 1 and self.norm_axes == "c" and not norms[0].uses_padding_mask:
            # image maps normalised position by position: views as (..., dim) spare an allocation per step
            norms = [make(channel_dim=-1) for _ in norms]
        return norms

    def rule(self) -> dict[str, Any]:
        same = self.kind == "rskip" and self.steps == 1
        return {**super().rule(), "kind": "xskip" if same else self.kind}

    def normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Eq. 4 from the first sum z on."""
        if self.post[0].channel_dim == self.channel_dim:
            return self.recurse(z, x, padding_mask)
        return channels_in_front(self.recurse(channels_at_end(z), channels_at_end(x), None), x)

    def recurse(self, y: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        owned = False
        for step, norm in enumerate(self.post):
            if step > 0:
                y = y.add_(x) if owned else y + x
            y = norm(y, padding_mask)
            # backward needs a normalisation's input, not its output: adding in place spares a large allocation, unless
            # a hook may hold the output
            owned = norm.owns_output and not is_hooked(norm)
        return y


class WSkip(Weighted, init=opt.start(1.0), branch_scale=branch_scale()):
    """Learned skip ``y = G(w * x + alpha * F)``: section 4.3; the parameter ``weight`` is w, of shape ``(dim,)``.

    ``init`` is its starting value; the paper tries 1 and 2.
    """

    kind = "wskip"
    decays = True

    def setup(self) -> None:
        self.branch_scale = float(self.options.branch_scale)
        self.weight = nn.Parameter(torch.full((self.dim,), float(self.options.init)))

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return self.per_channel(self.weight), self.branch_scale
