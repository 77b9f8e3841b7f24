"""Adaptive rules in a fairseq model.

The tests cover the cost of halting, checkpoints of rskip, and coefficients that never moved.
"""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from transformer_helpers import TINY, batch, build, sentences

from fairseq_rskip.modules import step_hooks
from fairseq_rskip.parameters import UnmovedCoefficients, learned
from fairseq_rskip.residual import create_skip, skips
from fairseq_rskip.residual.adaptive import lambdas
from fairseq_rskip.residual.halting import halting_cost, halting_modules

MODES = ("fraction", "mixture", "halting", "gradient")


def test_the_cost_of_halting_enters_the_loss():
    model = build(
        "transformer_askip_ln_tiny", **TINY, skip_adapt="halting", skip_halt_cost=0.25
    ).train()
    inputs = batch(sentences())

    def criterion(net, sample):
        return net(*sample)[0].float().logsumexp(-1).sum(), 7, {}

    def train_step(sample, model, criterion, optimizer):
        return criterion(model, sample)

    torch.manual_seed(0)
    plain, _, _ = criterion(model, inputs)
    halting_cost(halting_modules(model), "sum")
    torch.manual_seed(0)
    loss, size, _ = step_hooks.HaltCost(train_step, model)(inputs, model, criterion, None)
    tokens = [int(part.ne(model.encoder.padding_idx).sum()) for part in (inputs[0], inputs[2])]
    expected = [tokens["decoder" in name] for name in skips(model)]
    taken = float(loss - plain) / 0.25 / (sum(expected) / len(expected))
    assert size == 7 and 1.8 < taken < 2.2  # E[k] at the start
    loss.backward()
    assert all(skip.shares.moved.grad.abs().sum() > 0 for skip in skips(model).values())


def test_a_training_learns_from_the_cost_of_halting_and_reports_lambda(monkeypatch, caplog):
    """The cost is all that has a gradient here."""
    caplog.set_level(logging.INFO, logger=step_hooks.logger.name)
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)
    ended = []
    monkeypatch.setattr(step_hooks.atexit, "register", ended.append)
    halting = {"skip_adapt": "halting", "skip_halt_cost": 0.25}
    model = build("transformer_askip_ln_tiny", **TINY, **halting).train()

    def train_step(sample, model, criterion, *_):
        return criterion(model, sample)

    def criterion(net, sample):
        return 0.0 * net(*sample)[0].sum(), 1, {}

    made = SimpleNamespace(train_step=train_step, optimizer_step=None, load_dataset=None)
    step_hooks.attach(made, model, 0)
    loss, _, _ = made.train_step(batch(sentences()), model, criterion, None, 0)
    loss.backward()
    assert loss > 0
    assert all(skip.shares.moved.grad.abs().sum() > 0 for skip in skips(model).values())
    (say,) = ended
    say()
    assert "adaptive λ: encoder.layers.0.self_attn_skip 2." in caplog.text


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


def test_coefficients_that_never_moved_are_named():
    model = build("transformer_askip_ln_tiny", **TINY)
    movement = UnmovedCoefficients(model)
    assert len(movement.initial) == len(learned(model)) == 10
    assert movement.warning().startswith("10 of 10 learned coefficients")
    assert "encoder.layers.0.self_attn_skip.shares.moved" in movement.warning()
    with torch.no_grad():
        for value in learned(model).values():
            value.add_(0.1)
    assert movement.warning() == "" and list(lambdas(model).values()) == pytest.approx([2.1] * 10)


def test_a_coefficient_that_was_only_halved_has_not_moved():
    """fairseq halves a model under --fp16 after it is built; 0.1 is no number of fp16."""
    model = torch.nn.Sequential(create_skip("layerscale", 4, init=0.1))
    unmoved = UnmovedCoefficients(model)
    assert unmoved.names() == ["0.weight"]
    model.half()
    assert unmoved.names() == ["0.weight"]


def test_as_many_coefficients_as_a_warning_has_room_for_are_all():
    blocks = [create_skip("skipinit", 4) for _ in range(4)]
    names = "0.weight, 1.weight, 2.weight"
    for count, shown in ((3, names), (4, f"{names}, ...")):
        warning = UnmovedCoefficients(torch.nn.Sequential(*blocks[:count])).warning()
        assert warning.endswith(f"their initial value: {shown}")


def test_a_training_that_goes_on_from_a_model_begins_with_its_coefficients(monkeypatch):
    """fairseq loads the weights of --finetune-from-model after the model is built."""
    monkeypatch.setattr(step_hooks.atexit, "register", lambda say: None)
    model = build("transformer_layerscale_tiny", **TINY)
    reports = {start: step_hooks.Report(lambda *_: None, model) for start in (0, 7)}
    with torch.no_grad():
        for value in learned(model).values():
            value.add_(0.1)
    for update, report in reports.items():
        report(None, model, None, None, update)
        report(None, model, None, None, update + 1)
    begun, resumed = (report.unmoved.names() for report in reports.values())
    assert len(begun) == len(learned(model)) and resumed == []
