"""The interface of a skip connection: what its branch sees, and how the two are put together."""

import dataclasses
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from ..norms import NORMS, Norms, check_layout, create_norm
from . import options as opt
from .coefficients import WithCoefficients
from .place import Branch, Place
from .state import WithRule

KINDS: dict[str, Any] = {}


class SkipConnection(WithCoefficients, WithRule):
    """A skip connection ``y = skip(x, f_x, padding_mask=None)``; also the base class of every kind.

    Args:
        dim: size of the channel dimension.
        kind: one of ``KINDS``.
        place: where it stands in the network, for kinds whose constants depend on it.
        channel_dim: -1 for sequences ``(..., dim)``, 1 for image maps ``(batch, dim, height, width)``.
        pre_norm: let the branch see LN(x), :meth:`read`; for kinds whose own norm does not stand after the sum.
        norm_axes, eps, update_in_no_grad: see :mod:`fairseq_rskip.norms`.
        options: fields of the kind's ``Options``: ``norm``, one of ``norms.NORMS``, and the kind's own.

    A model computes ``x = skip(x, F(skip.read(x)))``. ``forward`` takes ``x`` and ``f_x`` of one shape in any floating
    types and returns ``x``'s shape and dtype; kinds that carry several tensors take and return ``width_in * dim`` and
    ``width_out * dim`` channels. ``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True
    where padded; batch normalisation leaves those positions out and returns zeros there, the other norms treat every
    row on its own.

    Raises:
        ValueError: naming the argument, its value and what is accepted, at construction for anything outside the
            above, at call for shapes that differ, a channel dimension other than ``dim``, inputs that are not floating
            point, or a mask of the wrong type or shape.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        norm: str = opt.option("layer", "normalisation G", choices=NORMS)
        drop_path: float = opt.option(
            0.0,
            "stochastic depth (Huang et al. 2016): the probability at which a branch is left out of an example in the "
            "last block, linear in depth",
            "rate",
            short="drop",
            in_rule=False,
        )

    kind = ""
    norm_stands = "after"  # after the sum, before the branch, behind the branch, or nowhere
    needs_norm = False
    for_images = True
    learns = False  # has parameters of its own beside the norms'
    decays = False  # which weight decay is to shrink
    branch_batch_norm = True  # whether a ResNet's branch keeps its batch norms
    zero_classifier = False  # whether a ResNet's classifier starts at 0
    speed = 1.0  # multiplies the learned coefficients where they act
    width_in = 1  # what it takes and returns, in tensors of dim channels
    width_out = 1
    spans_layers = False  # hands more than one tensor from layer to layer, so that no layer can be left out
    __constants__ = ["learns", "width_in", "width_out"]  # class attributes that TorchScript may read

    def __init_subclass__(cls, **defaults: Any) -> None:
        """Register a kind; ``class Scaled(ConstantSkip, norm="none")`` has other defaults than its base."""
        super().__init_subclass__()
        if defaults:
            cls.Options = opt.with_defaults(cls, **defaults)
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    def __new__(cls, dim: int = 0, kind: str | None = None, **options: Any) -> "SkipConnection":
        if cls is SkipConnection:
            kind = "rskip" if kind is None else kind
            if not isinstance(kind, str) or kind not in KINDS:
                raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
            cls = KINDS[kind]
        return super().__new__(cls)

    def __init__(
        self,
        dim: int,
        kind: str | None = None,
        place: Place | None = None,
        channel_dim: int = -1,
        pre_norm: bool = False,
        norm_axes: str = "c",
        eps: float = 1e-5,
        update_in_no_grad: bool = True,
        **options: Any,
    ):
        super().__init__()
        if kind not in (None, self.kind):
            raise ValueError(f"kind={kind!r}: expected {self.kind!r}, the kind of {type(self).__name__}")
        check_layout(dim, channel_dim)
        if channel_dim == 1 and not self.for_images:
            accepted = ", ".join(name for name, kind in KINDS.items() if kind.for_images)
            raise ValueError(f"kind={self.kind!r}: expected one of {accepted} for images")
        self.dim = int(dim)
        self.channel_dim = int(channel_dim)
        self.place = place or Place()
        self.options = self._checked(options)
        self.drop_rate = float(self.options.drop_path) * self.place.number / self.place.blocks
        layout = (channel_dim, norm_axes, eps, update_in_no_grad)
        self.norm_name = self.options.norm
        first = create_norm(self.norm_name, dim, *layout)
        self.eps = first.eps
        self.pre_norm: nn.Module | None = None
        if pre_norm:
            self._check_pre_norm()
        if self.norm_stands == "before":
            if first.uses_padding_mask:
                raise ValueError(
                    f"norm={self.norm_name!r}: expected a norm of single positions, for example 'layer', for kind "
                    f"{self.kind!r}, which normalises what a branch reads: it cannot tell padding there"
                )
            self.pre_norm = first
        elif pre_norm:
            self.pre_norm = create_norm("layer", dim, *layout)
        self.uses_padding_mask = first.uses_padding_mask
        self.norms = Norms()
        if self.norm_stands == "after" and self.norm_name != "none":
            self.norms.extend(create_norm(self.norm_name, dim, *self.norm_layout(layout)) for _ in range(self.steps()))

    def _checked(self, given: dict[str, Any]) -> Any:
        known = [field.name for field in dataclasses.fields(self.Options)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name}={value!r}: kind {self.kind} has no such option; it has {', '.join(known)}")
        if self.channel_dim == 1 and self.norm_stands == "before":
            if given.get("norm", "none") != "none":
                raise ValueError(
                    f"norm={given['norm']!r}: expected 'none' for kind {self.kind!r} in a ResNet, whose "
                    "branches begin with a norm of their own"
                )
            given = {**given, "norm": "none"}
        options = self.Options(**given)
        opt.check(options, self.kind)
        if self.needs_norm and options.norm == "none":
            raise ValueError(
                f"norm='none': expected a normalisation for kind {self.kind!r}, for example 'layer' or 'rms'"
            )
        if self.norm_stands == "nowhere" and options.norm != "none":
            raise ValueError(f"norm={options.norm!r}: expected 'none' for kind {self.kind!r}, which has no norm")
        return options

    def _check_pre_norm(self) -> None:
        if self.norm_stands == "before":
            if self.norm_name == "none":
                raise ValueError("norm='none': pre-norm is a normalisation before the branch: expected one")
        elif self.norm_stands != "nowhere" and self.norm_name != "none":
            way_out = f"kind {self.kind} without pre-norm" if self.needs_norm else "'none'"
            raise ValueError(
                f"norm={self.norm_name!r}: pre-norm is y = λx + αF(LN(x)), without a normalisation after the sum: "
                f"expected {way_out}"
            )

    def norm_layout(self, layout: tuple[Any, ...]) -> tuple[Any, ...]:
        """The layout, ``channel_dim`` and so on, of the norms after the sum."""
        return layout

    def steps(self) -> int:
        """How many normalisations, one per step, the kind owns."""
        return 1

    def growth(self) -> float:
        """What a block multiplies x by, before G, at the start of training."""
        return 1.0

    def constants(self) -> dict[str, float]:
        """The constants of this place's equation, by the names that the source gives them."""
        return {}

    def learned(self) -> dict[str, Tensor]:
        """The parameters of the rule itself, by name: not those of the norms."""
        return dict(self.named_parameters(recurse=False))

    def needs_final_norm(self) -> bool:
        """Whether what leaves the last block of a stack is still to be normalised, as in pre-norm."""
        return self.pre_norm is not None

    def initialise(self, branch: Branch) -> None:
        """Rescale what the branch starts with; nothing is redrawn, so that a run draws what stock fairseq draws."""

    def embedding_scale(self) -> float:
        """What the embedding of this side starts multiplied by."""
        return 1.0

    def draw(self, *shape: int) -> Tensor:
        """Standard normal values of this kind and place under the current seed, outside the global random stream."""
        place = f"{self.kind} {self.place.side} {self.place.number}"
        seed = (torch.initial_seed() + zlib.crc32(place.encode())) % 2**63
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
        return torch.empty(*shape).copy_(values)  # the same values on whatever device the module is built

    def share(self, first: "SkipConnection") -> None:
        """Share with ``first``, of the layer's first sublayer, the parameters that the rule has once per layer."""

    def effective_lambda(self) -> float | None:
        """lambda as it is now, of a kind that learns or chooses it; None otherwise."""
        return None

    def wants_profile(self) -> bool:
        """Whether :func:`fairseq_rskip.residual.profile.profile` is to set its start from one batch."""
        return False

    def take_cost(self) -> tuple[float, Tensor | None]:
        """A weight and what it weighs in the loss at each position of the last forward pass in training; once."""
        return 0.0, None

    def candidates(self) -> int:
        """How many lambdas :func:`fairseq_rskip.residual.profile.choose_lambdas` is to try, 1 to this; 0 for none."""
        return 0

    def profile(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None, before: float) -> float:
        """Set the start from what ``forward`` is about to see; ``before`` is what the last block returned, or 1."""
        return before

    def current(self, x: Tensor) -> Tensor:
        """The tensor that the branch stands on: x, or what a kind that carries several tensors takes from them."""
        return x

    def read(self, x: Tensor) -> Tensor:
        """What the branch sees: the current tensor, or G of it where the norm stands before the branch."""
        current = self.current(x)
        if self.pre_norm is not None:
            return self.pre_norm(current)
        return current

    def write(self, f_x: Tensor) -> Tensor:
        """What the branch adds: F, or G(F) where a norm stands behind the branch."""
        return f_x

    def combine(self, x: Tensor, f_x: Tensor) -> Tensor:
        """The equation, before the norms: shapes as in ``forward``."""
        raise ValueError("SkipConnection is a base class: build one of its kinds")

    def apply_norms(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """G of the sum z."""
        for norm in self.norms:
            z = norm(z, padding_mask)
        return z

    def forward(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        self.check(x, f_x, padding_mask)
        dtype = x.dtype
        f_x = self.write(f_x)
        if self.drop_rate > 0.0:
            f_x = self.drop_branch(f_x)
        if padding_mask is not None and self.learns and self.uses_padding_mask:
            # the norm masks the sum, but a rule's gradients are taken from x and F themselves; masked_fill would lose
            # channels_last
            padded, zero = padding_mask.unsqueeze(self.channel_dim), x.new_zeros(())
            x, f_x = torch.where(padded, zero, x), torch.where(padded, zero.to(f_x.dtype), f_x)
        if self.learns and f_x.dtype != x.dtype:
            wide = (x.new_empty(0) + f_x.new_empty(0)).dtype  # a scalar weight times half F would stay half
            x, f_x = x.to(wide), f_x.to(wide)
        if not torch.jit.is_scripting():
            fused = self.fused(x, f_x, padding_mask)
            if fused is not None:
                return fused if fused.dtype == dtype else fused.to(dtype)
        y = self.apply_norms(self.combine(x, f_x), x, padding_mask)
        return y if y.dtype == dtype else y.to(dtype)

    @torch.jit.unused
    def fused(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """y by the operator of :mod:`fairseq_rskip.ops`, where it computes this equation and is in use."""
        return None

    def drop_branch(self, f_x: Tensor) -> Tensor:
        """Stochastic depth: b F with b from Bernoulli(1 - p); in evaluation (1 - p) F.

        One draw per example (sentence or image), as in timm; Huang et al. 2016 draw once for a whole batch.
        """
        if not self.training:
            return f_x * (1.0 - self.drop_rate)
        shape = [1] * f_x.dim()
        axis = 0 if self.channel_dim == 1 else f_x.dim() - 2
        if axis >= 0:
            shape[axis] = f_x.size(axis)
        kept = torch.rand(shape, device=f_x.device) >= self.drop_rate
        return torch.where(kept, f_x, f_x.new_zeros(()))

    def per_channel(self, vector: Tensor) -> Tensor:
        """View a ``(dim,)`` vector so that it broadcasts along the channel dimension."""
        return vector.view(-1, 1, 1) if self.channel_dim == 1 else vector

    def check(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> None:
        """Raise ``ValueError`` for inputs that ``forward`` does not accept."""
        expected = list(x.shape)
        if self.width_in > 1 and x.dim() > 0:
            expected[-1] = self.dim
        if list(f_x.shape) != expected:
            raise ValueError(f"f_x has shape {list(f_x.shape)}: expected x's shape {expected}")
        if not (x.is_floating_point() and f_x.is_floating_point()):
            raise ValueError(f"x and f_x have dtypes {x.dtype} and {f_x.dtype}: expected floating point")
        if self.channel_dim == 1 and x.dim() != 4:
            raise ValueError(f"x has shape {list(x.shape)}: expected (batch, {self.dim}, height, width)")
        width = self.width_in * self.dim
        if x.dim() == 0 or x.size(self.channel_dim) != width:
            raise ValueError(f"x has shape {list(x.shape)}: expected {width} at dimension {self.channel_dim}")
        if padding_mask is not None:
            expected.pop(self.channel_dim)
            if padding_mask.dtype != torch.bool or list(padding_mask.shape) != expected:
                raise ValueError(
                    f"padding_mask has dtype {padding_mask.dtype} and shape {list(padding_mask.shape)}: "
                    f"expected a boolean mask of shape {expected}, True where padded"
                )

    def label(self) -> str:
        """A short name of the settings, such as rskip2-layer: the kind, its first own option, the norm, the rest."""
        return opt.label(self.kind, self.options, SkipConnection.Options)

    def extra_repr(self) -> str:
        given = ", ".join(f"{k}={opt.short(v)}" for k, v in dataclasses.asdict(self.options).items())
        return f"{self.dim}, kind={self.kind}, {given}, channel_dim={self.channel_dim}"


def skips(model: nn.Module) -> dict[str, SkipConnection]:
    """Module name -> skip connection, of all in ``model``, in the order in which they were registered."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SkipConnection)}
