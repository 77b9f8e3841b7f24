"""The names that rules have elsewhere, and what was meant by a name that is no kind."""

import re
from collections.abc import Callable, Iterable

from ..errors import did_you_mean

OTHER_NAMES: dict[str, str] = {}  # a rule's name elsewhere -> its kind
# rules that are looked for and are not here; docs/rules.md says why
NOT_BUILT = ("HAARES", "sHC", "SiHC", "HybridNorm", "Sub-LN", "ResFormer", "PowerNorm")


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
