"""The kinds of skip connections by name."""

from collections.abc import Callable
from typing import Any, TypeVar

from ..option_error import OptionError
from .names import OTHER_NAMES, nearest_kind
from .options import options_of

KINDS: dict[str, Any] = {}
Rule = TypeVar("Rule", bound=type)


def register(kind: str, also: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule's class as ``kind``.

    ``also`` has the names that papers and other codes give the rule, such as ``"MUDDFormer"``: they
    are suggested, not accepted. Raises ``ValueError`` if another class has that name, or if it is
    no name, and ``TypeError`` for what is no skip connection, or has a ``Choice`` without values.
    """
    if not kind.isidentifier():
        raise ValueError(f"kind={kind!r}: expected a name of letters, digits and _")

    def add(rule: Rule) -> Rule:
        if not hasattr(rule, "combine"):  # base.py, which has SkipConnection, imports this file
            raise TypeError(
                f"kind={kind!r}: {rule.__name__} is no SkipConnection: derive it from one"
            )
        other = KINDS.get(kind, rule)
        # the same class again: its module was reloaded
        if (other.__module__, other.__qualname__) != (rule.__module__, rule.__qualname__):
            owner = f"{other.__module__}.{other.__name__}"
            raise ValueError(f"kind={kind!r} of {rule.__name__}: the name is taken by {owner}")
        options_of(rule)  # raises for a Choice without values
        rule.kind = kind  # type: ignore[attr-defined]
        KINDS[kind] = rule
        OTHER_NAMES.update(dict.fromkeys(also, kind))
        return rule

    return add


def rule_of(kind: str) -> Any:
    """The class registered as ``kind``.

    Raises :class:`.OptionError` for another name, with the nearest kind or else all of them.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        hint = nearest_kind(kind, KINDS) if isinstance(kind, str) else ""
        expected = "a kind that docs/rules.md lists" if hint else f"one of {', '.join(KINDS)}"
        raise OptionError("kind", kind, expected, reason=hint)
    return KINDS[kind]
