"""Rules of several streams.

The tests check what a stack equals at its start and at the ends of its parameters, as its source
says.
"""

import math

import pytest
import torch
from skip_variants import draw
from stream_rules import Stack, copy_parameters, pre_norm

from fairseq_rskip.residual import Place, create_skip, skip_stack, skips

DECODER = Place("decoder", "ffn", 5, 6, 6, 2, 3, 2)
FIRST = Place(index=0, depth=6, position=1, sublayers=2)


def test_identity_hyper_connections_change_a_stream_by_the_branch_alone():
    """(y_i - x_i) is a multiple of F, w_i between 0 and 2."""
    skip = Stack("ihc", 2, 2, streams=4).randomise().double().skips[1]
    h, f = draw((5, 4 * 9), 1), draw((5, 9), 2)
    _, carried = skip.prepare(h)
    change = (skip(h, f, carried) - h).unflatten(-1, [4, 9])
    weights = (change * f.unsqueeze(1)).sum(-1) / f.square().sum(-1, keepdim=True)
    torch.testing.assert_close(change, weights.unsqueeze(-1) * f.unsqueeze(1))
    assert ((weights > 0) & (weights < 2)).all()


def test_identity_hyper_connections_are_mhc_with_the_identity():
    ihc, mhc = Stack("ihc", 2, 2, streams=4).randomise(), Stack("mhc", 2, 2, streams=4)
    copied = dict(ihc.named_parameters())
    with torch.no_grad():
        for name, parameter in mhc.named_parameters():
            if name in copied:
                parameter.copy_(copied[name])
            elif name.endswith("b_res"):
                parameter.copy_(1e4 * torch.eye(4))
    x = draw((4, 9), 1)
    torch.testing.assert_close(ihc.double()(x), mhc.double()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_identity_hyper_connections_start_as_n_times_pre_norm(n):
    """Each branch reads n streams of which all but one weigh 0.018.

    Pre-norm divides that out but for eps.
    """
    stack, x = Stack("ihc", 2, 3, streams=n).double(), draw((4, 9), 1)
    torch.testing.assert_close(stack(x), n * pre_norm(x, stack.blocks()), rtol=1e-4, atol=1e-4)


def single_pass_and_mhc(reading: torch.Tensor) -> tuple[Stack, Stack]:
    """Two stacks of equal, random parameters, but that ``reading`` has the weights p of each block
    of the first, ``(blocks, n)``, and that those of mHC come one block later."""
    blocks, n = reading.shape
    single, mhc = (Stack(rule, 2, blocks // 2, streams=n) for rule in ("single_pass_mhc", "mhc"))
    copy_parameters(single.randomise(), mhc)
    single, mhc, logits = single.double(), mhc.double(), torch.logit(reading)
    with torch.no_grad():
        for k in range(blocks):
            for stack, before in ((single, 0), (mhc, 1)):
                stack.skips[k].phi_pre.zero_()
                stack.skips[k].b_pre.copy_(logits[k - before])
    return single, mhc


def streams_of(stack: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    """H of each block."""
    actual = []
    for k, skip in enumerate(stack.skips):
        actual.append(skip.streams(x)[0])
        h, carried = skip.prepare(x)
        x = skip(x, stack.branch(k)(h), carried)
    return actual


def test_single_pass_mhc_that_reads_the_mean_in_each_block_is_mhc():
    """The stack's output is the mean of the streams, mHC's is their sum."""
    single, mhc = single_pass_and_mhc(torch.full((6, 4), 0.25, dtype=torch.float64))
    x = draw((5, 9), 1)
    torch.testing.assert_close(4 * single(x), mhc(x), rtol=1e-12, atol=1e-12)


def test_single_pass_mhc_with_constant_weights_is_mhc_with_those_of_the_block_before():
    """With weights of sum 1, as the first branch reads x."""
    reading = torch.softmax(draw((6, 4), 5), -1)
    single, mhc = single_pass_and_mhc(reading)
    x = draw((5, 9), 1)
    for ours, theirs in zip(streams_of(single, x), streams_of(mhc, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_single_pass_mhc_with_weights_of_the_position_is_not_mhc():
    single, mhc = single_pass_and_mhc(torch.full((6, 4), 0.25, dtype=torch.float64))
    x = draw((5, 9), 1)
    with torch.no_grad():
        for stack in (single, mhc):
            for k, skip in enumerate(stack.skips):
                skip.phi_pre.copy_(draw(skip.phi_pre.shape, 20 + k))
    difference = (4 * single(x) - mhc(x)).abs().max()
    assert difference > 0.01 * mhc(x).abs().max()


def test_a_branch_of_single_pass_mhc_reads_with_the_weights_of_the_block_before():
    """sigmoid of what block 1 makes of its own H, on the H that it returns."""
    stack = Stack("single_pass_mhc", 2, 2, streams=3).randomise().double()
    first, second, third, _ = stack.skips
    x, f = draw((5, 9), 1), draw((5, 9), 2)
    assert torch.equal(first.current(x)[0], x)

    stream = first(x, f)
    before = second.streams(stream)[0]
    after = second(stream, f)
    flat = before.flatten(-2) / (before.flatten(-2).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    weights = torch.sigmoid(second.alpha_pre * (flat @ second.phi_pre) + second.b_pre)
    expected = (weights.unsqueeze(-1) * third.streams(after)[0]).sum(-2)
    torch.testing.assert_close(third.current(after)[0], expected, rtol=1e-12, atol=1e-12)

    read_by_second = second.current(stream)[0]
    with torch.no_grad():
        second.phi_pre.mul_(-1)
        third.phi_pre.mul_(-1)
    assert torch.equal(second.current(stream)[0], read_by_second)
    assert torch.equal(third.current(after)[0], after[..., :9])  # its own phi_pre does not count
    assert not torch.equal(second(stream, f)[..., :9], after[..., :9])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_single_pass_mhc_starts_as_a_share_of_pre_norm(n):
    """sigmoid(4) + (n - 1) sigmoid(-4) of it, which G divides out but for eps."""
    stack, x = Stack("single_pass_mhc", 2, 3, streams=n).double(), draw((4, 9), 1)
    share = float(torch.sigmoid(torch.tensor([4.0] + [-4.0] * (n - 1))).sum())
    torch.testing.assert_close(stack(x), share * pre_norm(x, stack.blocks()), rtol=1e-4, atol=1e-4)


def test_orthogonal_hyper_connections_start_as_four_times_pre_norm():
    stack, x = Stack("ohc", 2, 3).double(), draw((4, 9), 1)
    torch.testing.assert_close(stack(x), 4 * pre_norm(x, stack.blocks()), rtol=1e-4, atol=1e-4)


def rotation(rule: str, spread: float) -> torch.Tensor:
    """The mixing matrices of a skip connection whose logits are drawn, ``(5, n, n)``."""
    skip = Stack(rule, 2, 2, streams=4).double().skips[1]
    with torch.no_grad():
        skip.b_res.copy_(draw(skip.b_res.shape, 2))
        skip.phi_res.copy_(spread * draw(skip.phi_res.shape, 3))
        skip.alpha_res.fill_(1.0)
        return skip.read_mix_write(draw((5, 4, 9), 1))[1]


def test_two_quaternions_turn_four_streams():
    """Orthogonal with determinant 1, and another at each position."""
    matrix = rotation("ohc", 0.1)
    identity = torch.eye(4).double().expand_as(matrix)
    torch.testing.assert_close(matrix @ matrix.mT, identity, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.linalg.det(matrix), torch.ones(5).double())
    assert (matrix[0] - matrix[1]).abs().max() > 0.01


def test_quaternions_are_for_four_streams():
    with pytest.raises(ValueError, match="streams=3: expected 4 with matrix='quaternions'"):
        create_skip("mhc", 9, streams=3, matrix="quaternions", place=FIRST)


def test_jpmhcs_matrix_is_the_cayley_transform_up_to_the_fourth_power():
    """It is ``(I - Z/2)^-1 (I + Z/2)``, Z = 0.1 (Q - Q^T), less Z^4/8 and higher powers.

    So it is nearly orthogonal.
    """
    skip = Stack("jpmhc", 2, 2, streams=4).double().skips[1]
    logits = 0.1 * draw((4, 4), 2)
    z = 0.1 * (logits - logits.T)
    identity = torch.eye(4).double()
    exact = torch.linalg.solve(identity - z / 2, identity + z / 2)
    actual = skip.matrix(logits)
    torch.testing.assert_close(actual + z.matrix_power(4) / 8, exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual @ actual.T, identity, rtol=0, atol=1e-5)


def test_streams_of_multi_gate_residuals_are_convex_in_the_branch():
    """No stream is longer than itself before or the branch.

    Gates of 0 leave it, gates of 1 replace it.
    """
    stack = Stack("multi_gate", 3, 2).randomise().double()
    skip, x, f = stack.skips[3], draw((5, 4 * 9), 1), draw((5, 9), 2)
    streams = x.unflatten(-1, (4, 9))[:, 1:]

    def after() -> torch.Tensor:
        return skip(x, f, skip.prepare(x)[1]).unflatten(-1, (4, 9))[:, 1:]

    longest = torch.maximum(streams.norm(dim=-1), f.norm(dim=-1, keepdim=True))
    assert (after().norm(dim=-1) <= longest + 1e-12).all()
    with torch.no_grad():
        skip.gate_bias.fill_(-1e4)
        assert torch.equal(after(), streams)
        skip.gate_bias.fill_(1e4)
        torch.testing.assert_close(after(), f.unsqueeze(1).expand(5, 3, 9), rtol=1e-12, atol=1e-12)


def test_multi_gates_collect_streams_that_differ_and_read_their_mean():
    """At the start the first two blocks add what their branches returned.

    Then gates move all alike.
    """
    stack, x = Stack("multi_gate", 2, 2).double(), draw((4, 9), 1)
    f1 = stack.branch(0)(stack.skips[0].pre(x))
    y1 = stack.skips[0](x, f1)
    torch.testing.assert_close(y1, torch.cat([(x + f1) / 2, x, f1], -1), rtol=1e-12, atol=1e-12)
    assert not hasattr(stack.skips[1], "gate_weight") and hasattr(stack.skips[2], "gate_weight")


@pytest.mark.parametrize("layers", [12, 24])
def test_gates_of_multi_gate_residuals_start_by_depth(layers):
    """-ln(sqrt(L/21) (e^3 + 1) - 4) of the L = 2 layers - 3 blocks with gates."""
    place = Place(index=layers - 1, depth=layers, position=1, sublayers=2)
    expected = -math.log(((2 * layers - 3) / 21) ** 0.5 * (math.exp(3) + 1) - 4)
    bias = create_skip("multi_gate", 5, place=place).gate_bias
    assert bias.tolist() == pytest.approx([expected] * 4)
    chosen = create_skip("multi_gate", 5, gate_bias=-1.5, place=place).gate_bias
    assert chosen.tolist() == [-1.5] * 4


def test_gates_start_half_open_in_a_stack_too_shallow_for_the_formula():
    place = Place(index=1, depth=2, position=1, sublayers=2)
    bias = create_skip("multi_gate", 5, streams=8, gate_bias=None, place=place)
    assert not hasattr(bias, "gate_bias")  # all four blocks collect streams
    place = Place(index=4, depth=5, position=1, sublayers=2)
    skip = create_skip("multi_gate", 5, streams=9, place=place)
    assert skip.gate_bias.tolist() == [0.0] * 9


def test_a_gated_residual_reads_half_of_the_mean_norm_at_gates_of_zero():
    """And then writes F to every stream once."""
    skip = Stack("gated_residual", 2, 2, streams=4).double().skips[1]
    with torch.no_grad():
        skip.gate_up.zero_()
        skip.write.zero_()
    h, f = draw((5, 4 * 9), 1), draw((5, 9), 2)
    read, carried = skip.prepare(h)
    streams = h.unflatten(-1, [4, 9])
    torch.testing.assert_close(read, torch.rms_norm(streams, [9], eps=1e-5).mean(1) / 2)
    change = skip(h, f, carried).unflatten(-1, [4, 9]) - streams
    torch.testing.assert_close(change, f.unsqueeze(1).expand_as(change))


def test_fractional_connections_report_the_parts_that_they_use():
    place = DECODER
    for parts, used in ((5, 4), (8, 8)):  # the largest divisor of 64 up to it
        assert create_skip("fractional", 64, parts=parts, place=place).constants()["m"] == used


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_a_branch_of_hyper_connections_reads_one_stream_the_next_in_each_block(mixing):
    first, *others = skips(skip_stack("hyper", 5, layers=3, streams=4, mixing=mixing)).values()
    streams = draw((3, 4, 5), 1, torch.float32)  # four that differ
    for number, skip in enumerate(others, start=1):
        read, _ = skip.current(streams.flatten(-2))
        torch.testing.assert_close(read, streams[:, number % 4])


@pytest.mark.parametrize(
    ("matrix", "most"),
    [
        ("sinkhorn", 2e-3),
        ("permutations", 1e-2),
        ("kronecker", 1e-3),
        ("quaternions", 0),
        ("cayley", 0),
    ],
)
def test_the_streams_of_mhc_are_hardly_mixed_at_first(matrix, most):
    """The logits beside the identity's start at -8: e^-8 is 0.0003, of 23 permutations 0.008."""
    _, second, *_ = skips(skip_stack("mhc", 9, layers=2, streams=4, matrix=matrix)).values()
    _, mixing, _ = second.read_mix_write(draw((5, 4, 9), 1, torch.float32))
    assert (mixing - torch.eye(4)).abs().max() <= most
