"""Where in a network a skip connection stands, and the weights of the branch beside it."""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a network a skip connection stands.

    ``side``: encoder, decoder or resnet. ``sublayer``: self_attn, encoder_attn, ffn, or block of a ResNet. ``index``:
    the layer's number from 0, of the ``depth`` layers of this side; ``position``: the sublayer's number from 0, of the
    ``sublayers`` that a layer has. ``other_depth``, ``other_sublayers``: those numbers of the other side.
    """

    side: str = "encoder"
    sublayer: str = "ffn"
    index: int = 0
    depth: int = 1
    other_depth: int = 0
    position: int = 0
    sublayers: int = 1
    other_sublayers: int = 0

    @property
    def number(self) -> int:
        """The residual block's number on this side, from 1."""
        return self.index * self.sublayers + self.position + 1

    @property
    def blocks(self) -> int:
        """How many residual blocks this side has."""
        return self.depth * self.sublayers

    @property
    def all_blocks(self) -> int:
        """How many the network has."""
        return self.blocks + self.other_depth * self.other_sublayers


class Weight(NamedTuple):
    """A weight matrix or kernel of a branch, ``(out, in, ...)``, the standard deviation it was drawn with, its bias."""

    tensor: Tensor
    std: float
    bias: Tensor | None = None

    def rescale(self, std: float) -> None:
        """Make ``std`` the standard deviation that the weight was drawn with."""
        with torch.no_grad():
            self.tensor.mul_(std / self.std)

    @property
    def xavier(self) -> float:
        """The standard deviation of Xavier's (Glorot and Bengio, 2010) initialisation, gain 1."""
        field = self.tensor[0][0].numel()
        return math.sqrt(2.0 / ((self.tensor.size(0) + self.tensor.size(1)) * field))


Branch = dict[str, Weight]  # by role: q, k, v, out of attention; fc1, fc2; conv1, conv2
