"""A kind's hyper-parameters: dataclasses whose fields :func:`option` makes; :mod:`fairseq_rskip.flags` makes both
command lines of them."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..norms import NORMS

_FP32 = torch.finfo(torch.float32)
MOST_STEPS = 1000


def _real(value: Any, least: float = -_FP32.max, most: float = _FP32.max) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and least <= value <= most  # a comparison with NaN is false


# what an option accepts -> how a message says it, whether a value is that
ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "positive": ("a finite real number > 0 that fp32 holds", lambda v: _real(v, _FP32.tiny)),
    "real": ("a finite real number that fp32 holds", _real),
    "fraction": ("a number from 0 to 1", lambda v: _real(v, 0, 1)),
    "rate": ("a number from 0 to below 1", lambda v: _real(v, 0, 1) and v < 1),
    "steps": (f"an integer from 1 to {MOST_STEPS}", lambda v: _real(v, 1, MOST_STEPS) and v == int(v)),
    "updates": ("an integer from 1 to 10,000,000", lambda v: _real(v, 1, 1e7) and v == int(v)),
    "count": ("an integer from 1 to 64", lambda v: _real(v, 1, 64) and v == int(v)),
}


def option(
    default: Any,
    text: str,
    accepts: str = "",
    choices: Sequence[str] = (),
    short: str = "",
    affects_output: bool = True,
    auto: Callable[[Any], float] | None = None,
) -> Any:
    """A field of an ``Options`` dataclass.

    ``accepts`` is a key of ``ACCEPTED``, or ``choices`` lists the values; ``short`` names the option in a run's name.
    ``affects_output`` is False for initial values and options that matter only in training: given the parameters, y in
    evaluation does not depend on them. If "auto" is given, ``auto`` computes the value from the :class:`.Place`.
    """
    about = {"help": text, "accepts": accepts, "choices": tuple(choices), "short": short, "auto": auto}
    return dataclasses.field(default=default, metadata={**about, "affects_output": affects_output})


WEIGHT = "the learned weight of the skip or of the branch (layerscale: 0 is by depth)"


def start(default: float, what: str = WEIGHT) -> Any:
    """An option for where a learned value starts."""
    return option(default, f"where {what} starts", "real", affects_output=False)


def warmup(default: int) -> Any:
    """The option T of rules whose branch grows with the number of updates."""
    return option(default, "T: updates until the branch counts in full (prores: times the layer)", "updates", short="T")


def norm(default: str = "layer", without: Sequence[str] = ()) -> Any:
    """The option ``norm`` of a kind that accepts all norms but those named."""
    return option(default, "normalisation G", choices=[name for name in NORMS if name not in without])


NO_NORM = norm("none", without=[name for name in NORMS if name != "none"])
SOME_NORM = norm(without=["none"])
WITHOUT_BATCH = norm(without=["batch"])  # before or behind a branch, where nothing says what is padding
ROW_NORM = norm(without=["none", "batch"])


def with_options(owner: Any, changes: dict[str, Any]) -> Any:
    """``owner.Options`` of a kind with ``changes``: a new default, or the field of an :func:`option`."""
    known = {field.name: field for field in dataclasses.fields(owner.Options)}
    fields = []
    for name, field in changes.items():
        if not isinstance(field, dataclasses.Field):
            field = dataclasses.field(default=field, metadata=known[name].metadata)
        fields.append((name, type(field.default), field))
    options = dataclasses.make_dataclass("Options", fields, bases=(owner.Options,), frozen=True)
    options.__module__, options.__qualname__ = owner.__module__, f"{owner.__qualname__}.Options"  # for pickle
    return options


def parse(cls: Any, given: dict[str, Any], kinds: dict[str, Any], images: bool, place: Any = None) -> Any:
    """The ``Options`` of the kind ``cls`` that ``given`` asks for. Raises ``ValueError`` for an option that the kind
    does not have, a value that its field does not accept, "auto" without a ``place``, and image maps where the kind is
    not defined on them."""
    if images and not cls.for_images:
        accepted = ", ".join(name for name, kind in kinds.items() if kind.for_images)
        raise ValueError(f"kind={cls.kind!r}: expected one of {accepted} for images")
    known = {field.name: field for field in dataclasses.fields(cls.Options)}
    if images and "pre" in cls.slots:
        if given.get("norm", "none") != "none":
            start = f"norm={given['norm']!r}: expected 'none' for kind {cls.kind!r} in a ResNet"
            raise ValueError(f"{start}, whose branches begin with a norm of their own")
        given = {**given, "norm": "none"}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name}={value!r}: kind {cls.kind} has no such option; it has {', '.join(known)}")
        if value == "auto" and known[name].metadata["auto"]:
            if place is None:
                raise ValueError(f"{name}='auto': expected a number where the depth is unknown (place=None)")
            given = {**given, name: known[name].metadata["auto"](place)}
    options = cls.Options(**given)
    for name, field in known.items():
        value, choices = getattr(options, name), field.metadata["choices"]
        if choices and (not isinstance(value, str) or value not in choices):
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)} for {cls.kind}")
        text, accepts = ACCEPTED.get(field.metadata["accepts"], ("", None))
        if accepts and not accepts(value):
            raise ValueError(f"{name}={value!r}: expected {text} for {cls.kind}")
    return options


def short(value: Any) -> str:
    """A value as labels show it: numbers with up to six digits."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
