"""The options of skip connections on command lines, for fairseq's and for train_cifar.py.

The option ``skip_lambda`` is ``--skip-lambda`` and ``init`` is ``--skip-init``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .console import number_or_auto
from .errors import UserError
from .residual.options import Declared, options_of, short
from .residual.registry import KINDS


def flag(name: str) -> str:
    """The field that holds the option ``name``: ``skip_lambda``, ``skip_init``."""
    return name if name.startswith("skip_") else f"skip_{name}"


def option_name(name: str) -> str:
    """The same with dashes between words: ``skip-lambda``, ``skip-init``."""
    return flag(name).replace("_", "-")


class Setting(NamedTuple):
    """One option of the command line, shared by all the kinds that have it.

    None leaves a kind's own default.
    """

    name: str
    type: Callable[[Any], Any]
    help: str
    choices: tuple[str, ...]


def settings(kinds: dict[str, Any]) -> list[Setting]:
    """Every option of every kind (name -> class), in the order of their first appearance.

    Raises ``UserError`` for a name that is a number in one kind and a word in another, and for one
    whose flag is taken.
    """
    uses: dict[str, dict[str, Declared]] = {}
    names = {"skip_kind": ""}  # flag -> its option; the kind's own flag is no option's
    for kind, rule in kinds.items():
        for name, option in options_of(rule).items():
            if names.setdefault(flag(name), name) != name:
                raise UserError(
                    f"option {name} of kind {kind}: --{option_name(name)} is taken: "
                    "expected another name"
                )
            uses.setdefault(name, {})[kind] = option
    return [_setting(name, by_kind, len(kinds)) for name, by_kind in uses.items()]


def _setting(name: str, uses: dict[str, Declared], kinds: int) -> Setting:
    """The setting of an option; ``uses``: kind -> the option as that kind declares it."""
    first = next(iter(uses.values()))
    takes_auto = any(option.about.auto for option in uses.values())
    convert = number_or_auto if takes_auto else first.type
    choices: dict[str, None] = {}
    for kind, option in uses.items():
        choices |= dict.fromkeys(option.choices)
        is_number = option.type in (int, float)
        if is_number != (first.type in (int, float)) or bool(option.choices) != bool(first.choices):
            raise UserError(
                f"option {name} of kind {kind} is of another type than in {next(iter(uses))}, "
                "and both are one option of the command line: expected another name"
            )
    return Setting(name, convert, _help(first, uses, kinds), tuple(choices))


def _help(first: Declared, uses: dict[str, Declared], kinds: int) -> str:
    """The text of an option, for which kinds, and the default of each."""
    by_default: dict[Any, list[str]] = {}
    for kind, option in uses.items():
        by_default.setdefault(option.default, []).append(kind)

    by_text: dict[str, list[str]] = {}
    for kind, option in uses.items():
        by_text.setdefault(option.about.help, []).append(kind)
    text = first.about.help
    for other in list(by_text)[1:]:
        text += f"; in {', '.join(by_text[other])} {other}"
    if first.choices:
        text += f": {', '.join(first.choices)}"
    if len(by_default) == 1:
        which = ", ".join(uses) if len(uses) < kinds else "any kind"
        return f"{text} (default {first.default}; {which})"
    defaults = "; ".join(f"{value}: {', '.join(names)}" for value, names in by_default.items())
    return f"{text} (default {defaults})"


def selected(values: dict[str, Any | None]) -> dict[str, Any]:
    """The options that are set, also those that the kind lacks, so that it refuses them."""
    return {name: value for name, value in values.items() if value is not None}


def label(skip: Any) -> str:
    """``rskip2-layer``: the kind, its first own option, the norm, and options that were changed."""
    declared = options_of(KINDS[skip.kind])
    own = [name for name in declared if name not in ("norm", "norm_alpha", "drop_path")]
    first = own[0] if own and not declared[own[0]].choices else ""
    value = getattr(skip.options, first) if first else None
    number = "" if value is None else short(value)

    parts = [skip.kind + number, skip.options.norm]
    for name, option in declared.items():
        value = getattr(skip.options, name)
        if value != option.default and name not in ("norm", first):
            parts.append(f"{option.about.short or name}{short(value)}")
    return "-".join(parts)
