"""The normalisations G of ``y = G(...)``, reached by name through :func:`create_norm`.

Every class in ``NORMS`` is a module ``norm(x, padding_mask=None)`` that returns ``x``'s shape and dtype, with
``x`` laid out as

* ``channel_dim=-1``: ``(..., dim)``, for example fairseq's ``(seq_len, batch, embed_dim)``;
* ``channel_dim=1``: image maps ``(batch, dim, height, width)``.

``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True where padded. Moments of fp16 and
bf16 inputs are taken in fp32.
"""

import numbers
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_AXES = ("c", "chw")


def is_half(x: Tensor) -> bool:
    """Whether ``x`` is fp16 or bf16, whose moments need a wider type."""
    return x.dtype == torch.float16 or x.dtype == torch.bfloat16


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if is_half(x) else x


def check_layout(dim: int, channel_dim: int) -> None:
    """Raise ``ValueError`` unless ``dim`` is a positive integer and ``channel_dim`` is -1 or 1."""
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral) or dim <= 0:
        raise ValueError(f"dim={dim!r}: expected an integer > 0, the size of the channel dimension")
    if isinstance(channel_dim, bool) or channel_dim not in (-1, 1):
        raise ValueError(f"channel_dim={channel_dim!r}: expected -1 (sequences) or 1 (image maps)")


class Norm(nn.Module):
    """What all normalisations share: the layout, and gain and bias of shape ``(dim,)`` when ``affine``.

    ``uses_padding_mask``: padded positions are left out. ``owns_output``: the result is a new tensor, not a view, and
    backward does not need it, so the caller may change it in place.
    """

    uses_padding_mask = False
    owns_output = False

    def __init__(
        self,
        dim: int,
        channel_dim: int = -1,
        norm_axes: str = "c",
        eps: float = 1e-5,
        update_in_no_grad: bool = True,
        affine: bool = True,
    ):
        super().__init__()
        check_layout(dim, channel_dim)
        if norm_axes not in NORM_AXES:
            raise ValueError(f"norm_axes={norm_axes!r}: expected one of {', '.join(NORM_AXES)}")
        if isinstance(eps, bool) or not isinstance(eps, numbers.Real) or not 0 < eps <= torch.finfo(torch.float32).max:
            raise ValueError(f"eps={eps!r}: expected a finite number > 0")
        self.dim = int(dim)
        self.channel_dim = int(channel_dim)
        self.norm_axes = norm_axes
        self.eps = float(eps)
        self.update_in_no_grad = bool(update_in_no_grad)
        if affine:
            self.weight = nn.Parameter(torch.ones(self.dim))
            self.bias = nn.Parameter(torch.zeros(self.dim))

    def per_channel(self, vector: Tensor) -> Tensor:
        """View a ``(dim,)`` vector so that it broadcasts along the channel dimension of an input."""
        return vector.view(-1, 1, 1) if self.channel_dim == 1 else vector

    def channels_at_end(self, x: Tensor) -> Tensor:
        """View ``x`` as ``(..., dim)``; its memory is contiguous that way if ``x`` is ``channels_last``."""
        return x.permute(0, 2, 3, 1) if self.channel_dim == 1 else x

    def to_layout(self, y: Tensor, x: Tensor) -> Tensor:
        """Undo :meth:`channels_at_end` for a result, in ``x``'s memory format."""
        if self.channel_dim == -1:
            return y
        y = y.permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y

    def moments(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """Mean and ``sqrt(var + eps)`` that ``forward`` would use now, broadcastable to ``x``; changes no state."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.dim}, channel_dim={self.channel_dim}, eps={self.eps:g}"


class NoNorm(Norm):
    """G = identity; no parameters."""

    def __init__(self, dim: int, channel_dim: int = -1, norm_axes: str = "c", eps: float = 1e-5, **options: bool):
        super().__init__(dim, channel_dim, norm_axes, eps, affine=False, **options)
        _refuse_chw(norm_axes, "norm 'none'")

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        return x

    def moments(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        return x.new_zeros(()), x.new_ones(())


class LayerNorm(Norm):
    """Layer normalisation (Ba et al., 2016): ``w * (x - mean) / sqrt(var + eps) + b`` per row.

    A row is one position's ``dim`` features (``norm_axes="c"``, both layouts); ``norm_axes="chw"``, image maps only,
    takes one example's ``dim * height * width`` values instead, as ``nn.GroupNorm(1, dim)`` does. Rows do not see
    each other, so ``padding_mask`` is not used. Raises ``ValueError`` for ``norm_axes="chw"`` with sequences.
    """

    def __init__(self, dim: int, channel_dim: int = -1, norm_axes: str = "c", eps: float = 1e-5, **options: bool):
        super().__init__(dim, channel_dim, norm_axes, eps, **options)
        if channel_dim == -1:
            _refuse_chw(norm_axes, "channel_dim=-1")
            self.owns_output = True

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        z, weight, bias = x, self.weight, self.bias
        if z.dtype != weight.dtype:
            # the wider of the two types: under amp the gain is fp32 while x may be half
            dtype = (z.new_empty(0) + weight.new_empty(0)).dtype
            z, weight, bias = z.to(dtype), weight.to(dtype), bias.to(dtype)
        if self.channel_dim == -1:
            y = torch.layer_norm(z, [self.dim], weight, bias, self.eps)
        elif self.norm_axes == "c":
            y = self.to_layout(torch.layer_norm(self.channels_at_end(z), [self.dim], weight, bias, self.eps), x)
        else:
            y = F.group_norm(z, 1, weight, bias, self.eps)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def moments(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        axes = (1, 2, 3) if self.norm_axes == "chw" else (self.channel_dim,)
        z = at_least_float32(x)
        mean = z.mean(axes, keepdim=True)
        return mean, ((z - mean).square().mean(axes, keepdim=True) + self.eps).sqrt()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm_axes={self.norm_axes}"


class BatchNorm(Norm):
    """Batch normalisation (Ioffe and Szegedy, 2015) per feature, over the unpadded positions of the batch.

    Equals ``nn.BatchNorm1d`` (``nn.BatchNorm2d`` for image maps) on the packed unpadded positions: outputs, gradients,
    running mean, unbiased running variance (momentum 0.1) and ``num_batches_tracked``. With a mask, padded positions
    come out as zero and whatever they hold, NaN included, reaches nothing. A batch of fewer than two unpadded
    positions has no variance: it is normalised with variance 0 and leaves the running statistics alone.

    ``update_in_no_grad=False`` updates the running statistics only while grad is enabled, so that activation
    checkpointing, which runs forward twice, counts each batch once. Running statistics stay fp32 under ``.half()``.
    """

    uses_padding_mask = True

    def __init__(self, dim: int, channel_dim: int = -1, norm_axes: str = "c", eps: float = 1e-5, **options: bool):
        super().__init__(dim, channel_dim, norm_axes, eps, **options)
        _refuse_chw(norm_axes, "norm 'batch'")
        self.momentum = 0.1
        self.register_buffer("running_mean", torch.zeros(self.dim))
        self.register_buffer("running_var", torch.ones(self.dim))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        # torch's kernel takes half inputs with fp32 statistics, and otherwise one type
        fused = self.running_mean.dtype == (torch.float32 if is_half(x) else x.dtype)
        if fused and padding_mask is None and (not self.training or x.numel() >= 2 * self.dim):
            return self._fused(x)
        z = self._rows(at_least_float32(x))
        padded = self._padded_rows(padding_mask, z)
        z = z.masked_fill(padded, 0.0)
        if self.training:
            mean, var, count = self._batch_moments(z, padded)
            if self.update_in_no_grad or torch.is_grad_enabled():
                self._update(mean, var, count)
        else:
            mean, var = self.running_mean, self.running_var
        y = (z - mean) * ((var + self.eps).rsqrt() * self.weight) + self.bias
        y = y.masked_fill(padded, 0.0).to(x.dtype)
        return self.to_layout(y.view(self.channels_at_end(x).shape), x)

    def _fused(self, x: Tensor) -> Tensor:
        update = self.training and (self.update_in_no_grad or torch.is_grad_enabled())
        if update:
            self.num_batches_tracked.add_(1)
        running = update or not self.training
        y = F.batch_norm(
            x if self.channel_dim == 1 else self._rows(x),
            self.running_mean if running else None,
            self.running_var if running else None,
            self.weight.to(self.running_mean.dtype),
            self.bias.to(self.running_mean.dtype),
            self.training,
            self.momentum,
            self.eps,
        )
        return y.view(x.shape).to(x.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` as ``(positions, dim)``."""
        return self.channels_at_end(x).reshape(-1, self.dim)

    def _padded_rows(self, padding_mask: Optional[Tensor], rows: Tensor) -> Tensor:
        """The mask as ``(positions, 1)``, nothing padded without one."""
        if padding_mask is None:
            return torch.zeros(rows.size(0), 1, dtype=torch.bool, device=rows.device)
        return padding_mask.reshape(-1, 1)

    def _batch_moments(self, rows: Tensor, padded: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Mean and biased variance per feature, and the count of unpadded rows; ``rows`` is zero where padded.

        Masked sums: indexing with the mask would make the host wait for the device.
        """
        count = padded.logical_not().sum().to(rows.dtype)
        divisor = count.clamp(min=1.0)
        mean = rows.sum(0) / divisor
        return mean, (rows - mean).masked_fill(padded, 0.0).square().sum(0) / divisor, count

    def _update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        counted = count >= 2
        dtype = self.running_mean.dtype
        momentum = self.momentum * counted.to(dtype)
        unbiased = var.detach() * (count / (count - 1.0).clamp(min=1.0))
        # .data, for torch's kernel saves the statistics of an earlier batch without using them in its backward: a
        # plain in-place update would make that backward refuse
        self.running_mean.data.lerp_(mean.detach().to(dtype), momentum)
        self.running_var.data.lerp_(unbiased.to(dtype), momentum)
        self.num_batches_tracked.add_(counted)

    def moments(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        mean, var = self.running_mean, self.running_var
        if self.training:
            rows = self._rows(at_least_float32(x))
            padded = self._padded_rows(padding_mask, rows)
            mean, var, _ = self._batch_moments(rows.masked_fill(padded, 0.0), padded)
        return self.per_channel(mean), self.per_channel((var + self.eps).sqrt())

    def _apply(self, fn, *args, **kwargs):
        """``.half()`` and the like convert gain and bias; a running variance would overflow or stall there."""
        before = self.running_mean, self.running_var
        super()._apply(fn, *args, **kwargs)
        if is_half(self.running_mean) and not is_half(before[0]):
            device = self.running_mean.device
            self.running_mean, self.running_var = before[0].to(device), before[1].to(device)
        return self


NORMS = {"none": NoNorm, "layer": LayerNorm, "batch": BatchNorm}


def create_norm(
    name: str,
    dim: int,
    channel_dim: int = -1,
    norm_axes: str = "c",
    eps: float = 1e-5,
    update_in_no_grad: bool = True,
) -> Norm:
    """Build the normalisation ``name``, one of ``NORMS``, over ``dim`` features.

    Raises ``ValueError``, naming argument, value and what is accepted, for an unknown ``name``, ``dim <= 0``,
    ``channel_dim`` other than -1 or 1, ``norm_axes`` that is unknown or does not fit, or ``eps <= 0``.
    """
    if not isinstance(name, str) or name not in NORMS:
        raise ValueError(f"norm={name!r}: expected one of {', '.join(NORMS)}")
    return NORMS[name](dim, channel_dim, norm_axes, eps, update_in_no_grad=update_in_no_grad)


def _refuse_chw(norm_axes: str, setting: str) -> None:
    if norm_axes == "chw":
        raise ValueError(f"norm_axes='chw' with {setting}: expected 'c'; 'chw' needs norm 'layer' and channel_dim=1")
