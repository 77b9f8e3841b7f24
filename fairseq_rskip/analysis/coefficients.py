"""The coefficients of x and F in y, their ratio x:F, and a rule's constants: read from the rule's own ``scales``."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..norms import at_least_float32
from ..residual import SkipConnection, Weighted
from ..residual import inputs as checks
from ..residual.adaptive import ASkip

NOT_OF_THE_EQUATION = ("drop_path", "lambda_lr", "eps", "drop_rate", "lr_multiplier")
# name -> symbol in the papers; if two names share one, the second has the value at this place
SYMBOLS = {"skip_lambda": "lambda", "skip_scale": "lambda", "branch_scale": "alpha", "max_steps": "K"}
SYMBOLS |= {"post_share": "a", "pre_scale": "1/sqrt(l)", "stream_scale": "1/sqrt(2l)"}
SYMBOLS |= {"streams": "n", "parts": "m", "warmup": "T"}


def coefficients(
    skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and c of ``y = a * x + b * F + c``, with the statistics of the norms and all gates held constant.

    Each of x's shape, at least fp32. Raises ``ValueError`` where a norm or the kind has no such map.
    """
    a, b, c, x, f_x = _first_sum(skip, x, f_x, padding_mask)
    steps: list[tuple[Tensor, ...]] = []
    for norm in skip.post:
        a = a + 1.0 if steps else a
        scale, shift = norm.affine_map(a * x + b * f_x + c, padding_mask)
        a, b, c = scale * a, scale * b, scale * c + shift
        steps.append(tuple(part.expand_as(x) for part in (a, b, c)))
    if isinstance(skip, ASkip):
        a, b, c = (torch.stack(each) for each in zip(*steps))
        axis = -1 if skip.channel_dim == -1 else 2  # features, behind the steps
        p = skip.weights((a * x + b * f_x + c).movedim(axis, -1)).detach()
        p = p.movedim(-1, axis) if p.dim() > 1 else p.view(-1, *[1] * x.dim())
        a, b, c = ((p * each).sum(0) for each in (a, b, c))
    return tuple(part.to(x.dtype).expand_as(x) for part in (a, b, c))


def skip_ratio(skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """x:F in y per feature and row. Returns ``x``'s shape, at least fp32.

    With one step it is ``p / q``, for G scales both alike. With lambda steps, appendix A of Liu et al. 2020 unrolled,
    ``(1 + sum_{i=1}^{lambda-1} prod_{j=1}^{i} sigma_j / w_j) / alpha``: ``sigma_j`` is ``sqrt(var + eps)`` of the input
    of step j (for batch norm with the statistics that ``forward`` would use in the current mode) and ``w_j`` that
    step's gain. The paper prints lambda as the sum's upper limit; its own Eq. 6, ``1 + sigma_1 / w_1`` for lambda = 2,
    shows that lambda - 1 is right. For an adaptive lambda it is the quotient of the :func:`coefficients`.
    """
    if isinstance(skip, ASkip):
        a, b, _ = coefficients(skip, x, f_x, padding_mask)
        return a / b
    p, q, r, x, f_x = _first_sum(skip, x, f_x, padding_mask)
    z, ratio, product = p * x + q * f_x + r, p, torch.ones_like(x)
    for norm in list(skip.post)[:-1]:
        scale, shift = norm.affine_map(z, padding_mask)
        product = product / scale
        ratio = ratio + product
        z = x + (scale * z + shift)
    return (ratio / q).to(x.dtype).expand_as(x)


def _first_sum(skip: Any, x: Tensor, f_x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, ...]:
    """p, q and r of the first sum ``p * x + q * F + r``; x and F as the norms take them."""
    checks.check(skip, x, f_x, None, padding_mask)
    if not isinstance(skip, Weighted):
        raise ValueError(f"{skip.kind} mixes features or streams: its y has no coefficient of x and of F")
    p, q = (at_least_float32(x).new_ones(()) * scale for scale in skip.scales(x))
    q, r = (1.0 - skip.drop_rate) * q, skip.offset() + x.new_zeros(())
    x, f_x = at_least_float32(x), at_least_float32(f_x)
    if skip.branch is not None:
        scale, shift = skip.branch.affine_map(f_x)
        q, r = q * scale, r + q * shift
    return p, q, r, x, f_x


def stream_gain(skip: SkipConnection) -> float:
    """The factor of x in a block's sum, before G, at the start of training."""
    if not isinstance(skip, Weighted):
        return 1.0
    x = torch.zeros(1, skip.dim, *([1, 1] if skip.channel_dim == 1 else []), device="cpu")
    return float(torch.as_tensor(skip.scales(x)[0], device="cpu").detach().abs().max())


def constants(skip: SkipConnection) -> dict[str, float]:
    """The constants of the equation at this place: options, what the rule made of its place, means of what it learns
    (matrices left out)."""
    options = [field.name for field in dataclasses.fields(skip.options) if field.metadata["affects_output"]]
    given = {name: getattr(skip.options, name) for name in options}
    values = {name: float(value) for name, value in given.items() if isinstance(value, (int, float))}
    values.update({name: value for name, value in vars(skip).items() if isinstance(value, float)})
    values.update({n: float(p.detach().double().mean()) for n, p in skip.learned().items() if p.dim() < 2})
    if isinstance(skip, ASkip):
        values["skip_lambda"] = skip.effective_lambda()
    return {SYMBOLS.get(name, name): value for name, value in values.items() if name not in NOT_OF_THE_EQUATION}
