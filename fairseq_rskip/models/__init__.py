"""Registers every architecture with fairseq.

``import fairseq_rskip.models`` does it without ``--user-dir``.
"""

import importlib.util
import logging
import re

from fairseq_rskip import compat
from fairseq_rskip.errors import nearest

if importlib.util.find_spec("fairseq._today") is None:
    compat.prepare()
    logging.getLogger(__name__).warning(
        "fairseq did not come from tools/build_fairseq.py: it reads checkpoints without an "
        "allow-list, and needs the torch and numpy of its own time (docs/fairseq.md)"
    )

from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY  # noqa: E402

from fairseq_rskip.models import _help, architectures, building, skip_transformer  # noqa: E402
from fairseq_rskip.residual import KINDS, own_rules  # noqa: E402
from fairseq_rskip.residual.names import nearest_kind, usual_name, why_not_built  # noqa: E402

# λ before a rule's name, or no norm behind it: transformer_2rskip_tiny
WITHOUT_NORM = re.compile(r"_\d?([xra]skip)(?=_(?!ln|bn)|$)")


def skip_architectures() -> list[str]:
    """The names of the architectures whose residuals are skip connections."""
    return [
        name for name, model in ARCH_MODEL_REGISTRY.items() if issubclass(model, building.SkipModel)
    ]


def default_kind(arch: str) -> str:
    """The kind of skip connection of an architecture without --skip-kind; "" for one of fairseq's
    own.
    """
    return getattr(MODEL_DATACLASS_REGISTRY.get(arch), "skip_kind", "")


def unknown_architecture_message(name: str) -> str:
    """The error for ``name``, which no architecture has, with the nearest name."""
    base = name
    while base and base not in ARCH_MODEL_REGISTRY:
        base = base.rpartition("_")[0]
    expected = f"rskip train --archs lists them{own_rules.hint()}"
    if base in skip_architectures():
        sizes = (
            architectures.LM_SIZES if base.startswith("transformer_lm_") else architectures.SIZES
        )
        listed = ", ".join(size for size in sizes if size)
        expected = f"the sizes of {base} are none and {listed}"
    return f"no architecture named {name!r}; {nearest_architecture(name, expected)}"


def nearest_architecture(name: str, expected: str) -> str:
    """``did you mean transformer_mudd?`` for transformer_muddformer or muddformer, if any is near,
    then ``expected``.
    """
    rule = name.removeprefix("transformer_")
    if reason := why_not_built(rule.removeprefix("lm_")):
        return f"{reason}; {expected}"
    usual = usual_name(f"transformer_{rule}", architectures.first_variant)
    meant = WITHOUT_NORM.sub(r"_\1_ln", usual)
    if meant in ARCH_MODEL_REGISTRY:
        return f"did you mean {meant}? {expected}".rstrip()
    # without what all have in common, which makes any two alike
    known = {arch.removeprefix("transformer_"): arch for arch in ARCH_MODEL_REGISTRY}
    near = nearest(rule, known)
    return f"did you mean {known[near]}? {expected}".rstrip() if near else expected


def with_nearest_kind(message: str) -> str:
    """argparse's ``message``; where it lists all kinds for a misspelt --skip-kind, the nearest."""
    found = re.search(r"--skip-kind: invalid choice: '([^']*)'", message)
    if found is None:
        return message
    hint = nearest_kind(found[1], KINDS) or f"expected one of {', '.join(KINDS)}"
    return f"--skip-kind {found[1]}: {hint}"


_help.wrap_parse_args(
    skip_transformer.SkipTransformerModel, unknown_architecture_message, with_nearest_kind
)
