"""The recursive skip and its norms in torch operators: what every other backend is compared with.

``z_1 = skip_scale * x + branch_scale * F``, ``y_k = norm(z_k) * gain_k + bias_k``,
``z_{k+1} = skip_scale * x + y_k``: Eq. 3 of Liu et al. 2020 with one gain, Eq. 4 with several and
``skip_scale = 1``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def computing_type(x: Tensor, f_x: Tensor, gains: list[Tensor]) -> torch.dtype:
    """The widest type of ``x``, ``f_x`` and the gains, at least fp32."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, f_x.dtype), torch.float32)
    for gain in gains:
        dtype = torch.promote_types(dtype, gain.dtype)
    return dtype


def skip_norm(
    x, f_x, gains, biases, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False
) -> Tensor:
    """As :func:`fairseq_rskip.ops.skip_norm`; on any device, differentiable any number of times."""
    return every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)[-1].to(x.dtype)


def every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms) -> list[Tensor]:
    """y_1 ... y_K in the type of computing."""
    dtype = computing_type(x, f_x, gains)
    wide_x = x.to(dtype)
    skipped = wide_x if skip_scale == 1.0 else skip_scale * wide_x
    z = torch.add(skipped, f_x.to(dtype), alpha=branch_scale)
    steps: list[Tensor] = []
    for k in range(len(gains)):
        gain = gains[k].to(dtype)
        bias = biases[k].to(dtype) if len(biases) > 0 else None
        if k > 0:
            z = skipped + steps[-1]
        if rms:  # Zhang and Sennrich 2019
            y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * gain
            steps.append(y if bias is None else y + bias)
        else:
            steps.append(F.layer_norm(z, [x.size(-1)], gain, bias, eps))
    return steps


def skip_mix(
    x, f_x, gains, biases, weights, direction, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False
):
    """As :func:`fairseq_rskip.ops.skip_mix`; on any device, differentiable any number of times."""
    steps = torch.stack(every_step(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms))
    if direction is None:
        p = weights
        shaped = p.view(-1, *[1] * x.dim())
    else:
        p = halting(steps, weights, direction)
        shaped = p.unsqueeze(-1)
    return (shaped.to(steps.dtype) * steps).sum(0).to(x.dtype), p


def halting(steps: Tensor, bias: Tensor, direction: Tensor) -> Tensor:
    """p of shape ``(K, ...)`` for ``steps`` of ``(K, ..., dim)``.

    ``h_k = sigmoid(direction . y_k + bias_k)``, ``p_k = h_k prod_{j<k} (1 - h_j)``, p_K the rest.
    """
    # a product and a sum rather than matmul, whose type autocast would narrow
    logits = (steps[:-1] * direction.to(steps.dtype)).sum(-1)
    logits = logits + bias.view(-1, *[1] * (steps.dim() - 2))
    halts = logits.sigmoid()
    reached = torch.cat((torch.ones_like(steps[:1, ..., 0]), (1.0 - halts).cumprod(0)))
    return reached * torch.cat((halts, torch.ones_like(reached[:1])))
