"""The text of ``rskip train --archs``: every rule with its equation and options, every size."""

import textwrap
from typing import Any

from fairseq_rskip.models.architectures import FAMILIES, LM_SIZES, SIZES, VARIANTS
from fairseq_rskip.residual.docstrings import equation

WIDTH = 120


def options_of_variant(variant: str) -> str:
    """What a variant sets beside its kind, as options; a kind of another name, too."""
    options = []
    for name, value in VARIANTS[variant].items():
        if name == "skip_kind" and value == variant:
            continue
        flag = f"--{name.replace('_', '-')}"
        options.append(flag if value is True else f"{flag} {value}")
    return " ".join(options)


def overview() -> str:
    """The architectures: every rule once, by family and with its equation, and every size once."""
    lines = [
        "--arch transformer_RULE or transformer_RULE_SIZE "
        "(python -m fairseq_rskip describe ARCH shows one),",
        "or --arch transformer_skip_SIZE --skip-kind KIND, with the options in brackets",
        "",
    ]
    width = max(map(len, VARIANTS))
    for family, variants in FAMILIES.items():
        lines.append(f"Rules {family}:")
        for variant, skip in variants.items():
            line = f"  {variant:{width}}  {equation(skip['skip_kind'])}"
            options = options_of_variant(variant)
            line = f"{line}  ({options})" if options else line
            lines += textwrap.wrap(line, WIDTH, subsequent_indent=" " * (width + 4))
        lines.append("")
    lines.append("Sizes (encoder layers × width, feed-forward width, heads):")
    lines += _lines_of_sizes(SIZES, "encoder")
    lines.append("Sizes of --task language_modeling --arch transformer_lm_RULE, layers as above:")
    lines += _lines_of_sizes(LM_SIZES, "decoder")
    return "\n".join(lines)


def _lines_of_sizes(sizes: dict[str, dict[str, Any]], side: str) -> list[str]:
    """A line for each size, with the numbers of its encoder or decoder."""
    lines = []
    for size, changes in sizes.items():
        layers = changes.get(f"{side}_layers", 6)
        dim = changes.get(f"{side}_embed_dim", 512)
        ffn = changes.get(f"{side}_ffn_embed_dim", 2048)
        heads = changes.get(f"{side}_attention_heads", 8)
        lines.append(f"  {size.lstrip('_') or 'none':23}  {layers} × {dim}, {ffn}, {heads}")
    return lines
