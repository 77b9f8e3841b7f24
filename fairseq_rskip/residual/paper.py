"""The skip connections of Liu et al. 2020, "Rethinking Skip Connection with Layer Normalization in Transformers and
ResNets" (COLING): expanded, recursive and learned."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import at_least_float32, channels_at_end, channels_in_front
from . import options as opt
from .weighted import ALPHA, LAMBDA, ConstantSkip, LearnedSkip, ScaledSkip, is_hooked


class XSkip(ScaledSkip, skip_lambda=2.0):
    """Expanded skip ``y = G(lambda * x + alpha * F)``: Eq. 2 without G, Eq. 3 with it; lambda < 1 contracts.

    lambda = alpha = 1 without G is the plain skip ``x + F``, with layer norm Transformer's post-norm. Shapes and
    errors as in :class:`SkipConnection`. LN(lambda * x + F) is LN(x + F / lambda) with eps / lambda^2 for eps, so that
    LN(0.5x + F) and LN(x + 2F) of the paper's Table 3 are one function.
    """

    kind = "xskip"
    one_operator = True


class RSkip(ConstantSkip):
    """Recursive skip ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``, ``y = y_lambda``: Eq. 4.

    Each step owns its gain and bias. lambda = 1 is Transformer's post-norm. Shapes as in :class:`SkipConnection`;
    raises its errors, and ``ValueError`` for a lambda that is not an integer >= 1 or norm ``none``.
    """

    kind = "rskip"
    one_operator = True
    needs_norm = True

    @dataclasses.dataclass(frozen=True)
    class Options(ScaledSkip.Options):
        skip_lambda: float = opt.option(2, LAMBDA, "steps")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.f_scale = float(self.options.branch_scale)

    def norm_layout(self, layout: tuple[Any, ...]) -> tuple[Any, ...]:
        # image maps normalised position by position: views as (..., dim) spare an allocation per step
        self.by_rows = layout[:2] == (1, "c") and self.norm_name not in ("none", "batch") and self.steps() > 1
        return (-1, *layout[1:]) if self.by_rows else layout

    def steps(self) -> int:
        return int(self.options.skip_lambda)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.steps(), "alpha": self.f_scale}

    def rule(self) -> dict[str, Any]:
        same = self.kind == "rskip" and self.steps() == 1
        return {**super().rule(), "kind": "xskip" if same else self.kind}

    def apply_norms(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Eq. 4 from the first sum z on."""
        if not self.by_rows:
            return self.recurse(z, x, padding_mask)
        return channels_in_front(self.recurse(channels_at_end(z), channels_at_end(x), None), x)

    def recurse(self, y: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        owned = False
        for step, norm in enumerate(self.norms):
            if step > 0:
                y = y.add_(x) if owned else y + x
            y = norm(y, padding_mask)
            if torch.jit.is_scripting():  # noqa: SIM108 (TorchScript compiles no hooks: it must see a statement)
                owned = False
            else:
                # backward needs a normalisation's input, not its output: adding in place spares a large allocation,
                # unless a hook may hold the output
                owned = norm.owns_output and not is_hooked(norm)
        return y

    def coefficients(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self.check(x, f_x, padding_mask)
        x, f_x = (self._rows(at_least_float32(tensor)) for tensor in (x, f_x))
        return tuple(self._unrow(part) for part in self.coefficients_by_step(x, f_x, padding_mask)[-1])

    def coefficients_by_step(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> list[tuple[Tensor, ...]]:
        """a, b and c of each y_k; x and F as the norms take them."""
        a, q = self.scales(x, f_x)
        b, c = self._kept() * q, torch.zeros_like(a)
        found: list[tuple[Tensor, ...]] = []
        for norm in self.norms:
            a, b, c = self._through(norm, a + 1.0 if found else a, b, c, x, f_x, padding_mask)
            found.append(self._expanded(x, a, b, c))
        return found

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x:F in y per feature and row, ``(1 + sum_{i=1}^{lambda-1} prod_{j=1}^{i} sigma_j / w_j) / alpha``.

        Appendix A, unrolled: ``sigma_j`` is ``sqrt(var + eps)`` of the input of step j (for batch norm with the
        statistics that ``forward`` would use in the current mode) and ``w_j`` that step's gain. The paper prints
        lambda as the sum's upper limit; its own Eq. 6, ``1 + sigma_1 / w_1`` for lambda = 2, shows that lambda - 1 is
        right. Returns ``x``'s shape, at least fp32; running statistics stay as they are.
        """
        self.check(x, f_x, padding_mask)
        x, f_x = (self._rows(at_least_float32(tensor)) for tensor in (x, f_x))
        alpha = self.f_scale * self._kept()
        z, ratio, product = x + alpha * f_x, torch.ones_like(x), torch.ones_like(x)
        for norm in self.norms[:-1]:
            scale, shift = norm.affine_map(z, padding_mask)
            product = product / scale
            ratio = ratio + product
            z = x + (scale * z + shift)
        return self._unrow(ratio / alpha)

    def _rows(self, x: Tensor) -> Tensor:
        return channels_at_end(x) if self.by_rows else x

    def _unrow(self, y: Tensor) -> Tensor:
        return y.permute(0, 3, 1, 2) if self.by_rows else y


class WSkip(LearnedSkip):
    """Learned skip ``y = G(w * x + alpha * F)``: section 4.3; the parameter ``weight`` is w, of shape ``(dim,)``.

    ``init`` is its starting value; the paper tries 1 and 2. Shapes and errors as in :class:`SkipConnection`.
    """

    kind = "wskip"
    decays = True

    @dataclasses.dataclass(frozen=True)
    class Options(LearnedSkip.Options):
        init: float = opt.start(1.0)
        branch_scale: float = opt.option(1.0, ALPHA, "positive", short="alpha")

    def __init__(self, dim: int, kind: str | None = None, **options: Any):
        super().__init__(dim, kind, **options)
        self.alpha = float(self.options.branch_scale)
        self.weight = nn.Parameter(torch.full((self.dim,), float(self.options.init)))

    def growth(self) -> float:
        return float(self.options.init)

    def constants(self) -> dict[str, float]:
        return {"w": float(self.weight.detach().mean()), "alpha": self.alpha}

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        return torch.add(x * self.per_channel(self.weight), f_x, alpha=self.alpha)

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        return self.per_channel(self.weight), x.new_full((), self.alpha)
