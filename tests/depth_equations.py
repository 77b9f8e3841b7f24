"""What whole stacks of the rules that keep earlier outputs compute.

It is written out in elementary float64 arithmetic. The references share nothing with the package;
gradients come from autograd.
"""

import torch
from stream_blocks import EPS, Blocks, rms, shares
from torch import Tensor


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
