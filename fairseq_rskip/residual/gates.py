"""Gates and transforms on the shortcut: Highway, the five shortcuts of He et al. 2016b, LAuReL.

He et al. 2016b, "Identity Mappings in Deep Residual Networks", arXiv 1603.05027.
"""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from ..norms import at_least_float32, root_mean_square
from ..option_error import OptionError
from .base import Common, SkipConnection
from .inputs import refuse_drop_path
from .options import Between, Integer, Real, all_norms
from .registry import register
from .weighted import ConstantSkip, SkipLambda, Weighted

GateBias = Annotated[float, Real("initial value of the bias of a gate", affects="start")]


@register("highway")
class Highway(Weighted):
    """Highway network, ``y = G(T * F + (1 - T) * x)``, ``T = sigmoid(W x + b)``.

    Srivastava et al. 2015, "Highway Networks". W is ``(dim, dim)``, applied to the features of each
    position (a 1x1 convolution for images), and starts with standard deviation 1/sqrt(dim); b
    starts at ``gate_bias``, -1 to -3 in the paper. b -> -inf gives x. Weight decay does not apply
    to W and b, nor to other learned coefficients except wskip's.
    """

    default_norm = "none"

    def __init__(self, dim: int, *, gate_bias: GateBias = -1.0, **common: Unpack[Common]):
        super().__init__(dim, gate_bias=gate_bias, **common)
        self.gate_weight = self.new_parameter(self.draw(dim, dim) * dim**-0.5)
        self.gate_bias = self.new_parameter(torch.full((dim,), float(gate_bias)))

    def gate(self, x: Tensor) -> Tensor:
        """sigmoid(W x + b), of x's shape, in at least fp32: near 0 and 1, bf16 would round the
        share of x alike in every block.
        """
        before = linear(x, self.channel_dim, self.gate_weight, self.gate_bias)
        return torch.sigmoid(at_least_float32(before))

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        gate = self.gate(x)
        return 1.0 - gate, gate


@register("exclusive_gate")
class ExclusiveGate(Highway):
    """Exclusive gating, ``y = G(g * F + (1 - g) * x)``, ``g = sigmoid(W x + b)``: He et al. 2016b.

    b starts at -6, the best of 0 to -10 in the paper's Table 1.
    """

    def __init__(self, dim: int, *, gate_bias: GateBias = -6.0, **common: Unpack[Common]):
        super().__init__(dim, gate_bias=gate_bias, **common)


@register("shortcut_gate")
class ShortcutGate(ExclusiveGate):
    """Shortcut-only gating, ``y = G(F + (1 - g) * x)``: He et al. 2016b.

    At b -> -inf it is x + F.
    """

    def scales(self, x: Tensor) -> tuple[Tensor, float]:
        return 1.0 - self.gate(x), 1.0


@register("constant")
class Constant(ConstantSkip):
    """Constant scaling, ``y = G(lambda * x + (1 - lambda) * F)``: He et al. 2016b (lambda 0.5).

    This and the paper's other five shortcuts it tries in ResNets with a ReLU after the sum; ours
    are the pre-activation networks that the paper ends with.
    """

    default_norm = "none"

    def __init__(self, dim: int, *, skip_lambda: SkipLambda = 0.5, **common: Unpack[Common]):
        super().__init__(dim, skip_lambda=skip_lambda, **common)
        self.skip_scale = float(skip_lambda)
        if not self.skip_scale < 1.0:
            raise OptionError("skip_lambda", skip_lambda, "a number between 0 and 1 for constant")
        self.branch_scale = 1.0 - self.skip_scale

    def constants(self) -> dict[str, float]:
        return {"lambda": self.skip_scale, "alpha": self.branch_scale, **super().constants()}


@register("conv_shortcut")
class ConvShortcut(SkipConnection):
    """1x1 convolutional shortcut, ``y = G(W x + F)``: He et al. 2016b.

    In a Transformer it is a linear map. W is ``(dim, dim)`` and starts as He's initialisation with
    the fan-out draws it. Weight decay leaves it alone, where He et al. decay all weights.
    """

    default_norm = "none"

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.weight = self.new_parameter(self.draw(dim, dim) * (2.0 / dim) ** 0.5)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        return linear(x, self.channel_dim, self.weight) + f_x


@register("dropout_shortcut")
class DropoutShortcut(ConstantSkip):
    """Dropout shortcut, ``y = G(dropout(x) + F)``: He et al. 2016b.

    The paper's rate is 0.5, which fails to converge. Values that are not dropped are multiplied by
    1 / (1 - rate): the shortcut's expected scale is 1, where the paper argues from 0.5.
    """

    default_norm = "none"

    def __init__(
        self,
        dim: int,
        *,
        shortcut_dropout: Annotated[
            float, Between("rate of dropout on the shortcut", affects="training", below=True)
        ] = 0.5,
        **common: Unpack[Common],
    ):
        super().__init__(dim, shortcut_dropout=shortcut_dropout, **common)
        self.rate = float(shortcut_dropout)

    def sum_and_norm(
        self, x: Tensor, f_x: Tensor, carried: Any, padding_mask: Tensor | None
    ) -> Tensor:
        x = F.dropout(x, self.rate, self.training)
        return super().sum_and_norm(x, f_x, carried, padding_mask)

    def constants(self) -> dict[str, float]:
        return {"rate": self.rate, **super().constants()}


@register("laurel")
class LAuReL(SkipConnection):
    """LAuReL, ``y = G(a * F + b * x + B A x)``: residual weights (RW) and low rank (LR) together.

    Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer". a and b are scalars that start
    at 1, A is ``(rank, dim)`` and starts with standard deviation 1/sqrt(dim), B is ``(dim, rank)``
    and starts at 0: y is initially the plain sum. The paper's Eq. 5 has ``b (x + B A x)``, the same
    functions with B divided by b; it bounds a and b by a softmax or sigmoid, here they are free. In
    code wdlctc/hyper-connection-factory they are twice a softmax, which starts at 1.
    """

    default_norm = "none"

    def __init__(
        self,
        dim: int,
        *,
        rank: Annotated[int, Integer("rank of laurel's BA")] = 16,
        **common: Unpack[Common],
    ):
        super().__init__(dim, rank=rank, **common)
        rank = int(rank)
        self.branch_weight = self.new_parameter(torch.ones(1))
        self.skip_weight = self.new_parameter(torch.ones(1))
        self.low = self.new_parameter(self.draw(rank, dim) * dim**-0.5)
        self.high = self.new_parameter(torch.zeros(dim, rank))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        augmented = linear(linear(x, self.channel_dim, self.low), self.channel_dim, self.high)
        return self.branch_weight * f_x + self.skip_weight * x + augmented

    def constants(self) -> dict[str, float]:
        return {"rank": float(self.options.rank), **super().constants()}


@register("gru_gate")
class GRUGate(SkipConnection):
    """GRU gate, ``y = G(z * x + (1 - z) * n)``, ``n = tanh(W_n F + b_n + r * (U_n x + c_n))`` with
    the gates z and r, each ``sigmoid(W F + U x + b + c)``: a GRU cell whose input is F and whose
    state is x. z = 1 is x.

    W_r, W_z and W_n are the rows of ``branch_weight``, (3 dim, dim), and the U of
    ``stream_weight``; all start with standard deviation 1/sqrt(dim), the biases at 0, but for z's b
    at ``gate_bias``. Parisotto et al. 2020, "Stabilizing Transformers for Reinforcement Learning",
    arXiv 1910.06764, whose gate is 1 - z and whose b_g is 2: there n has no c_n and r multiplies x
    in U_n's product. The equation here is torch's GRUCell, as in codes lucidrains/hyper-connections
    and x-transformers (gate_residual), which draw b at random. It is the gate alone, in place of
    post-norm's sum; :class:`GTrXL` is the paper's block.
    """

    default_norm = "none"

    def __init__(self, dim: int, *, gate_bias: GateBias = 2.0, **common: Unpack[Common]):
        super().__init__(dim, gate_bias=gate_bias, **common)
        weights = self.draw(6 * dim, dim) * dim**-0.5
        bias = torch.zeros(3 * dim)
        bias[dim : 2 * dim] = float(gate_bias)
        self.branch_weight = self.new_parameter(weights[: 3 * dim])
        self.stream_weight = self.new_parameter(weights[3 * dim :])
        self.branch_bias = self.new_parameter(bias)
        self.stream_bias = self.new_parameter(torch.zeros(3 * dim))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        axis = self.channel_dim
        of_branch = linear(f_x, axis, self.branch_weight, self.branch_bias).chunk(3, axis)
        of_stream = linear(x, axis, self.stream_weight, self.stream_bias).chunk(3, axis)
        reset = torch.sigmoid(of_branch[0] + of_stream[0])
        update = torch.sigmoid(at_least_float32(of_branch[1] + of_stream[1]))
        new = torch.tanh(of_branch[2] + reset * of_stream[2])
        return update * x + (1.0 - update) * new


@register("gtrxl", also=("Gated Transformer-XL",))
class GTrXL(SkipConnection):
    """GTrXL, ``y = (1 - z) * x + z * n``, ``n = tanh(W_n R + U_n (r * x))`` with
    ``r = sigmoid(W_r R + U_r x)``, ``z = sigmoid(W_z R + U_z x - b_z)``, R = relu(F) and F of G(x):
    pre-norm with a GRU in place of the sum. z = 0 is x.

    W_r, W_z and W_n are the rows of ``branch_weight``, (3 dim, dim), and the U of
    ``stream_weight``; all start with standard deviation 1/sqrt(dim) (ours), b_z, of shape (dim,),
    at ``gate_bias``, so that a stack starts near its input. Parisotto et al. 2020, "Stabilizing
    Transformers for Reinforcement Learning", arXiv 1910.06764, the gate of type GRU; 2 for b_z is
    the paper's.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(self, dim: int, *, gate_bias: GateBias = 2.0, **common: Unpack[Common]):
        super().__init__(dim, gate_bias=gate_bias, **common)
        weights = self.draw(6 * dim, dim) * dim**-0.5
        self.branch_weight = self.new_parameter(weights[: 3 * dim])
        self.stream_weight = self.new_parameter(weights[3 * dim :])
        self.gate_bias = self.new_parameter(torch.full((dim,), float(gate_bias)))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        axis = self.channel_dim
        of_branch = linear(torch.relu(f_x), axis, self.branch_weight).chunk(3, axis)
        of_gates, of_new = self.stream_weight.split((2 * self.dim, self.dim))
        of_stream = linear(x, axis, of_gates).chunk(2, axis)
        reset = torch.sigmoid(of_branch[0] + of_stream[0])
        before = of_branch[1] + of_stream[1] - self.per_channel(self.gate_bias)
        update = torch.sigmoid(at_least_float32(before))
        new = torch.tanh(of_branch[2] + linear(reset * x, axis, of_new))
        return (1.0 - update) * x + update * new


@register("review", also=("review residual",))
class ReviewResidual(SkipConnection):
    """Review residual, ``y = x + g * F``, ``g = sigmoid(V x / rms(x) + W F / rms(F) + b)``, F of
    G(x).

    Kramer 2026, "Review Residuals: Update-Conditioned Residual Gating for Transformers", arXiv
    2606.31859, its additive form; code SixSigmaEngineer/review-residuals (``review_neutral``). V
    and W, ``state_weight`` and ``update_weight`` of shape (dim, dim), and b start at 0, where g =
    1/2; b at ``gate_bias``. g = 1 is pre-norm. V, W and b decay in that code, and not here.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(self, dim: int, *, gate_bias: GateBias = 0.0, **common: Unpack[Common]):
        super().__init__(dim, gate_bias=gate_bias, **common)
        self.state_weight = self.new_parameter(torch.zeros(dim, dim))
        self.update_weight = self.new_parameter(torch.zeros(dim, dim))
        self.gate_bias = self.new_parameter(torch.full((dim,), float(gate_bias)))

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        of_state = linear(self.over_rms(x), self.channel_dim, self.state_weight, self.gate_bias)
        of_update = linear(self.over_rms(f_x), self.channel_dim, self.update_weight)
        return x + torch.sigmoid(of_state + of_update) * f_x

    def over_rms(self, z: Tensor) -> Tensor:
        """z over the root mean square of its features."""
        return at_least_float32(z) / root_mean_square(z, self.eps, self.channel_dim)


@register("gpas", also=("gradient-preserving activation scaling",))
class GPAS(Weighted):
    """Gradient-preserving activation scaling, ``y = z - silu(g) * sg(z)``, ``z = x + F(G(x))``.

    sg is a stop-gradient: the gradient passes as through z. g, ``gate``, is a scalar of each layer
    that starts at 0, where the stack is pre-norm; both sublayers share it, as in code
    dandingsky/GPAS. Chen et al. 2025, "GPAS", arXiv 2506.22049, on pre-norm.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        self.gate = self.new_parameter(torch.zeros(1))

    def share_with(self, first: SkipConnection) -> None:
        if isinstance(first, GPAS):
            self.gate = first.gate

    def removed(self) -> Tensor:
        """silu(g), the share of z that is subtracted."""
        return F.silu(self.gate)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        z = x + f_x
        return z - self.removed() * z.detach()

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of y's value, for :meth:`coefficients`; ``combine`` has the stop-gradient."""
        share = 1.0 - self.removed()
        return share, share


@register("orthogonal", also=("orthogonal residual", "ortho-residual"))
class Orthogonal(SkipConnection):
    """Orthogonal residual update, ``y = x + F - <F, x> / (|x|^2 + eps) * x``, F of G(x).

    The products are those over the features of each position: Oh et al. 2025, "Revisiting Residual
    Connections: Orthogonal Updates for Stable and Efficient Deep Networks", arXiv 2505.11881, its
    feature-wise form, the default of code BootsofLagrangian/ortho-residual (there eps is 1e-6), but
    for its ResNet, which projects over a whole example, as x-transformers does: here images, too,
    project at each position.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        along = (x * f_x).sum(self.channel_dim, keepdim=True)
        square = (x * x).sum(self.channel_dim, keepdim=True)
        return x + f_x - along / (square + self.eps) * x


@register("ddl", also=("deep delta learning", "delta residual"))
class DeltaResidual(SkipConnection):
    """Deep delta learning, ``y = x + b * (v - <k, x>) * k``, ``k = F / |F|``,
    ``b = 2 sigmoid(w_b . G(x) + c_b)``, ``v = 4 sigmoid(w_v . x + c_v)``, F of G(x): arXiv
    2601.00417, as in the authors' scalar-value code, yifanzhang-pro/deep-delta-learning,
    ``DDL-vdim1-gpt-mha-rope.py``; in the paper's appendix v is linear in G(x). c_b starts at 0, so
    that b = 1; w_b and w_v, of shape (1, dim), and c_v at 0, so that v = 2 (ours; there at random).

    The branch's length does not matter: each block writes a vector of length about 2. Beside a
    stream whose entries have size 1, as fairseq's embedding makes them, that is a small step; in
    the authors' code the embedding's entries start at 0.02, and 12 blocks outgrow it.
    """

    norms = all_norms(without=("batch",))
    slots = ("pre",)

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        refuse_drop_path(self)
        self.gate_weight = self.new_parameter(torch.zeros(1, dim))
        self.gate_bias = self.new_parameter(torch.zeros(1))
        self.value_weight = self.new_parameter(torch.zeros(1, dim))
        self.value_bias = self.new_parameter(torch.zeros(1))

    def prepare(self, x: Tensor) -> tuple[Tensor, Any]:
        h, _ = super().prepare(x)
        return h, (h,)

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        if carried is None:  # forward was called without prepare
            _, carried = self.prepare(x)
        h = at_least_float32(carried[0])
        x, f_x = at_least_float32(x), at_least_float32(f_x)
        gate = 2.0 * torch.sigmoid(linear(h, self.channel_dim, self.gate_weight, self.gate_bias))
        value = 4.0 * torch.sigmoid(linear(x, self.channel_dim, self.value_weight, self.value_bias))
        k = f_x * (f_x.square().sum(self.channel_dim, keepdim=True) + self.eps**2).rsqrt()
        return x + gate * (value - (k * x).sum(self.channel_dim, keepdim=True)) * k


def linear(x: Tensor, channel_dim: int, weight: Tensor, bias: nn.Parameter | None = None) -> Tensor:
    """``W x + b`` over the features of each position, W of shape ``(out, dim)``."""
    cast_bias = None if bias is None else bias.to(x.dtype)
    if channel_dim == 1:
        return F.conv2d(x, weight.to(x.dtype)[:, :, None, None], cast_bias)
    return F.linear(x, weight.to(x.dtype), cast_bias)
