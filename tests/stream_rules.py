"""What whole stacks of the rules that keep more than one tensor compute, written out in elementary float64 arithmetic.

The references share nothing with the package; gradients come from autograd.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

EPS = 1e-5
PARTS = ("pre", "post", "res")  # of mHC: what reads, what is written, what stays


class Blocks(NamedTuple):
    """What a reference is given: the branches F_k, the shape of the stack and the parameters by block and name."""

    branches: list[Callable[[Tensor], Tensor]]
    depth: int
    sublayers: int
    parameters: dict[str, Tensor]

    def get(self, k: int, name: str) -> Tensor:
        return self.parameters[f"skips.{k}.{name}"]

    def norm(self, k: int, name: str, z: Tensor) -> Tensor:
        mean = z.sum(-1, keepdim=True) / z.size(-1)
        var = ((z - mean) * (z - mean)).sum(-1, keepdim=True) / z.size(-1)
        return (z - mean) / (var + EPS) ** 0.5 * self.get(k, f"{name}.weight") + self.get(k, f"{name}.bias")

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
    return x + blocks.norm(len(blocks.branches) - 1, "post.1", r)


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
    """Pre-norm layers from x on; after block k, a layer's last, what is stored so far is mixed into the next x."""
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
        scores = [(blocks.get(k, "query") * v).sum(-1) / ((v * v).mean(-1) + EPS) ** 0.5 for v in values]
        total = sum(torch.exp(s) for s in scores)
        x = sum((torch.exp(s) / total).unsqueeze(-1) * v for s, v in zip(scores, values))
    return x


def gated(blocks: Blocks, k: int, rows: list[Tensor], weights: list[Tensor]) -> list[list[Tensor]]:
    """A_m, A_r and B of block k, for each of the rows of H, with what tanh(N(H) W) adds to them."""
    matrices = [[blocks.get(k, name)[i] for i in range(len(rows))] for name in ("a_m", "a_r", "b")]
    if not weights:
        return matrices
    normed = [blocks.norm(k, "gate_norm", h) for h in rows]
    scales = [blocks.get(k, name) for name in ("s_a", "s_a", "s_b")]
    return [[a + s * torch.tanh(h @ w) for a, h in zip(m, normed)] for m, s, w in zip(matrices, scales, weights)]


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
        f = blocks.branch(k, torch.cat([mixed(read, rows, j) for j in range(m)], -1)).split(x.size(-1) // m, -1)
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
    share, every = torch.exp(res) / torch.exp(res).sum(-1, keepdim=True), list(itertools.permutations(range(n)))
    return [[sum(share[..., k] for k, p in enumerate(every) if p[i] == j) for j in range(n)] for i in range(n)]


def kronecker(res: Tensor, n: int) -> list[list[Tensor]]:
    """Entry (i, j) is a product over the bits of i and j: p where they agree, 1 - p where they do not."""
    bits = n.bit_length() - 1
    stay = [1 / (1 + torch.exp(res[..., 2 * k + 1] - res[..., 2 * k])) for k in range(bits)]
    factors = [(p, 1 - p) for p in reversed(stay)]  # by whether a bit differs; the first factor is the highest bit
    return [[math.prod(f[(i ^ j) >> k & 1] for k, f in enumerate(factors)) for j in range(n)] for i in range(n)]


def mhc(x: Tensor, blocks: Blocks, doubly_stochastic=sinkhorn) -> Tensor:
    n = len(blocks.get(0, "b_pre"))
    streams = [x] * n
    for k in range(len(blocks.branches)):
        whole = torch.cat(streams, -1)
        whole = whole / ((whole * whole).mean(-1, keepdim=True) + EPS) ** 0.5
        phi, alpha, b = ([blocks.get(k, f"{name}_{part}") for part in PARTS] for name in ("phi", "alpha", "b"))
        pre, post, res = (alpha[i] * (whole @ phi[i]) + b[i].flatten() for i in range(3))
        matrix = doubly_stochastic(res, n)
        read, written = 1 / (1 + torch.exp(-pre)), 2 / (1 + torch.exp(-post))
        f = blocks.branch(k, sum(read[..., i, None] * streams[i] for i in range(n)))
        lines = [sum(matrix[i][j][..., None] * streams[j] for j in range(n)) for i in range(n)]
        streams = [lines[i] + written[..., i, None] * f for i in range(n)]
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
    "attnres-blocks": ({"kind": "attnres", "block_size": 2}, lambda x, blocks: attnres(x, blocks, 2)),
    "hyper": ({"streams": 3}, hyper),
    "hyper-static": ({"kind": "hyper", "streams": 4, "mixing": "static"}, hyper),
    "fractional": ({"parts": 3}, fractional),
    "mhc": ({"streams": 3}, mhc),
    "mhc-lite": ({"kind": "mhc", "streams": 3, "matrix": "permutations"}, lambda x, b: mhc(x, b, permutations)),
    "kromhc": ({"kind": "mhc", "streams": 4, "matrix": "kronecker"}, lambda x, b: mhc(x, b, kronecker)),
}
RULES = {name: ({"kind": name, **options}, equation) for name, (options, equation) in RULES.items()}
