"""fairseq-train --weight-decay: what skip connections learn does not decay.

That is so whatever holds the parameters.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.adam import Adam
from optimizer_helpers import PRECISIONS, small_model, train, wrapped
from transformer_helpers import batch, build, sentences

from fairseq_rskip.errors import UserError
from fairseq_rskip.modules import step_hooks
from fairseq_rskip.modules.parameter_groups import ParameterGroups
from fairseq_rskip.modules.step_hooks import attach
from fairseq_rskip.parameters import without_decay
from fairseq_rskip.residual import KINDS, skips


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update_shrinks_gains_but_not_coefficients(tiny_corpus, tmp_path, precision):
    """All of them start at 1, where 0.01 * 0.5 of decay is five times what fp16 resolves."""
    options = PRECISIONS[precision]
    fixed = [*options, "--optimizer", "adam", "--max-update", 1]
    plain, decayed = (
        train(
            tiny_corpus,
            tmp_path / str(decay),
            "transformer_laurel_tiny",
            *fixed,
            "--weight-decay",
            decay,
        )
        for decay in (0.0, 0.5)
    )
    for name, value in plain["model"].items():
        difference = decayed["model"][name].float() - value.float()
        if name.endswith(("skip_weight", "branch_weight", "skip.low", "skip.high")):
            assert torch.allclose(
                difference, torch.zeros(()), rtol=0, atol=1e-3 if options else 0
            ), name
        elif ".post." in name and name.endswith("weight"):
            assert torch.allclose(
                difference, torch.tensor(-0.005), rtol=0, atol=1e-3 if options else 1e-6
            ), name
    (group,) = decayed["last_optimizer_state"]["param_groups"]
    assert group["weight_decay"] == 0.5
    assert len(group["params"]) == len(plain["last_optimizer_state"]["param_groups"][0]["params"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ngpts_vectors_have_length_1_after_an_update(tiny_corpus, tmp_path, precision):
    options = ["--optimizer", "adam", "--lr", 0.1, "--max-update", 1, *PRECISIONS[precision]]
    saved = train(tiny_corpus, tmp_path, "transformer_ngpt_tiny", *options)["model"]
    matrices = [
        (name, w.float()) for name, w in saved.items() if ".layers." in name and w.dim() == 2
    ]
    assert len(matrices) == 32
    for name, matrix in matrices:
        lengths = matrix.norm(dim=0 if "out_proj" in name or "fc2" in name else 1)
        assert torch.allclose(lengths, torch.ones(()), atol=1e-3), name


def test_a_rule_says_whether_its_coefficients_decay():
    """laurel's do not; wskip's do, as in the paper."""
    model = small_model()
    kept = without_decay(model)
    laurel = model[1].learned().values()
    assert len(kept) == 4 and {id(p) for p in kept} == {id(p) for p in laurel}


def test_the_parts_of_a_composite_optimizer():
    model = small_model()
    parts = [torch.optim.SGD(part.parameters(), lr=1.0, weight_decay=0.5) for part in model]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ParameterGroups(lambda o: [part.step() for part in parts], model)(wrapped(*parts))
    kept = {f"1.{name}" for name in model[1].learned()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * (1 if name in kept else 0.5)), name


def test_where_each_process_steps_a_share_all_decays_and_one_line_says_so(caplog):
    """--zero-sharding: fairscale's optimizer steps an inner one, which has other groups."""
    model, groups = small_model(), []
    sharded = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    sharded.broadcast_global_state_dict = None
    step = ParameterGroups(lambda o: groups.append(len(o.optimizer.param_groups)), model)
    for _ in range(2):
        step(wrapped(sharded))
    assert groups == [1, 1] and caplog.text.count("because parameters are sharded") == 1
    with pytest.raises(UserError, match="--skip-lr-scale 4 does not work where parameters"):
        ParameterGroups(None, model, 4.0)(wrapped(sharded))


MIXING = ("hyper", "mhc", "ihc", "gated_residual", "fractional", "x0")
MIXING += ("dlcl", "denseformer", "mudd", "attnres", "mhar", "delta_attnres")
MIXING += ("ohc", "jpmhc", "multi_gate", "single_pass_mhc")


@pytest.mark.parametrize("kind", MIXING)
def test_weight_decay_leaves_the_mixing_of_streams_alone(kind):
    """Static matrices decayed towards 0 would shrink every stream with each block.

    All else is halved.
    """
    model = build(f"transformer_{kind}_tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: value.clone() for name, value in model.named_parameters()}
    ParameterGroups(lambda o: o.optimizer.step(), model)(wrapped(optimizer))

    kept = {f"{place}.{name}" for place, skip in skips(model).items() for name in skip.learned()}
    assert kept
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name] * (1 if name in kept else 0.5)), name


@pytest.mark.parametrize("decays", [False, True], ids=["ours", "all decays"])
@pytest.mark.parametrize("kind", ["hyper", "mhc", "fractional"])
def test_under_large_weight_decay_the_mixing_stays_unless_all_decays(monkeypatch, kind, decays):
    """Ten updates that take a tenth of every other weight each.

    Elsewhere a NaN is reported where static mixing matrices decay. Here the loss stays finite even
    then, but the matrices do not stay what they were.
    """
    monkeypatch.setattr(KINDS[kind], "decays", decays)
    model = build(f"transformer_{kind}_tiny")
    static = {
        name: value
        for name, value in model.named_parameters()
        if name.rpartition(".")[2] in ("a_r", "b_res", "a_m", "b")
    }
    before = {name: value.detach().clone() for name, value in static.items()}
    matrix = model.encoder.layers[0].fc1.weight
    size = float(matrix.detach().norm())
    optimizer = Adam(list(model.parameters()), lr=1e-3, weight_decay=100.0)
    step = ParameterGroups(lambda o: o.optimizer.step(), model)
    source, lengths, previous = batch(sentences())
    for _ in range(10):
        logits = model(source, lengths, previous)[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), previous.flatten())
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        step(wrapped(optimizer))
    assert float(matrix.detach().norm()) < 0.5 * size  # 0.9^10 is 0.35
    assert len(static) >= 10
    for name, value in static.items():
        if decays:  # 0.9^10 and the steps
            assert float(value.detach().norm()) < 0.5 * float(before[name].norm()), name
        else:  # ten steps of at most 0.001 x 1.1 each; decay would take 65 %
            torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "warns"), [("rezero", True), ("completep", True), ("rskip_ln", False)]
)
def test_fully_sharded_layers_warn_and_refuse_a_scale(monkeypatch, caplog, kind, warns):
    """fairscale takes the parameters out of the skip connections before the training is wrapped."""
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)
    monkeypatch.setattr(step_hooks, "is_fully_sharded", lambda model: True)
    model = build(f"transformer_{kind}_tiny", encoder_layers=6)  # deeper than completep's base
    for skip in skips(model).values():
        skip._parameters.clear()
    task = SimpleNamespace(train_step=None, optimizer_step=None, load_dataset=None)
    attach(task, model, 0)
    assert ("because parameters are sharded" in caplog.text) == warns
    assert task.optimizer_step is None
    with pytest.raises(
        UserError, match="--skip-lr-scale 2 does not work where parameters are sharded"
    ):
        attach(task, model, 0, lr_scale=2.0)
