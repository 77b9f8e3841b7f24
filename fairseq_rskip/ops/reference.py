"""The recursive skip and its norms in torch operators: what every other backend is compared with.

``z_1 = skip_scale * x + branch_scale * F``, ``y_k = norm(z_k) * gain_k + bias_k``, ``z_{k+1} = skip_scale * x + y_k``:
Eq. 3 of Liu et al. 2020 with one gain, Eq. 4 with several and ``skip_scale = 1``.
"""

from typing import List

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(z: Tensor, gain: Tensor, eps: float) -> Tensor:
    """``z / sqrt(mean(z^2) + eps) * gain`` over the last dimension (Zhang and Sennrich, 2019)."""
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * gain


def skip_norm(
    x: Tensor,
    f_x: Tensor,
    gains: List[Tensor],
    biases: List[Tensor],
    skip_scale: float = 1.0,
    branch_scale: float = 1.0,
    eps: float = 1e-5,
    rms: bool = False,
    all_steps: bool = False,
) -> Tensor:
    """Arguments and result as of :func:`fairseq_rskip.ops.skip_norm`; any device, differentiable any number of times.

    Computes in the widest type of ``x``, ``f_x`` and the gains, at least fp32.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, f_x.dtype), torch.float32)
    for gain in gains:
        dtype = torch.promote_types(dtype, gain.dtype)
    wide_x = x.to(dtype)
    skipped = wide_x if skip_scale == 1.0 else skip_scale * wide_x
    z = torch.add(skipped, f_x.to(dtype), alpha=branch_scale)
    steps = []
    y = z
    for k in range(len(gains)):
        if k > 0:
            z = skipped + y
        gain = gains[k].to(dtype)
        if rms:
            y = rms_norm(z, gain, eps)
            if len(biases) > 0:
                y = y + biases[k].to(dtype)
        else:
            y = F.layer_norm(z, [x.size(-1)], gain, biases[k].to(dtype) if len(biases) > 0 else None, eps)
        if all_steps:
            steps.append(y.to(x.dtype))
    return torch.stack(steps) if all_steps else y.to(x.dtype)
