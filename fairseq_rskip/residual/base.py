"""The interface of a skip connection: what its branch sees, and how the two are put together."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from ..norms import NoCoefficients, at_least_float32, check_layout, parameters_of_norms
from ..option_error import OptionError
from . import inputs, own_rules, training_setup
from .branch_weights import BranchWeights, check_weights
from .coefficients import Coefficients
from .norm_slots import NormSlots
from .options import WITH_ALPHA, checked_options, options_of, short
from .place import Place
from .registry import KINDS, rule_of
from .state import WithRule
from .training_setup import TrainingSetup


class Common(TypedDict, total=False):
    """The keyword arguments that every rule takes; :class:`SkipConnection` explains them."""

    place: Place | None
    channel_dim: int
    batch_dim: int
    pre_norm: bool
    norm: str
    norm_alpha: float | None
    norm_axes: str
    eps: float
    drop_path: float
    device: torch.device | str | None
    dtype: torch.dtype | None


class SkipConnection(NormSlots, WithRule):
    """The base class of every kind; :func:`create_skip` builds one by name.

        h, carried = skip.prepare(x)
        y = skip(x, F(h), carried)

    computes ``y = post(combine(x, branch(F(pre(x)))))`` with three norms: ``pre`` of the branch's
    input, ``branch`` of its output and ``post`` of the sum. The first two are a module or None,
    ``post`` is a :class:`.RecursiveNorm`, of length 0 where a rule has no norm there.

    A rule makes its parameters in its constructor, with :meth:`new_parameter`. Its equation is
    :meth:`combine`; a rule ``y = G(p x + q F)`` derives from :class:`.Weighted` and states p and q
    in ``scales``. What ``combine`` needs besides x and F, such as several streams, :meth:`current`
    returns as a tuple; a rule that makes it from the norm's output overrides :meth:`prepare`, and
    calls it in ``combine`` where that gets None (``forward`` without ``prepare``). Its options are
    annotated parameters of its constructor, which also make ``--skip-<name>`` (:mod:`.options`).
    docs/rules.md says how to add a rule.

    Args:
        dim: size of the channel dimension.
        place: position in the network. Rules that depend on it refuse to be built without one.
        channel_dim: -1 for sequences ``(..., dim)``, 1 for image maps
            ``(batch, dim, height, width)``.
        batch_dim: the dimension of a sequence's examples, which stochastic depth drops: -2 in
            fairseq, 0 batch-first.
        pre_norm: have a norm before the branch, layer norm in kinds without a norm.
        norm: one of ``norms.NORMS``; by default the kind's own.
        norm_alpha: the initial α of the norms "dyt" and "derf", by default 0.5.
        norm_axes, eps: see :mod:`fairseq_rskip.norms`.
        drop_path: stochastic depth's rate of the last block, linear in depth.
        device, dtype: of the parameters, as in torch's own modules.
        options: the kind's own options, which the constructors of kinds list.

    ``forward`` takes ``x`` and ``f_x`` in any floating types and returns ``x``'s dtype, all of one
    shape; in kinds that keep several tensors ``x`` has ``widths[0] * dim`` channels, ``f_x`` dim,
    the result ``widths[1] * dim``. ``padding_mask`` is boolean, of ``x``'s shape without the
    channel dimension, True where padded; batch normalisation leaves those positions out and returns
    zeros there, other norms treat every position on its own. Raises ``ValueError``, naming the
    argument, its value and what is accepted.
    """

    kind: ClassVar[str] = ""
    for_images: ClassVar[bool] = True
    needs_place: ClassVar[bool] = False  # whether the rule depends on its position
    starts_branch: bool = False  # whether initialise rescales the weights of the branch
    decays: ClassVar[bool] = False  # whether weight decay applies to what the rule learns
    replaces_batch_norm: ClassVar[bool] = False  # whether biases replace a ResNet's batch norm
    zero_classifier: ClassVar[bool] = False  # whether the classifier starts at 0
    scales_embedding: ClassVar[bool] = False  # whether initialise rescales the word embeddings
    mixes_streams: ClassVar[bool] = True  # False where the matrix of streams() is I by definition
    has_unit_length: ClassVar[bool] = False  # whether to_unit_length has to follow each update

    def __init__(
        self,
        dim: int,
        *,
        place: Place | None = None,
        channel_dim: int = -1,
        batch_dim: int = -2,
        pre_norm: bool = False,
        norm: str | None = None,
        norm_alpha: float | None = None,
        norm_axes: str = "c",
        eps: float = 1e-5,
        drop_path: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        check_layout(dim, channel_dim)
        self._check_kind(channel_dim)
        self.dim, self.channel_dim, self.eps = int(dim), int(channel_dim), eps
        self.batch_dim = 0 if channel_dim == 1 else checked_batch_dim(batch_dim)
        self.norm_axes = norm_axes
        self.factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.setup = TrainingSetup()

        if not (place is None or isinstance(place, Place)):
            raise ValueError(f"place={place!r}: expected a Place, such as Place(index=0, depth=6)")
        self.has_place = place is not None
        self.place = Place() if place is None else place

        common = {
            "norm": self.default_norm if norm is None else norm,
            "norm_alpha": norm_alpha,
            "drop_path": drop_path,
        }
        self.options = checked_options(self, {**common, **options}, place)
        self._check_alpha()
        if self.needs_place:
            self.require_place()
        self.drop_rate = float(drop_path) * self.place.block_number / self.place.num_blocks
        self.add_norms(norm, pre_norm)

    def _check_kind(self, channel_dim: int) -> None:
        """Raise ``ValueError`` for a base class, and for a rule of sequences in a ResNet."""
        if not self.kind:
            raise ValueError(f"{type(self).__name__} is a base class: build one of its kinds")
        if channel_dim == 1 and not self.for_images:
            accepted = ", ".join(name for name, rule in KINDS.items() if rule.for_images)
            raise OptionError("kind", self.kind, f"one of {accepted} for images")

    def _check_alpha(self) -> None:
        """Raise :class:`.OptionError` for an initial α of a norm that has none."""
        norm, alpha = self.options.norm, self.options.norm_alpha
        if alpha is not None and norm not in WITH_ALPHA:
            reason = "only dyt and derf have an α"
            raise OptionError("norm_alpha", alpha, "no value", {"norm": norm}, reason)

    @property
    def widths(self) -> tuple[int, int]:
        """What ``forward`` takes and returns, in tensors of ``dim`` channels."""
        return 1, 1

    def new_parameter(self, values: Tensor) -> nn.Parameter:
        """A parameter of the rule with initial ``values``, on its device and of its dtype.

        Raises ``ValueError`` for a number of shape (): FSDP needs one dimension.
        """
        if values.dim() == 0:
            raise ValueError(f"kind {self.kind}: a learned number has shape (1,), not ()")
        return nn.Parameter(values.detach().to(**self.factory, copy=True))

    def draw(self, *shape: int) -> Tensor:
        """Standard normal initial values: those of the place, or torch's next ones without one."""
        if self.has_place:
            return self.place.draw(self.kind, *shape)
        return torch.randn(*shape)

    def require_place(self) -> None:
        """Raise ``ValueError``, with what to do, for a skip connection that has no place."""
        if not self.has_place:
            stack = (
                f'skip_stack("{self.kind}", {self.dim}, layers=6, sublayers=("self_attn", "ffn"))'
            )
            raise ValueError(
                f"place=None: kind {self.kind} depends on its position: expected "
                f"place=Place(index=..., depth=...), or for a whole stack {stack}"
            )

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters of the rule itself, by name: not those of norms."""
        norms = parameters_of_norms(self)
        parameters = self.named_parameters()
        return {name: value for name, value in parameters if id(value) not in norms}

    def constants(self) -> dict[str, float]:
        """The numbers of the equation at this place, by the papers' symbols.

        A learned vector of unequal values has its mean, named as such; matrices are left out.
        """
        numbers = {}
        for name, parameter in self.learned().items():
            if parameter.dim() >= 2 or parameter.numel() == 0:
                continue
            values = parameter.detach().double()
            is_one_value = bool((values == values.flatten()[0]).all())
            numbers[name if is_one_value else f"mean {name}"] = float(values.mean())
        return numbers

    def choices(self) -> dict[str, str]:
        """The options of the equation that are not among its constants, as matrix=sinkhorn.

        The norm is left out. Numbers are those of a rule of your own; the constants of this
        package's rules have theirs, by the papers' symbols.
        """
        is_own = own_rules.file_of(self.kind) is not None
        constants = self.constants()
        chosen = {}
        for name, option in options_of(type(self)).items():
            value = getattr(self.options, name)
            is_number = isinstance(value, int | float)
            if name == "norm" or option.about.affects != "output" or name in constants:
                continue
            if isinstance(value, str) or (is_own and is_number):
                chosen[name] = short(value)
        return chosen

    def coefficients(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> Coefficients:
        """a, b and c of ``y = a * x + b * F + c``, each of x's shape and at least fp32.

        The statistics of the norms and all gates are held constant. Raises
        :class:`.NoCoefficients`, a ``ValueError``, where a norm or the kind has no such map.
        """
        raise self._no_coefficients()

    def ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x:F in y for each feature and position, of x's shape, at least fp32.

        It is ``a / b`` of :meth:`coefficients`; a rule may know it where the two themselves are not
        defined. Raises :class:`.NoCoefficients` where a norm or the kind has no such quotient.
        """
        raise self._no_coefficients()

    def parts(
        self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``a * x`` and ``b * F``, what x and F add to the sum that the last norm reads.

        They are at least fp32; of y itself in a rule that mixes the outputs of several norms.
        Raises :class:`.NoCoefficients`.
        """
        a, b, _ = self.coefficients(x, f_x, padding_mask)
        return a * x, b * f_x

    def _no_coefficients(self) -> NoCoefficients:
        return NoCoefficients(
            f"{self.kind} mixes features or streams: its y has no coefficient of x and of F"
        )

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The streams H of x, ``(..., n, width)``, and their mixing matrix R, ``([...,] n, n)``.

        Row i of R has the weights of the streams in the next stream i. None for a rule of one
        stream, and for one whose streams are not measured.
        """
        return None

    def stream_gain(self) -> float:
        """The initial factor of x in a block's sum, before G."""
        return 1.0

    def initialise(self, weights: BranchWeights) -> None:
        """Rescale the initial ``weights`` of the branch, as the rule wants them.

        Call it once, before training. Absent roles are left as they are. Nothing is redrawn: a run
        uses the same random numbers as stock fairseq. Raises ``ValueError`` unless ``weights`` is a
        mapping from roles to ``Weight``, and where it would rescale weights again.

        A rule that overrides this calls it first, and sets ``starts_branch``: its first forward
        pass in training then warns if nobody has called it.
        """
        check_weights(weights)
        if self.starts_branch and not self.has_unit_length:
            training_setup.refuse_second_start(self, weights)
        self.setup.roles_started.update(weights)

    def missing_setup(self) -> str:
        """What should have been called before training and was not; "" if nothing is missing."""
        if not self.starts_branch or self.setup.roles_started or self.setup.state_was_loaded:
            return ""
        return (
            "the branch's weights are as they were drawn; "
            "call initialise({role: Weight(parameter, std), ...}) once, before training"
        )

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, *strict_and_keys: Any
    ) -> None:
        super()._load_from_state_dict(state, prefix, metadata, *strict_and_keys)
        has_entries = any(name.startswith(prefix) for name in state)
        could_have = bool([*self.parameters(), *self.buffers()])  # T-Fixup could not
        if "skip" in metadata or has_entries or not could_have:
            self.setup.state_was_loaded = True

    def without_gradient(self) -> tuple[str, ...]:
        """The names of learned parameters that have no gradient at this place, by the equation."""
        return ()

    def layer_factors(self) -> tuple[float, float]:
        """Factors of the learning rate and of Adam's epsilon, for every parameter of the
        Transformer layer that holds this skip connection; fairseq-train applies them.
        """
        return 1.0, 1.0

    def set_num_updates(self, updates: int) -> None:
        """Set the number of updates so far, 0 or more, on which a rule with a schedule depends.

        fairseq's models and train_cifar.py call this before each update.
        """

    def to_unit_length(self, copies: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Restore, after an update, the lengths that a rule gives the branch's vectors.

        ``copies``: id of a weight -> the copy of it that an optimizer updates in its place.
        """

    def share_with(self, first: "SkipConnection") -> None:
        """Share parameters with ``first``, the skip connection of the layer's first sublayer."""

    def example_axis(self, x: Tensor) -> int | None:
        """The axis of x's examples (sentences or images); None where x is a single one."""
        axis = self.batch_dim if self.batch_dim >= 0 else x.dim() + self.batch_dim
        return axis if 0 <= axis < x.dim() - 1 else None

    def current(self, x: Tensor) -> tuple[Tensor, Any]:
        """The tensor that the branch reads, before ``pre``, and what is carried to ``combine``.

        That is None in most rules, else a tuple of the rule's own. x is ``(..., widths[0] * dim)``,
        the first result ``(..., dim)``.
        """
        return x, None

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        """The branch's input, and what is carried to ``forward``: None, or a tuple.

        Raises ``ValueError`` for an x of another width. A rule that overrides this calls it.
        """
        inputs.check_width(self, x)
        if not torch.compiler.is_compiling():
            self.setup.was_prepared = True
        h, carried = self.current(x)
        return h if self.pre is None else self.pre(h), carried

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        """The equation, before the norms after the sum: ``(..., widths[1] * dim)``.

        x is ``(..., widths[0] * dim)``, ``f_x`` ``(..., dim)``; ``carried`` is the second result of
        :meth:`prepare`, or of :meth:`current` where ``forward`` was called without it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no combine(x, f_x, carried)")

    def forward(
        self, x: Tensor, f_x: Tensor, carried: Any = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """y of x and the branch's output ``f_x`` = F(h), with h and ``carried`` of :meth:`prepare`.

        Shapes, types, the mask and what is raised: :class:`SkipConnection`.
        """
        inputs.check(self, x, f_x, carried, padding_mask)
        if self.training and not self.setup.was_checked:
            training_setup.warn_of_missing_setup(self, x)
        dtype = x.dtype
        if self.branch is not None:
            # rounded to a half type once, after the sum
            f_x = self.branch(at_least_float32(f_x), padding_mask)
        if self.training and self.drop_rate > 0.0:
            f_x = inputs.drop_path(self, f_x)
        x, f_x = inputs.align(self, x, f_x, padding_mask)
        if carried is None:
            carried = self.current(x)[1]
        y = self.sum_and_norm(x, f_x, carried, padding_mask)
        return y if y.dtype == dtype else y.to(dtype)

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        """The equation and the norms after the sum."""
        z = self.combine(x, f_x, carried)
        return self.post(z, padding_mask=padding_mask) if len(self.post) > 0 else z

    def rule(self) -> dict[str, Any]:
        declared = options_of(type(self)).values()
        names = [option.name for option in declared if option.about.affects == "output"]
        options = {name: getattr(self.options, name) for name in names}
        return {"kind": self.kind, **options, "norm_axes": self.norm_axes, "eps": self.eps}

    def extra_repr(self) -> str:
        shown = {name: value for name, value in vars(self.options).items() if value is not None}
        options = ", ".join(f"{name}={short(value)}" for name, value in shown.items())
        return f"{self.dim}, kind={self.kind}, {options}, channel_dim={self.channel_dim}"


def checked_batch_dim(batch_dim: Any) -> int:
    """``batch_dim`` if it can be that of a sequence's examples; else raise ``ValueError``."""
    if isinstance(batch_dim, bool) or batch_dim not in (-3, -2, 0, 1):
        raise ValueError(
            f"batch_dim={batch_dim!r}: expected 0 or -3 for (batch, length, dim), "
            "1 or -2 for (length, batch, dim)"
        )
    return int(batch_dim)


def create_skip(kind: str, dim: int, **options: Any) -> SkipConnection:
    """Build a skip connection of ``kind``, one of ``KINDS``, over ``dim`` features.

    ``options`` are the keyword arguments of :class:`SkipConnection` and those of the kind's
    constructor. Raises ``ValueError``, naming the argument, its value and what is accepted.
    """
    skip: SkipConnection = rule_of(kind)(dim, **options)
    return skip


def skips(model: nn.Module) -> dict[str, SkipConnection]:
    """Module name -> skip connection, of all in ``model``, in the order of their registration."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SkipConnection)
    }
