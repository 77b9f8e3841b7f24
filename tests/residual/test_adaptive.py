"""askip: equal to rskip at every integer, a lambda that moves, and what each mode promises."""

import copy

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw
from transformer_helpers import TINY, batch, build, sentences

from fairseq_rskip.analysis.live import Movement, learned
from fairseq_rskip.modules import training
from fairseq_rskip.residual import Place, SkipConnection, skips
from fairseq_rskip.residual.adaptive import halting, halting_cost, lambdas
from fairseq_rskip.residual.profile import set_starts

MODES = ("fraction", "mixture", "halting", "gradient")


def askip(adapt, steps=2, dim=5, **options):
    """An askip whose p is one-hot at ``steps``, with random gains and biases."""
    skip = SkipConnection(dim, "askip", adapt=adapt, **options)
    with torch.no_grad():
        for norm in skip.post:
            norm.weight.uniform_(0.5, 1.5), norm.bias.uniform_(-0.5, 0.5)
        if adapt == "mixture":
            skip.start.copy_(torch.where(torch.arange(4) == steps - 1, 0.0, -1e9))
        elif adapt == "halting":
            skip.start.copy_(torch.where(torch.arange(3) < steps - 1, -1e9, 1e9))
        elif adapt == "fraction":
            skip.start.fill_(steps)
        else:
            skip.freeze(steps)
    return skip


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("adapt", MODES)
@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_at_an_integer_it_is_rskip_bit_for_bit(adapt, steps, shape, dtype, stock_operators):
    layout = {"channel_dim": 1} if shape == IMAGE else {}
    skip = askip(adapt, steps, **layout)
    fixed = SkipConnection(5, "rskip", skip_lambda=steps, **layout)
    fixed.load_state_dict({name: value for name, value in skip.state_dict().items() if name in fixed.state_dict()})
    x, f = draw(shape, 1, dtype), draw(shape, 2, dtype)
    assert torch.equal(skip.to(dtype)(x, f), fixed.to(dtype)(x, f))
    if adapt != "halting":  # its running mean says what training has seen
        assert skip.effective_lambda() == pytest.approx(steps)


@pytest.mark.parametrize("start", [1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
@pytest.mark.parametrize("adapt", ["fraction", "mixture", "halting"])
def test_lambda_starts_where_it_is_told_to(adapt, start):
    skip = SkipConnection(5, "askip", adapt=adapt, skip_lambda=start)
    p = skip.weights(torch.zeros(4, 2, 3, 5)).detach().reshape(4, -1).mean(1)
    k = torch.arange(1.0, 5.0)
    assert float((k * p).sum()) == pytest.approx(start, abs=0.3 if adapt != "fraction" else 1e-6)
    assert skip.effective_lambda() == pytest.approx(float((k * p).sum()))


@pytest.mark.parametrize("value", [0.3, 4.6], ids=["below", "above"])
def test_a_lambda_beyond_its_ends_stays_there_and_can_come_back(value):
    skip = askip("fraction", 2)
    with torch.no_grad():
        skip.moved.fill_(value - 2)
    assert skip.effective_lambda() == pytest.approx(1 if value < 1 else 4)
    skip(draw(SEQUENCE, 1, torch.float32), draw(SEQUENCE, 2, torch.float32)).square().sum().backward()
    assert skip.moved.grad != 0


def test_halting_costs_what_its_tokens_take_and_padding_nothing():
    skip = askip("halting", 3, halt_cost=0.5)
    x, mask = draw((4, 3, 5), 1, torch.float32), torch.zeros(4, 3, dtype=torch.bool)
    mask[2:, 1] = True
    skip(x, x, None, mask)
    assert torch.equal(skip.cost.detach(), 3.0 * (~mask))
    assert halting_cost([skip], torch.sum).item() == 0.5 * 3 * 10 and halting_cost([skip], torch.sum) is None
    skip(x, x, None, mask)
    assert copy.deepcopy(skip).cost is None and skip.cost is not None
    skip.mean_steps.fill_(2.0), skip(x, x, None, mask)
    assert float(skip.mean_steps) == pytest.approx(2 + 0.01)  # a running mean, from its start towards 3
    skip.bfloat16()(x.bfloat16(), x.bfloat16())
    assert float(skip.mean_steps) == pytest.approx(2 + 0.0199)  # bf16 has nothing between 2 and 2.0156
    halting_cost([skip.float()], torch.sum)
    skip.eval()(x, x, None, mask)
    assert halting_cost([skip], torch.sum) is None


def test_the_cost_of_halting_enters_the_loss():
    model = build("transformer_askip_ln_tiny", **TINY, skip_adapt="halting", skip_halt_cost=0.25).train()
    inputs = batch(sentences())

    def criterion(net, sample):
        return net(*sample)[0].float().logsumexp(-1).sum(), 7, {}

    def train_step(sample, model, criterion, optimizer):
        return criterion(model, sample)

    torch.manual_seed(0)
    plain, _, _ = criterion(model, inputs)
    halting_cost(halting(model), torch.sum)
    torch.manual_seed(0)
    loss, size, _ = training.HaltCost(train_step, model)(inputs, model, criterion, None)
    tokens = [int(part.ne(model.encoder.padding_idx).sum()) for part in (inputs[0], inputs[2])]
    expected = [tokens["decoder" in name] for name in skips(model)]
    taken = float(loss - plain) / 0.25 / (sum(expected) / len(expected))
    assert size == 7 and 1.8 < taken < 2.2  # E[k] at the start
    loss.backward()
    assert all(skip.moved.grad.abs().sum() > 0 for skip in skips(model).values())


@pytest.mark.parametrize("adapt", MODES)
def test_a_checkpoint_of_rskip_goes_on_as_askip(adapt):
    fixed = build("transformer_rskip_ln_tiny", skip_lambda=3, **TINY)
    model = build("transformer_askip_ln_tiny", seed=2, skip_adapt=adapt, **TINY)
    model.load_state_dict(fixed.state_dict())
    inputs = batch(sentences())
    assert all(norm.weight.eq(1).all() for skip in skips(model).values() for norm in skip.post)
    if adapt in ("fraction", "gradient"):
        assert torch.equal(model(*inputs)[0], fixed(*inputs)[0])
        assert set(lambdas(model).values()) == {3.0}
    assert all(2.7 < value < 3.1 for value in lambdas(model).values())
    again = build("transformer_askip_ln_tiny", seed=3, skip_adapt=adapt, **TINY)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(*inputs)[0], model(*inputs)[0])


class Scaled(torch.nn.Module):
    """Blocks of a linear branch and an askip."""

    def __init__(self, gains):
        super().__init__()
        places = [Place(index=i, depth=len(gains)) for i in range(len(gains))]
        self.skips = torch.nn.ModuleList(SkipConnection(8, "askip", adapt="gradient", place=p) for p in places)
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
            skip.freeze(k)
        outputs = model(x)
        norms = [g.norm() for g in torch.autograd.grad((outputs[-1] - target).square().mean(), outputs)]
        for block in range(3):
            ratio = abs((norms[block] / norms[block + 1]).log().item())
            expected.setdefault(block, {})[k] = ratio
    before = {name: value.clone() for name, value in model.named_parameters()}
    found = set_starts(model, lambda: (model(x)[-1] - target).square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert list(found.values()) == [min(ratios, key=ratios.get) for ratios in expected.values()]
    assert len(set(found.values())) > 1 and all(p.grad is None for p in model.parameters())


def test_coefficients_that_never_moved_are_named():
    model = build("transformer_askip_ln_tiny", **TINY)
    movement = Movement(model)
    assert len(movement.starts) == len(learned(model)) == 10
    assert movement.warning().startswith("10 of 10 learned coefficients")
    assert "encoder.layers.0.self_attn_skip.moved" in movement.warning()
    with torch.no_grad():
        for value in learned(model).values():
            value.add_(0.1)
    assert movement.warning() == "" and list(lambdas(model).values()) == pytest.approx([2.1] * 10)
