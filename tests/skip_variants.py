"""Every skip variant with its equation written out, and normalisations made of elementary sums.

The normalisations are in float64. The references share nothing with the package: gradients come
from autograd through plain arithmetic in float64.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_rskip.flags import label
from fairseq_rskip.residual import KINDS, Place, SkipConnection, create_skip

# y of x, F, the norms G (by step) and the parameters (by name), all on rows (positions, dim);
# p["hold"] of a gate is the gate, or the gate as a constant
Equation = Callable[[Tensor, Tensor, list[Callable[[Tensor], Tensor]], dict[str, Any]], Tensor]


class Variant(NamedTuple):
    """Options of one skip connection and its equation."""

    options: dict[str, Any]
    equation: Equation

    def build(self, dim: int, seed: int = 0, **layout) -> SkipConnection:
        """Build the variant with every parameter drawn at random.

        So no gain is 1 and no bias is 0.
        """
        skip = create_skip(dim=dim, **self.options, **layout)
        with torch.no_grad():
            for name, parameter in skip.named_parameters():
                generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
                parameter.uniform_(0.5, 1.5, generator=generator)
                is_vector = name in skip.learned() and parameter.dim() == 1
                if is_vector and not name.startswith("shares.") and not name.endswith("bias"):
                    signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
                    parameter.mul_(signs)  # a rule that takes |w| for w would not show
        skip.set_num_updates(700)
        return skip

    @property
    def kind(self) -> str:
        return self.options["kind"]

    @property
    def norm(self) -> str:
        return create_skip(dim=1, **self.options).options.norm

    @property
    def name(self) -> str:
        return label(create_skip(dim=1, **self.options))


def row(kind: str, equation: Equation, **options: Any) -> Variant:
    return Variant({"kind": kind, **options}, equation)


VARIANTS = [
    row("xskip", lambda x, f, g, p: x + f, skip_lambda=1, norm="none"),
    row("xskip", lambda x, f, g, p: 2.5 * x + f, skip_lambda=2.5, norm="none"),
    row(
        "xskip", lambda x, f, g, p: 0.5 * x + 3 * f, skip_lambda=0.5, norm="none", branch_scale=3.0
    ),
    row("xskip", lambda x, f, g, p: g[0](2 * x + f), skip_lambda=2, norm="layer"),
    row("xskip", lambda x, f, g, p: g[0](x + 2 * f), skip_lambda=1, norm="layer", branch_scale=2.0),
    row(
        "xskip",
        lambda x, f, g, p: g[0](3 * x + 0.5 * f),
        skip_lambda=3,
        norm="batch",
        branch_scale=0.5,
    ),
    row("rskip", lambda x, f, g, p: g[0](x + f), skip_lambda=1),
    row("rskip", lambda x, f, g, p: g[1](x + g[0](x + f)), skip_lambda=2),
    row(
        "rskip",
        lambda x, f, g, p: g[2](x + g[1](x + g[0](x + 0.5 * f))),
        skip_lambda=3,
        branch_scale=0.5,
    ),
    row("rskip", lambda x, f, g, p: g[1](x + g[0](x + f)), skip_lambda=2, norm="batch"),
    row(
        "rskip",
        lambda x, f, g, p: steps(x, 2 * f, g[:3])[2],
        skip_lambda=3,
        norm="batch",
        branch_scale=2.0,
    ),
    row("wskip", lambda x, f, g, p: p["weight"] * x + f, init=1, norm="none"),
    row("wskip", lambda x, f, g, p: g[0](p["weight"] * x + f), init=2, norm="layer"),
    row(
        "wskip",
        lambda x, f, g, p: g[0](p["weight"] * x + 2 * f),
        init=1,
        norm="batch",
        branch_scale=2.0,
    ),
    row("preln", lambda x, f, g, p: 2 * x + 0.5 * f, skip_lambda=2, branch_scale=0.5),
    row("periln", lambda x, f, g, p: x + g[0](f)),
    row("outln", lambda x, f, g, p: x + g[0](f), norm="rms"),
    row("lnscale", lambda x, f, g, p: x + f, place=Place()),
    row("mixln", lambda x, f, g, p: x + f, post_share=0, place=Place()),
    row("mixln", lambda x, f, g, p: g[0](x + f), post_share=1, place=Place()),
]
for _norm in ("rms", "scale", "ada", "dyt", "derf"):
    VARIANTS += [
        row("xskip", lambda x, f, g, p: g[0](2 * x + f), skip_lambda=2, norm=_norm),
        row("rskip", lambda x, f, g, p: g[1](x + g[0](x + f)), skip_lambda=2, norm=_norm),
    ]
# a rival has its own defaults but for options, in the last sublayer of the third of six encoder
# layers
PLACE = Place(
    "encoder", "ffn", index=2, depth=6, other_depth=6, other_sublayers=3, position=1, sublayers=2
)
rival = functools.partial(row, place=PLACE)


def steps(x, f, g):
    """y_1 ... y_K of Eq. 4."""
    actual = [g[0](x + f)]
    for norm in g[1:]:
        actual.append(norm(x + actual[-1]))
    return actual


def fraction(x, f, g, p):
    value, y = p["shares.start"] + p["shares.moved"], steps(x, f, g)
    below = int(value)
    return (1 - (value - below)) * y[below - 1] + (value - below) * y[below]


def mixture(x, f, g, p):
    weights = torch.exp(p["shares.start"] + p["shares.moved"])
    return sum(w * y for w, y in zip(weights / weights.sum(), steps(x, f, g)))


def halting(x, f, g, p):
    biases = p["shares.start"] + p["shares.moved"]
    total, left = 0, 1
    for k, y in enumerate(steps(x, f, g)):
        last = k == len(g) - 1
        halt = 1 if last else p["hold"](sigmoid(y @ p["shares.direction"] + biases[k])).unsqueeze(1)
        total, left = total + left * halt * y, left * (1 - halt)
    return total


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def gate(x, p):
    return p["hold"](sigmoid(x @ p["gate_weight"].T + p["gate_bias"]))


def gpas(x, f, p):
    held = (
        x + f if p["hold"] is torch.Tensor.detach else (x + f).detach()
    )  # with all else held, y is linear in x and F
    return x + f - p["gate"] * sigmoid(p["gate"]) * held


def ddl(x, f, p):
    h = standardise(x, [1], 1e-5) * p["pre.weight"] + p["pre.bias"] if "pre.weight" in p else x
    gate = 2 * sigmoid(h @ p["gate_weight"].T + p["gate_bias"])
    value = 4 * sigmoid(x @ p["value_weight"].T + p["value_bias"])
    k = f / ((f * f).sum(1, keepdim=True) + 1e-10) ** 0.5
    return x + gate * (value - (k * x).sum(1, keepdim=True)) * k


def ngpt(x, f, p):
    d = x.size(1)
    x, f = (z / ((z * z).sum(1, keepdim=True) / d) ** 0.5 for z in (x, f))
    y = x + 0.05 * d**0.5 * p["weight"].abs() * (f - x)
    return y / ((y * y).sum(1, keepdim=True) / d) ** 0.5


def turn(angle, x, f, g):
    """The fixed and the learned angle, f normalised already."""
    angle = torch.as_tensor(angle, dtype=x.dtype)
    return g(torch.cos(angle) * x + torch.sin(angle) * f)


def over_rms(z):
    return z / ((z * z).mean(1, keepdim=True) + 1e-5) ** 0.5


def review(x, f, p):
    logit = over_rms(x) @ p["state_weight"].T + over_rms(f) @ p["update_weight"].T
    return x + p["hold"](sigmoid(logit + p["gate_bias"])) * f


def gru(x, f, p):
    of_branch = (f @ p["branch_weight"].T + p["branch_bias"]).split(x.size(1), 1)
    of_stream = (x @ p["stream_weight"].T + p["stream_bias"]).split(x.size(1), 1)
    reset = sigmoid(of_branch[0] + of_stream[0])
    kept = sigmoid(of_branch[1] + of_stream[1])
    new = 2 * sigmoid(2 * (of_branch[2] + reset * of_stream[2])) - 1
    return kept * x + (1 - kept) * new


def gtrxl(x, f, p):
    """Parisotto et al. 2020, the gate of type GRU, of relu(F)."""
    y = f * (f > 0)
    w_r, w_z, w_g = p["branch_weight"].split(x.size(1), 0)
    u_r, u_z, u_g = p["stream_weight"].split(x.size(1), 0)
    r = sigmoid(y @ w_r.T + x @ u_r.T)
    z = sigmoid(y @ w_z.T + x @ u_z.T - p["gate_bias"])
    h = 2 * sigmoid(2 * (y @ w_g.T + (r * x) @ u_g.T)) - 1
    return (1 - z) * x + z * h


def length(z):
    return ((z * z).sum(1, keepdim=True) + 1e-10) ** 0.5


def geonorm(x, f, p, layer):
    """A turn by an angle of at most pi/4 in the plane of x and F."""
    across = f - (x * f).sum(1, keepdim=True) / length(x) ** 2 * x
    quarter = torch.full_like(x[:, :1], math.pi / 4)
    angle = torch.minimum(length(across) / length(x), quarter)
    angle = torch.minimum((p["scale"] * angle + p["shift"]) / layer, quarter)
    return torch.cos(angle) * x + torch.sin(angle) * length(x) * across / length(across)


def nag(x, f, p):
    d = x.size(1)
    unit = lambda z: z / ((z * z).mean(1, keepdim=True) + 1e-10) ** 0.5  # noqa: E731
    r = unit(x)
    f = f - f.sum(1, keepdim=True) / d
    u = unit(f - (f * r).sum(1, keepdim=True) / d * r)
    shares = torch.exp(p["direction_logit"]) / torch.exp(p["direction_logit"]).sum()
    m = (sigmoid(r @ p["direction"].T + p["direction_bias"]) * shares).sum(1, keepdim=True)
    return x + ((x * x).mean(1, keepdim=True) + 1e-10) ** 0.5 * p["weight"] * m * u


def along(f, x):
    """The part of F along x."""
    return (x * f).sum(1, keepdim=True) / ((x * x).sum(1, keepdim=True) + 1e-5) * x


def laurel(x, p):
    return p["skip_weight"] * x + x @ p["low"].T @ p["high"].T


VARIANTS += [
    rival("ddl", lambda x, f, g, p: ddl(x, f, p)),
    rival("gru_gate", lambda x, f, g, p: gru(x, f, p)),
    rival("gtrxl", lambda x, f, g, p: gtrxl(x, f, p)),
    rival("review", lambda x, f, g, p: review(x, f, p)),
    rival("geonorm", lambda x, f, g, p: geonorm(x, f, p, 3)),
    rival("nag", lambda x, f, g, p: nag(x, f, p)),
    rival("completep", lambda x, f, g, p: x + f * 2 / 6),
    rival("completep", lambda x, f, g, p: x + f / 2**0.5, depth_exponent=0.5, base_depth=3),
    rival("angle", lambda x, f, g, p: turn(0.7 / 12**0.5, x, g[0](f), g[1]), angle=0.7),
    rival(
        "angle",
        lambda x, f, g, p: turn(1.2 / 12, x, g[0](f), g[1]),
        angle=1.2,
        angle_exponent=1.0,
        norm="rms",
    ),
    rival("learned_angle", lambda x, f, g, p: turn(p["weight"], x, g[0](f), g[1])),
    rival("keel", lambda x, f, g, p: g[0](12 * x + f)),
    rival("prores", lambda x, f, g, p: x + 700 / 3000 * f),
    rival("branchnorm", lambda x, f, g, p: g[0](x + 700 / 4000 * f)),
    rival("ngpt", lambda x, f, g, p: ngpt(x, f, p)),
    rival("gpas", lambda x, f, g, p: gpas(x, f, p)),
    rival("orthogonal", lambda x, f, g, p: x + f - along(f, x)),
    rival("skipinit", lambda x, f, g, p: x + p["weight"] * f),
    rival("rezero", lambda x, f, g, p: x + p["weight"] * f),
    rival("layerscale", lambda x, f, g, p: x + p["weight"] * f),
    rival("residual_scaling", lambda x, f, g, p: x + 0.1 * f),
    rival("scaled", lambda x, f, g, p: x + f / 12**0.5),
    rival("learned_scalar", lambda x, f, g, p: g[0](x + p["weight"] * f), norm="layer"),
    rival("deepnorm", lambda x, f, g, p: g[0](0.81 * (6**4 * 6) ** (1 / 16) * x + f)),
    rival("admin", lambda x, f, g, p: g[0](p["weight"] * x + f)),
    rival("fixup", lambda x, f, g, p: x + p["scale"] * f + p["bias_out"]),
    rival("tfixup", lambda x, f, g, p: x + f),
    rival("gpt2", lambda x, f, g, p: x + f),
    rival("highway", lambda x, f, g, p: gate(x, p) * f + (1 - gate(x, p)) * x),
    rival(
        "exclusive_gate",
        lambda x, f, g, p: g[0](gate(x, p) * f + (1 - gate(x, p)) * x),
        norm="layer",
    ),
    rival("shortcut_gate", lambda x, f, g, p: f + (1 - gate(x, p)) * x),
    rival("constant", lambda x, f, g, p: 0.25 * x + 0.75 * f, skip_lambda=0.25),
    rival("conv_shortcut", lambda x, f, g, p: x @ p["weight"].T + f),
    rival("dropout_shortcut", lambda x, f, g, p: x + f, shortcut_dropout=0.0),
    rival("askip", fraction, skip_lambda=1.25, max_steps=3),
    rival("askip", mixture, adapt="mixture", max_steps=3),
    rival("askip", halting, adapt="halting", max_steps=3),
    rival("askip", lambda x, f, g, p: steps(x, f, g)[1], adapt="gradient", max_steps=3),
    rival("laurel", lambda x, f, g, p: laurel(x, p) + p["branch_weight"] * f, rank=2),
]
IMAGED = [variant for variant in VARIANTS if KINDS[variant.kind].for_images]
MIXING = (
    "conv_shortcut",
    "laurel",
    "orthogonal",
    "ddl",
    "ngpt",
    "gru_gate",
    "gtrxl",
    "review",
    "geonorm",
    "nag",
)  # y mixes the features of x: no coefficient, no ratio
# nor through a recursion whose steps are a tanh
WITHOUT_RATIO = {
    v.name for v in VARIANTS if v.kind in MIXING or v.name in ("rskip2-dyt", "rskip2-derf")
}
NAMES = [variant.name for variant in VARIANTS]
SEQUENCE, IMAGE = (4, 3, 5), (2, 5, 3, 2)


class Case(NamedTuple):
    """A variant on one layout, with or without padding."""

    variant: Variant
    shape: tuple
    axes: str = "c"
    masked: bool = False

    @property
    def channel_dim(self) -> int:
        return 1 if len(self.shape) == 4 else -1

    def build(self, **options) -> SkipConnection:
        dim = self.shape[self.channel_dim]
        return self.variant.build(dim, channel_dim=self.channel_dim, norm_axes=self.axes, **options)

    def mask(self) -> Tensor | None:
        """A third of the positions or fewer, never all but one."""
        if not self.masked:
            return None
        positions = torch.zeros(self.shape).select(self.channel_dim, 0)
        return (torch.arange(positions.numel()) % 3 == 1).view(positions.shape)

    @property
    def name(self) -> str:
        layout = {-1: "sequence", 1: f"image-{self.axes}"}[self.channel_dim]
        return f"{self.variant.name}-{layout}{'-masked' if self.masked else ''}"


CASES = [Case(v, SEQUENCE) for v in VARIANTS]
CASES += [Case(v, IMAGE) for v in IMAGED]
CASES += [case._replace(masked=True) for case in CASES if case.variant.norm == "batch"]
CASES += [
    Case(v, IMAGE, "chw")
    for v in VARIANTS
    if v.norm == "layer" and v.kind in ("xskip", "rskip", "wskip")
]
CASE_NAMES = [case.name for case in CASES]


def draw(shape, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def to_rows(x: Tensor, channel_dim: int) -> Tensor:
    return x.movedim(channel_dim, -1).reshape(-1, x.size(channel_dim))


def from_rows(rows: Tensor, like: Tensor, channel_dim: int) -> Tensor:
    return rows.view(like.movedim(channel_dim, -1).shape).movedim(-1, channel_dim)


def standardise(z: Tensor, axes: list[int], eps: float, hold=lambda statistic: statistic) -> Tensor:
    count = z.numel() / z.sum(axes).numel()
    mean = hold(z.sum(axes, keepdim=True) / count)
    return (z - mean) / (
        hold(((z - mean) * (z - mean)).sum(axes, keepdim=True) / count) + eps
    ) ** 0.5


def ada(z: Tensor, own: dict[str, Tensor], eps: float, hold) -> Tensor:
    z = z - hold(z.sum(1, keepdim=True) / z.size(1))
    z = z / (hold(((z * z).sum(1, keepdim=True) / max(z.size(1) - 1, 1)) ** 0.5) + eps)
    return (1 - z.detach() / 10) * z


ROW_NORMS: dict[str, Callable[..., Tensor]] = {
    "rms": lambda z, own, eps, hold: (
        z / hold(((z * z).sum(1, True) / z.size(1) + eps) ** 0.5) * own["weight"]
    ),
    "scale": lambda z, own, eps, hold: (
        own["weight"] * z / hold((z * z).sum(1, True) ** 0.5).clamp(min=eps)
    ),
    "ada": ada,
    "dyt": lambda z, own, eps, hold: (
        (1 - 2 / ((2 * own["alpha"] * z).exp() + 1)) * own["weight"] + own["bias"]
    ),
    "derf": lambda z, own, eps, hold: (
        torch.erf(own["alpha"] * z + own["shift"]) * own["weight"] + own["bias"]
    ),
}


def reference_norm(
    case: Case, own: dict[str, Tensor], hold, eps: float = 1e-5
) -> Callable[[Tensor], Tensor]:
    """Return G, with its parameters ``own``, on rows ``(positions, dim)``.

    ``hold`` is given its statistics.
    """
    mask = case.mask()
    keep = slice(None) if mask is None else (~mask).flatten()

    def layer(z: Tensor) -> Tensor:
        cells = z.view(case.shape[0] if case.axes == "chw" else len(z), -1, z.size(1))
        return standardise(cells, [1, 2], eps, hold).view(z.shape) * own["weight"] + own["bias"]

    def batch(z: Tensor) -> Tensor:
        y = torch.zeros_like(z)
        y[keep] = standardise(z[keep], [0], eps, hold) * own["weight"] + own["bias"]
        return y

    by_row = ROW_NORMS.get(case.variant.norm)
    return {"layer": layer, "batch": batch}.get(
        case.variant.norm, lambda z: by_row(z, own, eps, hold)
    )


def reference(
    case: Case, skip: SkipConnection, x: Tensor, f: Tensor, parameters: dict, freeze: bool = False
) -> Tensor:
    """Return the variant's equation in float64.

    ``parameters`` are by name, as ``skip.named_parameters()`` has them; ``freeze`` makes statistics
    and gates constants.
    """
    hold = torch.Tensor.detach if freeze else lambda statistic: statistic
    prefixes = [
        f"{name}." for name, _ in skip.named_modules() if name.startswith(("post.", "branch"))
    ]
    owned = [
        {name[len(p) :]: value for name, value in parameters.items() if name.startswith(p)}
        for p in prefixes
    ]
    norms = [reference_norm(case, own, hold) for own in owned]
    rows, f_rows = to_rows(x, case.channel_dim), to_rows(f, case.channel_dim)
    parameters = {
        **{name: buffer.double() for name, buffer in skip.named_buffers()},
        **parameters,
        "hold": hold,
    }
    return from_rows(case.variant.equation(rows, f_rows, norms, parameters), x, case.channel_dim)


def gradients(y: Tensor, upstream: Tensor, tensors) -> list[Tensor]:
    return list(
        torch.autograd.grad(y, tensors, upstream, allow_unused=True, materialize_grads=True)
    )
