"""A kind's hyper-parameters as dataclasses; both command lines, hydra, help and checks are generated from them.

Every field of ``SkipConnection.Options`` and of the ``Options`` of each kind is made by :func:`option`, which says what
values it accepts. On a command line, the option ``skip_lambda`` is ``--skip-lambda`` and ``init`` is ``--skip-init``.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..norms import NORMS

_FP32 = torch.finfo(torch.float32)
MOST_STEPS = 1000
SOME_NORM = tuple(name for name in NORMS if name != "none")  # of rules that need one
# before or behind a branch, where nothing says what is padding
WITHOUT_BATCH = tuple(name for name in NORMS if name != "batch")
ROW_NORMS = tuple(name for name in SOME_NORM if name != "batch")
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
    default: Any,
    text: str,
    accepts: str = "",
    choices: Sequence[str] = (),
    short: str = "",
    affects_output: bool = True,
) -> Any:
    """A field of an ``Options`` dataclass.

    ``accepts`` is a key of ``ACCEPTED``, or ``choices`` lists the values; ``short`` names the option in a run's name.
    ``affects_output`` is False for a start, and for what matters in training alone: given the parameters, y in
    evaluation does not depend on it.
    """
    made = {"help": text, "accepts": accepts, "choices": tuple(choices), "short": short}
    return dataclasses.field(default=default, metadata={**made, "affects_output": affects_output})


WEIGHT = "the learned weight of the skip or of the branch (layerscale: 0 is by depth)"


def start(default: float, what: str = WEIGHT) -> Any:
    """An option for where a learned value starts."""
    return option(default, f"where {what} starts", "real", affects_output=False)


def with_defaults(owner: Any, defaults: dict[str, Any], norms: Sequence[str] | None) -> Any:
    """``owner.Options`` of a kind with other defaults, field name -> value, as a class of its own; ``norms`` are those
    that it accepts."""
    known = {field.name: field for field in dataclasses.fields(owner.Options)}
    fields = []
    for name in {**defaults, **({"norm": None} if norms else {})}:
        metadata = {**known[name].metadata, **({"choices": tuple(norms)} if norms and name == "norm" else {})}
        made = dataclasses.field(default=defaults.get(name, known[name].default), metadata=metadata)
        fields.append((name, known[name].type, made))
    made = dataclasses.make_dataclass("Options", fields, bases=(owner.Options,), frozen=True)
    made.__module__, made.__qualname__ = owner.__module__, f"{owner.__qualname__}.Options"  # where pickle finds it
    return made


def parse(cls: Any, given: dict[str, Any], kinds: dict[str, Any], images: bool) -> Any:
    """The ``Options`` of the kind ``cls`` that ``given`` asks for.

    Raises ``ValueError`` for an option that the kind does not have, a value that its field does not accept, and for
    image maps where the kind is not defined on them.
    """
    if images and not cls.for_images:
        accepted = ", ".join(name for name, kind in kinds.items() if kind.for_images)
        raise ValueError(f"kind={cls.kind!r}: expected one of {accepted} for images")
    known = {field.name: field for field in dataclasses.fields(cls.Options)}
    if images and "pre" in cls.slots:
        if given.get("norm", "none") != "none":
            raise ValueError(
                f"norm={given['norm']!r}: expected 'none' for kind {cls.kind!r} in a ResNet, whose branches begin with "
                "a norm of their own"
            )
        given = {**given, "norm": "none"}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name}={value!r}: kind {cls.kind} has no such option; it has {', '.join(known)}")
    options = cls.Options(**given)
    for name, field in known.items():
        value, choices = getattr(options, name), field.metadata["choices"]
        if choices and (not isinstance(value, str) or value not in choices):
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)} for {cls.kind}")
        text, accepts = ACCEPTED.get(field.metadata["accepts"], ("", None))
        if accepts and not accepts(value):
            raise ValueError(f"{name}={value!r}: expected {text} for {cls.kind}")
    return options


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


def label(skip: Any) -> str:
    """``rskip2-layer``: the kind, its first own option, the norm, and what differs from the defaults."""
    fields = dataclasses.fields(skip.options)
    own = [field for field in fields if field.name not in ("norm", "drop_path")]
    first = own[:1] if own and not own[0].metadata["choices"] else []
    parts = [skip.kind + "".join(short(getattr(skip.options, field.name)) for field in first), skip.options.norm]
    for field in fields:
        value = getattr(skip.options, field.name)
        if value != field.default and field.name != "norm" and field not in first:
            parts.append(f"{field.metadata['short'] or field.name}{short(value)}")
    return "-".join(parts)


def short(value: Any) -> str:
    """A value as labels show it: numbers with up to six digits."""
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
