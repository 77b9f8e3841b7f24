"""The kinds of skip connections by name."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import did_you_mean
from ..option_error import OptionError

KINDS: dict[str, Any] = {}
OTHER_NAMES: dict[str, str] = {}  # a rule's name elsewhere -> its kind
# rules that are looked for and are not here; docs/rules.md says why
NOT_BUILT = ("HAARES", "sHC", "SiHC", "HybridNorm", "Sub-LN", "ResFormer", "PowerNorm")

ANCESTORS = ("angle", "learned_angle")  # whose docstrings have the papers of other rules

Rule = TypeVar("Rule", bound=type)


def register(kind: str, also: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule's class as ``kind``.

    ``also`` has the names that papers and other codes give the rule, such as ``"MUDDFormer"``: they
    are suggested, not accepted. Raises ``ValueError`` if another class has that name, or if it is
    no name, and ``TypeError`` for what is no skip connection.
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


def nearest_kind(name: str, kinds: Iterable[str]) -> str:
    """``did you mean mudd?`` for MUDDFormer, or that a rule is not built; "" if nothing is near."""
    return why_not_built(name) or did_you_mean(usual_name(name), kinds)


def why_not_built(name: str) -> str:
    """Where docs/rules.md says why ``name`` is no rule of ours; "" where it does not."""
    letters = re.sub("[ _-]", "", name.lower())
    for other in NOT_BUILT:
        if re.sub("-", "", other.lower()) == letters:
            return f"{other} is not built (docs/rules.md says why)"
    return ""


def usual_name(text: str, name_of: Callable[[str], str] = str) -> str:
    """``text`` with the longest name that a rule has elsewhere replaced by ours, ``name_of(kind)``.

    ``Pre-norm``, ``pre norm`` and ``prenorm`` are one name, and a plural is its singular.
    """
    text = re.sub("[ -]", "_", text.lower())
    for other in sorted(OTHER_NAMES, key=len, reverse=True):
        letters = re.sub("[ -]", "", other.lower())
        pattern = rf"(?<![^_]){'_?'.join(letters)}s?(?![^_])"
        if re.search(pattern, text):
            return re.sub(pattern, name_of(OTHER_NAMES[other]), text, count=1)
    return text


def paper(kind: str) -> str:
    """The arXiv number of a kind's paper, the first in its docstring; "" without one."""
    found = re.search(r"arXiv (\d{4}\.\d{5})", " ".join((KINDS[kind].__doc__ or "").split()))
    return "" if found is None or kind in ANCESTORS else found[1]


def equation(kind: str) -> str:
    """The equations of a kind, as the first sentence of its docstring has them."""
    docstring = " ".join((KINDS[kind].__doc__ or "").split())
    parts = docstring.split("``")
    texts, quoted = parts[::2], parts[1::2]
    formulas: list[str] = []
    for text_before, formula in zip(texts, quoted):
        if formulas and re.search(r"[.:] ", text_before):
            break
        if " = " in formula:
            formulas.append(formula)
    return ", ".join(formulas)
