"""Rules that weigh the branch or the skip by a constant or a learned value, and what their branches start with.

A published "scale by beta" is relative to Xavier's initialisation with gain 1. fairseq draws q, k and v with gain
1/sqrt(2) and fc1 and fc2 as torch does: ``initialise`` rescales to the standard deviation that the paper means. Biases
keep torch's uniform draw, where the usual implementations of DeepNorm, T-Fixup and GPT-2 start them at zero.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import at_least_float32
from . import options as opt
from .base import SkipConnection, skips
from .inputs import refuse_drop_path
from .place import Branch, rescale_to_xavier
from .profile import Profiled, arguments, hooked, without_gradients
from .weighted import BranchWeight, ConstantSkip, Weighted, branch_scale


class SkipInit(BranchWeight, kind="skipinit", norm=opt.NO_NORM, slots=()):
    """SkipInit, ``y = x + a * F`` with one learned scalar a per block, 0 at first, and no normalisation at all: De and
    Smith 2020, "Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks".

    A ResNet's branch also has no batch norm; scalar biases take its place, as in Fixup. The authors' code has a bias
    per channel and starts the classifier at zero; here the classifier keeps torch's initial values.
    """

    replaces_batch_norm = True


class ReZero(BranchWeight, kind="rezero", norm=opt.NO_NORM, slots=()):
    """ReZero, ``y = x + a * F`` with one learned scalar a per layer, 0 at first, which all its sublayers share:
    Bachlechner et al. 2020, "ReZero is All You Need". A ResNet keeps the batch norms of its branches, as there."""

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        if first is not None:
            self.weight = first.weight


class LayerScale(BranchWeight, kind="layerscale", norm=opt.WITHOUT_BATCH, slots=("pre",)):
    """LayerScale, ``y = x + gamma * F(G(x))``: Touvron et al. 2021, "Going deeper with Image Transformers".

    gamma, of shape ``(dim,)``, starts at 0.1 up to 18 layers, 1e-5 up to 24 and 1e-6 beyond (the paper; the authors'
    code has 1e-5 at 36 layers, too), or at ``init`` where that is not 0. gamma = 1 is pre-norm. A ResNet's branch has
    its own batch norm.
    """

    def setup(self) -> None:
        depth = self.place.depth
        by_depth = 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6
        self.weight = nn.Parameter(torch.full((self.dim,), float(self.options.init) or by_depth))


class LearnedScalar(BranchWeight, kind="learned_scalar", norm="none", init=1.0):
    """Learned scale, ``y = G(x + a * F)`` with one scalar a per block, 1 at first: the learned form of
    :class:`Scaled`, SkipInit's equation from the plain skip's start (De and Smith 2020)."""


class Scaled(ConstantSkip, kind="scaled", norm="none"):
    """Fixed scale, ``y = G(x + F / sqrt(L))``: Hayou et al. 2021, "Stable ResNet", where L is the residual blocks of
    the network: here those of this side, which is the depth of one stream."""

    def setup(self) -> None:
        self.branch_scale = self.place.num_blocks**-0.5


class ResidualScaling(ConstantSkip, kind="residual_scaling", norm="none", branch_scale=branch_scale(0.1)):
    """Residual scaling, ``y = G(x + alpha * F)`` with alpha = 0.1: Szegedy et al. 2017, "Inception-v4" (0.1 to 0.3);
    Lim et al. 2017, EDSR."""


class DeepNorm(ConstantSkip, kind="deepnorm", norm=opt.SOME_NORM, for_images=False):
    """DeepNorm, ``y = LN(alpha * x + F)``: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers".

    With N encoder and M decoder layers the encoder has alpha = 0.81 (N^4 M)^(1/16) and beta = 0.87 (N^4 M)^(-1/16), the
    decoder alpha = (3M)^(1/4) and beta = (12M)^(-1/4); a side alone, of N layers, (2N)^(1/4) and (8N)^(-1/4). The
    paper's alpha is ``skip_scale``. v, out, fc1 and fc2 start with beta times Xavier's standard deviation, q and k with
    Xavier's. (torchscale has 1.15 for 0.87.)
    """

    def setup(self) -> None:
        here, other = float(self.place.depth), float(self.place.other_depth)
        if not other:
            self.skip_scale, self.beta = (2 * here) ** 0.25, (8 * here) ** -0.25
        elif self.place.side == "encoder":
            self.skip_scale, self.beta = (0.81 * (here**4 * other) ** (1 / 16), 0.87 * (here**4 * other) ** (-1 / 16))
        else:
            self.skip_scale, self.beta = (3 * here) ** 0.25, (12 * here) ** -0.25

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        rescale_to_xavier(branch, self.beta)


_OMEGA = opt.option("profile", "where admin's ω starts", choices=("profile", "formula"), affects_output=False)


class Admin(Profiled, Weighted, kind="admin", norm=opt.SOME_NORM, omega=_OMEGA):
    """Admin, ``y = LN(omega * x + F)``, omega of shape ``(dim,)`` and learned: Liu et al. 2020, "Understanding the
    Difficulty of Training Transformers".

    omega is initialised from one batch, block after block: omega_1 = 1 and
    ``omega_{i+1}^2 = var(omega_i * x_i) + var(F_i)`` over all unpadded elements. If x has unit variance, this is the
    paper's sum ``omega_i^2 = sum_{j<i} var(F_j)``, where F_0 is the stack's input, of variance 1. The authors' code
    also counts padding, and starts fc1 and fc2 at Xavier's; here they start as in fairseq.
    Encoder and decoder are separate chains. ``--skip-omega formula`` takes the profile-free
    ``sqrt((R + 1) / ln(R + 1) - 1)`` of microsoft/admin-torch, R the residual blocks of this side.
    """

    def setup(self) -> None:
        self.wants_profile = self.options.omega == "profile"
        blocks = self.place.num_blocks + 1.0
        start = 1.0 if self.wants_profile else math.sqrt(blocks / math.log(blocks) - 1.0)
        self.weight = nn.Parameter(torch.full((self.dim,), start))

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return self.per_channel(self.weight), 1.0

    @classmethod
    def profile(cls, skips: Any, model: nn.Module, loss: Any, shortcuts: Any) -> dict[str, float]:
        chains: dict[str, float] = {}
        handed_on: dict[str, float] = {}

        def see(name: str, skip: nn.Module, args: Any, kwargs: Any) -> None:
            before = chains.get(skip.place.side, 1.0)
            handed_on[name] = chains[skip.place.side] = skip.start_at(before, *arguments(*args, **kwargs))

        with without_gradients(model), hooked(skips, nn.Module.register_forward_pre_hook, see):
            loss()
        return handed_on

    def start_at(self, omega: float, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> float:
        """Set omega, and return the next block's."""
        self.weight.fill_(omega)
        if padding_mask is not None:
            kept = padding_mask.logical_not()
            x, f_x = (tensor.movedim(self.channel_dim, -1)[kept] for tensor in (x, f_x))
        if not x.numel():  # nothing but padding
            return omega
        return math.sqrt(sum(part.double().var(unbiased=False) for part in (omega * x, f_x)))


class Fixup(Weighted, kind="fixup", norm=opt.NO_NORM, slots=()):
    """Fixup, ``y = x + s * F(x + b) + c``, no norm, with learned scalars s, b and c that start at 1, 0 and 0: Zhang et
    al. 2019, "Fixup Initialization".

    The last matrix of each branch (out, fc2, conv2) and its bias start at 0, so that a stack starts as the identity;
    with K branches in the network (2N + 3M in a Transformer) fc1 and conv1 start at K^(-1/2) times their usual standard
    deviation, and q, k and v, of a branch of four matrices, at K^(-1/6). "Usual" is Xavier's in a Transformer and He's
    in a ResNet, which has scalar biases in place of its batch norms (b among them, decayed like those). The classifier
    starts at 0, and so does an output matrix that is not the embedding (an adaptive softmax keeps its draw). In code
    hongyi-zhang/Fixup scalars learn at a tenth of the rate and decay; its Transformer has scalar biases inside of the
    feed-forward branch and at the ends of the stacks, too, no biases in linear maps, and no c.
    """

    replaces_batch_norm = zero_classifier = True

    def setup(self) -> None:
        self.scale = nn.Parameter(torch.ones(1))
        self.register_parameter("bias_in", None if self.channel_dim == 1 else nn.Parameter(torch.zeros(1)))
        self.bias_out = nn.Parameter(torch.zeros(1))

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        factors = {"q": -1 / 6, "k": -1 / 6, "v": -1 / 6, "fc1": -1 / 2, "conv1": -1 / 2}
        for role, weight in branch.items():
            if role in factors:
                usual = weight.std if role == "conv1" else weight.xavier
                weight.rescale(usual * self.place.num_blocks_of_network ** factors[role])
            elif role in ("out", "fc2", "conv2"):
                weight.rescale(0.0)
                if weight.bias is not None:
                    nn.init.zeros_(weight.bias)

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, carried = super().prepare(x)
        return h if self.bias_in is None else (h + self.bias_in).to(h.dtype), carried

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        return 1.0, self.scale

    def offset(self) -> Tensor:
        return self.bias_out


class TFixup(ConstantSkip, kind="tfixup", norm=opt.NO_NORM, slots=(), for_images=False):
    """T-Fixup, ``y = x + F`` without norm, trainable without warm-up: Huang et al. 2020, "Improving Transformer
    Optimization Through Better Initialization".

    v, out, fc1 and fc2 start with 0.67 N^(-1/4) times Xavier's standard deviation in an encoder of N layers and
    (9M)^(-1/4) in a decoder of M, q and k with Xavier's; the embeddings of a side of N layers with (9N)^(-1/4) of
    theirs. One embedding for both sides is scaled once, by the encoder's factor. (The authors' code leaves q and k with
    fairseq's 1/sqrt(2) of Xavier's.) A decoder without an encoder raises ``ValueError``: the paper has no factors for
    it.
    """

    def setup(self) -> None:
        depth = self.place.depth
        if self.place.side == "decoder" and not self.place.other_depth:
            raise ValueError("kind tfixup is derived for an encoder and a decoder: expected a model with an encoder")
        self.beta = 0.67 * depth**-0.25 if self.place.side == "encoder" else (9 * depth) ** -0.25
        self.embedding_scale = (9 * depth) ** -0.25

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        rescale_to_xavier(branch, self.beta)
        if "embedding" in branch:
            branch["embedding"].scale(self.embedding_scale)


class GPT2(ConstantSkip, kind="gpt2", norm=opt.WITHOUT_BATCH, slots=("pre",), for_images=False):
    """GPT-2's start, ``y = x + F(LN(x))``: what writes to the stream (out, fc2) starts with standard deviation
    0.02 / sqrt(L), L the residual blocks of this side (2N there), every other matrix with 0.02: Radford et al. 2019,
    "Language Models are Unsupervised Multitask Learners", and karpathy/nanoGPT. The draws keep fairseq's uniform
    distribution, GPT-2's is normal; and the embeddings are fairseq's, which enter the stack with variance 1 and
    sinusoidal positions, where GPT-2's enter with standard deviation 0.02: beside them the branches start small.
    """

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        for role, weight in branch.items():
            if role != "embedding":
                weight.rescale(0.02 * (self.place.num_blocks**-0.5 if role in ("out", "fc2") else 1.0))


class Scheduled(Weighted):
    """``y = G(x + min(1, t / warmup) * F)`` at update t: the buffer ``updates``, kept in checkpoints."""

    def setup(self) -> None:
        self.warmup = float(self.options.warmup)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def set_num_updates(self, updates: int) -> None:
        """Set the number of updates so far; fairseq's models and train_cifar.py call this before each update."""
        self.updates.fill_(updates)

    def scales(self, x: Tensor) -> tuple[float, Tensor]:
        updates = self.updates.view(1).to(torch.promote_types(x.dtype, torch.float32))
        return 1.0, (updates / self.warmup).clamp(max=1.0)


class ProRes(Scheduled, kind="prores", norm=opt.WITHOUT_BATCH, warmup=opt.warmup(1000), slots=("pre",)):
    """Progressive residual warm-up, ``y = x + min(1, t / (T * l)) * F(G(x))`` at update t in layer l, counted from 1:
    Chen et al. 2026, "Progressive Residual Warmup for Language Model Pretraining", arXiv 2603.05369, its linear
    schedule on pre-norm, as in code dandingsky/ProRes. T is ``warmup``; encoder and decoder count for themselves."""

    def setup(self) -> None:
        super().setup()
        self.warmup *= self.place.index + 1


class BranchNorm(Scheduled, kind="branchnorm", norm=opt.SOME_NORM, warmup=opt.warmup(4000)):
    """BranchNorm, ``y = LN(x + min(1, t / T) * F)`` at update t, post-norm from update T on: Liu et al. 2023,
    "BranchNorm: Robustly Scaling Extremely Deep Transformers", arXiv 2305.02790. T is ``warmup``. We had no copy
    of the paper: ProRes' paper (footnote 3) says the ramp is linear, the same in each layer; T's default is ours."""


class NGPT(SkipConnection, kind="ngpt", norm=opt.NO_NORM, slots=(), for_images=False):
    """nGPT's residual, ``y = N(N(x) + a * (N(F(N(x))) - N(x)))``, N(z) = sqrt(dim) z / |z|, where nGPT's vectors have
    length 1: fairseq's sublayers expect entries of size 1. Loshchilov et al. 2024, "nGPT: Normalized Transformer with
    Representation Learning on the Hypersphere", arXiv 2410.01131, and code NVIDIA/ngpt.

    a, ``|weight| * 0.05 sqrt(dim)`` with ``weight`` at 1/sqrt(dim), is 0.05 at first. Every vector of the branch's
    matrices along the model's dimension has length 1: under fairseq this is done after each update; in your
    own loop call ``set_num_updates`` before each. The matrices are those given to ``initialise``, so whatever replaces
    parameters (FSDP, ``load_state_dict(assign=True)``) is not supported. The architectures have FixNorm. nGPT's
    learned scales of queries and keys, hidden units and logits are left out: they are not part of a skip connection.
    """

    def setup(self) -> None:
        refuse_drop_path(self)
        if self.pre is not None:
            raise ValueError("pre_norm=True: kind ngpt normalises x itself: expected no pre-norm")
        self.weight = nn.Parameter(torch.full((self.dim,), self.dim**-0.5))
        self.lr_multiplier = 0.05 * self.dim**0.5
        self.matrices: list[tuple[Tensor, int]] = []  # of the branch, and the axis of the model's dimension

    def initialise(self, branch: Branch, first: SkipConnection | None = None) -> None:
        names = [role for role in branch if role != "embedding"]  # which the stack's first block is given by itself
        self.matrices += [(branch[role].tensor, 0 if role in ("out", "fc2") else 1) for role in names]
        self.to_unit_length()

    @torch.no_grad()
    def to_unit_length(self, copies: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Give the branch's vectors length 1; ``copies``: what an optimizer steps with in place of a matrix, by id."""
        for matrix, axis in self.matrices:
            whole = copies.get(id(matrix), matrix)
            whole.div_(whole.norm(dim=axis, keepdim=True).clamp(min=self.eps))
            matrix.copy_(whole)

    def set_num_updates(self, updates: int) -> None:
        self.to_unit_length()

    def unit(self, z: Tensor) -> Tensor:
        return nn.functional.normalize(at_least_float32(z), dim=-1, eps=self.eps) * self.dim**0.5

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.unit(x).to(x.dtype), None

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, share = self.unit(x), (self.lr_multiplier * self.weight).abs()
        return self.unit(x + share * (self.unit(f_x) - x))


def scheduled(model: nn.Module) -> list[Any]:
    """The skip connections below ``model`` that are told the number of updates."""
    return [skip for skip in skips(model).values() if hasattr(skip, "set_num_updates")]
