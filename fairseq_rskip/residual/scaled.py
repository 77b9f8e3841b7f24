"""Rules that weigh the branch or the skip by a constant, most of them by one of the depth."""

from typing import Annotated

from typing_extensions import Unpack

from .base import Common
from .branch_weights import BranchWeights, rescale_to_xavier
from .options import Between, Integer, all_norms
from .registry import register
from .weighted import BranchScale, ConstantSkip


@register("scaled", also=("Stable ResNet",))
class Scaled(ConstantSkip):
    """Fixed scale, ``y = G(x + F / sqrt(L))``: Hayou et al. 2021, "Stable ResNet".

    There L is the number of residual blocks of the network; here it is that of this side, the depth
    of one stream, which :class:`FixedAngle` calls N.
    """

    default_norm = "none"
    needs_place = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.branch_scale = self.place.num_blocks**-0.5

    def constants(self) -> dict[str, float]:
        return {"alpha": self.branch_scale, **super().constants()}


@register("completep", also=("CompleteP",))
class CompleteP(ConstantSkip):
    """CompleteP ``y = x + m^(-e) * F(G(x))``, ``m = L / L_0``, L the layers of this side: Dey et
    al. 2025, "Don't be lazy: CompleteP enables compute-efficient deep transformers", arXiv
    2505.01618, Table 1; code EleutherAI/nanoGPT-mup, branch completep.

    e is ``depth_exponent``, in the paper from 0.5 to 1, which is CompleteP; L_0, the depth for
    which the rates were tuned, is ``base_depth``, by default that of the code's examples. Adam's
    epsilon times m^(-e) and the learning rate times m^(e-1), which is 1 where e is, are those of
    all matrices, biases and norms of the layers; embeddings, the norm at the stack's end and the
    output keep the command line's: :meth:`layer_factors`, which fairseq-train applies. (The
    authors' code has the epsilon for embeddings, too.) All that the paper scales by the width is
    left out, and so are the rates of a ResNet, which train_cifar.py trains with SGD.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    needs_place = True

    def __init__(
        self,
        dim: int,
        *,
        depth_exponent: Annotated[
            float, Between("e of CompleteP's scale (L / L_0)^(-e) of a branch")
        ] = 1.0,
        base_depth: Annotated[
            int,
            Integer("L_0 of CompleteP: the layers for which the rates were tuned", short="base"),
        ] = 2,
        **common: Unpack[Common],
    ):
        super().__init__(dim, depth_exponent=depth_exponent, base_depth=base_depth, **common)
        self.depth_ratio = self.place.depth / int(base_depth)
        self.branch_scale = self.depth_ratio ** -float(depth_exponent)

    def layer_factors(self) -> tuple[float, float]:
        if self.channel_dim == 1:
            return 1.0, 1.0
        exponent = float(self.options.depth_exponent)
        return self.depth_ratio ** (exponent - 1.0), self.depth_ratio**-exponent

    def constants(self) -> dict[str, float]:
        lr, eps = self.layer_factors()
        factors = {"alpha": self.branch_scale, "factor of adam-eps": eps, "factor of lr": lr}
        return {**factors, **super().constants()}


@register("residual_scaling")
class ResidualScaling(ConstantSkip):
    """Residual scaling, ``y = G(x + alpha * F)`` with alpha = 0.1.

    Szegedy et al. 2017, "Inception-v4" (0.1 to 0.3); Lim et al. 2017, EDSR.
    """

    default_norm = "none"

    def __init__(self, dim: int, *, branch_scale: BranchScale = 0.1, **common: Unpack[Common]):
        super().__init__(dim, branch_scale=branch_scale, **common)
        self.branch_scale = float(branch_scale)

    def constants(self) -> dict[str, float]:
        return {"alpha": self.branch_scale, **super().constants()}


@register("deepnorm", also=("DeepNet",))
class DeepNorm(ConstantSkip):
    """DeepNorm, ``y = LN(alpha * x + F)``, alpha by the depth.

    Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers". With N encoder and M decoder
    layers the encoder has alpha = 0.81 (N^4 M)^(1/16) and beta = 0.87 (N^4 M)^(-1/16), the decoder
    alpha = (3M)^(1/4) and beta = (12M)^(-1/4); a side alone, of N layers, (2N)^(1/4) and
    (8N)^(-1/4). The paper's alpha is ``skip_scale``. v, out, fc1 and fc2 start with beta times
    Xavier's standard deviation, q and k with Xavier's. (torchscale has 1.15 for 0.87.)
    """

    norms = all_norms(without=("none",))
    for_images = False
    needs_place = True
    starts_branch = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        here, other = float(self.place.depth), float(self.place.other_depth)
        if not other:
            self.skip_scale = (2 * here) ** 0.25
            self.beta = (8 * here) ** -0.25
        elif self.place.side == "encoder":
            self.skip_scale = 0.81 * (here**4 * other) ** (1 / 16)
            self.beta = 0.87 * (here**4 * other) ** (-1 / 16)
        else:
            self.skip_scale = (3 * here) ** 0.25
            self.beta = (12 * here) ** -0.25

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        rescale_to_xavier(weights, self.beta)

    def constants(self) -> dict[str, float]:
        return {"lambda": self.skip_scale, "beta": self.beta, **super().constants()}
