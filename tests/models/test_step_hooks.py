"""The work around a training step: nGPT's vectors, sharded parameters, the report at the end."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from optimizer_helpers import flat_copy
from transformer_helpers import TINY, build

from fairseq_rskip.errors import UserError
from fairseq_rskip.modules import step_hooks
from fairseq_rskip.modules.profiling import is_fully_sharded
from fairseq_rskip.parameters import UnmovedCoefficients
from fairseq_rskip.residual import skip_stack, skips


def test_the_fp32_copies_of_ngpts_vectors_have_length_1_too():
    """Else they grow under --fp16, and their updates count less and less."""
    model = build("transformer_ngpt_tiny", **TINY)
    parameters, flat = flat_copy(model)
    fairseqs = SimpleNamespace(
        has_flat_params=True, fp32_params={None: flat}, fp16_params=parameters
    )

    def update(_optimizer):
        flat.data.mul_(3)

    step_hooks.UnitLength(update, list(skips(model).values()))(fairseqs)
    start = 0
    for name, parameter in model.named_parameters():
        copy = flat.detach()[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        if ".layers." in name and parameter.dim() == 2:
            lengths = copy.norm(dim=0 if "out_proj" in name or "fc2" in name else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), msg=name)


def test_ngpt_is_refused_where_parameters_are_sharded(monkeypatch):
    """Its matrices are views of flat parameters there, which nothing would keep at length 1."""
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)  # as in a training
    monkeypatch.setattr(step_hooks, "is_fully_sharded", lambda model: True)
    model = build("transformer_ngpt_tiny", **TINY)
    training = SimpleNamespace(train_step=None, optimizer_step=None, load_dataset=None)
    with pytest.raises(UserError, match="--skip-kind ngpt under --ddp-backend fully_sharded"):
        step_hooks.attach(training, model, 0)


def test_a_model_that_fairscale_has_wrapped_is_fully_sharded():
    wrapped = type("FullyShardedDataParallel", (torch.nn.Module,), {})()  # fairscale's name
    assert is_fully_sharded(torch.nn.Sequential(wrapped))
    assert not is_fully_sharded(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_only_the_first_process_reports_lambda(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="fairseq_rskip")
    report = step_hooks.Report(None, build("transformer_askip_ln_tiny", **TINY))
    monkeypatch.setattr(step_hooks, "get_global_rank", lambda: 1)
    report.say()
    assert not caplog.messages
    monkeypatch.setattr(step_hooks, "get_global_rank", lambda: 0)
    report.say()
    assert any(line.startswith("adaptive λ: ") for line in caplog.messages)


def test_coefficients_that_cannot_move_are_not_warned_of():
    """mHC's matrix in the first block mixes equal streams, so that nothing learns from it."""
    stack = skip_stack("mhc", 8, layers=2)
    unmoved = UnmovedCoefficients(stack).names()
    assert "0.self_attn.b_pre" in unmoved and "0.self_attn.b_res" not in unmoved
    assert "0.ffn.b_res" in unmoved
