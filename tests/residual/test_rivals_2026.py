"""The rules of 2026.

The tests check what each equals at its start and at the ends of its parameters, as its source says.
"""

import math

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw
from stream_rules import Stack, pre_norm

from fairseq_rskip.residual import Place, create_skip

FIRST, LAST = (Place(index=index, depth=6, position=1, sublayers=2) for index in (0, 5))


def copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give each parameter of ``target`` the value that ``source`` has under its name."""
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(values[name])


def pre_norm_stack(depth: int, sublayers: int, **options: float) -> Stack:
    """The stack of pre-norm's own rule, with the branches of every other stack of this size."""
    stack = Stack("x0", depth, sublayers)
    stack.skips = torch.nn.ModuleList(create_skip("preln", 9, **options) for _ in stack.skips)
    return stack


@pytest.mark.parametrize("rule", ["mudd", "delta_attnres-zero"])
def test_a_stack_starts_as_plain_pre_norm_bit_for_bit(rule):
    stack, x = Stack(rule, 2, 3), draw((4, 9), 1, torch.float32)
    assert torch.equal(stack(x), pre_norm_stack(2, 3)(x))


@pytest.mark.parametrize(
    ("rule", "share"), [("attnres", 1 / 7), ("mhar", 1 / 7), ("delta_attnres", 1)]
)
def test_equal_weights_over_depth_are_pre_norm_but_for_eps(rule, share):
    """The mean of what entered and all branches is a share of pre-norm's sum, which G takes for
    the whole: here with an eps that does not count."""
    stack, x = Stack(rule, 2, 3, eps=1e-14).double(), draw((4, 9), 1)
    plain = pre_norm_stack(2, 3, eps=1e-14).double()
    torch.testing.assert_close(stack(x), share * plain(x), rtol=1e-9, atol=1e-9)


def test_mudd_without_its_dynamic_weights_is_denseformer():
    mudd, dense = Stack("mudd", 3, 2).double(), Stack("denseformer", 3, 2).randomise().double()
    with torch.no_grad():
        for parameter, value in zip(
            [p for name, p in mudd.named_parameters() if not name.endswith(("w1", "w2"))],
            dense.parameters(),
        ):
            parameter.copy_(value)
    x = draw((4, 9), 1)
    torch.testing.assert_close(mudd(x), dense(x), rtol=1e-12, atol=1e-12)


def test_mudd_weighs_each_position_by_its_own_newest_output():
    """A change at one position changes nothing at another."""
    stack, x = Stack("mudd", 2, 2).randomise().double(), draw((4, 9), 1)
    changed = x.clone()
    changed[2] += 1
    before, after = stack(x), stack(changed)
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("size", [1, 2])
def test_one_head_at_temperature_one_is_attention_residuals(size):
    many = Stack("mhar", 2, 2, heads=1, block_size=size).randomise()
    one = Stack("attnres", 2, 2, block_size=size)
    copy_parameters(many, one)
    x = draw((4, 9), 1, torch.float32)
    assert torch.equal(many(x), one(x))


def test_each_head_mixes_its_channels_by_its_part_of_the_query():
    """A change of one group's query leaves the other groups as they were."""
    skip = Stack("mhar", 2, 2, heads=3).randomise().double().skips[1]
    history = draw((4, 3, 9), 1)
    before = skip.mix(history)
    with torch.no_grad():
        skip.query[3:6] *= -1
    after = skip.mix(history)
    assert torch.equal(before[:, [0, 1, 2, 6, 7, 8]], after[:, [0, 1, 2, 6, 7, 8]])
    assert not torch.equal(before[:, 3:6], after[:, 3:6])


def test_a_high_temperature_is_the_mean_and_a_low_one_a_choice():
    history = draw((4, 3, 9), 1)
    skips = {
        temperature: Stack("mhar", 2, 2, heads=3, temperature=temperature)
        .randomise()
        .double()
        .skips[1]
        for temperature in (1e9, 1e-6)
    }
    torch.testing.assert_close(skips[1e9].mix(history), history.mean(1), rtol=1e-6, atol=1e-6)
    chosen = skips[1e-6].mix(history)
    assert (chosen.unsqueeze(1) == history).any(1).all()


@pytest.mark.parametrize(("dim", "heads"), [(9, 3), (8, 4), (7, 1), (512, 4)])
def test_heads_are_the_widths_largest_divisor_up_to_four(dim, heads):
    assert create_skip("mhar", dim, place=FIRST).constants()["H"] == heads


def test_delta_attention_adds_the_mean_of_earlier_branches_at_the_start():
    stack, x = Stack("delta_attnres", 2, 2).double(), draw((4, 9), 1)
    blocks, values, h = stack.blocks(), [x], x
    for k in range(4):
        read = h if k == 0 else h + sum(values) / len(values)
        values.append(blocks.branch(k, read))
        h = h + values[-1]
    torch.testing.assert_close(stack(x), h, rtol=1e-12, atol=1e-12)


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
    found = []
    for k, skip in enumerate(stack.skips):
        found.append(skip.streams(x)[0])
        h, carried = skip.prepare(x)
        x = skip(x, stack.branch(k)(h), carried)
    return found


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
    found = skip.matrix(logits)
    torch.testing.assert_close(found + z.matrix_power(4) / 8, exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(found @ found.T, identity, rtol=0, atol=1e-5)


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


def test_spannorm_with_a_last_branch_of_zero_normalises_the_layers_input():
    first, last = Stack("spannorm", 1, 2).double().skips
    x, f = draw((4, 9), 1), draw((4, 9), 2)
    assert torch.equal(first.prepare(x)[0], torch.layer_norm(x, [9]))
    y = last(first(x, f), torch.zeros_like(f))
    torch.testing.assert_close(y, torch.layer_norm(x, [9]), rtol=1e-12, atol=1e-12)


def test_completep_at_its_base_depth_is_pre_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    for exponent in (0.5, 1.0):
        options = {"depth_exponent": exponent, "base_depth": 6, "place": LAST}
        skip = create_skip("completep", 5, **options).double()
        assert torch.equal(skip(x, f), x + f)
        assert skip.constants() == {"alpha": 1, "factor of adam-eps": 1, "factor of lr": 1}


def test_completep_with_exponent_one_half_and_base_one_is_the_fixed_scale():
    """Of one block a layer, where the fixed scale counts blocks and CompleteP layers."""
    x, f, place = draw(SEQUENCE, 1), draw(SEQUENCE, 2), Place(index=2, depth=7)
    options = {"depth_exponent": 0.5, "base_depth": 1, "norm": "none", "place": place}
    ours = create_skip("completep", 5, **options).double()
    scaled = create_skip("scaled", 5, place=place).double()
    torch.testing.assert_close(ours(x, f), scaled(x, f), rtol=1e-14, atol=1e-14)


def test_completep_names_the_factors_of_the_optimizer():
    place = Place(index=0, depth=32)
    found = create_skip("completep", 5, place=place).constants()
    expected = {"alpha": 1 / 16, "factor of adam-eps": 1 / 16, "factor of lr": 1}
    assert found == pytest.approx(expected)
    found = create_skip("completep", 5, depth_exponent=0.5, place=place).constants()
    expected = {"alpha": 1 / 4, "factor of adam-eps": 1 / 4, "factor of lr": 1 / 4}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_geonorm_keeps_the_length_of_a_row(shape):
    axis = 1 if shape == IMAGE else -1
    skip = create_skip("geonorm", 5, place=LAST, channel_dim=axis, eps=1e-12).double()
    x, f = 3 * draw(shape, 1), draw(shape, 2)
    torch.testing.assert_close(skip(x, f).norm(dim=axis), x.norm(dim=axis))
    torch.testing.assert_close(skip(x, 2 * x), x)


def test_geonorm_turns_by_at_most_an_eighth_of_a_turn_over_the_layer():
    """A branch across x: the angle is |F| / |x|, then pi / 4, in layer l over l."""
    x = torch.tensor([[[2.0, 0.0, 0.0]]], dtype=torch.float64)
    f = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    for place, layer in ((FIRST, 1), (LAST, 6)):
        skip = create_skip("geonorm", 3, place=place, eps=1e-12).double()
        for size, angle in ((1.0, 0.5), (100.0, math.pi / 4)):
            y = skip(x, size * f)
            turned = torch.atan2(y[..., 1], y[..., 0])
            torch.testing.assert_close(turned, torch.full_like(turned, angle / layer))


def test_geonorm_leaves_a_row_of_zeros_finite_with_its_gradients():
    skip = create_skip("geonorm", 5, place=FIRST)
    x = torch.zeros(2, 5, requires_grad=True)
    f = torch.zeros(2, 5, requires_grad=True)
    y = skip(x, f)
    y.sum().backward()
    for value in (y, x.grad, f.grad):
        assert torch.isfinite(value).all()


def test_a_norm_agnostic_step_is_across_x_and_a_share_of_its_length():
    skip = create_skip("nag", 5, place=LAST, eps=1e-12).double()
    with torch.no_grad():
        skip.direction.copy_(draw(skip.direction.shape, 3))
    x, f = 3 * draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    step = skip(x, f) - x
    inner = (step * x).sum(-1)
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-10)
    ratio = step.norm(dim=-1) / x.norm(dim=-1)
    assert ((ratio > 0) & (ratio < 12**-0.5)).all()
    torch.testing.assert_close(skip(x, 7 * f), x + step)  # the size of F does not count
    torch.testing.assert_close(skip(7 * x, f), 7 * (x + step))  # and that of x scales the step


def test_norm_agnostic_steps_start_at_half_weight_over_root_of_the_block():
    for place, number in ((FIRST, 2), (LAST, 12)):
        skip = create_skip("nag", 5, place=place).double()
        with torch.no_grad():
            skip.direction.zero_()
        x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
        ratio = (skip(x, f) - x).norm(dim=-1) / x.norm(dim=-1)
        torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5 * number**-0.5))


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
