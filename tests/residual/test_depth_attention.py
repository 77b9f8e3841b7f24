"""Attention over depth: its derivatives, and what it keeps for them."""

import pytest
import torch
from skip_variants import draw

from fairseq_rskip.residual.depth_attention import depth_attention

HEADS = pytest.mark.parametrize(("heads", "temperature"), [(1, 1.0), (3, 0.7)])


def from_the_equation(history, query, heads, temperature):
    """Each group of channels by itself, eps = 1e-5."""
    rms = (history.square().mean(-1) + 1e-5).sqrt()
    mixtures = []
    for v, w in zip(history.chunk(heads, -1), query.chunk(heads)):
        p = torch.softmax((v @ w) / (temperature * rms), -1)
        mixtures.append(torch.einsum("bk,bkd->bd", p, v))
    return torch.cat(mixtures, -1)


@HEADS
def test_it_is_its_equation(heads, temperature):
    history, query = draw((4, 5, 9), 1), draw((9,), 2)
    torch.testing.assert_close(
        depth_attention(history, query, 1e-5, heads, temperature),
        from_the_equation(history, query, heads, temperature),
        rtol=1e-12,
        atol=1e-12,
    )


@HEADS
def test_first_and_second_derivatives(heads, temperature):
    inputs = (draw((2, 3, 6), 1).requires_grad_(), draw((6,), 2).requires_grad_())

    def mixture(history, query):
        return depth_attention(history, query, 1e-5, heads, temperature)

    assert torch.autograd.gradcheck(mixture, inputs)
    assert torch.autograd.gradgradcheck(mixture, inputs)


def test_the_derivatives_where_a_stored_tensor_is_zero():
    history = draw((2, 3, 6), 1)
    history[:, 1] = 0
    inputs = (history.requires_grad_(), draw((6,), 2).requires_grad_())
    assert torch.autograd.gradcheck(lambda *both: depth_attention(*both, 1e-2), inputs)


def test_transforms_of_torch_func():
    history, query = draw((2, 3, 6), 1), draw((6,), 2)

    def total(one):
        return depth_attention(one, query, 1e-5).square().sum()

    each = torch.stack([torch.func.grad(total)(one) for one in history])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(history), each)
    direction = draw((3, 6), 3)
    tangent = torch.func.jvp(total, (history[0],), (direction,))[1]
    torch.testing.assert_close(tangent, (each[0] * direction).sum())


def test_backward_keeps_the_history_and_nothing_else_of_its_size():
    history = draw((4, 50, 8), 1).requires_grad_()
    query = draw((8,), 2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        depth_attention(history, query, 1e-5)
    large = [x for x in kept if x.numel() >= history.numel()]
    assert [x.data_ptr() for x in large] == [history.data_ptr()]
    assert sum(x.numel() for x in kept) == history.numel() + query.numel()
