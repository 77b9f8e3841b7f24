"""Skip connections that turn x towards the branch, by an angle or by a step across x.

The angle does not follow from |F|.
"""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..norms import at_least_float32, root_mean_square
from .base import Common, SkipConnection
from .inputs import refuse_drop_path
from .options import Between, all_norms
from .registry import register
from .weighted import ConstantSkip, Weighted

AngleScale = Annotated[
    float,
    Between("c of the angle c / N^e, N the residual blocks of the stack (in radians)", most=1000),
]
AngleExponent = Annotated[
    float,
    Between("e of the angle c / N^e: 0.5 adds paths in squares, 0 makes c the angle", most=10),
]


class Angled(Weighted):
    """The base of rules ``y = G(cos(t) * x + sin(t) * G'(F(x)))`` with the initial t = c / N^e."""

    norms = all_norms(without=("none",))
    slots = ("branch", "post")

    def __init__(
        self,
        dim: int,
        *,
        angle: AngleScale = 1.0,
        angle_exponent: AngleExponent = 0.5,
        **common: Unpack[Common],
    ):
        super().__init__(dim, angle=angle, angle_exponent=angle_exponent, **common)
        exponent = self.options.angle_exponent
        if exponent != 0:
            self.require_place()
        theta = self.options.angle / self.place.num_blocks**exponent
        self.set_angle(min(theta, math.pi / 2))

    def set_angle(self, theta: float) -> None:
        """Make what the equation needs of the angle, at the end of the constructor."""
        raise NotImplementedError

    def constants(self) -> dict[str, float]:
        return {
            "angle": float(self.options.angle),
            "angle_exponent": float(self.options.angle_exponent),
            **super().constants(),
        }


@register("angle")
class FixedAngle(Angled, ConstantSkip):
    """Fixed angle ``y = G(cos(t) * x + sin(t) * G'(F(x)))``, ``t = c / N^e``.

    N is the number of residuals of the stack. If the rows of x and G'(F) have one length and are
    orthogonal, the angle between y and x is t, whatever the size of F. t = 0 is ``G(x)``; t = pi /
    4 is post-norm of ``G'(F)``, up to eps. c is ``angle``, e ``angle_exponent``; encoder and
    decoder count for themselves. In short stacks t is at most pi / 2, where y is ``G(G'(F))``.

    Without G' it is the weighting of Kedia et al. 2024, "Transformers Get Stable", arXiv 2403.09635
    (DeepScaleLM), ``sin(t) = sqrt(2 / N)``; u-mu-P (Blake et al. 2024, arXiv 2407.17465) and the
    magnitude-preserving sum of Karras et al. 2024 (arXiv 2312.02696, Eq. 88) are kin. That G' holds
    the angle while F grows is ours (docs/related-work.md).
    """

    def set_angle(self, theta: float) -> None:
        self.theta = theta
        self.skip_scale = math.cos(self.theta)
        self.branch_scale = math.sin(self.theta)

    def constants(self) -> dict[str, float]:
        own = {"theta": self.theta, "lambda": self.skip_scale, "alpha": self.branch_scale}
        return {**super().constants(), **own}


@register("learned_angle")
class LearnedAngle(Angled):
    """Learned angle ``y = G(cos(t) * x + sin(t) * G'(F(x)))`` with one learned t per residual.

    t, the parameter ``weight``, starts at :class:`FixedAngle`'s value.
    """

    def set_angle(self, theta: float) -> None:
        self.weight = self.new_parameter(torch.full((1,), theta))

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.per_channel(self.weight)
        return theta.cos(), theta.sin()


@register("geonorm", also=("GeoNorm",))
class GeoNorm(SkipConnection):
    """GeoNorm ``y = cos(t) * x + sin(t) * |x| * v / |v|``, ``v = F - <F, x> / |x|^2 * x``, a step
    on the sphere by the angle ``t = min(pi/4, (s * min(pi/4, |v| / |x|) + b) / l)`` in layer l,
    counted from 1.

    |y| = |x|, and where b is 0, F parallel to x leaves x; both up to eps, which is added to both
    lengths. A b that training has moved turns by t though v is near 0, where |v| / (|v| + eps)
    shortens the step, and so y. s and b are learned scalars of each block, ``scale`` and ``shift``
    of shape (1,), initially 1 and 0. The
    branch reads x, and only the length of the stack's input normalises the stack: a row of zeros
    stays one. Zheng et al. 2026, "GeoNorm: Unify Pre-Norm and Post-Norm with Geodesic
    Optimization", arXiv 2601.22095, Eq. 3 to 5 and Appendix D, which we read in a third party's
    code; that the branch has no norm of its own is our reading, and of the decays over depth that
    it lists, 1/l, 1/sqrt(l) and linear, we have the first.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    needs_place = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.layer = self.place.index + 1
        self.scale = self.new_parameter(torch.ones(1))
        self.shift = self.new_parameter(torch.zeros(1))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        length = self.length(x)
        tangent = f_x
        for _ in range(2):  # the second time takes out what rounding left of x
            along = (x * tangent).sum(self.channel_dim, keepdim=True)
            tangent = tangent - along / length.square() * x
        ratio = self.length(tangent) / length

        limit = math.pi / 4
        angle = (self.scale * ratio.clamp(max=limit) + self.shift) / self.layer
        angle = angle.clamp(max=limit)
        return angle.cos() * x + angle.sin() / ratio * tangent

    def length(self, z: Tensor) -> Tensor:
        """sqrt(|z|^2 + eps^2) over the features: no row has length 0."""
        return (z.square().sum(self.channel_dim, keepdim=True) + self.eps**2).sqrt()

    def constants(self) -> dict[str, float]:
        return {"l": float(self.layer), **super().constants()}


@register("nag", also=("norm-agnostic residual", "norm-agnostic"))
class NormAgnostic(SkipConnection):
    """Norm-agnostic residual ``y = x + a * m * |x| * u / |u|``, ``u = f - <f, x> / |x|^2 * x``, f
    being F less its mean over the features: a step across x whose length is a share of x's, with
    ``m = sum_c p_c sigmoid(w_c . r + b_c)``, p the softmax of C logits.

    The branch, too, reads the direction ``r = sqrt(dim) x / |x|``. So |y| = |x| sqrt(1 + (a m)^2).
    a, ``weight``, starts at 1/sqrt(l) in block l, counted from 1 on each side; the w_c, (C, dim),
    with standard deviation 0.02, b and the logits at 0. Figliolia and Millidge 2026, "Scaling
    Adaptive Depth with Norm-Agnostic Residual Networks", arXiv 2606.16112, Eq. 3 to 14, 23 and 24,
    which we read in a third party's tests; its exponents of m and of l are 1 and 1/2 here, where
    another's code learns that of m from 1; C is 32, those parties'. Here a norm follows the stack,
    so |x| has no effect on the output; in that code the logits are those of the direction times a
    function of |x|. The paper's skipping of layers is left out.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    for_images = False
    needs_place = True
    normalises_x = True
    directions = 32

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        refuse_drop_path(self)
        self.weight = self.new_parameter(torch.full((1,), self.place.block_number**-0.5))
        self.direction = self.new_parameter(self.draw(self.directions, dim) * 0.02)
        self.direction_bias = self.new_parameter(torch.zeros(self.directions))
        self.direction_logit = self.new_parameter(torch.zeros(self.directions))

    def needs_final_norm(self) -> bool:
        return True  # the length of x grows with depth

    def prepare(self, x: Tensor) -> tuple[Tensor, None]:
        h, _ = super().prepare(x)
        return self.unit(h).to(x.dtype), None

    def unit(self, z: Tensor) -> Tensor:
        """sqrt(dim) z / |z|."""
        z = at_least_float32(z)
        return z / root_mean_square(z, self.eps**2)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        direction = self.unit(x)
        across = f_x - f_x.mean(-1, keepdim=True)
        across = across - (across * direction).mean(-1, keepdim=True) * direction

        gates = F.linear(direction.to(self.direction.dtype), self.direction, self.direction_bias)
        share = (gates.sigmoid() * self.direction_logit.softmax(-1)).sum(-1, keepdim=True)
        return x + root_mean_square(x, self.eps**2) * self.weight * share * self.unit(across)
