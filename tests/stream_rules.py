"""What whole stacks of the rules that keep more than one tensor compute.

It is written out in elementary float64 arithmetic; beside it is such a stack of the package's. The
references share nothing with the package; gradients come from autograd.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from skip_variants import draw
from torch import Tensor, nn

from fairseq_rskip.residual import Place, create_skip

EPS = 1e-5
PARTS = ("pre", "post", "res")  # of mHC: what reads, what is written, what stays


class Blocks(NamedTuple):
    """What a reference is given.

    That is the branches F_k, the shape of the stack and the parameters by block and name.
    """

    branches: list[Callable[[Tensor], Tensor]]
    depth: int
    sublayers: int
    parameters: dict[str, Tensor]

    def get(self, k: int, name: str) -> Tensor:
        return self.parameters[f"skips.{k}.{name}"]

    def norm(self, k: int, name: str, z: Tensor) -> Tensor:
        mean = z.sum(-1, keepdim=True) / z.size(-1)
        var = ((z - mean) * (z - mean)).sum(-1, keepdim=True) / z.size(-1)
        return (z - mean) / (var + EPS) ** 0.5 * self.get(k, f"{name}.weight") + self.get(
            k, f"{name}.bias"
        )

    def branch(self, k: int, z: Tensor) -> Tensor:
        """F of the normalised z."""
        return self.branches[k](self.norm(k, "pre", z))


def b2t(x: Tensor, blocks: Blocks) -> Tensor:
    for layer in range(blocks.depth):
        x0 = x
        for position in range(blocks.sublayers):
            k = layer * blocks.sublayers + position
            z = x + blocks.branches[k](x)
            if 0 < position == blocks.sublayers - 1:
                z = x0 + z
            x = blocks.norm(k, "post.0", z)
    return x


def residual_dual(x: Tensor, blocks: Blocks) -> Tensor:
    r = x
    for k, branch in enumerate(blocks.branches):
        f = branch(x)
        x, r = blocks.norm(k, "post.0", x + f), r + f
    return x + blocks.norm(len(blocks.branches) - 1, "dual_norm", r)


def x0(x: Tensor, blocks: Blocks) -> Tensor:
    first = x
    for k in range(len(blocks.branches)):
        x = blocks.get(k, "r") * x + blocks.branch(k, x) + blocks.get(k, "s") * first
    return x


def siamesenorm(x: Tensor, blocks: Blocks) -> Tensor:
    y, last = x, len(blocks.branches) - 1
    for k in range(last + 1):
        x = blocks.norm(k, "x_norm", x)
        z = blocks.branch(k, x + blocks.norm(k, "y_norm", y))
        x, y = x + z / (blocks.sublayers * (k // blocks.sublayers + 1)) ** 0.5, y + z
    return blocks.norm(last, "last_x_norm", x) + blocks.norm(last, "last_y_norm", y)


def by_layers(x: Tensor, stored: Tensor, blocks: Blocks, norm: str = "") -> Tensor:
    """Compute pre-norm layers from x on.

    After block k, a layer's last, what is stored so far is mixed into the next x.
    """
    history = [stored]
    for k in range(len(blocks.branches)):
        x = x + blocks.branch(k, x)
        if (k + 1) % blocks.sublayers == 0:
            history.append(blocks.norm(k, norm, x) if norm else x)
            x = sum(weight * h for weight, h in zip(blocks.get(k, "weight"), history))
    return x


def dlcl(x: Tensor, blocks: Blocks) -> Tensor:
    stored = blocks.norm(0, "input_norm", x)
    return by_layers(blocks.get(0, "first_weight") * stored, stored, blocks, "layer_norm")


def attnres(x: Tensor, blocks: Blocks, size: int = 1) -> Tensor:
    values = [x]
    for k in range(len(blocks.branches)):
        f = blocks.branch(k, x)
        values = [*values, f] if k % size == 0 else [*values[:-1], values[-1] + f]
        scores = [
            (blocks.get(k, "query") * v).sum(-1) / ((v * v).mean(-1) + EPS) ** 0.5 for v in values
        ]
        total = sum(torch.exp(s) for s in scores)
        x = sum((torch.exp(s) / total).unsqueeze(-1) * v for s, v in zip(scores, values))
    return x


def rms(z: Tensor) -> Tensor:
    return ((z * z).mean(-1, keepdim=True) + EPS) ** 0.5


def shares(scores: list[Tensor]) -> list[Tensor]:
    total = sum(torch.exp(score) for score in scores)
    return [torch.exp(score) / total for score in scores]


def mhar(x: Tensor, blocks: Blocks, heads: int, temperature: float = 1.0, size: int = 1) -> Tensor:
    """Each group of channels with a softmax of its own; rms over all channels."""
    width = x.size(-1) // heads
    values = [x]
    for k in range(len(blocks.branches)):
        f = blocks.branch(k, x)
        values = [*values, f] if k % size == 0 else [*values[:-1], values[-1] + f]
        groups = []
        for first in range(0, x.size(-1), width):
            part = slice(first, first + width)
            query = blocks.get(k, "query")[part]
            scores = [(query * (v / rms(v))[..., part]).sum(-1) / temperature for v in values]
            weighted = zip(shares(scores), values)
            groups.append(sum(p.unsqueeze(-1) * v[..., part] for p, v in weighted))
        x = torch.cat(groups, -1)
    return x


def delta_attnres(x: Tensor, blocks: Blocks) -> Tensor:
    """Compute the ordinary pre-norm sum.

    Its branches also read a mixture of what earlier branches returned.
    """
    values = [x]
    for k in range(len(blocks.branches)):
        read = x
        if k > 0:
            query = blocks.get(k, "query")
            scores = [(query * v / rms(v)).sum(-1, keepdim=True) for v in values]
            gate = blocks.parameters.get(f"skips.{k}.gate", 1.0)
            read = x + gate * sum(p * v for p, v in zip(shares(scores), values))
        f = blocks.branch(k, read)
        x = x + f
        values.append(f)
    return x


def gelu(z: Tensor) -> Tensor:
    return z * (1 + torch.erf(z / 2**0.5)) / 2


def mudd(x: Tensor, blocks: Blocks) -> Tensor:
    """Compute pre-norm layers.

    After each, what is stored so far is mixed with weights of the newest output.
    """
    history = [x]
    for k in range(len(blocks.branches)):
        x = x + blocks.branch(k, x)
        if (k + 1) % blocks.sublayers == 0:
            history.append(x)
            hidden = gelu((x / rms(x)) @ blocks.get(k, "w1").T)
            weights = blocks.get(k, "weight") + hidden @ blocks.get(k, "w2").T
            x = sum(weights[..., j, None] * h for j, h in enumerate(history))
    return x


def spannorm(x: Tensor, blocks: Blocks) -> Tensor:
    for layer in range(blocks.depth):
        x0 = x
        for position in range(blocks.sublayers):
            k = layer * blocks.sublayers + position
            f = blocks.branch(k, x) if k == 0 else blocks.branches[k](x)
            is_last = position == blocks.sublayers - 1
            x = blocks.norm(k, "post.0", (x0 if is_last else x) + f)
    return x


def gated(blocks: Blocks, k: int, rows: list[Tensor], weights: list[Tensor]) -> list[list[Tensor]]:
    """A_m, A_r and B of block k, for each of the rows of H, with what tanh(N(H) W) adds to them."""
    matrices = [[blocks.get(k, name)[i] for i in range(len(rows))] for name in ("a_m", "a_r", "b")]
    if not weights:
        return matrices
    normed = [blocks.norm(k, "gate_norm", h) for h in rows]
    scales = [blocks.get(k, name) for name in ("s_a", "s_a", "s_b")]
    return [
        [a + s * torch.tanh(h @ w) for a, h in zip(m, normed)]
        for m, s, w in zip(matrices, scales, weights)
    ]


def mixed(matrix: list[Tensor], rows: list[Tensor], j: int) -> Tensor:
    return sum(a[..., j, None] * h for a, h in zip(matrix, rows))


def hyper(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "b"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        names = ("w_m", "w_r", "w_b") if "skips.0.w_m" in blocks.parameters else ()
        read, kept, written = gated(blocks, k, streams, [blocks.get(k, name) for name in names])
        f = blocks.branch(k, sum(a * h for a, h in zip(read, streams)))
        streams = [mixed(kept, streams, j) + written[j] * f for j in range(n)]
    return sum(streams)


def fractional(x: Tensor, blocks: Blocks) -> Tensor:
    for k in range(len(blocks.branches)):
        m = len(blocks.get(k, "b"))
        rows = x.split(x.size(-1) // m, -1)
        read, kept, written = gated(blocks, k, rows, blocks.get(k, "weight").split([m, m, 1], 1))
        f = blocks.branch(k, torch.cat([mixed(read, rows, j) for j in range(m)], -1)).split(
            x.size(-1) // m, -1
        )
        x = torch.cat([mixed(kept, rows, j) + written[j] * f[j] for j in range(m)], -1)
    return x


def sinkhorn(res: Tensor, n: int) -> list[list[Tensor]]:
    matrix = [[torch.exp(res[..., i * n + j]) for j in range(n)] for i in range(n)]
    for _ in range(20):
        columns = [sum(matrix[i][j] for i in range(n)) for j in range(n)]
        matrix = [[matrix[i][j] / columns[j] for j in range(n)] for i in range(n)]
        matrix = [[entry / sum(line) for entry in line] for line in matrix]
    return matrix


def permutations(res: Tensor, n: int) -> list[list[Tensor]]:
    share, every = (
        torch.exp(res) / torch.exp(res).sum(-1, keepdim=True),
        list(itertools.permutations(range(n))),
    )
    return [
        [sum(share[..., k] for k, p in enumerate(every) if p[i] == j) for j in range(n)]
        for i in range(n)
    ]


def kronecker(res: Tensor, n: int) -> list[list[Tensor]]:
    """Return the matrix whose entry (i, j) is a product over the bits of i and j.

    A factor is p where they agree, 1 - p where they do not.
    """
    bits = n.bit_length() - 1
    stay = [1 / (1 + torch.exp(res[..., 2 * k + 1] - res[..., 2 * k])) for k in range(bits)]
    factors = [
        (p, 1 - p) for p in reversed(stay)
    ]  # by whether a bit differs; the first factor is the highest bit
    return [
        [math.prod(f[(i ^ j) >> k & 1] for k, f in enumerate(factors)) for j in range(n)]
        for i in range(n)
    ]


def weights_of_mhc(blocks: Blocks, k: int, streams: list[Tensor], doubly_stochastic):
    """What block k reads with, its mixing matrix and what it writes with, of its streams."""
    whole = torch.cat(streams, -1)
    whole = whole / ((whole * whole).mean(-1, keepdim=True) + EPS) ** 0.5
    phi, alpha, b = (
        [blocks.get(k, f"{name}_{part}") for part in PARTS] for name in ("phi", "alpha", "b")
    )
    pre, post, res = (alpha[i] * (whole @ phi[i]) + b[i].flatten() for i in range(3))
    matrix = doubly_stochastic(res, len(streams))
    return 1 / (1 + torch.exp(-pre)), matrix, 2 / (1 + torch.exp(-post))


def weighted_sum(weights: Tensor, streams: list[Tensor]) -> Tensor:
    return sum(weights[..., i, None] * stream for i, stream in enumerate(streams))


def after_mhc(streams: list[Tensor], matrix, written: Tensor, f: Tensor) -> list[Tensor]:
    n = len(streams)
    lines = [sum(matrix[i][j][..., None] * streams[j] for j in range(n)) for i in range(n)]
    return [lines[i] + written[..., i, None] * f for i in range(n)]


def mhc(x: Tensor, blocks: Blocks, doubly_stochastic=sinkhorn) -> Tensor:
    streams = [x] * len(blocks.get(0, "b_pre"))
    for k in range(len(blocks.branches)):
        read, matrix, written = weights_of_mhc(blocks, k, streams, doubly_stochastic)
        f = blocks.branch(k, weighted_sum(read, streams))
        streams = after_mhc(streams, matrix, written, f)
    return sum(streams)


def single_pass_mhc(x: Tensor, blocks: Blocks, doubly_stochastic=sinkhorn) -> Tensor:
    """X_{l+1} = B_l X_l + C_l F_l(A_{l-1} X_l) from n copies of x on; the first A is one-hot."""
    n = len(blocks.get(0, "b_pre"))
    streams, read_before = [x] * n, torch.eye(n, dtype=x.dtype)[0]
    for k in range(len(blocks.branches)):
        read, matrix, written = weights_of_mhc(blocks, k, streams, doubly_stochastic)
        f = blocks.branch(k, weighted_sum(read_before, streams))
        streams, read_before = after_mhc(streams, matrix, written, f), read
    return weighted_sum(read_before, streams)


def hamilton(p: list[Tensor], q: list[Tensor]) -> list[Tensor]:
    """The product of two quaternions a + bi + cj + dk."""
    (a, b, c, d), (e, f, g, h) = p, q
    return [
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    ]


def quaternions(res: Tensor, n: int) -> list[list[Tensor]]:
    """Column j is where p 1_j q goes."""
    p, q = res[..., :4], res[..., 4:]
    p, q = (list((z / (z * z).sum(-1, keepdim=True) ** 0.5).unbind(-1)) for z in (p, q))
    one, none = torch.ones_like(p[0]), torch.zeros_like(p[0])
    units = [[one if i == j else none for i in range(n)] for j in range(n)]
    columns = [hamilton(hamilton(p, unit), q) for unit in units]
    return [[columns[j][i] for j in range(n)] for i in range(n)]


def cayley(res: Tensor, n: int) -> list[list[Tensor]]:
    """Two steps towards the Cayley transform: 1 + z + z^2/2 + z^3/4 of z = 0.1 (Q - Q^T)."""
    q = res.unflatten(-1, [n, n])
    z = 0.1 * (q - q.transpose(-1, -2))
    matrix = torch.eye(n, dtype=q.dtype) + z + z @ z / 2 + z @ z @ z / 4
    return [[matrix[..., i, j] for j in range(n)] for i in range(n)]


def multi_gate(x: Tensor, blocks: Blocks, n: int) -> Tensor:
    """n streams: the first are what entered and what the first n - 1 branches returned."""
    streams, root = [x], x.size(-1) ** 0.5
    for k in range(len(blocks.branches)):
        f = blocks.branch(k, x)
        if len(streams) < n:
            streams.append(f)
        else:
            weight, bias = blocks.get(k, "gate_weight"), blocks.get(k, "gate_bias")
            scores = [(weight * s / rms(s)).sum(-1, keepdim=True) / root for s in streams]
            gates = [1 / (1 + torch.exp(-(score + b))) for score, b in zip(scores, bias)]
            streams = [(1 - beta) * s + beta * f for beta, s in zip(gates, streams)]
        query = blocks.get(k, "query")
        scores = [(query * s / rms(s)).sum(-1, keepdim=True) / root for s in streams]
        x = sum(p * s for p, s in zip(shares(scores), streams))
    return x


def ihc(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "b_pre"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        whole = torch.cat(streams, -1)
        whole = whole / rms(whole)
        logits = [
            blocks.get(k, f"alpha_{part}") * (whole @ blocks.get(k, f"phi_{part}"))
            + blocks.get(k, f"b_{part}")
            for part in PARTS[:2]
        ]
        read, written = 1 / (1 + torch.exp(-logits[0])), 2 / (1 + torch.exp(-logits[1]))
        f = blocks.branch(k, sum(read[..., i, None] * streams[i] for i in range(n)))
        streams = [streams[i] + written[..., i, None] * f for i in range(n)]
    return sum(streams)


def gated_residual(x: Tensor, blocks: Blocks) -> Tensor:
    n = len(blocks.get(0, "write"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        normal = [blocks.get(k, "gain")[i] * h / rms(h) for i, h in enumerate(streams)]
        whole = torch.cat(normal, -1) / n
        down = whole @ blocks.get(k, "gate_down").T
        gate = 1 / (1 + torch.exp(-((down / (1 + torch.exp(-down))) @ blocks.get(k, "gate_up").T)))
        read = sum(a * h for a, h in zip(gate.split(x.size(-1), -1), normal)) / n
        written = 2 / (1 + torch.exp(-(whole @ blocks.get(k, "write").T)))
        f = blocks.branches[k](read)
        streams = [streams[i] + written[..., i, None] * f for i in range(n)]
    return sum(streams)


def pre_norm(x: Tensor, blocks: Blocks) -> Tensor:
    """The plain pre-norm stack x + F(G(x))."""
    for k in range(len(blocks.branches)):
        x = x + blocks.branch(k, x)
    return x


# name -> options, equation
RULES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Blocks], Tensor]]] = {
    "b2t": ({}, b2t),
    "residual_dual": ({}, residual_dual),
    "x0": ({}, x0),
    "siamesenorm": ({}, siamesenorm),
    "dlcl": ({}, dlcl),
    "denseformer": ({}, lambda x, blocks: by_layers(x, x, blocks)),
    "attnres": ({}, attnres),
    "attnres-blocks": (
        {"kind": "attnres", "block_size": 2},
        lambda x, blocks: attnres(x, blocks, 2),
    ),
    "mhar": ({"heads": 3}, lambda x, blocks: mhar(x, blocks, 3)),
    "mhar-blocks": (
        {"kind": "mhar", "heads": 3, "temperature": 2.0, "block_size": 2},
        lambda x, blocks: mhar(x, blocks, 3, 2.0, 2),
    ),
    "delta_attnres": ({}, delta_attnres),
    "delta_attnres-zero": ({"kind": "delta_attnres", "depth_gate": "zero"}, delta_attnres),
    "mudd": ({}, mudd),
    "spannorm": ({}, spannorm),
    "ihc": ({"streams": 3}, ihc),
    "gated_residual": ({"streams": 3, "gate_rank": 2}, gated_residual),
    "hyper": ({"streams": 3}, hyper),
    "hyper-static": ({"kind": "hyper", "streams": 4, "mixing": "static"}, hyper),
    "fractional": ({"parts": 3}, fractional),
    "mhc": ({"streams": 3}, mhc),
    "single_pass_mhc": ({"streams": 3}, single_pass_mhc),
    "single_pass_mhc-lite": (
        {"kind": "single_pass_mhc", "streams": 3, "matrix": "permutations"},
        lambda x, b: single_pass_mhc(x, b, permutations),
    ),
    "mhc-lite": (
        {"kind": "mhc", "streams": 3, "matrix": "permutations"},
        lambda x, b: mhc(x, b, permutations),
    ),
    "kromhc": (
        {"kind": "mhc", "streams": 4, "matrix": "kronecker"},
        lambda x, b: mhc(x, b, kronecker),
    ),
    "ohc": (
        {"kind": "mhc", "streams": 4, "matrix": "quaternions"},
        lambda x, b: mhc(x, b, quaternions),
    ),
    "jpmhc": (
        {"kind": "mhc", "streams": 3, "matrix": "cayley"},
        lambda x, b: mhc(x, b, cayley),
    ),
    "multi_gate": ({"streams": 3}, lambda x, b: multi_gate(x, b, 3)),
}
RULES = {name: ({"kind": name, **options}, equation) for name, (options, equation) in RULES.items()}


class Stack(nn.Module):
    """``depth`` layers of ``sublayers`` blocks.

    The branch of block k is ``tanh(z W_k)`` with W_k constant.
    """

    def __init__(self, rule: str, depth: int = 2, sublayers: int = 2, dim: int = 9, **options: Any):
        super().__init__()
        self.depth, self.sublayers, blocks = depth, sublayers, depth * sublayers
        places = [
            Place("encoder", "ffn", k // sublayers, depth, 0, k % sublayers, sublayers)
            for k in range(blocks)
        ]
        options = {**RULES[rule][0], **options}
        self.turns = options.get("matrix") in ("quaternions", "cayley")
        self.ends_with_gate = options["kind"] == "single_pass_mhc"
        self.skips = nn.ModuleList(create_skip(dim=dim, place=place, **options) for place in places)
        # beside streams that do not grow, or turn, rounding inside of a steep branch would count
        # more
        steepness = 0.25 if rule in ("multi_gate", "ohc") else 1.0
        self.weights = [steepness * draw((dim, dim), 50 + k) for k in range(blocks)]

    def randomise(self) -> "Stack":
        """Every parameter off its start: no gain is 1, no bias and no mixing weight is 0."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.uniform_(0.5, 1.5, generator=generator)
                if name.endswith(("query", "w1", "w2", "gate_down", "gate_weight")):
                    parameter.mul_(0.2)  # a sharp softmax amplifies rounding
                if name.endswith("phi_res") and self.turns:
                    parameter.mul_(0.02)  # and so does the direction of a short quaternion
                if name.endswith("phi_pre") and self.ends_with_gate:
                    parameter.mul_(0.2)  # and the tail of a sigmoid that multiplies the output
        return self

    def branch(self, k: int) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.tanh(z @ self.weights[k].to(z.dtype))

    def forward(self, x: Tensor, padding_mask=None) -> Tensor:
        for k, skip in enumerate(self.skips):
            h, carried = skip.prepare(x)
            x = skip(x, self.branch(k)(h), carried, padding_mask)
        return x

    def blocks(self) -> Blocks:
        """For a reference: float64 leaf copies of all parameters."""
        parameters = {
            name: p.detach().double().requires_grad_() for name, p in self.named_parameters()
        }
        return Blocks(
            [self.branch(k) for k in range(len(self.skips))], self.depth, self.sublayers, parameters
        )
