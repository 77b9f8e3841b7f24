"""A kind's hyper-parameters as dataclasses; both command lines, hydra, help and checks are generated from them.

Every field of ``SkipConnection.Options`` and of the ``Options`` of each kind is made by :func:`option`, which says what
values it accepts. On a command line, the option ``skip_lambda`` is ``--skip-lambda`` and ``init`` is ``--skip-init``.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_FP32 = torch.finfo(torch.float32)
MOST_STEPS = 1000
STORED_AT_1 = ("skip_lambda", "branch_scale", "init")  # by earlier versions for every kind, where it meant nothing


def _real(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and -_FP32.max <= value <= _FP32.max  # a comparison with NaN is false


def _whole(value: Any, least: int, most: int) -> bool:
    return _real(value) and least <= value <= most and value == int(value)


# what an option accepts -> how a message says it, whether a value is that
ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "positive": ("a finite real number > 0 that fp32 holds", lambda v: _real(v) and v >= _FP32.tiny),
    "real": ("a finite real number that fp32 holds", _real),
    "fraction": ("a number from 0 to 1", lambda v: _real(v) and 0 <= v <= 1),
    "rate": ("a number from 0 to below 1", lambda v: _real(v) and 0 <= v < 1),
    "steps": (f"an integer from 1 to {MOST_STEPS}", lambda v: _whole(v, 1, MOST_STEPS)),
    "count": ("an integer from 1 to 64", lambda v: _whole(v, 1, 64)),
}


def option(
    default: Any, text: str, accepts: str = "", choices: Sequence[str] = (), short: str = "", in_rule: bool = True
) -> Any:
    """A field of an ``Options`` dataclass.

    ``accepts`` is a key of ``ACCEPTED``, or ``choices`` lists the values; ``short`` names the option in a run's name.
    ``in_rule`` is False for a start, and for what matters in training alone: given the parameters, y in evaluation does
    not depend on it.
    """
    made = {"help": text, "accepts": accepts, "choices": tuple(choices), "short": short, "in_rule": in_rule}
    return dataclasses.field(default=default, metadata=made)


WEIGHT = "the learned weight of the skip or of the branch (layerscale: 0 is by depth)"


def start(default: float, what: str = WEIGHT) -> Any:
    """An option for where a learned value starts."""
    return option(default, f"where {what} starts", "real", in_rule=False)


def with_defaults(owner: Any, **defaults: Any) -> Any:
    """``owner.Options`` of a kind with other defaults, field name -> value, as a class of its own."""
    known = {field.name: field for field in dataclasses.fields(owner.Options)}
    fields = [
        (name, known[name].type, dataclasses.field(default=value, metadata=known[name].metadata))
        for name, value in defaults.items()
    ]
    made = dataclasses.make_dataclass("Options", fields, bases=(owner.Options,), frozen=True)
    made.__module__, made.__qualname__ = owner.__module__, f"{owner.__qualname__}.Options"  # where pickle finds it
    return made


def check(options: Any, kind: str) -> None:
    """Raise ``ValueError`` for a value of ``options``, an ``Options`` of ``kind``, that its field does not accept."""
    for field in dataclasses.fields(options):
        value, choices = getattr(options, field.name), field.metadata["choices"]
        if choices:
            if not isinstance(value, str) or value not in choices:
                raise ValueError(f"{field.name}={value!r}: expected one of {', '.join(choices)}")
            continue
        text, holds = ACCEPTED[field.metadata["accepts"]]
        if not holds(value):
            raise ValueError(f"{field.name}={value!r}: expected {text} for {kind}")


def flag(name: str) -> str:
    """How the command lines spell the option ``name``, without dashes: ``skip_lambda``, ``skip_init``."""
    return name if name.startswith("skip_") else f"skip_{name}"


def in_terms_of_flags(message: str) -> str:
    """``norm='none': expected ...`` of the modules as ``--skip-norm 'none': expected ...``."""
    name, equals, rest = message.partition("=")
    return f"--{flag(name).replace('_', '-')} {rest}" if equals and name.isidentifier() else message


class Setting(NamedTuple):
    """One option as a command line shows it, shared by all the kinds that have it; None leaves a kind's own default."""

    name: str
    type: type
    help: str
    choices: tuple[str, ...]


def settings(kinds: dict[str, Any]) -> list[Setting]:
    """Every option of every kind (name -> class), in the order of their first appearance."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for kind, cls in kinds.items():
        for field in dataclasses.fields(cls.Options):
            found.setdefault(field.name, []).append((kind, field))
    return [
        Setting(name, uses[0][1].type, _help(uses, len(kinds)), uses[0][1].metadata["choices"])
        for name, uses in found.items()
    ]


def _help(uses: list[tuple[str, Any]], kinds: int) -> str:
    """The text of an option, for which kinds, and the default of each."""
    defaults: dict[Any, list[str]] = {}
    for kind, field in uses:
        defaults.setdefault(field.default, []).append(kind)
    text = uses[0][1].metadata["help"]
    if choices := uses[0][1].metadata["choices"]:
        text += f": {', '.join(choices)}"
    if len(defaults) == 1:
        which = ", ".join(kind for kind, _ in uses) if len(uses) < kinds else "any kind"
        return f"{text} (default {uses[0][1].default}; {which})"
    return f"{text} (default {'; '.join(f'{value}: ' + ', '.join(names) for value, names in defaults.items())})"


def select(cls: Any, given: dict[str, Any | None]) -> dict[str, Any]:
    """What of ``given``, option name -> value or None, is to be handed to the kind ``cls``.

    A value that the kind has no use for stays in, so that the kind refuses it, but for those ``STORED_AT_1``.
    """
    known = {field.name for field in dataclasses.fields(cls.Options)}
    return {k: v for k, v in given.items() if v is not None and (k in known or k not in STORED_AT_1 or v != 1)}


def label(kind: str, options: Any, shared: Any) -> str:
    """``rskip2-layer``: the kind, its first option that is not among ``shared``, the norm, and all but defaults."""
    common = {field.name for field in dataclasses.fields(shared)}
    own = [field for field in dataclasses.fields(options) if field.name not in common]
    first = own[:1] if own and not own[0].metadata["choices"] else []
    parts = [kind + "".join(short(getattr(options, field.name)) for field in first), options.norm]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name != "norm" and field not in first:
            parts.append(f"{field.metadata['short'] or field.name}{short(value)}")
    return "-".join(parts)


def short(value: Any) -> str:
    """A value as labels show it: numbers with up to six digits."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def power(base: float, exponent: int) -> float:
    """``base ** exponent``, infinite where Python would raise ``OverflowError``."""
    return base**exponent if base <= 0 or exponent * math.log(base) < 700 else math.inf
