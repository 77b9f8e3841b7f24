"""The residual module: every skip connection of the paper, its equation, and one way to build it.

Liu et al. 2020, "Rethinking Skip Connection with Layer Normalization in Transformers and ResNets". ``x`` is the
block's input, ``F`` the output of its weighted branch, ``G`` a normalisation of :mod:`fairseq_rskip.norms`:

====== ========================================================= =======================
kind   equation                                                  source
====== ========================================================= =======================
xskip  ``y = G(lambda * x + alpha * F)``                         Eq. 2 and 3, Table 3
rskip  ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``  Eq. 4
wskip  ``y = G(w * x + alpha * F)``, ``w`` learned per feature   section 4.3
====== ========================================================= =======================

``SkipConnection(dim, kind=...)`` builds the class that ``KINDS`` names.
"""

import numbers
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .norms import Norm, at_least_float32, check_layout, create_norm

MOST_STEPS = 1000
_LARGEST = torch.finfo(torch.float32).max


def _finite(name: str, value: Any, positive: bool) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not -_LARGEST <= value <= _LARGEST or (positive and value <= 0):  # a comparison with NaN is false
        raise ValueError(f"{name}={value!r}: expected a finite real number{' > 0' if positive else ''} that fp32 holds")
    return float(value)


class SkipConnection(nn.Module):
    """A skip connection ``y = skip(x, f_x, padding_mask=None)``; also the base class of every kind.

    Args:
        dim: size of the channel dimension.
        kind: one of ``KINDS``.
        skip_lambda: the weight of the skip, a finite real > 0; for rskip the number of steps, an integer >= 1
            (an integral float such as 2.0 counts as one). wskip checks it but uses its vector instead.
        norm: one of ``norms.NORMS``; rskip needs one other than ``none``.
        branch_scale: alpha, the weight of the branch, a finite real > 0; in rskip it applies to step 1.
        init: starting value of wskip's vector, a finite real; the other kinds have none.
        channel_dim: -1 for sequences ``(..., dim)``, 1 for image maps ``(batch, dim, height, width)``.
        norm_axes, eps, update_in_no_grad: see :mod:`fairseq_rskip.norms`.

    ``forward`` takes ``x`` and ``f_x`` of one shape in any floating types and returns ``x``'s shape and dtype.
    ``padding_mask`` is boolean, of ``x``'s shape without the channel dimension, True where padded; batch
    normalisation leaves those positions out and returns zeros there, the other norms treat every row on its own.

    Raises:
        ValueError: naming the argument, its value and what is accepted, at construction for anything outside the
            above, at call for shapes that differ, a channel dimension other than ``dim``, inputs that are not floating
            point, or a mask of the wrong type or shape.
    """

    kind = ""
    takes_lambda = True
    takes_init = False

    def __new__(cls, dim: int = 0, kind: str = "xskip", *args: Any, **kwargs: Any) -> "SkipConnection":
        if cls is SkipConnection:
            if not isinstance(kind, str) or kind not in KINDS:
                raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
            cls = KINDS[kind]
        return super().__new__(cls)

    def __init__(
        self,
        dim: int,
        kind: Optional[str] = None,
        skip_lambda: float = 1,
        norm: str = "none",
        branch_scale: float = 1.0,
        init: float = 1.0,
        channel_dim: int = -1,
        norm_axes: str = "c",
        eps: float = 1e-5,
        update_in_no_grad: bool = True,
    ):
        super().__init__()
        if kind not in (None, self.kind):
            raise ValueError(f"kind={kind!r}: expected {self.kind!r}, the kind of {type(self).__name__}")
        check_layout(dim, channel_dim)
        self.dim = int(dim)
        self.channel_dim = int(channel_dim)
        self.skip_lambda = self.check_lambda(skip_lambda)
        self.branch_scale = _finite("branch_scale", branch_scale, positive=True)
        self.init = _finite("init", init, positive=False)
        self.norm_name = norm
        first = create_norm(norm, dim, channel_dim, norm_axes, eps, update_in_no_grad)
        self.uses_padding_mask = first.uses_padding_mask
        self.by_rows = channel_dim == 1 and norm == "layer" and norm_axes == "c" and self.steps() > 1
        self.norms = nn.ModuleList()
        if norm != "none":
            layout = -1 if self.by_rows else channel_dim
            for _ in range(self.steps()):
                self.norms.append(create_norm(norm, dim, layout, norm_axes, eps, update_in_no_grad))

    def check_lambda(self, skip_lambda: Any) -> float:
        return _finite("skip_lambda", skip_lambda, positive=True)

    def steps(self) -> int:
        """How many normalisations, one per step, the kind owns."""
        return 1

    def skip_scale(self) -> float:
        """What the skip multiplies x by before G, at the start of training."""
        return self.skip_lambda

    def check(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor]) -> None:
        """Raise ``ValueError`` for inputs that ``forward`` does not accept."""
        if x.shape != f_x.shape:
            raise ValueError(f"f_x has shape {list(f_x.shape)}: expected x's shape {list(x.shape)}")
        if not (x.is_floating_point() and f_x.is_floating_point()):
            raise ValueError(f"x and f_x have dtypes {x.dtype} and {f_x.dtype}: expected floating point")
        if self.channel_dim == 1 and x.dim() != 4:
            raise ValueError(f"x has shape {list(x.shape)}: expected (batch, {self.dim}, height, width)")
        if x.dim() == 0 or x.size(self.channel_dim) != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}: expected {self.dim} at dimension {self.channel_dim}")
        if padding_mask is not None:
            expected = list(x.shape)
            expected.pop(self.channel_dim)
            if padding_mask.dtype != torch.bool or list(padding_mask.shape) != expected:
                raise ValueError(
                    f"padding_mask has dtype {padding_mask.dtype} and shape {list(padding_mask.shape)}: "
                    f"expected a boolean mask of shape {expected}, True where padded"
                )

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, kind={self.kind}, lambda={self.skip_lambda:g}, norm={self.norm_name}, "
            f"alpha={self.branch_scale:g}, channel_dim={self.channel_dim}"
        )


class XSkip(SkipConnection):
    """Expanded skip ``y = G(lambda * x + alpha * F)``: Eq. 2 without G, Eq. 3 with it; lambda < 1 contracts.

    lambda = alpha = 1 without G is the plain skip ``x + F``, with layer norm Transformer's post-norm. Shapes and
    errors as in :class:`SkipConnection`.
    """

    kind = "xskip"

    def forward(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        self.check(x, f_x, padding_mask)
        if self.skip_lambda == 1.0:
            y = torch.add(x, f_x, alpha=self.branch_scale)
        elif self.branch_scale == 1.0:
            y = torch.add(f_x, x, alpha=self.skip_lambda)
        else:
            y = torch.add(self.skip_lambda * x, f_x, alpha=self.branch_scale)
        for norm in self.norms:
            y = norm(y, padding_mask)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """x:F in y is ``lambda / alpha``: G scales both alike. Returns ``x``'s shape, at least fp32."""
        self.check(x, f_x, padding_mask)
        return torch.full_like(at_least_float32(x), self.skip_lambda / self.branch_scale)


class RSkip(SkipConnection):
    """Recursive skip ``y_1 = G_1(x + alpha * F)``, ``y_k = G_k(x + y_{k-1})``, ``y = y_lambda``: Eq. 4.

    Each step owns its gain and bias. lambda = 1 is Transformer's post-norm. Shapes as in :class:`SkipConnection`;
    raises its errors, and ``ValueError`` for a lambda that is not an integer >= 1 or norm ``none``.
    """

    kind = "rskip"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if len(self.norms) == 0:
            raise ValueError("norm='none': expected a normalisation for kind 'rskip', for example 'layer' or 'batch'")

    def check_lambda(self, skip_lambda: Any) -> int:
        real = isinstance(skip_lambda, numbers.Real) and not isinstance(skip_lambda, bool)
        if not real or not 1 <= skip_lambda <= MOST_STEPS or skip_lambda != int(skip_lambda):
            raise ValueError(f"skip_lambda={skip_lambda!r}: expected an integer from 1 to {MOST_STEPS} for rskip")
        return int(skip_lambda)

    def steps(self) -> int:
        return self.skip_lambda

    def skip_scale(self) -> float:
        return 1.0

    def forward(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        self.check(x, f_x, padding_mask)
        if not self.by_rows:
            return self.recurse(x, f_x, padding_mask)
        # image maps, normalised position by position: views as (..., dim) spare an allocation a step
        y = self.recurse(x.permute(0, 2, 3, 1), f_x.permute(0, 2, 3, 1), None).permute(0, 3, 1, 2)
        return y.contiguous() if x.is_contiguous() else y

    def recurse(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
        """Eq. 4 in the layout of ``self.norms``: ``(..., dim)`` for image maps by rows, otherwise as given."""
        y = torch.add(x, f_x, alpha=self.branch_scale)
        owned = False
        for step, norm in enumerate(self.norms):
            if step > 0:
                y = y.add_(x) if owned else y + x
            y = norm(y, padding_mask)
            if torch.jit.is_scripting():
                owned = False
            else:
                # backward needs a normalisation's input, not its output: adding in place spares a large allocation,
                # unless a hook may hold the output
                owned = norm.owns_output and not norm._forward_hooks and not norm._backward_hooks
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """x:F in y per feature and row, ``(1 + sum_{i=1}^{lambda-1} prod_{j=1}^{i} sigma_j / w_j) / alpha``.

        Appendix A, unrolled: ``sigma_j`` is ``sqrt(var + eps)`` of the input of step j (for batch norm with the
        statistics that ``forward`` would use in the current mode) and ``w_j`` that step's gain. The paper prints
        lambda as the sum's upper limit; its own Eq. 6, ``1 + sigma_1 / w_1`` for lambda = 2, shows that lambda - 1 is
        right. Returns ``x``'s shape, at least fp32; running statistics stay as they are.
        """
        self.check(x, f_x, padding_mask)
        if not self.by_rows:
            return self.unrolled_ratio(x, f_x, padding_mask)
        return self.unrolled_ratio(x.permute(0, 2, 3, 1), f_x.permute(0, 2, 3, 1), None).permute(0, 3, 1, 2)

    def unrolled_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor]) -> Tensor:
        """The formula of :meth:`skip_ratio`, in the layout of :meth:`recurse`."""
        x = at_least_float32(x)
        z = torch.add(x, f_x, alpha=self.branch_scale)
        product = torch.ones_like(x)
        ratio = product
        for step in range(self.skip_lambda - 1):
            norm: Norm = self.norms[step]
            gain, bias = norm.per_channel(norm.weight), norm.per_channel(norm.bias)
            mean, sigma = norm.moments(z, padding_mask)
            product = product * (sigma / gain)
            ratio = ratio + product
            z = x + (z - mean) / sigma * gain + bias
        return ratio / self.branch_scale


class WSkip(SkipConnection):
    """Learned skip ``y = G(w * x + alpha * F)``: section 4.3; the parameter ``weight`` is w, of shape ``(dim,)``.

    ``init`` is its starting value; the paper tries 1 and 2. w takes lambda's place, so ``skip_lambda`` has no effect.
    Shapes and errors as in :class:`SkipConnection`.
    """

    kind = "wskip"
    takes_lambda = False
    takes_init = True

    def skip_scale(self) -> float:
        return self.init

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.weight = nn.Parameter(torch.full((self.dim,), self.init))

    def per_channel(self) -> Tensor:
        return self.weight.view(-1, 1, 1) if self.channel_dim == 1 else self.weight

    def forward(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        self.check(x, f_x, padding_mask)
        skip = x
        if padding_mask is not None and self.uses_padding_mask:
            # the norm masks the sum, but w's gradient is taken from x itself; masked_fill would lose channels_last
            skip = torch.where(padding_mask.unsqueeze(self.channel_dim), x.new_zeros(()), x)
        y = torch.add(skip * self.per_channel(), f_x, alpha=self.branch_scale)
        for norm in self.norms:
            y = norm(y, padding_mask)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def skip_ratio(self, x: Tensor, f_x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """x:F in y is ``w / alpha`` per feature: G scales both alike. Returns ``x``'s shape, at least fp32."""
        self.check(x, f_x, padding_mask)
        return (self.per_channel() / self.branch_scale).expand_as(x).to(at_least_float32(x).dtype)


KINDS = {cls.kind: cls for cls in (XSkip, RSkip, WSkip)}
