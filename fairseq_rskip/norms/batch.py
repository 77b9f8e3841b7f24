"""Batch normalisation over the unpadded positions of a batch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import KeepsStatistics, Norm, at_least_float32, is_half, is_recomputed


class BatchNorm(KeepsStatistics, Norm, nn.modules.batchnorm._BatchNorm):
    """Batch normalisation (Ioffe and Szegedy, 2015) per feature, over a batch's unpadded positions.

    Equals ``nn.BatchNorm1d`` (``nn.BatchNorm2d`` for image maps) on the packed unpadded positions:
    outputs, gradients, running mean, unbiased running variance (momentum 0.1) and
    ``num_batches_tracked``. With a mask, padded positions come out as zero and whatever they hold,
    NaN included, reaches nothing. A batch of fewer than two unpadded positions has no variance: it
    is normalised with variance 0 and leaves the running statistics alone.

    Activation checkpointing, which runs forward twice, counts each batch once. Running statistics
    stay fp32 under ``.half()``. ``SyncBatchNorm.convert_sync_batchnorm`` is not supported.
    """

    uses_padding_mask = True
    statistics = ("running_mean", "running_var")
    affine = track_running_stats = True  # as torch's own class has them
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float | None  # None: the mean over all batches, as torch.optim.swa_utils sets it

    def __init__(self, dim: int, *layout: Any, **options: Any):
        super().__init__(dim, *layout, **options)
        self.num_features = self.dim
        self.momentum = 0.1
        at_least_32 = at_least_float32(self.weight.detach())  # statistics are never of a half type
        self.register_buffer("running_mean", torch.zeros_like(at_least_32))
        self.register_buffer("running_var", torch.ones_like(at_least_32))
        count = torch.zeros((), dtype=torch.long, device=self.weight.device)
        self.register_buffer("num_batches_tracked", count)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if padding_mask is None and self._kernel_takes(x):
            return self._fused(x)
        z = self._rows(at_least_float32(x))
        padded = self._padded_rows(padding_mask, z)
        z = z.masked_fill(padded, 0.0)
        if self.training:
            mean, var, count = self._batch_moments(z, padded)
            if not is_recomputed():
                self._update(mean, var, count)
        else:
            mean, var = self.running_mean, self.running_var
        scale = (var + self.eps).rsqrt() * self.weight
        y = (z - mean) * scale + self.bias
        y = y.masked_fill(padded, 0.0).to(x.dtype)
        return self.to_layout(y.view(self.channels_at_end(x).shape), x)

    def _kernel_takes(self, x: Tensor) -> bool:
        """Whether torch's kernel computes x: of a half type with fp32 statistics, else of theirs;
        in training two positions or more.
        """
        statistics = torch.float32 if is_half(x) else x.dtype
        if self.running_mean.dtype != statistics:
            return False
        return not self.training or x.numel() >= 2 * self.dim

    def _fused(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training and is_recomputed():
            mean, var = mean.clone(), var.clone()  # torch's kernel updates its arguments
        elif self.training:
            self.num_batches_tracked.add_(1)
        weight = self.weight.to(self.running_mean.dtype)
        bias = self.bias.to(self.running_mean.dtype)
        z = x if self.channel_dim == 1 else self._rows(x)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / max(1, int(self.num_batches_tracked))
        y = F.batch_norm(z, mean, var, weight, bias, self.training, momentum, self.eps)
        return y.view(x.shape).to(x.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` as ``(positions, dim)``."""
        return self.channels_at_end(x).reshape(-1, self.dim)

    def _padded_rows(self, padding_mask: Tensor | None, rows: Tensor) -> Tensor:
        """The mask as ``(positions, 1)``, nothing padded without one."""
        if padding_mask is None:
            return torch.zeros(rows.size(0), 1, dtype=torch.bool, device=rows.device)
        return padding_mask.reshape(-1, 1)

    def _batch_moments(self, rows: Tensor, padded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and biased variance per feature, and the count of unpadded rows.

        ``rows`` is zero where padded. Masked sums: indexing with the mask would make the host wait
        for the device.
        """
        count = padded.logical_not().sum().to(rows.dtype)
        divisor = count.clamp(min=1.0)
        mean = rows.sum(0) / divisor
        deviations = (rows - mean).masked_fill(padded, 0.0)
        return mean, deviations.square().sum(0) / divisor, count

    def _update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        counted = count >= 2
        dtype = self.running_mean.dtype
        self.num_batches_tracked.add_(counted)
        share = counted.to(dtype)  # of this batch in the averages
        if self.momentum is None:
            share = share / self.num_batches_tracked.clamp(min=1)
        else:
            share = share * self.momentum
        unbiased = var.detach() * (count / (count - 1.0).clamp(min=1.0))
        # .data, because torch's kernel saves the statistics of an earlier batch, though its
        # backward does not use them: a plain in-place update would make that backward raise an
        # error
        self.running_mean.data.lerp_(mean.detach().to(dtype), share)
        self.running_var.data.lerp_(unbiased.to(dtype), share)

    def affine_map(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean, var = self.running_mean, self.running_var
        if self.training:
            rows = self._rows(at_least_float32(x))
            padded = self._padded_rows(padding_mask, rows)
            mean, var, _ = self._batch_moments(rows.masked_fill(padded, 0.0), padded)
        scale = self.weight / (var + self.eps).sqrt()
        return self.per_channel(scale), self.per_channel(self.bias - mean * scale)
