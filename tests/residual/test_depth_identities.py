"""Rules that weigh earlier outputs.

The tests check what a stack equals at its start and at the ends of its parameters, as its source
says.
"""

import pytest
import torch
from skip_variants import draw
from stream_rules import Stack, copy_parameters

from fairseq_rskip.residual import Place, create_skip

FIRST = Place(index=0, depth=6, position=1, sublayers=2)


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


@pytest.mark.parametrize(
    ("members", "hidden"), [(2, 64), (15, 64), (16, 128), (17, 128), (31, 128), (32, 192)]
)
def test_mudds_hidden_size_is_a_multiple_of_64_above_four_times_its_members(members, hidden):
    skip = create_skip("mudd", 8, place=Place(index=members - 2, depth=40))
    assert skip.weight.shape == (members,)
    assert skip.w1.shape == (hidden, 8) and skip.w2.shape == (members, hidden)


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
