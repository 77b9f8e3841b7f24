"""The options of a rule, read from the annotations of its constructor, and the check of values.

A rule declares its options in the signature of its constructor, each with a default and an
:class:`Option`::

    def __init__(self, dim: int, *, gate_bias: Annotated[float, Real("initial bias")] = -1.0, ...)

:func:`options_of` reads the signature; :mod:`fairseq_rskip.flags` makes both command lines of it.
"""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import torch

from ..norms import NORMS
from ..option_error import OptionError, UnknownOption

_FP32 = torch.finfo(torch.float32)


@dataclasses.dataclass(frozen=True)
class Option:
    """What an annotation says about an option.

    Args:
        help: the text of the command lines.
        short: the option's name in the name of a run; by default its own.
        affects: "output" if y in evaluation depends on it, for equal parameters; "start" for an
            initial value; "training" for what matters in training only.
        auto: computes the value from the :class:`.Place` if the value is "auto".
    """

    help: str
    short: str = ""
    affects: Literal["output", "start", "training"] = "output"
    auto: Callable[[Any], float] | None = None

    accepted = ""

    def __post_init__(self) -> None:
        is_text = isinstance(self.help, str) and isinstance(self.short, str)
        if not is_text or self.affects not in ("output", "start", "training"):
            raise TypeError(
                f"{type(self).__name__}({self.help!r}, {self.short!r}, {self.affects!r}): expected "
                "its help, a text, and the rest by name, as affects='start'"
            )

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is valid; ``accepted`` says in words what is."""
        return True


def _between(value: Any, least: float, most: float) -> bool:
    """Whether ``value`` is a real number in a closed interval; NaN is in none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    number: Any = value
    return least <= number <= most


class Real(Option):
    accepted = "a finite real number that fp32 holds"

    def accepts(self, value: Any) -> bool:
        return _between(value, -_FP32.max, _FP32.max)


class Positive(Option):
    accepted = "a finite real number > 0 that fp32 holds"

    def accepts(self, value: Any) -> bool:
        return _between(value, _FP32.tiny, _FP32.max)


@dataclasses.dataclass(frozen=True)
class Between(Option):
    """A number from 0 to ``most``, or below it."""

    most: float = 1.0
    below: bool = False

    @property
    def accepted(self) -> str:  # type: ignore[override]
        return f"a number from 0 to {'below ' if self.below else ''}{self.most:g}"

    def accepts(self, value: Any) -> bool:
        return _between(value, 0, self.most) and not (self.below and value == self.most)


@dataclasses.dataclass(frozen=True)
class Integer(Option):
    """An integer from 1 to ``most``."""

    most: int = 64

    @property
    def accepted(self) -> str:  # type: ignore[override]
        return f"an integer from 1 to {self.most:,}"

    def accepts(self, value: Any) -> bool:
        return _between(value, 1, self.most) and value == int(value)


class Choice(Option):
    """An option of a ``Literal`` type, whose values are the accepted ones:
    ``Annotated[Literal["channel", "scalar"], Choice("one weight per channel, or one in all")]``.
    """


@dataclasses.dataclass(frozen=True)
class Declared:
    """An option as a constructor declares it.

    ``type`` is int, float or str; ``choices`` are the values of a ``Literal``; ``about`` is the
    annotation's :class:`Option`; ``optional``: whether None is accepted.
    """

    name: str
    type: type
    default: Any
    about: Option
    choices: tuple[str, ...] = ()
    optional: bool = False

    def check(self, value: Any, kind: str) -> None:
        """Raise :class:`.OptionError` for a value that is not accepted."""
        if value is None and self.optional:
            return
        if self.choices and (not isinstance(value, str) or value not in self.choices):
            accepted = f"one of {', '.join(self.choices)}"
            raise OptionError(self.name, value, f"{accepted} for {kind}")
        if not self.about.accepts(value):
            raise OptionError(self.name, value, f"{self.about.accepted} for {kind}")


DROP_PATH = Declared(
    "drop_path",
    float,
    0.0,
    Between(
        "stochastic depth (Huang et al. 2016): rate of the last block, linear in depth",
        short="drop",
        affects="training",
        below=True,
    ),
)


NORM_ALPHA = Declared(
    "norm_alpha",
    float,
    None,
    Positive("initial α of the norms dyt and derf, by default 0.5", short="α", affects="start"),
    optional=True,
)
WITH_ALPHA = ("dyt", "derf")  # the norms that have an α


def options_of(rule: Any) -> dict[str, Declared]:
    """Name -> option of a rule's class: its norm, stochastic depth, and its constructor's own."""
    norm = Declared("norm", str, rule.default_norm, Choice("normalisation G"), rule.norms)
    common = {"norm": norm, "norm_alpha": NORM_ALPHA, "drop_path": DROP_PATH}
    return {**common, **_own_options(rule)}


@functools.cache
def _own_options(rule: Any) -> dict[str, Declared]:
    """The annotated parameters of the rule's constructor."""
    hints = typing.get_type_hints(rule.__init__, include_extras=True)
    declared = {}
    for name, parameter in inspect.signature(rule.__init__).parameters.items():
        about = [each for each in getattr(hints.get(name), "__metadata__", ()) if _is_option(each)]
        if about:
            declared[name] = _declared(name, hints[name], parameter.default, about[0])
    return declared


def _is_option(value: Any) -> bool:
    return isinstance(value, Option)


def _declared(name: str, annotation: Any, default: Any, about: Option) -> Declared:
    """Take an ``Annotated`` apart: ``float``, ``float | None``, ``int | Literal["auto"]``, ..."""
    annotated = annotation.__origin__
    is_union = typing.get_origin(annotated) in (typing.Union, types.UnionType)
    members = typing.get_args(annotated) if is_union else (annotated,)

    value_type: type = str
    choices: tuple[str, ...] = ()
    for member in members:
        if typing.get_origin(member) is Literal:
            choices += typing.get_args(member)
        elif member is not types.NoneType:
            value_type = member
    if isinstance(about, Choice) and not choices:
        raise TypeError(
            f"option {name}: Choice({about.help!r}) has no values: expected a Literal, as in "
            'Annotated[Literal["channel", "scalar"], Choice("help")]'
        )
    if about.auto is not None:
        choices = ()  # "auto" beside numbers: a value, not a list of values
    return Declared(name, value_type, default, about, choices, types.NoneType in members)


def checked_options(skip: Any, values: dict[str, Any], place: Any) -> types.SimpleNamespace:
    """The options of ``skip`` by name, "auto" replaced by its value.

    Raises :class:`.OptionError` for an option that the rule does not have, a value that it does not
    accept, and "auto" where ``place`` is None.
    """
    own = options_of(type(skip))
    known = {**own, **_inherited_options(type(skip), own)}
    _refuse_unknown(skip, values, known, own)
    for name in own.keys() - values.keys():
        raise TypeError(
            f"{type(skip).__name__} does not hand its option {name} to super().__init__"
        )
    checked = {}
    for name, option in known.items():
        if name in values:
            checked[name] = _without_auto(skip, option, values[name], place)
            option.check(checked[name], skip.kind)
    return types.SimpleNamespace(**checked)


def _refuse_unknown(
    skip: Any, values: dict[str, Any], known: dict[str, Declared], own: dict[str, Declared]
) -> None:
    """Raise :class:`.OptionError` for the first of ``values`` that is no option."""
    for name, value in values.items():
        if name in known:
            continue
        hint = ""
        if name in inspect.signature(type(skip).__init__).parameters:
            hint = f"to make {name} an option, write Annotated[type, Real(help)] for its type"
        raise UnknownOption(name, value, skip.kind, list(own), hint)


def _without_auto(skip: Any, option: Declared, value: Any, place: Any) -> Any:
    """``value``, or what "auto" stands for at ``place``. Raises :class:`.OptionError`."""
    auto = option.about.auto
    if auto is None or not isinstance(value, str) or value != "auto":
        return value
    if place is None:
        stack = f'skip_stack("{skip.kind}", {skip.dim}, layers=6, {option.name}="auto")'
        raise OptionError(
            option.name,
            value,
            f"a number where the depth is unknown (place=None), or a whole stack: {stack}",
        )
    return auto(place)


def _inherited_options(rule: type, own: dict[str, Declared]) -> dict[str, Declared]:
    """The options that base classes of ``rule`` declare and its own constructor sets."""
    inherited: dict[str, Declared] = {}
    for base in rule.__mro__[1:]:
        if "__init__" in vars(base) and hasattr(base, "combine"):
            for name, option in _own_options(base).items():
                if name not in own:
                    inherited.setdefault(name, option)
    return inherited


def all_norms(*, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of the norms that a rule accepts."""
    return tuple(name for name in NORMS if name not in without)


def largest_divisor(width: int, most: int) -> int:
    """The largest divisor of ``width`` that is at most ``most``."""
    return max(k for k in range(1, most + 1) if width % k == 0)


def short(value: Any) -> str:
    """A value as labels show it: numbers with up to six digits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)
