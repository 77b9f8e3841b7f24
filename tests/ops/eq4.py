"""Eq. 4 in torch's operators: what the operator is compared with.

``z_1 = skip_scale * x + branch_scale * F``, ``y_k = norm(z_k) * gain_k + bias_k``,
``z_{k+1} = skip_scale * x + y_k``: Eq. 3 of Liu et al. 2020 with one gain, Eq. 4 with several and
``skip_scale = 1``. Its functions have the names and arguments of :mod:`fairseq_rskip.ops`.
"""

import torch
import torch.nn.functional as F


def skip_norm(x, f_x, gains, biases, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False):
    return every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)[-1].to(x.dtype)


def skip_mix(
    x, f_x, gains, biases, weights, direction, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False
):
    steps = every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)
    p = weights if direction is None else halting(steps, weights, direction)
    y = sum(share.unsqueeze(-1).to(step.dtype) * step for share, step in zip(p, steps))
    return y.to(x.dtype), p


def every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms):
    """y_1 ... y_K in the compute dtype: the widest of x, F and the gains, at least fp32."""
    dtype = torch.float32
    for tensor in (x, f_x, *gains):
        dtype = torch.promote_types(dtype, tensor.dtype)
    skipped = skip_scale * x.to(dtype)
    z = skipped + branch_scale * f_x.to(dtype)
    steps = []
    for k in range(len(gains)):
        gain = gains[k].to(dtype)
        bias = biases[k].to(dtype) if len(biases) > 0 else torch.zeros_like(gain)
        if k > 0:
            z = skipped + steps[-1]
        if rms:  # Zhang and Sennrich 2019
            steps.append(z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * gain + bias)
        else:
            steps.append(F.layer_norm(z, [x.size(-1)], gain, bias, eps))
    return steps


def halting(steps, biases, direction):
    """p of shape ``(K, ...)``: ``p_k = h_k prod_{j<k} (1 - h_j)``, p_K the rest."""
    ys = torch.stack(steps)
    logits = (ys[:-1] * direction.to(ys.dtype)).sum(-1)
    halts = (logits + biases.view(-1, *[1] * (ys.dim() - 2))).sigmoid()
    last = torch.ones_like(ys[:1, ..., 0])
    return torch.cat([last, (1.0 - halts).cumprod(0)]) * torch.cat([halts, last])
