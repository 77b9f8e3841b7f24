"""The options of skip connections on command lines, for fairseq's and for train_cifar.py.

The option ``skip_lambda`` is ``--skip-lambda`` and ``init`` is ``--skip-init``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from .console import number_or_auto
from .residual.options import short

STORED_AT_1 = ("skip_lambda", "branch_scale", "init")  # by earlier versions for every kind, even one without it


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
    type: Callable[[Any], Any]
    help: str
    choices: tuple[str, ...]


def settings(kinds: dict[str, Any]) -> list[Setting]:
    """Every option of every kind (name -> class), in the order of their first appearance."""
    fields: dict[str, list[tuple[str, Any]]] = {}
    for kind, cls in kinds.items():
        for field in dataclasses.fields(cls.Options):
            fields.setdefault(field.name, []).append((kind, field))
    return [
        Setting(name, _type(uses[0][1]), _help(uses, len(kinds)), uses[0][1].metadata["choices"])
        for name, uses in fields.items()
    ]


def _type(field: Any) -> Any:
    return number_or_auto if field.metadata["auto"] else field.type


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
    """The part of ``given``, option name -> value or None, to pass to the kind ``cls``.

    Set values stay in even if the kind lacks the option, so that it refuses them, except a 1 of ``STORED_AT_1``.
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
