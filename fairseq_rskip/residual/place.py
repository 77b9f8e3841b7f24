"""The position of a skip connection in a network."""

import dataclasses
import zlib

import torch
from torch import Tensor

SIDES = ("encoder", "decoder", "resnet")


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a skip connection in a network.

    Args:
        side: encoder, decoder or resnet.
        sublayer: self_attn, encoder_attn, ffn, or block of a ResNet.
        index: the layer's number, from 0.
        depth: the number of layers of this side.
        other_depth: the number of layers of the other side, 0 without one.
        position: the sublayer's number in its layer, from 0.
        sublayers: the number of sublayers of a layer of this side.
        other_sublayers: the same of the other side.

    ``block_number``, from 1, and ``num_blocks`` count residual blocks of this side.
    """

    side: str = "encoder"
    sublayer: str = "ffn"
    index: int = 0
    depth: int = 1
    other_depth: int = 0
    position: int = 0
    sublayers: int = 1
    other_sublayers: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a place outside its stack, and for what is no place."""
        if self.side not in SIDES:
            raise ValueError(f"side={self.side!r}: expected one of {', '.join(SIDES)}")
        for name, value in dataclasses.asdict(self).items():
            if name in ("side", "sublayer"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r}: expected an integer of at least 0")
        for name, count in (("index", "depth"), ("position", "sublayers")):
            number, total = getattr(self, name), getattr(self, count)
            if not 0 <= number < total:
                raise ValueError(
                    f"{name}={number!r}: expected a number from 0 on and below {count}={total!r}"
                )

    @property
    def block_number(self) -> int:
        """The residual block's number in its stack, from 1."""
        return self.index * self.sublayers + self.position + 1

    @property
    def num_blocks(self) -> int:
        """The number of residual blocks of this side."""
        return self.depth * self.sublayers

    @property
    def num_blocks_of_network(self) -> int:
        """The number of residual blocks of both sides.

        Raises ``ValueError`` where the other side has layers and no number of sublayers.
        """
        if self.other_depth and not self.other_sublayers:
            raise ValueError(
                "other_sublayers=0: expected the residual blocks of a layer of the other side, "
                f"which has {self.other_depth} layers"
            )
        return self.num_blocks + self.other_depth * self.other_sublayers

    @property
    def is_first(self) -> bool:
        """Whether this is the stack's first block."""
        return self.block_number == 1

    @property
    def is_last(self) -> bool:
        """Whether this is the stack's last block."""
        return self.block_number == self.num_blocks

    def draw(self, kind: str, *shape: int) -> Tensor:
        """Standard normal values for ``kind`` at this place under the current seed.

        They do not advance the global random stream, and are the same on every device. A second
        call at one place returns the same values: draw all that a rule needs at once.
        """
        name = f"{kind} {self.side} {self.block_number}"
        seed = (torch.initial_seed() + zlib.crc32(name.encode())) % 2**63
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
        return torch.empty(*shape).copy_(values)
