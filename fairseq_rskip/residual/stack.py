"""The skip connections of a whole stack at once."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from .base import create_skip
from .place import Place


def skip_stack(
    kind: str,
    dim: int,
    layers: int,
    sublayers: Sequence[str] = ("self_attn", "ffn"),
    *,
    side: str = "encoder",
    other_layers: int = 0,
    other_sublayers: int = 0,
    **options: Any,
) -> nn.ModuleList:
    """Build the skip connections of a stack, each with its :class:`.Place`.

    Args:
        kind, dim, options: as in :func:`.create_skip`.
        layers: the number of layers.
        sublayers: the residual blocks of a layer, by name, in their order.
        side, other_layers, other_sublayers: of an encoder with a decoder, or the reverse; see
            :class:`.Place`.

    Returns a list of layers, each a ``ModuleDict`` by sublayer::

        for layer, skip in zip(layers, skips):
            h, carried = skip["ffn"].prepare(x)
            x = skip["ffn"](x, layer.ffn(h), carried)

    A rule that keeps several tensors widens the stream in the stack's first block and returns
    ``(..., dim)`` from its last. The sublayers of a layer share what the rule shares. Raises
    ``ValueError`` as :func:`.create_skip`.
    """
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers={layers!r}: expected an integer > 0")
    if isinstance(sublayers, str) or not sublayers:
        raise ValueError(
            f'sublayers={sublayers!r}: expected one or more names, such as ("self_attn", "ffn")'
        )
    if len(set(sublayers)) < len(sublayers):
        raise ValueError(f"sublayers={sublayers!r}: expected names that differ")
    stack = nn.ModuleList()
    for index in range(layers):
        layer = nn.ModuleDict()
        first = None
        for position, sublayer in enumerate(sublayers):
            place = Place(
                side=side,
                sublayer=sublayer,
                index=index,
                depth=layers,
                other_depth=other_layers,
                position=position,
                sublayers=len(sublayers),
                other_sublayers=other_sublayers,
            )
            skip = create_skip(kind, dim, place=place, **options)
            if first is None:
                first = skip
            else:
                skip.share_with(first)
            layer[sublayer] = skip
        stack.append(layer)
    return stack
