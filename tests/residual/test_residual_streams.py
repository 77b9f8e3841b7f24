"""Rules that keep more than one tensor.

Whole stacks are compared with their equations, and with what each is at its start.
"""

import depth_equations
import hyper_equations
import pytest
import stream_blocks
import torch
from skip_variants import draw, gradients
from stream_rules import RULES, Stack, pre_norm

from fairseq_rskip.residual import Place, create_skip

SHAPES = {"one block": (1, 1), "one layer": (1, 2), "encoder": (2, 2), "decoder": (2, 3)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_stack_is_its_equation_with_all_gradients(rule, shape):
    stack = Stack(rule, *SHAPES[shape]).randomise().double()
    x, upstream, blocks = draw((4, 3, 9), 1).requires_grad_(), draw((4, 3, 9), 2), stack.blocks()
    y, expected = stack(x), RULES[rule][1](x, blocks)
    assert y.shape == x.shape
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    ours = gradients(y, upstream, [x, *stack.parameters()])
    theirs = gradients(expected, upstream, [x, *blocks.parameters.values()])
    for name, a, b in zip(["x", *blocks.parameters], ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rule", RULES)
def test_eps_is_that_of_every_norm_of_a_stack(rule, monkeypatch):
    for module in (stream_blocks, depth_equations, hyper_equations):
        monkeypatch.setattr(module, "EPS", 0.1, raising=False)
    stack, x = Stack(rule, eps=0.1).randomise().double(), draw((4, 3, 9), 1)
    expected = RULES[rule][1](x, stack.blocks())
    torch.testing.assert_close(stack(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_the_parameters_without_a_gradient_are_those_that_the_rule_names(rule):
    stack = Stack(rule).randomise().double()
    (stack(draw((4, 3, 9), 1)) * draw((4, 3, 9), 2)).sum().backward()
    for skip in stack.skips:
        still = {name for name, p in skip.learned().items() if p.grad.abs().max() < 1e-12}
        assert still == set(skip.without_gradient())


# type of x and of the parameters, width, whether under autocast to bf16, tolerance
PRECISIONS = [
    (torch.float16, torch.float16, 33, False, 0.01),
    (torch.bfloat16, torch.float32, 33, False, 0.06),
    (torch.bfloat16, torch.bfloat16, 33, False, 0.06),
    (torch.float32, torch.float32, 33, False, 1e-5),
    (torch.float32, torch.float32, 9, True, 0.03),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_stream_keeps_its_type_in_every_precision(rule):
    """Compare with float64 on the same rounded inputs.

    A stack's rounding grows with its largest value.
    """
    for dtype, parameters, dim, autocast, tolerance in PRECISIONS:
        stack, x = Stack(rule, dim=dim).randomise().to(parameters), draw((5, dim), 1, dtype)
        expected = RULES[rule][1](x.double(), stack.blocks())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = stack(x)
            assert (
                y.dtype == dtype and stack.skips[1].prepare(stack.skips[0](x, x))[0].dtype == dtype
            )
        assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_torch_compile_sees_one_graph(rule):
    torch._dynamo.reset()
    stack, x = (
        Stack(rule, 1, 3).randomise().requires_grad_(False),
        draw((4, 3, 9), 1, torch.float32),
    )
    mask = torch.zeros(4, 3).bool()
    torch.testing.assert_close(
        torch.compile(stack, backend="eager", fullgraph=True)(x, mask), stack(x, mask)
    )


@pytest.mark.parametrize("rule", RULES)
def test_what_padding_holds_reaches_no_other_position(rule):
    stack, mask = Stack(rule).randomise(), torch.zeros(4, 3).bool()
    mask[1, 0] = mask[3, 2] = True
    x = draw((4, 3, 9), 1, torch.float32)
    clean, poisoned = (
        stack(x.masked_fill(mask.unsqueeze(-1), fill), mask) for fill in (0.0, float("nan"))
    )
    assert torch.equal(clean[~mask], poisoned[~mask])


@pytest.mark.parametrize("rule", ["b2t", "residual_dual"])
def test_batch_norms_of_a_stack_leave_padding_out(rule):
    stack, mask = Stack(rule, norm="batch").randomise().double(), torch.zeros(4, 3).bool()
    mask[1, 0] = mask[3, 2] = True
    x = draw((4, 3, 9), 1).masked_fill(mask.unsqueeze(-1), float("nan"))
    packed = stack(x[~mask])
    torch.testing.assert_close(stack(x, mask)[~mask], packed, rtol=1e-10, atol=1e-10)


def test_b2t_with_a_branch_of_zero_is_a_recursive_skip(stock_operators):
    stack = Stack("b2t", 1, 2).randomise().double()
    recursive = create_skip("rskip", 9, skip_lambda=2, norm="layer").double()
    recursive.post.load_state_dict(
        {f"{k}.{name}": p for k in (0, 1) for name, p in stack.skips[k].post[0].named_parameters()}
    )
    x, f = draw((4, 9), 1), draw((4, 9), 2)
    first = stack.skips[0](x, f)
    assert torch.equal(stack.skips[1](first, torch.zeros_like(f)), recursive(x, f))


def test_residual_dual_of_one_block_is_twice_post_norm():
    x, f = draw((4, 9), 1), draw((4, 9), 2)
    skip = create_skip("residual_dual", 9, place=Place()).double()
    torch.testing.assert_close(skip(x, f), 2 * torch.layer_norm(x + f, [9]), rtol=1e-12, atol=1e-12)


def test_siamese_streams_with_branches_of_zero_are_those_that_enter():
    stack, x = Stack("siamesenorm", 2, 2).double(), draw((4, 9), 1)
    for skip in stack.skips:
        h, carried = skip.prepare(x)
        x, before = skip(x, torch.zeros(4, 9).double(), carried), x
    normal = torch.layer_norm(before[:, :9], [9])
    torch.testing.assert_close(
        x, normal + torch.layer_norm(before[:, 9:], [9]), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(before[:, 9:], draw((4, 9), 1)) and stack.skips[-1].needs_final_norm()


@pytest.mark.parametrize("depth", [1, 6])
def test_dlcl_starts_with_rows_that_sum_to_one(depth):
    rows = [skip.learned() for skip in Stack("dlcl", depth, 2).skips]
    weights = [row["weight"] for row in rows if "weight" in row]
    assert rows[0]["first_weight"].tolist() == [1] and [len(weight) for weight in weights] == list(
        range(2, depth + 2)
    )
    for weight in weights:
        torch.testing.assert_close(weight, torch.full_like(weight, 1 / len(weight)), rtol=0, atol=0)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_denseformer_has_the_papers_number_of_weights(depth):
    learned = [p for skip in Stack("denseformer", depth, 3).skips for p in skip.learned().values()]
    assert sum(p.numel() for p in learned) == depth * (depth + 3) // 2


def test_attention_residuals_start_as_the_mean():
    stack, x = Stack("attnres", 2, 2).double(), draw((4, 9), 1)
    blocks, values, c = stack.blocks(), [x], x
    for k in range(4):
        values.append(blocks.branch(k, c))
        c = sum(values) / len(values)
    torch.testing.assert_close(stack(x), c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("rule", ["hyper", "hyper-static", "mhc", "mhc-lite", "kromhc", "jpmhc"])
def test_hyper_connections_start_as_n_times_plain_pre_norm(rule, n):
    """mHC reads a little of every stream, 1.07 x for n = 4.

    Pre-norm divides that out again but for its eps.
    """
    stack, x = Stack(rule, 2, 3, streams=n).double(), draw((4, 9), 1)
    tolerance = 1e-12 if "hyper" in rule else 1e-4
    torch.testing.assert_close(
        stack(x), n * pre_norm(x, stack.blocks()), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("size", [1.0, 500.0], ids=["usual", "huge"])
@pytest.mark.parametrize("rule", ["mhc", "mhc-lite", "kromhc"])
def test_the_mixing_matrix_of_mhc_is_doubly_stochastic(rule, size):
    skip = Stack(rule, 2, 2, streams=4).double().skips[1]
    with torch.no_grad():
        skip.phi_res.copy_(draw(skip.phi_res.shape, 3) * size)
        skip.b_res.zero_()
        _, matrix, _ = skip.read_mix_write(draw((3, 4, 9), 1))
    ones = torch.ones(3, 4).double()
    torch.testing.assert_close(matrix.sum(-1), ones, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(matrix).all() and (matrix >= 0).all()
    if size == 1.0 or rule != "mhc":  # 20 steps of Sinkhorn are enough for the usual
        tolerance = 1e-6 if rule == "mhc" else 1e-12
        torch.testing.assert_close(matrix.sum(-2), ones, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", ["x0", "denseformer", "fractional"])
def test_at_the_start_a_stack_is_plain_pre_norm(rule):
    stack, x = Stack(rule, 2, 3).double(), draw((4, 9), 1)
    torch.testing.assert_close(stack(x), pre_norm(x, stack.blocks()), rtol=1e-12, atol=1e-12)


def test_attention_residuals_of_one_block_start_as_half_of_pre_norm():
    """c is the mean of what entered and the sum of all branches.

    That is half of x + F + F', which G takes for the whole.
    """
    stack, x = Stack("attnres-blocks", 2, 3, block_size=6).double(), draw((4, 9), 1)
    torch.testing.assert_close(2 * stack(x), pre_norm(x, stack.blocks()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "fractional"])
def test_wrong_inputs_are_refused_with_the_sizes(rule):
    skip = Stack(rule, 1, 2).skips[1]
    wide = skip.widths[0] * 9
    with pytest.raises(ValueError, match=rf"\[4, {wide + 1}\]: expected {wide} at dimension -1"):
        skip(torch.zeros(4, wide + 1), torch.zeros(4, 9))
    with pytest.raises(ValueError, match=rf"\[4, {wide + 1}\]: expected {wide} at dimension -1"):
        skip.prepare(torch.zeros(4, wide + 1))
