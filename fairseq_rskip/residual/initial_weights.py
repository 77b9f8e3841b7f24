"""Rules that depend on the initial weights of the branch.

fairseq draws q, k and v with gain 1/sqrt(2) of Xavier's initialisation, and fc1 and fc2 as torch
does; ``initialise`` rescales them to the standard deviation that the paper means. Biases keep
torch's uniform draw, where the usual implementations of T-Fixup and GPT-2 start them at zero.
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .base import Common
from .branch_weights import BranchWeights, rescale_to_xavier
from .options import all_norms
from .registry import register
from .weighted import ConstantSkip, Weighted


@register("fixup")
class Fixup(Weighted):
    """Fixup, ``y = x + s * F(x + b) + c``, no norm; s, b and c are learned scalars.

    They start at 1, 0 and 0. Zhang et al. 2019, "Fixup Initialization". The last matrix of each
    branch (out, fc2, conv2) and its bias start at 0, so that a stack starts as the identity; with K
    branches in the network (2N + 3M in a Transformer) fc1 and conv1 start at K^(-1/2) times their
    usual standard deviation, and q, k and v, of a branch of four matrices, at K^(-1/6). "Usual" is
    Xavier's in a Transformer and He's in a ResNet, which has scalar biases in place of its batch
    norms (b among them, decayed like those). The classifier starts at 0, and so does an output
    matrix that is not the embedding (an adaptive softmax keeps its draw). In code
    hongyi-zhang/Fixup scalars learn at a tenth of the rate and decay; q, k and v start at 1/sqrt(2)
    of ours there, and those of the attention to the encoder with K = 12; its Transformer has scalar
    biases inside of the feed-forward branch and at the ends of the stacks, too, no biases in linear
    maps, and no c.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    replaces_batch_norm = zero_classifier = True
    needs_place = True
    starts_branch = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.scale = self.new_parameter(torch.ones(1))
        self.bias_in = None if self.channel_dim == 1 else self.new_parameter(torch.zeros(1))
        self.bias_out = self.new_parameter(torch.zeros(1))

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        powers = {"q": -1 / 6, "k": -1 / 6, "v": -1 / 6, "fc1": -1 / 2, "conv1": -1 / 2}
        for role, weight in weights.items():
            if role in powers:
                usual = weight.std if role == "conv1" else weight.xavier
                weight.rescale(usual * self.place.num_blocks_of_network ** powers[role])
            elif role in ("out", "fc2", "conv2"):
                weight.rescale(0.0)
                if weight.bias is not None:
                    nn.init.zeros_(weight.bias)

    def prepare(self, x: Tensor) -> tuple[Tensor, None]:
        h, _ = super().prepare(x)
        return h if self.bias_in is None else (h + self.bias_in).to(h.dtype), None

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        return 1.0, self.scale

    def offset(self) -> Tensor:
        return self.bias_out


@register("tfixup", also=("T-Fixup",))
class TFixup(ConstantSkip):
    """T-Fixup, ``y = x + F`` without norm, trainable without warm-up.

    Huang et al. 2020, "Improving Transformer Optimization Through Better Initialization". v, out,
    fc1 and fc2 start with 0.67 N^(-1/4) times Xavier's standard deviation in an encoder of N layers
    and (9M)^(-1/4) in a decoder of M, q and k with Xavier's; the embeddings of a side of N layers
    with (9N)^(-1/4) of theirs. One embedding for both sides is scaled once, by the encoder's
    factor. (The authors' code leaves q and k with fairseq's 1/sqrt(2) of Xavier's.) A decoder
    without an encoder raises ``ValueError``: the paper has no factors for it.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    for_images = False
    needs_place = True
    starts_branch = scales_embedding = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        depth = self.place.depth
        is_encoder = self.place.side == "encoder"
        if self.place.side == "decoder" and not self.place.other_depth:
            raise ValueError(
                "kind tfixup is derived for an encoder and a decoder: "
                "expected a model with an encoder"
            )
        self.beta = 0.67 * depth**-0.25 if is_encoder else (9 * depth) ** -0.25
        self.embedding_scale = (9 * depth) ** -0.25

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        rescale_to_xavier(weights, self.beta)
        if "embedding" in weights:
            weights["embedding"].scale(self.embedding_scale)

    def constants(self) -> dict[str, float]:
        own = {"beta": self.beta, "embedding_scale": self.embedding_scale}
        return {**own, **super().constants()}


@register("gpt2")
class GPT2(ConstantSkip):
    """GPT-2's initial weights, ``y = x + F(LN(x))``.

    The matrices that write to the stream (out, fc2) start with standard deviation 0.02 / sqrt(L), L
    the residual blocks of this side (2N there), every other matrix with 0.02: Radford et al. 2019,
    "Language Models are Unsupervised Multitask Learners", and karpathy/nanoGPT. The draws have
    fairseq's uniform distribution, GPT-2's is normal; and the embeddings are fairseq's, which enter
    the stack with variance 1 and sinusoidal positions, where GPT-2's enter with standard deviation
    0.02: beside them the branches start small.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)
    for_images = False
    needs_place = True
    starts_branch = True

    def initialise(self, weights: BranchWeights) -> None:
        super().initialise(weights)
        for role, weight in weights.items():
            if role in ("out", "fc2"):
                weight.rescale(0.02 * self.place.num_blocks**-0.5)
            elif role != "embedding":
                weight.rescale(0.02)
