"""The coefficients of x and of F in what a skip connection computes."""

from typing import NamedTuple

from torch import Tensor

from ..norms import Norm


class Coefficients(NamedTuple):
    """a, b and c of ``a * x + b * F + c``, which broadcast to x.

    The statistics of the norms and all gates are held constant.
    """

    a: Tensor
    b: Tensor
    c: Tensor

    def value(self, x: Tensor, f_x: Tensor) -> Tensor:
        """``a * x + b * F + c``."""
        return self.a * x + self.b * f_x + self.c

    def after(
        self, norm: Norm, x: Tensor, f_x: Tensor, padding_mask: Tensor | None
    ) -> "Coefficients":
        """Those of ``norm(a * x + b * F + c)``. Raises :class:`.NoCoefficients`."""
        scale, shift = norm.affine_map(self.value(x, f_x), padding_mask)
        return Coefficients(scale * self.a, scale * self.b, scale * self.c + shift)

    def like(self, x: Tensor) -> "Coefficients":
        """The same with x's type and shape."""
        return Coefficients(*(part.to(x.dtype).expand_as(x) for part in self))
