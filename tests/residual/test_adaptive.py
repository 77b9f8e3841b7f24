"""askip: equal to rskip at every integer, a lambda that moves, and what each mode promises."""

import copy

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw

from fairseq_rskip.residual import Place, create_skip, initialise_from_batch
from fairseq_rskip.residual.halting import halting_cost, halting_modules

MODES = ("fraction", "mixture", "halting", "gradient")


def askip(adapt, steps=2, dim=5, **options):
    """An askip whose p is one-hot at ``steps``, with random gains and biases."""
    skip = create_skip("askip", dim, adapt=adapt, **options)
    with torch.no_grad():
        for norm in skip.post:
            norm.weight.uniform_(0.5, 1.5), norm.bias.uniform_(-0.5, 0.5)
        if adapt == "mixture":
            skip.shares.start.copy_(torch.where(torch.arange(4) == steps - 1, 0.0, -1e9))
        elif adapt == "halting":
            skip.shares.start.copy_(torch.where(torch.arange(3) < steps - 1, -1e9, 1e9))
        elif adapt == "fraction":
            skip.shares.start.fill_(steps)
        else:
            skip.shares.freeze(steps)
    return skip


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("adapt", MODES)
@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_at_an_integer_it_is_rskip_bit_for_bit(adapt, steps, shape, dtype, stock_operators):
    layout = {"channel_dim": 1} if shape == IMAGE else {}
    skip = askip(adapt, steps, **layout)
    fixed = create_skip("rskip", 5, skip_lambda=steps, **layout)
    fixed.load_state_dict(
        {name: value for name, value in skip.state_dict().items() if name in fixed.state_dict()}
    )
    x, f = draw(shape, 1, dtype), draw(shape, 2, dtype)
    assert torch.equal(skip.to(dtype)(x, f), fixed.to(dtype)(x, f))
    if adapt != "halting":  # its running mean says what training has seen
        assert skip.effective_lambda() == pytest.approx(steps)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("adapt", MODES)
def test_the_parts_of_x_and_f_are_those_of_the_steps_that_count(adapt, steps):
    """Of one row, whose last norm divides both parts by one number."""
    skip = askip(adapt, steps).double()
    fixed = create_skip("rskip", 5, skip_lambda=steps).double()
    for norm in [*skip.post, *fixed.post]:
        torch.nn.init.ones_(norm.weight), torch.nn.init.zeros_(norm.bias)
    x, f_x = draw((1, 5), 1), draw((1, 5), 2)
    quotients = []
    for each in (skip, fixed):
        of_x, of_branch = each.parts(x, f_x)
        quotients.append(of_branch.norm() / of_x.norm())
    torch.testing.assert_close(*quotients, rtol=1e-9, atol=0.0)


def lambda_at_the_start(skip):
    """``sum_k k p_k`` for y_k of zeros."""
    steps = skip.steps
    p = skip.shares.of_steps(torch.zeros(steps, 2, 3, 5)).detach().reshape(steps, -1).mean(1)
    return float((torch.arange(1.0, steps + 1) * p).sum())


@pytest.mark.parametrize("start", ["1", "1.5", "2", "2.5", "3.3", "K/2", "K-0.7", "K"])
@pytest.mark.parametrize("steps", [4, 16, 64])
@pytest.mark.parametrize("adapt", ["fraction", "mixture", "halting"])
def test_the_initial_lambda_is_that_of_the_option(adapt, steps, start):
    value = {"K/2": steps / 2, "K-0.7": steps - 0.7, "K": steps}.get(start) or float(start)
    skip = create_skip("askip", 5, adapt=adapt, skip_lambda=value, max_steps=steps)
    tolerance = 0.3 if adapt != "fraction" else 1e-5
    assert lambda_at_the_start(skip) == pytest.approx(value, abs=tolerance)
    assert skip.effective_lambda() == pytest.approx(lambda_at_the_start(skip))


@pytest.mark.parametrize(("value", "rounded"), [(1.4, 1), (2.6, 3)])
def test_an_initial_lambda_for_the_gradient_to_change_is_rounded(value, rounded):
    skip = create_skip("askip", 5, adapt="gradient", skip_lambda=value)
    fixed = create_skip("rskip", 5, skip_lambda=rounded)
    x, f = draw(SEQUENCE, 1, torch.float32), draw(SEQUENCE, 2, torch.float32)
    torch.testing.assert_close(skip.eval()(x, f), fixed(x, f))
    assert skip.effective_lambda() == rounded


@pytest.mark.parametrize("value", [1, 2, 3])
@pytest.mark.parametrize("steps", [4, 8, 64])
def test_at_a_small_lambda_an_early_step_halts_with_sigmoid_of_minus_three(steps, value):
    skip = create_skip("askip", 5, adapt="halting", skip_lambda=value, max_steps=steps)
    early = value - 1
    assert skip.shares.start.tolist() == [-3.0] * early + [3.0] * (steps - 1 - early)


@pytest.mark.parametrize("value", [0.3, 4.6], ids=["below", "above"])
def test_a_lambda_beyond_its_ends_stays_there_and_can_come_back(value):
    skip = askip("fraction", 2)
    with torch.no_grad():
        skip.shares.moved.fill_(value - 2)
    assert skip.effective_lambda() == pytest.approx(1 if value < 1 else 4)
    skip(
        draw(SEQUENCE, 1, torch.float32), draw(SEQUENCE, 2, torch.float32)
    ).square().sum().backward()
    assert skip.shares.moved.grad != 0


@pytest.fixture
def padded_batch():
    """Four positions of three sentences, and a mask that leaves 10 of the 12 tokens."""
    x = draw((4, 3, 5), 1, torch.float32)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2:, 1] = True
    return x, mask


@pytest.fixture
def three_steps():
    """A halting skip whose every token takes 3 steps, at a cost of 0.5 a step."""
    return askip("halting", 3, halt_cost=0.5)


def test_only_a_halting_skip_with_a_cost_enters_the_loss(three_steps):
    model = torch.nn.ModuleList([three_steps, askip("halting"), askip("fraction")])
    assert halting_modules(model) == [three_steps.shares]


@pytest.mark.parametrize(("reduction", "cost"), [("sum", 0.5 * 3 * 10), ("mean", 0.5 * 3)])
def test_the_cost_is_that_of_the_steps_of_unpadded_tokens(
    three_steps, padded_batch, reduction, cost
):
    x, mask = padded_batch
    three_steps(x, x, None, mask)
    assert halting_cost([three_steps.shares], reduction).item() == pytest.approx(cost)


def test_a_cost_is_a_sum_or_a_mean(three_steps):
    with pytest.raises(ValueError, match="^reduction='none': expected 'mean' or 'sum'"):
        halting_cost([three_steps.shares], "none")


def test_a_batch_of_padding_costs_nothing(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps(x, x, None, torch.ones_like(mask))
    assert halting_cost([three_steps.shares], "mean").item() == 0


def test_a_forward_pass_is_charged_once(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps(x, x, None, mask)
    assert halting_cost([three_steps.shares], "sum") is not None
    assert halting_cost([three_steps.shares], "sum") is None


def test_a_pass_in_evaluation_costs_nothing(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps.eval()(x, x, None, mask)
    assert halting_cost([three_steps.shares], "sum") is None


def test_a_copy_is_not_charged_for_the_last_pass(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps(x, x, None, mask)
    assert halting_cost([copy.deepcopy(three_steps).shares]) is None
    assert halting_cost([three_steps.shares]) is not None


def test_the_mean_number_of_steps_moves_a_hundredth_of_the_way(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps.shares.mean_steps.fill_(2.0)
    three_steps(x, x, None, mask)
    assert float(three_steps.shares.mean_steps) == pytest.approx(2 + 0.01 * (3 - 2))


def test_a_batch_of_padding_does_not_move_the_mean_number_of_steps(three_steps, padded_batch):
    x, mask = padded_batch
    three_steps.shares.mean_steps.fill_(2.0)
    three_steps(x, x, None, torch.ones_like(mask))
    assert float(three_steps.shares.mean_steps) == 2.0


def test_the_mean_number_of_steps_is_kept_in_fp32(three_steps, padded_batch):
    x, _ = padded_batch
    three_steps.shares.mean_steps.fill_(2.0)
    three_steps.bfloat16()(x.bfloat16(), x.bfloat16())
    # bf16 has nothing between 2 and 2.0156
    assert float(three_steps.shares.mean_steps) == pytest.approx(2.01)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_activation_checkpointing_counts_the_steps_of_a_batch_once(reentrant):
    skip = askip("halting", 3)
    skip.shares.mean_steps.fill_(2.0)
    x = draw((4, 3, 5), 1, torch.float32).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(skip, x, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert float(skip.shares.mean_steps) == pytest.approx(2 + 0.01)  # towards 3


def test_a_cost_without_a_gradient_is_refused():
    """Reentrant checkpointing runs the pass that E[k] is of without one."""
    skip = create_skip("askip", 5, adapt="halting", halt_cost=1.0)
    x = draw((4, 3, 5), 1, torch.float32).requires_grad_()
    torch.utils.checkpoint.checkpoint(skip, x, x, use_reentrant=True)
    with pytest.raises(ValueError, match="kept no gradient.*use_reentrant=False"):
        halting_cost([skip.shares])
    torch.utils.checkpoint.checkpoint(skip, x, x, use_reentrant=False)
    halting_cost([skip.shares]).backward()
    assert skip.shares.moved.grad.abs().sum() > 0


@pytest.mark.parametrize("adapt", ["fraction", "mixture", "halting"])
def test_a_small_move_of_what_bfloat16_holds_counts(adapt):
    """Beside a start of 1.25 or 3, whose neighbours in bf16 are 0.008 or 0.016 away."""
    half = create_skip("askip", 5, adapt=adapt, skip_lambda=1.25, dtype=torch.bfloat16)
    single = create_skip("askip", 5, adapt=adapt, skip_lambda=1.25)
    single.load_state_dict(half.state_dict())
    with torch.no_grad():
        for skip in (half, single):
            skip.shares.moved[0] = 2**-9
    ys = draw((4, 3, 2, 5), 1, torch.float32)
    shares = [skip.shares.of_steps(ys) for skip in (half, single)]
    torch.testing.assert_close(*shares, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "batch", "dyt", "ada"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("adapt", MODES)
def test_a_used_askip_that_loads_an_rskip_starts_at_its_lambda(adapt, steps, norm):
    used = create_skip("askip", 5, adapt=adapt, skip_lambda=3.0, norm=norm)
    x, f = (draw(SEQUENCE, seed, torch.float32) for seed in (1, 2))
    used(x, f)
    with torch.no_grad():
        for parameter in used.parameters():
            parameter.add_(1.0)
    fixed = create_skip("rskip", 5, skip_lambda=steps, norm=norm)
    with torch.no_grad():
        for parameter in fixed.parameters():
            parameter.add_(0.5)
    used.load_state_dict(fixed.state_dict())

    fresh = create_skip("askip", 5, adapt=adapt, skip_lambda=float(steps), norm=norm)
    expected = {**fresh.state_dict(), **fixed.state_dict()}
    torch.testing.assert_close(used.state_dict(), expected, rtol=0, atol=0)
    assert used.effective_lambda() == pytest.approx(steps, abs=0.3)
    with pytest.raises(RuntimeError, match="was saved with kind='askip'"):
        create_skip("rskip", 5, skip_lambda=4, norm=norm).load_state_dict(used.state_dict())


@pytest.mark.parametrize("adapt", MODES)
def test_a_state_that_notes_no_rule_has_the_lambda_of_its_number_of_norms(adapt):
    """That of stock fairseq, or of an rskip whose metadata is lost."""
    skip = create_skip("askip", 5, adapt=adapt, skip_lambda=1.0)
    skip.load_state_dict(dict(create_skip("rskip", 5, skip_lambda=3).state_dict()))
    assert skip.effective_lambda() == pytest.approx(3, abs=0.3)


def test_an_xskip_that_is_no_recursive_skip_is_refused():
    state = create_skip("xskip", 5, skip_lambda=2.0, norm="layer").state_dict()
    with pytest.raises(RuntimeError, match="was saved with kind='xskip': expected 'askip'"):
        create_skip("askip", 5).load_state_dict(state)


def test_a_missing_norm_of_an_rskip_is_named_and_a_rule_without_a_kind_differs():
    skip = create_skip("askip", 5)
    state = create_skip("rskip", 5, skip_lambda=2).state_dict()
    del state["post.1.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "post.1.weight"'):
        skip.load_state_dict(state)
    assert skip.mismatch({"skip_lambda": 1}) == "kind=None: expected 'askip'"


def test_a_lambda_that_was_broadcast_is_the_one_that_is_used():
    """DistributedDataParallel copies rank 0's buffers into those of the others, in place."""
    skip = askip("gradient", 2)
    fixed, before = copy.deepcopy(skip), copy.deepcopy(skip)
    x, f_x = draw((3, 5), 1, torch.float32), draw((3, 5), 2, torch.float32)
    with torch.no_grad():
        skip.shares.start.fill_(4)
    fixed.shares.freeze(4)
    assert torch.equal(skip(x, f_x), fixed(x, f_x))
    assert not torch.equal(skip(x, f_x), before(x, f_x))


@pytest.mark.parametrize("moved", [torch.nn.Module.float, copy.deepcopy])
def test_a_second_state_is_used_wherever_the_buffer_was_moved_to(moved):
    """A tensor that replaces another counts its changes from 0 again."""
    states = []
    for steps in (1, 4):
        made = askip("gradient", 2)
        made.shares.freeze(steps)
        states.append(made.state_dict())
    skip = askip("gradient", 2).double()
    skip.load_state_dict(states[0])
    x, f_x = draw((3, 5), 1, torch.float32), draw((3, 5), 2, torch.float32)
    skip.double()(x.double(), f_x.double())
    skip = moved(skip)
    skip.load_state_dict(states[1])
    assert skip.shares.chosen == 4 == skip.effective_lambda()


class Scaled(torch.nn.Module):
    """Blocks of a linear branch and an askip."""

    def __init__(self, gains):
        super().__init__()
        places = [Place(index=i, depth=len(gains)) for i in range(len(gains))]
        self.skips = torch.nn.ModuleList(
            create_skip("askip", 8, adapt="gradient", place=p) for p in places
        )
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in gains)
        for layer, gain in zip(self.layers, gains):
            layer.weight.data.mul_(gain)

    def forward(self, x):
        outputs = [x]
        for skip, layer in zip(self.skips, self.layers):
            outputs.append(skip(outputs[-1], layer(outputs[-1])))
        return outputs


def test_lambda_from_the_gradient_is_the_one_whose_ratio_is_nearest_one():
    torch.manual_seed(0)
    model, x = Scaled([0.1, 3.0, 12.0]), torch.randn(6, 4, 8, requires_grad=True)
    target = torch.randn(6, 4, 8)
    expected = {}
    for k in (1, 2, 3, 4):
        for skip in model.skips:
            skip.shares.freeze(k)
        outputs = model(x)
        norms = [
            g.norm() for g in torch.autograd.grad((outputs[-1] - target).square().mean(), outputs)
        ]
        for block in range(3):
            ratio = abs((norms[block] / norms[block + 1]).log().item())
            expected.setdefault(block, {})[k] = ratio
    before = {name: value.clone() for name, value in model.named_parameters()}
    actual = initialise_from_batch(model, lambda: (model(x)[-1] - target).square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert list(actual.values()) == [min(ratios, key=ratios.get) for ratios in expected.values()]
    assert len(set(actual.values())) > 1 and all(p.grad is None for p in model.parameters())


def test_functional_call_has_the_lambda_of_its_own_buffers():
    """Two tensors that were written equally often have the same version."""
    one, four = (
        create_skip("askip", 5, adapt="gradient", skip_lambda=value, max_steps=4)
        for value in (1.0, 4.0)
    )
    x, f_x = draw((6, 5), 1, torch.float32), draw((6, 5), 2, torch.float32)
    own = one(x, f_x)
    state = {**dict(four.named_parameters()), **dict(four.named_buffers())}
    assert torch.equal(torch.func.functional_call(one, state, (x, f_x)), four(x, f_x))
    assert torch.equal(one(x, f_x), own) and not torch.equal(own, four(x, f_x))


def test_a_lambda_without_a_gradient_stays_as_it_was():
    model, x = Scaled([1.0, 1.0]), draw((6, 4, 8), 1, torch.float32).requires_grad_()
    actual = initialise_from_batch(model, lambda: 0.0 * model(x)[-1].sum())
    assert list(actual.values()) == [2, 2] == [skip.effective_lambda() for skip in model.skips]


def test_a_lambda_from_the_gradient_that_a_moving_average_left_a_little_lower_is_the_same():
    skip = create_skip("askip", 8, max_steps=4, adapt="gradient")
    skip.shares.freeze(3)
    skip.shares.start.copy_(torch.tensor(2.9999998))
    x, f_x = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    fixed = create_skip("rskip", 8, skip_lambda=3)
    torch.testing.assert_close(skip(x, f_x), fixed(x, f_x))
    ys = torch.zeros(4, 1)
    assert skip.shares.chosen == 3 and skip.shares.of_steps(ys).tolist() == [0.0, 0.0, 1.0, 0.0]
