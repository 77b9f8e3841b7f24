"""The interface of a skip connection: what its branch sees, and how the two are put together."""

import dataclasses
import functools
from typing import Any

from torch import Tensor, nn

from ..norms import Layout, Norm, at_least_float32, check_layout, create_norm, parameters_of_norms
from . import inputs
from . import options as opt
from .place import Branch, Place
from .state import WithRule

KINDS: dict[str, Any] = {}


class SkipConnection(Layout, WithRule):
    """A skip connection, and the base class of every kind.

        h, carried = skip.prepare(x)
        y = skip(x, F(h), carried)

    computes ``y = post(combine(x, branch(F(pre(x)))))``. A kind defines :meth:`setup` (its parameters) and
    :meth:`combine` (its equation). ``pre``, ``branch`` and ``post`` are norms before the branch, behind it and after
    the sum: a module or None, ``post`` a list, one norm for each step; rskip adds x again before each further one.

    Args:
        dim: size of the channel dimension.
        kind: one of ``KINDS``.
        place: position in the network, for kinds whose constants depend on it.
        channel_dim: -1 for sequences ``(..., dim)``, 1 for image maps ``(batch, dim, height, width)``.
        batch_dim: the dimension of a sequence's examples, which stochastic depth drops: -2 in fairseq, 0 batch-first.
        pre_norm: have a norm before the branch, layer norm in kinds without a norm.
        norm_axes, eps: see :mod:`fairseq_rskip.norms`.
        options: fields of the kind's ``Options``: ``norm``, one of ``norms.NORMS``, and the kind's own.

    ``forward`` takes ``x`` and ``f_x`` in any floating types and returns ``x``'s dtype, all of one shape; in kinds that
    keep several tensors ``x`` has ``widths[0] * dim`` channels, ``f_x`` dim, the result ``widths[1] * dim``.
    ``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True where padded; batch normalisation
    leaves those positions out and returns zeros there, other norms treat every position on its own. Raises
    ``ValueError``, naming the argument, its value and what is accepted.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        norm: str = opt.norm()
        drop_path: float = opt.option(
            0.0, "stochastic depth (Huang et al. 2016): rate of the last block, linear in depth", "rate", short="drop"
        )

    kind = ""
    slots: tuple[str, ...] = ("post",)  # which of pre, branch and post use the norm of the option ``norm``
    for_images = True
    decays = False  # whether weight decay applies to what the rule learns
    replaces_batch_norm = zero_classifier = False  # biases replace a ResNet's batch norm; the classifier is 0 at first
    widths = (1, 1)  # what forward takes and returns, in tensors of dim channels

    def __init_subclass__(cls, kind: str = "", **options: Any) -> None:
        """Register a kind. ``class Highway(Weighted, kind="highway", norm="none", gate_bias=opt.start(-1.0))`` has
        another default than its base and an option of its own; ``slots`` and ``for_images`` are set the same way."""
        super().__init_subclass__()
        for name in {"slots", "for_images"} & options.keys():
            setattr(cls, name, options.pop(name))
        if options:
            cls.Options = opt.with_options(cls, options)
        if kind:
            other = KINDS.get(kind, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"kind={kind!r} of {cls.__name__}: {other.__module__}.{other.__name__} has it")
            cls.kind, KINDS[kind] = kind, cls

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
        batch_dim: int = -2,
        pre_norm: bool = False,
        norm_axes: str = "c",
        eps: float = 1e-5,
        **options: Any,
    ):
        super().__init__()
        if kind not in (None, self.kind):
            raise ValueError(f"kind={kind!r}: expected {self.kind!r}, the kind of {type(self).__name__}")
        check_layout(dim, channel_dim)
        self.dim, self.channel_dim, self.place = int(dim), int(channel_dim), place or Place()
        self.batch_dim = 0 if channel_dim == 1 else batch_dim
        self.options = opt.parse(type(self), options, KINDS, channel_dim == 1, place)
        self.drop_rate = float(self.options.drop_path) * self.place.block_number / self.place.num_blocks
        self.norm_axes, self.eps = norm_axes, eps
        make = functools.partial(create_norm, dim=dim, channel_dim=channel_dim, norm_axes=norm_axes, eps=eps)
        own = functools.partial(make, self.options.norm)
        own()  # raises where the norm does not have this layout
        slots = () if self.options.norm == "none" else self.slots
        if pre_norm and set(slots) - {"pre"}:
            raise ValueError(
                f"norm={self.options.norm!r}: pre-norm is y = λx + αF(LN(x)), without a normalisation after the sum: "
                f"expected 'none' or, for kinds that need their norm such as rskip, no pre-norm (kind {self.kind})"
            )
        self.pre = own() if "pre" in slots else make("layer") if pre_norm else None
        self.branch = own() if "branch" in slots else None
        self.post = nn.ModuleList(self._post_norms(own) if "post" in slots else ())
        self.setup()
        self.learns = bool(self.learned())  # also where FSDP has flattened the parameters

    def setup(self) -> None:
        """Make the kind's parameters and constants; called once, after the norms."""

    def _post_norms(self, make: Any) -> list[Norm]:
        """The norms after the sum, one for each step."""
        return [make()]

    def learned(self) -> dict[str, Tensor]:
        """The parameters of the rule itself, by name: not those of norms."""
        norms = parameters_of_norms(self)
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in norms}

    def initialise(self, branch: Branch, first: "SkipConnection | None" = None) -> None:
        """Rescale what ``branch`` starts with; nothing is redrawn, so that a run uses the random numbers of stock
        fairseq. ``first``: the skip connection of the layer's first sublayer, to share parameters with."""

    def needs_final_norm(self) -> bool:
        """Whether the output of a stack's last block still has to be normalised, as in pre-norm."""
        return not self.post and (self.pre is not None or "pre" in self.slots or "branch" in self.slots)

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        """What the branch sees, and what is carried to ``forward``: None, or a tuple of the kind's own."""
        return x if self.pre is None else self.pre(x), None

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        """The equation, before the norms after the sum."""
        raise ValueError("SkipConnection is a base class: build one of its kinds")

    def _normalise(self, z: Tensor, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """``post`` of the sum z."""
        for norm in self.post:
            z = norm(z, padding_mask)
        return z

    def forward(self, x: Tensor, f_x: Tensor, carried: Any = None, padding_mask: Tensor | None = None) -> Tensor:
        inputs.check(self, x, f_x, carried, padding_mask)
        dtype = x.dtype
        if self.branch is not None:
            f_x = self.branch(at_least_float32(f_x))  # rounded to a half type once, after the sum
        if self.drop_rate > 0.0:
            f_x = inputs.drop_path(self, f_x)
        if self.learns:
            x, f_x = inputs.align(self, x, f_x, padding_mask)
        y = self._output(x, f_x, carried, padding_mask)
        return y if y.dtype == dtype else y.to(dtype)

    def _output(self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None) -> Tensor:
        return self._normalise(self.combine(x, f_x, carried), x, padding_mask)

    def rule(self) -> dict[str, Any]:
        fields = [field.name for field in dataclasses.fields(self.options) if field.metadata["affects_output"]]
        options = {name: getattr(self.options, name) for name in fields}
        return {"kind": self.kind, **options, "norm_axes": self.norm_axes, "eps": self.eps}

    def extra_repr(self) -> str:
        options = ", ".join(f"{k}={opt.short(v)}" for k, v in dataclasses.asdict(self.options).items())
        return f"{self.dim}, kind={self.kind}, {options}, channel_dim={self.channel_dim}"


def skips(model: nn.Module) -> dict[str, SkipConnection]:
    """Module name -> skip connection, of all in ``model``, in the order in which they were registered."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SkipConnection)}
