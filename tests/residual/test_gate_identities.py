"""Gates: open, closed and at their start, as their sources say."""

import math

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw

from fairseq_rskip.residual import create_skip


def test_gpas_scales_the_output_and_not_the_gradient():
    x, f, g = draw(SEQUENCE, 1).requires_grad_(), draw(SEQUENCE, 2), draw(SEQUENCE, 3)
    skip = create_skip("gpas", 5).double()
    assert torch.equal(skip(x, f), x + f)
    torch.nn.init.constant_(skip.gate, 0.5)
    y = skip(x, f)
    torch.testing.assert_close(y, (1 - 0.5 / (1 + math.exp(-0.5))) * (x + f))
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g)


@pytest.mark.parametrize(
    ("kind", "expected"), [("highway", "x"), ("exclusive_gate", "x"), ("shortcut_gate", "sum")]
)
@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_a_closed_gate(kind, expected, shape):
    x, f = draw(shape, 1), draw(shape, 2)
    skip = create_skip(kind, 5, gate_bias=-1e4, channel_dim=1 if shape == IMAGE else -1).double()
    assert torch.equal(skip(x, f), x if expected == "x" else x + f)


@pytest.mark.parametrize(
    ("kind", "bias"), [("highway", -1), ("exclusive_gate", -6), ("shortcut_gate", -6)]
)
def test_a_gate_opens_as_far_at_the_start_as_in_the_paper(kind, bias):
    """-1 to -3 in Srivastava et al. 2015; -6 is the best in He et al. 2016b, Table 1."""
    skip, x, f = create_skip(kind, 5).double(), draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    torch.nn.init.zeros_(skip.gate_weight)
    gate = 1 / (1 + math.exp(-bias))
    expected = (1 - gate) * x + (f if kind == "shortcut_gate" else gate * f)
    torch.testing.assert_close(skip(x, f), expected)


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_a_gru_gate_that_keeps_everything_returns_x(shape):
    axis = 1 if shape == IMAGE else -1
    skip = create_skip("gru_gate", 5, gate_bias=1e4, channel_dim=axis).double()
    x = draw(shape, 1)
    assert torch.equal(skip(x, draw(shape, 2)), x)


def test_a_gru_gate_is_torchs_gru_cell():
    skip, cell = create_skip("gru_gate", 5).double(), torch.nn.GRUCell(5, 5).double()
    with torch.no_grad():
        cell.weight_ih.copy_(skip.branch_weight)
        cell.weight_hh.copy_(skip.stream_weight)
        cell.bias_ih.copy_(skip.branch_bias)
        cell.bias_hh.copy_(skip.stream_bias)
    x, f = draw((6, 5), 1), draw((6, 5), 2)
    torch.testing.assert_close(skip(x, f), cell(f, x), rtol=1e-12, atol=1e-12)
    assert skip.branch_bias.tolist() == [0.0] * 5 + [2.0] * 5 + [0.0] * 5


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_gtrxls_gate_keeps_x_or_takes_the_new_value(shape):
    axis = 1 if shape == IMAGE else -1
    x, f = draw(shape, 1), draw(shape, 2)
    kept = create_skip("gtrxl", 5, gate_bias=1e4, channel_dim=axis).double()
    assert torch.equal(kept(x, f), x)
    new = create_skip("gtrxl", 5, gate_bias=-1e4, channel_dim=axis).double()
    assert new(x, f).abs().max() < 1  # a tanh
    negative = -f.abs()  # nothing of it passes the ReLU
    assert torch.equal(new(x, negative), new(x, 2 * negative))


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_a_review_gate_starts_at_one_half_and_ends_as_pre_norm(shape):
    axis = 1 if shape == IMAGE else -1
    x, f = draw(shape, 1), draw(shape, 2)
    neutral = create_skip("review", 5, channel_dim=axis).double()
    assert torch.equal(neutral(x, f), x + f / 2)
    wide_open = create_skip("review", 5, gate_bias=1e4, channel_dim=axis).double()
    assert torch.equal(wide_open(x, f), x + f)


def test_a_review_gate_does_not_see_the_size_of_its_inputs():
    """Up to eps: the gate of (3 x, 5 F) is that of (x, F)."""
    skip = create_skip("review", 5, eps=1e-12).double()
    with torch.no_grad():
        for parameter in skip.learned().values():
            parameter.copy_(draw(parameter.shape, 3))
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    gate = (skip(x, f) - x) / f
    torch.testing.assert_close((skip(3 * x, 5 * f) - 3 * x) / (5 * f), gate)


GATED = ["highway", "exclusive_gate", "shortcut_gate", "gru_gate", "gtrxl"]


@pytest.mark.parametrize("kind", GATED)
def test_under_autocast_a_gate_takes_as_much_of_x_as_in_fp32(kind):
    """1 - g = 0.9975 is 0.9961 in bf16: alike in every block, which 72 blocks make a tenth."""
    skip = create_skip(kind, 4)
    with torch.no_grad():
        for parameter in skip.parameters():
            if parameter.dim() == 2:
                parameter.zero_()  # the gate is its bias alone
    x, f_x = torch.ones(3, 2, 4), torch.zeros(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = skip(x, f_x)
    torch.testing.assert_close(y, skip(x, f_x), rtol=1e-6, atol=0.0)  # two roundings of fp32
