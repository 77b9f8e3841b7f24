"""Whole stacks against the equations of wdlctc/hyper-connection-factory, which no index has.

They are written here in our own words after its ``hcfactory/connections`` (dense.py,
depth_attention.py, hyper.py, laurel.py; commit 412aeba), which keeps lists of sources and routers
before each sublayer where we keep one tensor and a query behind it. float64, 1e-10.

What differs there: its norms have their own eps (here ours); its delta attention residuals read
x + x in the first block, which the norm behind takes for x; its mHC starts elsewhere and reads the
stack's last streams with a gate.
"""

import pytest
import torch
from skip_variants import draw
from stream_blocks import EPS
from stream_rules import Stack
from torch import Tensor, nn

from fairseq_rskip.residual import create_skip

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def unit(z: Tensor) -> Tensor:
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + EPS)


def made(rule: str, **options) -> tuple[Stack, list[nn.Module], Tensor]:
    """Return a stack of three layers of two sublayers, its skips, and an input ``(4, 3, 9)``.

    All parameters are drawn.
    """
    stack = Stack(rule, 3, 2, **options).randomise().double()
    return stack, list(stack.skips), draw((4, 3, 9), 1)


def sublayer(stack: Stack, k: int):
    """Branch k with its norm, as that repository's sublayers have theirs inside."""
    return lambda h: stack.branch(k)(stack.skips[k].pre(h))


def route(query: Tensor, sources: list[Tensor], heads: int = 1) -> Tensor:
    """A softmax over the sources, in each of ``heads`` groups of channels."""
    stacked = torch.stack(sources).unflatten(-1, (heads, -1))  # (sources, ..., heads, width)
    keys = torch.stack([unit(source) for source in sources]).unflatten(-1, (heads, -1))
    logits = torch.einsum("n...hw,hw->n...h", keys, query.view(heads, -1))
    return torch.einsum("n...h,n...hw->...hw", logits.softmax(0), stacked).flatten(-2)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_residuals_and_their_heads(heads, size):
    """A router before each sublayer and one for the output; ours is the block's before it."""
    stack, skips, x = made("mhar", heads=heads, block_size=size)
    sources: list[Tensor] = [x]
    partial = None
    h = x  # the first router sees one source
    for k, skip in enumerate(skips):
        out = sublayer(stack, k)(h)
        partial = out if partial is None else partial + out
        seen = [*sources, partial]
        if (k + 1) % size == 0:
            sources, partial = seen, None
        h = route(skip.query, seen, heads)
    torch.testing.assert_close(stack(x), h, **TOLERANCE)


@pytest.mark.parametrize("gate", ["none", "zero"])
def test_delta_attention_residuals(gate):
    stack, skips, x = made("delta_attnres", depth_gate=gate)
    h, sources = x, [x]
    for k, skip in enumerate(skips):
        routed = torch.zeros_like(x) if k == 0 else route(skip.query, sources)
        if gate == "zero" and k > 0:
            routed = skip.gate * routed
        out = sublayer(stack, k)(h + routed)
        h = h + out
        sources.append(out)
    torch.testing.assert_close(stack(x), h, **TOLERANCE)


def test_its_first_delta_block_reads_twice_x_which_the_norm_divides_out():
    stack, _, x = made("delta_attnres", eps=1e-30)
    torch.testing.assert_close(sublayer(stack, 0)(x + x), sublayer(stack, 0)(x), **TOLERANCE)


@pytest.mark.parametrize("rule", ["mudd", "denseformer"])
def test_dense_connections(rule):
    """MUDD's fourth way, the residual stream; its other three change what attention reads."""
    stack, skips, x = made(rule)
    outputs = [x]
    h = x
    for layer in range(3):
        for k in (2 * layer, 2 * layer + 1):
            h = h + sublayer(stack, k)(h)
        outputs.append(h)
        skip = skips[2 * layer + 1]
        weights = skip.weight
        if rule == "mudd":
            hidden = nn.functional.gelu(unit(h) @ skip.w1.mT)
            weights = weights + hidden @ skip.w2.mT
        else:
            weights = weights.expand(*h.shape[:-1], -1)
        h = torch.einsum("...n,n...d->...d", weights, torch.stack(outputs))
    torch.testing.assert_close(stack(x), h, **TOLERANCE)


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_hyper_connections(mixing):
    """One matrix (A_m | A_r) for each stream, n x (1 + n)."""
    stack, skips, x = made("hyper", streams=3, mixing=mixing)
    streams = torch.stack([x] * 3, -2)
    for k, skip in enumerate(skips):
        alpha = torch.cat([skip.a_m.unsqueeze(1), skip.a_r], 1)
        beta = skip.b
        if mixing == "dynamic":
            normed = skip.gate_norm(streams)
            dynamic = torch.cat([skip.w_m, skip.w_r], 1)
            alpha = alpha + skip.s_a * torch.tanh(normed @ dynamic)
            beta = beta + skip.s_b * torch.tanh(normed @ skip.w_b).squeeze(-1)
        mixed = torch.einsum("...nc,...nd->...cd", alpha.expand(*x.shape[:-1], 3, 4), streams)
        out = sublayer(stack, k)(mixed[..., 0, :])
        streams = mixed[..., 1:, :] + beta.unsqueeze(-1) * out.unsqueeze(-2)
    torch.testing.assert_close(stack(x), streams.sum(-2), **TOLERANCE)


def test_fractional_connections():
    stack, skips, x = made("fractional", parts=3, mixing="dynamic")
    h = x.unflatten(-1, (3, 3))
    for k, skip in enumerate(skips):
        gates = torch.tanh(skip.gate_norm(h) @ skip.weight)
        static = torch.cat([skip.a_m, skip.a_r], 1)
        alpha = static + skip.s_a * gates[..., :6]
        beta = skip.b + skip.s_b * gates[..., 6]
        mixed = torch.einsum("...nc,...nd->...cd", alpha, h)
        out = sublayer(stack, k)(mixed[..., :3, :].flatten(-2)).unflatten(-1, (3, 3))
        h = mixed[..., 3:, :] + beta.unsqueeze(-1) * out
    torch.testing.assert_close(stack(x), h.flatten(-2), **TOLERANCE)


def test_mhc_reads_writes_and_mixes_alike():
    """Sinkhorn's steps are in its order, rows before columns.

    After many, the order no longer counts. Its matrix is that of what goes to a stream, the
    transpose of what comes from one.
    """
    stack, skips, x = made("mhc", streams=3)
    for skip in skips:
        with torch.no_grad():
            skip.phi_res.mul_(0.01)  # near a matrix that 20 steps balance
    streams = torch.stack([x] * 3, -2)
    for k, skip in enumerate(skips):
        flat = streams.flatten(-2)
        projected = {
            part: getattr(skip, f"alpha_{part}")
            * (flat @ getattr(skip, f"phi_{part}"))
            * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + EPS)
            for part in ("pre", "post", "res")
        }
        logits = projected["res"].unflatten(-1, (3, 3)) + skip.b_res
        matrix = logits.mT.softmax(-1)
        for _ in range(200):
            matrix = matrix / matrix.sum(-2, keepdim=True)
            matrix = matrix / matrix.sum(-1, keepdim=True)
        read = torch.sigmoid(projected["pre"] + skip.b_pre)
        write = 2 * torch.sigmoid(projected["post"] + skip.b_post)
        out = sublayer(stack, k)(torch.einsum("...n,...nd->...d", read, streams))
        streams = torch.einsum("...jk,...jd->...kd", matrix, streams)
        streams = streams + write.unsqueeze(-1) * out.unsqueeze(-2)
    torch.testing.assert_close(stack(x), streams.sum(-2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", ["start", "drawn"])
def test_laurel(weights):
    """Its (a, b) are twice a softmax, ours are free, and b multiplies its low-rank part, too.

    At the start b is 1, and A and B are the same; elsewhere our B is b times its own.
    """
    h = expected = draw((4, 3, 9), 1)
    for k in range(6):
        logits = torch.zeros(2).double() if weights == "start" else draw((2,), 10 + k)
        down, up, w = draw((9, 2), 20 + k) / 3, draw((2, 9), 30 + k) / 3, draw((9, 9), 40 + k)
        a, b = 2 * logits.softmax(0)
        expected = a * torch.tanh(expected @ w) + b * (expected + expected @ down @ up)

        skip = create_skip("laurel", 9, rank=2).double()
        with torch.no_grad():
            skip.branch_weight.fill_(a)
            skip.skip_weight.fill_(b)
            skip.low.copy_(down.T)
            skip.high.copy_(b * up.T)
        h = skip(h, torch.tanh(h @ w))
    torch.testing.assert_close(h, expected, **TOLERANCE)
