"""The coefficients of x and F in y, with the statistics of norms and all gates held constant."""

from typing import Any

from torch import Tensor, nn

from ..norms import at_least_float32


class WithCoefficients(nn.Module):
    """What :class:`~fairseq_rskip.residual.SkipConnection` says of x:F; a kind gives :meth:`scales`."""

    def scales(self, x: Tensor, f_x: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of ``y = G(p * x + q * F)``, broadcastable to x, whatever depends on x and F in them held constant.

        Raises ``ValueError`` for a kind whose y mixes features or carries several tensors.
        """
        raise ValueError(f"{self.kind} mixes features or streams: its y has no coefficient of x and of F")

    def coefficients(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and c of ``y = a * x + b * F + c``, with the statistics of the norms and all gates held constant.

        Each of x's shape, at least fp32. Raises ``ValueError`` where a norm or the kind has no such map.
        """
        self.check(x, f_x, padding_mask)
        p, q = self.scales(x, f_x)
        a, b, c = p, self._kept() * q, self.offset(x, f_x)
        for norm in self.norms:
            a, b, c = self._through(norm, a, b, c, x, f_x, padding_mask)
        return self._expanded(x, a, b, c)

    def offset(self, x: Tensor, f_x: Tensor) -> Tensor:
        """What is added to ``p * x + q * F``, broadcastable to x."""
        return x.new_zeros(())

    def _kept(self) -> float:
        """The share of F that stochastic depth leaves on average."""
        return 1.0 - self.drop_rate

    def _expanded(self, x: Tensor, *parts: Tensor) -> Any:
        like = at_least_float32(x)
        return tuple(part.to(like.dtype).expand_as(like) for part in parts)

    def _through(self, norm: Any, a: Tensor, b: Tensor, c: Tensor, x: Tensor, f_x: Tensor, padding_mask: Any) -> Any:
        """The coefficients after ``norm``."""
        scale, shift = norm.affine_map(a * at_least_float32(x) + b * f_x + c, padding_mask)
        return scale * a, scale * b, scale * c + shift

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """x:F in y, ``p / q``: G scales both alike. Returns ``x``'s shape, at least fp32."""
        self.check(x, f_x, padding_mask)
        p, q = self.scales(x, f_x)
        return self._expanded(x, p / (self._kept() * q))[0]
