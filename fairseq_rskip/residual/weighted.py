"""Rules of the form ``y = G(p * x + q * F)``, among them those of Liu et al. 2020.

Liu et al. 2020, "Rethinking Skip Connection with Layer Normalization in Transformers and ResNets"
(COLING).
"""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, weighted_sum
from . import inputs
from .base import Common, SkipConnection
from .coefficients import Coefficients
from .options import Integer, Positive, Real, all_norms
from .place import Place
from .registry import register

MOST_STEPS = 1000
LAMBDA_HELP = (
    "λ: scale of x in xskip (any real > 0), number of steps in rskip (integer ≥ 1); "
    "1 is the plain skip; auto: an estimate from the depth (docs/depth.md)"
)
WEIGHT_HELP = (
    "initial value of the learned weight of the skip or of the branch "
    "(layerscale: by depth if not given)"
)

SkipLambda = Annotated[float, Positive(LAMBDA_HELP)]
BranchScale = Annotated[
    float,
    Positive(
        "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step",
        short="alpha",
    ),
]
InitialWeight = Annotated[float, Real(WEIGHT_HELP, affects="start")]


def least_scale(place: Place) -> float:
    """``λ = sqrt(N)``, an estimate for LN(λx + F) in a stack of N residuals.

    With |F| = |x| at right angles the skips then pass on e^(-1/2) of a gradient; where F points
    along x, less, and the less the deeper the stack (docs/depth.md).
    """
    return math.sqrt(place.num_blocks)


def least_steps(place: Place) -> int:
    """``λ = 1 + log_4(N) + log_2(atan(1))``, rounded up.

    The same estimate as :func:`least_scale` for Eq. 4, where each step halves the angle.
    """
    return max(1, math.ceil(1 + math.log(place.num_blocks, 4) + math.log2(math.atan(1.0))))


class Weighted(SkipConnection):
    """``y = G(p * x + q * F)``."""

    def scales(self, x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """p and q: numbers, or tensors that broadcast to x."""
        raise NotImplementedError(f"{type(self).__name__} has no scales(x), the p and q of its sum")

    def offset(self) -> Tensor | float:
        """A learned r of ``p * x + q * F + r``."""
        return 0.0

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        z = weighted_sum(x, f_x, *self.scales(x))
        r = self.offset()
        return z + r if isinstance(r, Tensor) else z

    def coefficients(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> Coefficients:
        return self.step_coefficients(x, f_x, padding_mask)[-1]

    def step_coefficients(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> list[Coefficients]:
        """:meth:`coefficients` of y_1, y_2, ... after each norm, or of the sum without a norm."""
        inputs.check(self, x, f_x, None, padding_mask)
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        sums = self.coefficients_of_sums(x, f_x, padding_mask)
        if len(self.post) == 0:
            return [sums[0].like(x)]
        return [
            of_sum.after(norm, x, f_x, padding_mask).like(x)
            for norm, of_sum in zip(self.post, sums)
        ]

    def coefficients_of_sums(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> list[Coefficients]:
        """Those of what each norm after the sum reads, for x and F of at least fp32."""
        first = self.coefficients_of_first_sum(x, f_x, padding_mask)
        sums = [first]
        for norm in list(self.post)[:-1]:
            a, b, c = sums[-1].after(norm, x, f_x, padding_mask)
            sums.append(Coefficients(first.a + a, b, c))  # x once more
        return sums

    def ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x:F in y for each feature and position, of x's shape, at least fp32.

        With one step it is ``p / q``, as G scales both alike. With lambda steps it is, by appendix
        A of Liu et al. 2020, ``(1 + sum_{i=1}^{lambda-1} prod_{j=1}^{i} sigma_j / w_j) / alpha``:
        ``sigma_j`` is ``sqrt(var + eps)`` of the input of step j (for batch norm with the
        statistics that ``forward`` would use in the current mode) and ``w_j`` that step's gain. The
        paper prints lambda as the sum's upper limit; its own Eq. 6, ``1 + sigma_1 / w_1`` for
        lambda = 2, shows that lambda - 1 is right.
        """
        a, b, _ = self.coefficients_of_last_sum(x, f_x, padding_mask)
        return (a / b).expand_as(x)

    def parts(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        a, b, _ = self.coefficients_of_last_sum(x, f_x, padding_mask)
        return a * x, b * f_x

    def coefficients_of_last_sum(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> Coefficients:
        """Those of the sum that the last norm reads."""
        inputs.check(self, x, f_x, None, padding_mask)
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        return self.coefficients_of_sums(x, f_x, padding_mask)[-1]

    def coefficients_of_first_sum(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> Coefficients:
        """p, q and r of ``p * x + q * F + r``, for x and F of at least fp32."""
        one = x.new_ones(())
        p, q = (one * scale for scale in self.scales(x))
        r = self.offset() + x.new_zeros(())
        if self.branch is not None:
            scale, shift = self.branch.affine_map(f_x, padding_mask)
            q, r = q * scale, r + q * shift
        return Coefficients(p, q, r)

    def stream_gain(self) -> float:
        shape = [1, self.dim, 1, 1] if self.channel_dim == 1 else [1, self.dim]
        p, _ = self.scales(torch.zeros(shape, device="cpu"))
        return float(torch.as_tensor(p, device="cpu").detach().abs().max())


class ConstantSkip(Weighted):
    """``y = G(skip_scale * x + branch_scale * F)`` with constants λ and α.

    :mod:`fairseq_rskip.ops` computes it where its kernels are in use. ``combine`` is not called: a
    rule with a sum of its own derives from :class:`Weighted`.
    """

    skip_scale = branch_scale = 1.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.combine is not Weighted.combine:
            raise TypeError(
                f"{cls.__name__}: a ConstantSkip's sum is skip_scale and branch_scale, its combine "
                "is not called: derive from Weighted, or set the two"
            )

    def scales(self, x: Tensor) -> tuple[float, float]:
        return self.skip_scale, self.branch_scale

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        return self.post(x, f_x, self.skip_scale, self.branch_scale, padding_mask)


@register("xskip", also=("post-norm", "post-LN"))
class XSkip(ConstantSkip):
    """Expanded skip ``y = G(lambda * x + alpha * F)``: Eq. 2 without G, Eq. 3 with it.

    lambda < 1 contracts. lambda = alpha = 1 without G is the plain skip ``x + F``, with layer norm
    the Transformer's post-norm. LN(lambda * x + F) is LN(x + F / lambda) with eps / lambda^2 for
    eps, so that LN(0.5x + F) and LN(x + 2F) of the paper's Table 3 are one function.
    """

    def __init__(
        self,
        dim: int,
        *,
        skip_lambda: Annotated[
            float | Literal["auto"], Positive(LAMBDA_HELP, auto=least_scale)
        ] = 2.0,
        branch_scale: BranchScale = 1.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, skip_lambda=skip_lambda, branch_scale=branch_scale, **common)
        self.skip_scale = float(self.options.skip_lambda)
        self.branch_scale = float(branch_scale)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.skip_scale, "alpha": self.branch_scale, **super().constants()}


class Recursive(ConstantSkip):
    """``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})`` with one norm for each step."""

    norms = all_norms(without=("none",))

    def __init__(self, dim: int, *, branch_scale: float, **options: Any):
        super().__init__(dim, branch_scale=branch_scale, **options)
        self.branch_scale = float(branch_scale)


@register("rskip", also=("recursive skip",))
class RSkip(Recursive):
    """Recursive skip of Eq. 4: ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``,
    ``y = y_lambda``.

    Each step owns its gain and bias. lambda, an integer >= 1, is the number of
    ``steps``; lambda = 1 is the Transformer's post-norm.
    """

    def __init__(
        self,
        dim: int,
        *,
        skip_lambda: Annotated[
            int | Literal["auto"], Integer(LAMBDA_HELP, auto=least_steps, most=MOST_STEPS)
        ] = 2,
        branch_scale: BranchScale = 1.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, skip_lambda=skip_lambda, branch_scale=branch_scale, **common)

    @property
    def steps(self) -> int:
        return int(self.options.skip_lambda)

    def rule(self) -> dict[str, Any]:
        rule = super().rule()
        return {**rule, "kind": "xskip"} if self.steps == 1 else rule

    def mismatch(self, stored: dict[str, Any] | None) -> str:
        if stored is not None and is_recursive(stored):  # they differ in lambda, not in kind
            stored = {**stored, "kind": self.rule()["kind"]}
        return super().mismatch(stored)

    def constants(self) -> dict[str, float]:
        return {
            "lambda": float(self.steps),
            "alpha": self.branch_scale,
            **super().constants(),
        }


def is_recursive(rule: dict[str, Any]) -> bool:
    """Whether a stored rule is rskip's, which stores itself as xskip at lambda = 1."""
    kind = rule.get("kind")
    return kind == "rskip" or (kind == "xskip" and rule.get("skip_lambda") == 1)


@register("wskip")
class WSkip(Weighted):
    """Learned skip ``y = G(w * x + alpha * F)``, section 4.3; w is ``weight``, of shape ``(dim,)``.

    ``init`` is its initial value; the paper tries 1 and 2.
    """

    decays = True

    def __init__(
        self,
        dim: int,
        *,
        init: InitialWeight = 1.0,
        branch_scale: BranchScale = 1.0,
        **common: Unpack[Common],
    ):
        super().__init__(dim, init=init, branch_scale=branch_scale, **common)
        self.branch_scale = float(branch_scale)
        self.weight = self.new_parameter(torch.full((dim,), float(init)))

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return self.per_channel(self.weight), self.branch_scale

    def constants(self) -> dict[str, float]:
        return {"alpha": self.branch_scale, **super().constants()}
