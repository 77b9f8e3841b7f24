"""What the equations of whole stacks are given and share, in elementary float64 arithmetic."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-5


class Blocks(NamedTuple):
    """What a reference is given.

    That is the branches F_k, the shape of the stack and the parameters by block and name.
    """

    branches: list[Callable[[Tensor], Tensor]]
    depth: int
    sublayers: int
    parameters: dict[str, Tensor]

    def get(self, k: int, name: str) -> Tensor:
        return self.parameters[f"skips.{k}.{name}"]

    def norm(self, k: int, name: str, z: Tensor) -> Tensor:
        mean = z.sum(-1, keepdim=True) / z.size(-1)
        var = ((z - mean) * (z - mean)).sum(-1, keepdim=True) / z.size(-1)
        return (z - mean) / (var + EPS) ** 0.5 * self.get(k, f"{name}.weight") + self.get(
            k, f"{name}.bias"
        )

    def branch(self, k: int, z: Tensor) -> Tensor:
        """F of the normalised z."""
        return self.branches[k](self.norm(k, "pre", z))


def rms(z: Tensor) -> Tensor:
    return ((z * z).mean(-1, keepdim=True) + EPS) ** 0.5


def shares(scores: list[Tensor]) -> list[Tensor]:
    total = sum(torch.exp(score) for score in scores)
    return [torch.exp(score) / total for score in scores]
