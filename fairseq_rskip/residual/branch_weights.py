"""The weights of a branch, which a rule may rescale before training."""

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

ENOUGH_FOR_STD = 64  # so many draws have a standard deviation within a quarter of the true one


class Weight(NamedTuple):
    """A weight matrix or kernel of a branch, ``(out, in, ...)``, and its bias.

    It is ``parameter``, or the ``rows`` of one that holds several, as the ``in_proj_weight`` of
    torch's MultiheadAttention does. ``std`` is the standard deviation that it was drawn with.
    """

    parameter: Tensor
    std: float
    bias: Tensor | None = None
    rows: slice = slice(None)

    @property
    def tensor(self) -> Tensor:
        """The weight, of which a change in place changes the parameter."""
        return self.parameter.detach()[self.rows]

    def rescale(self, std: float) -> None:
        """Make ``std`` the standard deviation that the weight was drawn with.

        Warn if it cannot have been drawn with the present one: another number was given, or the
        weight has been rescaled already.
        """
        measured = self._measured_std()
        if measured and not 0.5 < measured / self.std < 2.0:
            warnings.warn(
                f"a weight of shape {tuple(self.tensor.shape)} has the standard deviation "
                f"{measured:.3g}, where Weight(…, std={self.std:.3g}) says how it was drawn",
                RuntimeWarning,
                stacklevel=3,  # past the rule's initialise
            )
        self.scale(std / self.std)

    def _measured_std(self) -> float:
        """That of the values; 0 of constants, of too few values to tell, and on the meta device."""
        if self.tensor.is_meta or self.tensor.numel() < ENOUGH_FOR_STD:
            return 0.0
        return float(self.tensor.float().std())

    def scale(self, factor: float) -> None:
        """Multiply the weight by ``factor``."""
        self.tensor.mul_(factor)

    @property
    def xavier(self) -> float:
        """The standard deviation of Xavier's (Glorot and Bengio, 2010) initialisation, gain 1."""
        weight = self.tensor
        field = weight[0][0].numel()
        return math.sqrt(2.0 / ((weight.size(0) + weight.size(1)) * field))


# of attention, of a feed-forward branch, of a ResNet's block; embedding in a side's first block
ROLES = ("q", "k", "v", "out", "fc1", "fc2", "conv1", "conv2", "embedding")
BranchWeights = dict[str, Weight]  # role -> weight


def check_weights(weights: BranchWeights) -> None:
    """Raise ``ValueError`` unless ``weights`` is a mapping from ``ROLES`` to :class:`Weight`."""
    expected = "expected Weight(linear.weight, std) by role, such as fc1; std is that of its draw"
    if not isinstance(weights, Mapping):
        raise ValueError(f"initialise: the weights are a {type(weights).__name__}; {expected}")
    for role, weight in weights.items():
        if role not in ROLES:  # which every rule would leave as it is, without a word
            raise ValueError(f"initialise: role {role!r}: expected one of {', '.join(ROLES)}")
        if not isinstance(weight, Weight):
            raise ValueError(f"initialise: {role!r} is a {type(weight).__name__}; {expected}")


def rescale_to_xavier(weights: BranchWeights, beta: float) -> None:
    """Give v, out, fc1 and fc2 ``beta`` times Xavier's standard deviation, q and k Xavier's.

    A published "scale by beta" is relative to Xavier's initialisation with gain 1. fairseq draws q,
    k and v with gain 1/sqrt(2) and fc1 and fc2 as torch does. Biases keep torch's uniform draw,
    where the usual implementations of DeepNorm and T-Fixup start them at zero.
    """
    for role, weight in weights.items():
        if role in ("q", "k"):
            weight.rescale(weight.xavier)
        elif role in ("v", "out", "fc1", "fc2"):
            weight.rescale(weight.xavier * beta)
