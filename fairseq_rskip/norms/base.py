"""What every normalisation G shares: the layout of its input, its parameters, its affine map."""

import numbers
from typing import Any

import torch
from torch import Tensor, nn

from ..option_error import OptionError

NORM_AXES = ("c", "chw")


class NoCoefficients(ValueError):
    """The output is no sum of the inputs times coefficients, even with statistics held constant."""


def is_half(x: Tensor) -> bool:
    """Whether ``x`` is fp16 or bf16, whose moments need a wider type."""
    return x.dtype == torch.float16 or x.dtype == torch.bfloat16


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` converted to fp32 if it is fp16 or bf16, otherwise ``x`` itself."""
    return x.float() if is_half(x) else x


def root_mean_square(x: Tensor, eps: float, dim: int = -1) -> Tensor:
    """``sqrt(mean(x^2) + eps)`` over ``dim``, which is kept with size 1; at least fp32."""
    return (at_least_float32(x).square().mean(dim, keepdim=True) + eps).sqrt()


def is_recomputed() -> bool:
    """Whether this forward pass runs during backward, as activation checkpointing's second one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def check_layout(dim: int, channel_dim: int) -> None:
    """Raise ``ValueError`` unless ``dim`` is a positive integer and ``channel_dim`` is -1 or 1."""
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral) or dim <= 0:
        raise ValueError(f"dim={dim!r}: expected an integer > 0, the size of the channel dimension")
    if isinstance(channel_dim, bool) or channel_dim not in (-1, 1):
        raise ValueError(f"channel_dim={channel_dim!r}: expected -1 (sequences) or 1 (image maps)")


class Layout:
    """Views of the inputs of a module with a ``channel_dim``, -1 or 1."""

    channel_dim: int

    def per_channel(self, vector: Tensor) -> Tensor:
        """View a ``(dim,)`` vector so that it broadcasts along an input's channel dimension."""
        return vector.view(-1, 1, 1) if self.channel_dim == 1 else vector

    def channels_at_end(self, x: Tensor) -> Tensor:
        """View ``x`` as rows ``(..., dim)``, contiguous if image maps are ``channels_last``."""
        return x.permute(0, 2, 3, 1) if self.channel_dim == 1 else x

    def to_layout(self, y: Tensor, x: Tensor) -> Tensor:
        """Undo :meth:`channels_at_end` for a result, in ``x``'s memory format."""
        if self.channel_dim == -1:
            return y
        y = y.permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y


class KeepsStatistics(nn.Module):
    """A module whose running ``statistics``, by name, stay in fp32 under ``.half()`` and the like.

    In fp16 or bf16 a variance could overflow, and a mean would not move if an update is below its
    resolution.
    """

    statistics: tuple[str, ...] = ()

    def _apply(self, fn, *args, **kwargs):
        before = {name: getattr(self, name) for name in self.statistics if hasattr(self, name)}
        super()._apply(fn, *args, **kwargs)
        for name, value in before.items():
            now = getattr(self, name)
            if is_half(now) and not is_half(value):
                setattr(self, name, value.to(now.device))
        return self


class Norm(Layout, nn.Module):
    """A normalisation ``norm(x, padding_mask=None)``; returns ``x``'s shape and dtype.

    Args:
        dim: size of the channel dimension.
        channel_dim: -1 for ``(..., dim)``, 1 for image maps ``(batch, dim, height, width)``.
        norm_axes: ``"c"``; layer norm of image maps takes ``"chw"``, too.
        eps: a finite number > 0.
        device, dtype: of the parameters, as in torch's own modules.

    ``has_gain``, ``has_bias``: there are parameters ``weight`` and ``bias``, which start at 1 and 0
    and have shape ``(dim,)``, except ScaleNorm's ``weight``. ``uses_padding_mask``: padded
    positions are left out.
    """

    uses_padding_mask = False
    takes_chw = False
    has_gain = has_bias = True
    gain_size: int | None = None  # None: dim

    dim: int
    channel_dim: int
    norm_axes: str
    eps: float
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self,
        dim: int,
        channel_dim: int = -1,
        norm_axes: str = "c",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)  # not super(): a subclass may also be a norm of torch's
        check_layout(dim, channel_dim)
        if norm_axes not in NORM_AXES:
            raise OptionError("norm_axes", norm_axes, f"one of {', '.join(NORM_AXES)}")
        if norm_axes == "chw" and not (self.takes_chw and channel_dim == 1):
            where = "sequences" if self.takes_chw else type(self).__name__
            raise OptionError(
                "norm_axes", "chw", f"'c' for {where}", reason="'chw' is for layer norm of images"
            )
        is_number = isinstance(eps, numbers.Real) and not isinstance(eps, bool)
        if not is_number or not 0 < eps <= torch.finfo(torch.float32).max:
            raise ValueError(f"eps={eps!r}: expected a finite number > 0")
        self.dim = int(dim)
        self.channel_dim = int(channel_dim)
        self.norm_axes = norm_axes
        self.eps = float(eps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if self.has_gain:
            self.weight = nn.Parameter(torch.ones(self.gain_size or self.dim, **factory))
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(self.dim, **factory))

    def affine_map(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(scale, shift)`` of ``scale * x + shift``, this norm with its statistics held constant.

        Both broadcast to ``x``. Changes no state. Raises :class:`NoCoefficients` for a norm that
        is no such map.
        """
        raise NoCoefficients(
            f"{type(self).__name__} is not an affine map of its input, whatever is held constant"
        )

    def extra_repr(self) -> str:
        layout = f"channel_dim={self.channel_dim}, eps={self.eps:g}, norm_axes={self.norm_axes}"
        return f"{self.dim}, {layout}"
