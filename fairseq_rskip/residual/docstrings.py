"""A rule's paper and equation, as the docstring of its class has them."""

import re

from .registry import KINDS

ANCESTORS = ("angle", "learned_angle")  # whose docstrings have the papers of other rules


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
