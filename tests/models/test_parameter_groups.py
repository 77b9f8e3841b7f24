"""fairseq-train --skip-lr-scale and completep's factors.

These are the settings with which the optimizer steps.
"""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import build_optimizer
from fairseq.optim.adafactor import Adafactor
from fairseq.optim.adam import Adam
from fairseq.optim.lr_scheduler import build_lr_scheduler
from optimizer_helpers import OPTIMIZERS, PRECISIONS, flat_copy, small_model, train, wrapped
from transformer_helpers import build

from fairseq_rskip.errors import UserError
from fairseq_rskip.modules.parameter_groups import ParameterGroups
from fairseq_rskip.modules.step_hooks import attach
from fairseq_rskip.parameters import learned, parameter_settings
from fairseq_rskip.residual import create_skip, skip_stack

SCALE = 4.0
SCHEDULES = {
    "fixed": ["--lr", "0.1,0.05", "--warmup-updates", "2"],
    "inverse_sqrt": ["--lr", "0.1", "--warmup-updates", "3", "--warmup-init-lr", "0.01"],
    "cosine": ["--lr", "0.1", "--max-update", "9", "--warmup-updates", "2"],
    "polynomial_decay": ["--lr", "0.1", "--total-num-update", "9", "--warmup-updates", "2"],
    "triangular": ["--lr", "0.01", "--max-lr", "0.1", "--lr-period-updates", "6"],
    "tri_stage": ["--lr", "0.1", "--warmup-steps", "2", "--hold-steps", "2", "--decay-steps", "3"],
    "reduce_lr_on_plateau": ["--lr", "0.1", "--warmup-updates", "2"],
    "step": ["--lr", "0.1", "--lr-deacy-period", "3", "--warmup-updates", "2"],
    "manual": ["--lr", "0.1", "--update2lr", "{'0': 0.1, '3': 0.05}"],
}


def own_settings(model, decay: float, scale: float = SCALE) -> list[dict]:
    """Return the groups that an optimizer would have from the start.

    laurel's learn and do not decay; wskip's do both, as in the paper.
    """
    laurel = {id(p) for p in model[1].learned().values()}
    groups: dict[tuple[float, float], list] = {}
    for p in model.parameters():
        weight_decay = 0.0 if id(p) in laurel else decay
        factor = scale if id(p) in laurel or p is model[2].weight else 1.0
        groups.setdefault((weight_decay, factor), []).append(p)
    return [
        {"params": params, "weight_decay": weight_decay, "factor": factor}
        for (weight_decay, factor), params in groups.items()
    ]


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["none", "half"])
@pytest.mark.parametrize("scale", [1.0, SCALE], ids=["one", "four"])
def test_steps_are_those_of_groups_that_the_optimizer_has_from_the_start(made, decay, scale):
    """Under a rate that changes with every update, bit for bit."""
    results = []
    for apart in (True, False):
        model = small_model()
        if apart:
            optimizer = made(own_settings(model, decay, scale), weight_decay=decay)
            step = optimizer.step
        else:
            optimizer = made(list(model.parameters()), weight_decay=decay)
            groups = optimizer.param_groups
            wrapper = ParameterGroups(lambda o: o.optimizer.step(), model, scale)
            step = partial(wrapper, wrapped(optimizer))
        for k in range(4):
            for group in optimizer.param_groups:
                group["lr"] = group.get("factor", 1.0) * 0.1 / (k + 1)
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 + k)
            step()
        results.append(model.state_dict())
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [len(results[0])]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_nag_knows_its_last_rate_where_every_parameter_has_a_factor():
    """Its momentum is divided by the rate of the last step."""
    model = create_skip("wskip", 5, norm="none")
    plain = torch.nn.Parameter(model.weight.detach().clone())
    ours, theirs = OPTIMIZERS["nag"]([model.weight]), OPTIMIZERS["nag"]([plain])
    step = ParameterGroups(lambda o: o.optimizer.step(), model, SCALE)
    for k in range(4):
        ours.param_groups[0]["lr"] = 0.1 / (k + 1)
        theirs.param_groups[0]["lr"] = SCALE * 0.1 / (k + 1)
        model.weight.grad, plain.grad = (torch.full((5,), 0.1 + k) for _ in range(2))
        step(wrapped(ours))
        theirs.step()
    torch.testing.assert_close(model.weight, plain, rtol=1e-6, atol=1e-6)


FLAT = {name: OPTIMIZERS[name] for name in ("adam", "nag", "sgd")}


@pytest.mark.parametrize("made", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["none", "half"])
def test_a_flat_tensor_steps_as_groups_do(made, decay):
    """The steps are in float64 and agree up to its rounding.

    NAG and SGD keep momentum, which the factor must not touch twice.
    """
    model = small_model().double()
    reference = copy.deepcopy(model)
    parameters, flat = flat_copy(model)
    optimizer = made([flat], weight_decay=decay)
    fairseqs = SimpleNamespace(
        optimizer=optimizer,
        has_flat_params=True,
        fp32_params={None: flat},
        fp16_params=parameters,
    )
    grouped = made(own_settings(reference, decay), weight_decay=decay)
    step = ParameterGroups(lambda o: o.optimizer.step(), model, SCALE)
    torch.manual_seed(1)
    for k in range(4):
        for group in [*optimizer.param_groups, *grouped.param_groups]:
            group["lr"] = group.get("factor", 1.0) * 0.1 / (k + 1)
        flat.grad.copy_(torch.randn_like(flat))
        at = 0
        for p in reference.parameters():
            p.grad = flat.grad[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        step(fairseqs)
        grouped.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(flat.detach(), expected, rtol=1e-12, atol=1e-12)
    assert flat.data_ptr() == optimizer.param_groups[0]["params"][0].data_ptr()
    for name in learned(model):
        block, _, parameter = name.partition(".")
        theirs = getattr(reference[int(block)], parameter)
        torch.testing.assert_close(
            getattr(model[int(block)], parameter), theirs, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_that_of_every_schedule_times_the_factor(name):
    argv = ["data", "--optimizer", "adam", "--lr-scheduler", name, *SCHEDULES[name]]
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(
            options.get_training_parser(), [*argv, "--arch", "transformer_laurel_tiny"]
        )
    )
    model = small_model()
    optimizer = build_optimizer(cfg.optimizer, list(model.parameters()))
    schedule = build_lr_scheduler(cfg.lr_scheduler, optimizer)
    own = {id(p) for p in learned(model).values()}
    seen = []

    def look(fairseqs):
        for group in fairseqs.optimizer.param_groups:
            are_own = {id(p) in own for p in group["params"]}
            seen.append((group["lr"], are_own))
        fairseqs.step()

    step = ParameterGroups(look, model, SCALE)
    schedule.step_begin_epoch(1)
    rates = []
    for update in range(1, 7):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        schedule.step_update(update - 1)
        rates.append(optimizer.get_lr())
        step(optimizer)
        assert seen == [(rates[-1], {False}), (SCALE * rates[-1], {True})]
        assert optimizer.get_lr() == rates[-1]
        seen.clear()
    assert len(set(rates)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [*((p, "adam") for p in PRECISIONS), ("fp32", "sgd"), ("flat", "sgd")],
)
def test_an_update_moves_coefficients_four_times_as_far(
    tiny_corpus, tmp_path, precision, optimizer
):
    """All else is unchanged, bit for bit.

    fp16 resolves 0.001 at 1, where most coefficients start.
    """
    fixed = [*PRECISIONS[precision], "--optimizer", optimizer, "--max-update", 1]
    arch = "transformer_laurel_tiny"
    plain, scaled = (
        train(tiny_corpus, tmp_path / str(factor), arch, *fixed, "--skip-lr-scale", factor)["model"]
        for factor in (1, SCALE)
    )
    model = build(arch, encoder_embed_dim=32, encoder_ffn_embed_dim=32)
    starts = learned(model)
    tolerance = 2e-3 * SCALE if PRECISIONS[precision] else 2e-6
    for name, start in starts.items():
        step = plain[name].float() - start.detach()
        scaled_step = scaled[name].float() - start.detach()
        torch.testing.assert_close(scaled_step, SCALE * step, rtol=1e-4, atol=tolerance)
        if optimizer == "adam" and not name.endswith("low"):  # B is 0, and so A's gradient
            assert step.abs().max() > 0.005
    for name, _ in model.named_parameters():
        assert name in starts or torch.equal(plain[name], scaled[name]), name


@pytest.mark.slow
def test_a_resumed_training_with_a_factor_is_the_uninterrupted_one(tiny_corpus, tmp_path):
    options = ["--optimizer", "adam", "--skip-lr-scale", SCALE, "--lr-scheduler", "inverse_sqrt"]
    options += ["--warmup-updates", 2, "--weight-decay", 0.1]
    arch = "transformer_laurel_tiny"
    whole = train(tiny_corpus, tmp_path / "whole", arch, *options, "--max-update", 4)
    train(tiny_corpus, tmp_path / "parts", arch, *options, "--max-update", 2)
    resumed = train(tiny_corpus, tmp_path / "parts", arch, *options, "--max-update", 4)
    for name, _ in build(arch).named_parameters():
        assert torch.equal(resumed["model"][name], whole["model"][name]), name
    states = [run["last_optimizer_state"]["state"] for run in (whole, resumed)]
    for key, state in states[0].items():
        for name, value in state.items():
            other = states[1][key][name]
            assert torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (key, name)


def test_a_factor_where_nothing_is_learned_is_refused():
    with pytest.raises(UserError, match="--skip-lr-scale 4: expected 1 .kind preln learns no"):
        build("transformer_preln_tiny", skip_lr_scale=4.0)
    with pytest.raises(UserError, match="--skip-lr-scale 0: expected a finite number > 0"):
        build("transformer_rezero_tiny", skip_lr_scale=0.0)


def test_a_factor_that_the_optimizer_cannot_apply_is_refused():
    model = small_model()
    step = ParameterGroups(lambda o: o.optimizer.step(), model, SCALE)
    with pytest.raises(UserError, match="adafactor --relative-step, which has no"):
        step(wrapped(Adafactor(model.parameters(), relative_step=True)))
    sharded = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(UserError, match="--skip-lr-scale 4 does not work where parameters"):
        step(wrapped(sharded))


DEEP = {"encoder_layers": 8, "decoder_layers": 2, "skip_base_depth": 2, "skip_depth_exponent": 0.5}


def settings_of(model, optimizer) -> dict[str, tuple[float, float]]:
    """Parameter's name -> the rate and epsilon with which one step of ``optimizer`` moves it."""
    names = {id(p): name for name, p in model.named_parameters()}
    seen = {}

    def look(fairseqs):
        for group in fairseqs.optimizer.param_groups:
            seen.update({names[id(p)]: (group["lr"], group["eps"]) for p in group["params"]})

    ParameterGroups(look, model)(wrapped(optimizer))
    return seen


def test_completep_scales_rate_and_epsilon_of_every_parameter_of_a_layer():
    """Table 1 names hidden matrices, their biases and the norms before the branches, nothing else.

    The factor is m = L / L_0. The decoder here has the base depth.
    """
    model = build("transformer_completep_tiny", **DEEP)
    adam = Adam(list(model.parameters()), lr=0.01, eps=1e-6)
    actual = settings_of(model, adam)
    assert actual.keys() == {name for name, _ in model.named_parameters()}
    inside = {name for name in actual if name.startswith("encoder.layers.")}
    kinds = {name.split(".", 3)[3] for name in inside}
    assert {"fc1.weight", "fc2.bias", "self_attn.q_proj.weight", "final_skip.pre.bias"} <= kinds
    assert len(inside) == 8 * 16
    for name, (lr, eps) in actual.items():
        m = 4 if name in inside else 1
        assert lr == pytest.approx(0.01 * m**-0.5, rel=1e-12), name
        assert eps == pytest.approx(1e-6 * m**-0.5, rel=1e-12), name
    assert adam.param_groups[0]["lr"] == 0.01 and adam.param_groups[0]["eps"] == 1e-6


def test_completep_with_exponent_1_changes_epsilon_alone():
    model = build("transformer_lm_completep_tiny", decoder_layers=6, max_target_positions=16)
    actual = settings_of(model, Adam(list(model.parameters()), lr=0.01, eps=1e-6))
    assert {rates for name, rates in actual.items() if ".layers." not in name} == {(0.01, 1e-6)}
    ((lr, eps),) = {rates for name, rates in actual.items() if ".layers." in name}
    assert (lr, eps) == (0.01, pytest.approx(1e-6 / 3))


def test_a_stack_beside_its_branches_is_refused_for_completep():
    """Its factors would reach the norms alone."""
    model = torch.nn.Module()
    model.skips = skip_stack("completep", 8, layers=4)
    model.branches = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8))
    with pytest.raises(ValueError, match="^kind completep has factors .* skips.0 has skip"):
        parameter_settings(model)
    model.skips = skip_stack("rskip", 8, layers=4)
    assert parameter_settings(model) == {}
    layer = torch.nn.Module()  # whose branch is a parameter of its own
    layer.weight = torch.nn.Parameter(torch.ones(8, 8))
    layer.skip = skip_stack("completep", 8, layers=4)[0]["ffn"]
    assert id(layer.weight) in parameter_settings(torch.nn.ModuleList([layer]))


@pytest.mark.parametrize(
    ("kind", "scale", "inside", "learned_too"),
    [("completep", 1.0, 4**-0.5, 1.0), ("laurel", SCALE, 1.0, SCALE), ("preln", 1.0, 1.0, 1.0)],
)
def test_the_step_of_a_training_has_the_rates_of_its_rule(
    monkeypatch, kind, scale, inside, learned_too
):
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)
    monkeypatch.setattr("atexit.register", lambda say: None)  # what the end of a training says
    deep = {"encoder_layers": 8, "decoder_layers": 2}
    options = DEEP if kind == "completep" else deep
    model = build(f"transformer_{kind}_tiny", **options)
    rates = {}

    def look(fairseqs):
        for group in fairseqs.optimizer.param_groups:
            rates.update({id(p): group["lr"] for p in group["params"]})

    made = SimpleNamespace(train_step=None, optimizer_step=look, load_dataset=None)
    attach(made, model, 0, scale)
    made.optimizer_step(wrapped(Adam(list(model.parameters()), lr=0.01)))
    own = {id(p) for p in learned(model).values()}
    for name, parameter in model.named_parameters():
        factor = inside if name.startswith("encoder.layers.") else 1.0
        factor *= learned_too if id(parameter) in own else 1.0
        assert rates[id(parameter)] == pytest.approx(0.01 * factor), name


def test_sgd_has_no_epsilon_and_keeps_completeps_rates():
    model = build("transformer_completep_tiny", **DEEP)
    rates = {}

    def look(fairseqs):
        for group in fairseqs.optimizer.param_groups:
            assert "eps" not in group
            rates.update({id(p): group["lr"] for p in group["params"]})

    ParameterGroups(look, model)(wrapped(torch.optim.SGD(model.parameters(), lr=0.01)))
    assert rates[id(model.encoder.layers[3].fc1.weight)] == 0.005
    assert rates[id(model.decoder.layers[1].fc1.weight)] == 0.01


def test_a_flat_tensor_has_completeps_epsilon_by_its_gradient():
    """In float64, with an epsilon as large as the gradients, so that it counts."""
    model = build("transformer_completep_tiny", **DEEP).double()
    reference = copy.deepcopy(model)
    parameters, flat = flat_copy(model)
    optimizer = Adam([flat], lr=0.01, eps=0.5)
    fairseqs = SimpleNamespace(
        optimizer=optimizer, has_flat_params=True, fp32_params={None: flat}, fp16_params=parameters
    )
    inside = [p for n, p in reference.named_parameters() if n.startswith("encoder.layers.")]
    outside = [p for n, p in reference.named_parameters() if not n.startswith("encoder.layers.")]
    scaled = {"params": inside, "lr": 0.005, "eps": 0.25}
    grouped = Adam([{"params": outside}, scaled], lr=0.01, eps=0.5)
    step = ParameterGroups(lambda o: o.optimizer.step(), model)
    torch.manual_seed(1)
    for _ in range(3):
        flat.grad = torch.randn_like(flat)
        at = 0
        for p in reference.parameters():
            p.grad = flat.grad[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        step(fairseqs)
        grouped.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(flat.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_completep_trains_with_a_flat_tensor_as_with_groups(tiny_corpus, tmp_path):
    """This is one update of fairseq-train, --fp16 against fp32.

    An epsilon of 1 makes a step proportional to the gradient over it: without the factor 1/4 of
    completep the two would differ fourfold.
    """
    options = ["--optimizer", "adam", "--adam-eps", 1, "--max-update", 1, "--encoder-layers", 8]
    arch = "transformer_completep_tiny"
    trainings = {"fp32": ["--lr", 300], "flat": ["--lr", 300, "--fp16"], "start": ["--lr", 1e-30]}
    actual = {
        name: train(tiny_corpus, tmp_path / name, arch, *options, *more)["model"]
        for name, more in trainings.items()
    }
    for name in ("encoder.layers.0.fc1.weight", "encoder.layers.0.final_skip.pre.weight"):
        start = actual["start"][name].float()
        steps = [actual[each][name].float() - start for each in ("fp32", "flat")]
        assert steps[0].abs().max() > 0.03
        torch.testing.assert_close(steps[1], steps[0], rtol=0.05, atol=2e-3)
