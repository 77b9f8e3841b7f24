"""The norms of a skip connection: which of them a rule has, and which combinations are refused."""

from types import SimpleNamespace
from typing import Any, ClassVar

from torch import nn

from ..norms import DyT, Layout, Norm, RecursiveNorm, create_norm
from ..option_error import OptionError
from .options import all_norms


class NormSlots(Layout):
    """Three places for norms around a branch: before it, behind it, and after the sum.

    ``pre`` is of the branch's input, ``branch`` of its output, and ``post`` of the sum, of length 0
    where there is none. A rule names in ``slots`` those that the option ``norm`` fills.
    """

    kind: ClassVar[str]
    norms: ClassVar[tuple[str, ...]] = all_norms()  # which norms the rule accepts
    default_norm: ClassVar[str] = "layer"
    normalises_x: ClassVar[bool] = False  # whether the branch reads x normalised by the rule itself
    slots: tuple[str, ...] = ("post",)  # which of pre, branch and post the norm fills

    dim: int
    norm_axes: str
    eps: float
    factory: dict[str, Any]  # device and dtype
    options: SimpleNamespace
    pre: Norm | None
    branch: Norm | None
    post: RecursiveNorm

    def add_norms(self, norm: str | None, pre_norm: bool) -> None:
        """Make ``pre``, ``branch`` and ``post`` as the arguments of the constructor say.

        Raises :class:`.OptionError` for what the rule, or a ResNet, does not take.
        """
        if self.channel_dim == 1 and "pre" in self.slots:
            self._leave_norm_to_branch(norm)
        filled = () if self.options.norm == "none" else self.slots
        if pre_norm:
            self._check_pre_norm(filled)
        self.new_norm()  # raises for a layout or eps that the norm does not take
        self.pre = None
        if "pre" in filled:
            self.pre = self.new_norm()
        elif pre_norm:
            self.pre = self.new_norm("layer")
        self.branch = self.new_norm() if "branch" in filled else None
        self.post = self.new_post(self.steps if "post" in filled else 0)

    def _leave_norm_to_branch(self, norm: str | None) -> None:
        """Have no norm: the branches of a ResNet begin with one. Raises :class:`.OptionError`."""
        if norm not in (None, "none"):
            raise OptionError(
                "norm",
                norm,
                f"'none' for kind {self.kind} in a ResNet",
                reason="its branches begin with a norm of their own",
            )
        if "none" not in self.norms:
            raise OptionError(
                "kind",
                self.kind,
                "a rule that takes norm='none', for a ResNet",
                reason="its branches begin with a norm of their own",
            )
        self.options.norm = "none"

    def _check_pre_norm(self, filled: tuple[str, ...]) -> None:
        """Raise :class:`.OptionError` for a pre-norm beside another norm of the rule."""
        if self.normalises_x:
            reason = f"kind {self.kind} normalises x itself"
            raise OptionError("pre_norm", True, "no pre-norm", reason=reason)
        if not set(filled) - {"pre"}:
            return
        if "none" not in self.norms:
            where = "after the sum" if "post" in self.slots else "behind the branch"
            reason = f"kind {self.kind} needs its norm {where}"
            raise OptionError("pre_norm", True, "no pre-norm", reason=reason)
        raise OptionError(
            "norm",
            self.options.norm,
            "'none'",
            {"pre_norm": True},
            "pre-norm is y = λx + αF(LN(x)), without a normalisation after the sum",
        )

    @property
    def steps(self) -> int:
        """The number of norms after the sum."""
        return 1

    def new_post(self, steps: int) -> RecursiveNorm:
        """The norms after the sum."""
        layout = (self.channel_dim, self.norm_axes, self.eps)
        post = RecursiveNorm(self.options.norm, self.dim, steps, *layout, **self.factory)
        for norm in post:
            self._set_alpha(norm)
        return post

    def new_norm(self, name: str | None = None) -> Norm:
        """A norm over the features, by default that of the option ``norm``."""
        layout = (self.channel_dim, self.norm_axes, self.eps)
        norm = create_norm(name or self.options.norm, self.dim, *layout, **self.factory)
        self._set_alpha(norm)
        return norm

    def _set_alpha(self, norm: Norm) -> None:
        if isinstance(norm, DyT) and self.options.norm_alpha is not None:
            nn.init.constant_(norm.alpha, self.options.norm_alpha)

    def needs_final_norm(self) -> bool:
        """Whether the output of a stack's last block still has to be normalised, as in pre-norm."""
        if len(self.post) > 0:
            return False
        return self.pre is not None or "pre" in self.slots or "branch" in self.slots
