"""What a constructor accepts: places, whole stacks, devices and types, initial values."""

import inspect
import re
import warnings
from typing import Annotated, Literal

import pytest
import torch
from skip_variants import draw

from fairseq_rskip.flags import settings
from fairseq_rskip.norms import DyT
from fairseq_rskip.residual import (
    KINDS,
    Place,
    RSkip,
    XSkip,
    create_skip,
    initialise_from_batch,
    skip_stack,
    skips,
)
from fairseq_rskip.residual.adaptive import SHARES, AdaptiveSkip
from fairseq_rskip.residual.gates import Highway
from fairseq_rskip.residual.halting import Halting
from fairseq_rskip.residual.mixing_matrices import MATRICES
from fairseq_rskip.residual.options import Choice, Real, options_of
from fairseq_rskip.residual.place import Weight

NEED_PLACE = ["hyper", "mhc", "residual_dual", "siamesenorm", "attnres", "dlcl", "denseformer"]
NEED_PLACE += ["x0", "b2t", "deepnorm", "scaled", "lnscale", "keel", "mixln", "fixup", "gpt2"]
NEED_PLACE += ["tfixup", "prores", "layerscale", "single_pass_mhc"]


@pytest.mark.parametrize("kind", NEED_PLACE)
def test_a_rule_of_the_position_is_refused_without_a_place(kind):
    with pytest.raises(ValueError) as refused:
        create_skip(kind, 8)
    message = str(refused.value)
    assert message.startswith(f"place=None: kind {kind} depends on its position")
    assert f'skip_stack("{kind}", 8, layers=6' in message and "\n" not in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_begins_and_ends_with_one_tensor(kind):
    stack, x = skip_stack(kind, 8, layers=3, other_layers=2, other_sublayers=3), draw((5, 2, 8), 1)
    stack.double()
    for layer in stack:
        for name in ("self_attn", "ffn"):
            h, carried = layer[name].prepare(x)
            x = layer[name](x, torch.tanh(h), carried)
    assert x.shape == (5, 2, 8) and torch.isfinite(x).all()
    numbers = [skip.place.block_number for skip in skips(stack).values()]
    assert numbers == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["rezero", "gpas"])
def test_the_sublayers_of_a_layer_share_what_the_rule_shares(kind):
    stack = skip_stack(kind, 8, layers=2)
    assert len(list(stack.parameters())) == len({id(p) for p in stack.parameters()})
    assert all(
        list(layer["ffn"].learned().values())[0] is list(layer["self_attn"].learned().values())[0]
        for layer in stack
    )


@pytest.mark.parametrize(
    "options",
    [
        {"layers": 0},
        {"layers": 2, "sublayers": "ffn"},
        {"layers": 2, "sublayers": ("ffn", "self_attn", "ffn")},
    ],
    ids=str,
)
def test_a_stack_without_layers_or_names_is_refused(options):
    with pytest.raises(ValueError, match=f"^{list(options)[-1]}=.*: expected"):
        skip_stack("rskip", 8, **options)


def test_every_block_of_a_stack_is_at_its_place():
    names = ("self_attn", "encoder_attn", "ffn")
    other = {"other_layers": 5, "other_sublayers": 2}
    stack = skip_stack("fixup", 4, 2, names, side="decoder", **other)
    expected = []
    for index in (0, 1):
        for position, name in enumerate(names):
            expected.append(Place("decoder", name, index, 2, 5, position, 3, 2))
    assert [skip.place for skip in skips(stack).values()] == expected


@pytest.mark.parametrize(
    "place", [{"index": 5, "depth": 2}, {"index": -1}, {"position": 1, "sublayers": 1}], ids=str
)
def test_a_place_outside_its_stack_is_refused(place):
    with pytest.raises(ValueError, match=f"^{list(place)[0]}=.*: expected"):
        Place(**place)


def test_a_constant_skip_does_not_drop_an_equation_of_its_own():
    with pytest.raises(TypeError, match="Doubled: a ConstantSkip's sum .* derive from Weighted"):

        class Doubled(XSkip):
            def combine(self, x, f_x, carried):
                return 2 * x + f_x


def test_several_steps_repeat_the_scale_of_x():
    """The coefficients of y = G_2(2x + G_1(2x + F))."""

    class Twice(XSkip):
        kind, steps = "xskip", 2

    skip, x, f_x = Twice(5, skip_lambda=2.0).double(), draw((3, 5), 1), draw((3, 5), 2)
    a, b, c = skip.coefficients(x, f_x)
    torch.testing.assert_close(a * x + b * f_x + c, skip(x, f_x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(skip.ratio(x, f_x), a / b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_device_and_dtype_are_those_of_every_parameter(kind):
    place = Place(other_depth=1)
    skip = create_skip(kind, 8, place=place, device="meta", dtype=torch.bfloat16)
    for parameter in skip.parameters():
        assert parameter.is_meta and parameter.dtype == torch.bfloat16
    assert all(buffer.is_meta for buffer in skip.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_has_a_memory_of_its_own(kind):
    """A part of a larger tensor would be saved with the whole, and safetensors refuses it."""
    for parameter in create_skip(kind, 8, place=Place(other_depth=1)).parameters():
        size = parameter.numel() * parameter.element_size()
        assert parameter.untyped_storage().nbytes() == size


def test_two_gates_without_a_place_have_draws_of_their_own():
    torch.manual_seed(1)
    first, second = (create_skip("highway", 8).gate_weight for _ in range(2))
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, create_skip("highway", 8).gate_weight)


def test_the_options_of_a_rule_are_those_of_its_constructor():
    signature = inspect.signature(Highway)
    assert signature.parameters["gate_bias"].default == -1.0
    assert list(options_of(Highway)) == ["norm", "norm_alpha", "drop_path", "gate_bias"]
    assert Highway(4, gate_bias=-3.0).gate_bias.tolist() == [-3.0] * 4


def test_an_option_that_a_subclass_sets_is_checked_all_the_same():
    class Fixed(XSkip):
        def __init__(self, dim, **common):
            super().__init__(dim, skip_lambda=-2.0, **common)

    with pytest.raises(ValueError, match="skip_lambda=-2.0: expected a finite real number > 0"):
        Fixed(4)


@pytest.mark.parametrize("adapt", SHARES)
def test_askip_has_the_shares_of_its_option(adapt):
    for skip in (create_skip("askip", 4, adapt=adapt, max_steps=3), AdaptiveSkip(4, adapt=adapt)):
        assert type(skip) is AdaptiveSkip and skip.options.adapt == adapt
        assert type(skip.shares) is SHARES[adapt]
        assert skip.wants_profile == (adapt == "gradient") and bool(skip.learned()) == (
            adapt != "gradient"
        )
    if adapt != "halting":
        with pytest.raises(ValueError, match=f"halt_cost=0.1: expected 0 with adapt='{adapt}'"):
            create_skip("askip", 4, adapt=adapt, halt_cost=0.1)


@pytest.mark.parametrize("adapt", ["other", None, ["halting"]])
def test_askip_refuses_another_adapt(adapt):
    expected = "expected one of fraction, mixture, halting, gradient for askip"
    with pytest.raises(ValueError, match=re.escape(f"adapt={adapt!r}: {expected}")):
        create_skip("askip", 4, adapt=adapt)


def test_the_help_says_what_lambda_is_in_askip():
    texts = {setting.name: setting.help for setting in settings(KINDS)}
    assert "in askip the initial λ" in texts["skip_lambda"]


def test_an_option_of_two_kinds_is_one_option_of_the_command_line():
    class Own(XSkip):
        def __init__(
            self, dim, *, mixing: Annotated[Literal["a", "b"], Choice("which")] = "a", **common
        ):
            super().__init__(dim, mixing=mixing, **common)

    class Other(XSkip):
        def __init__(self, dim, *, mixing: Annotated[float, Real("how much")] = 1.0, **common):
            super().__init__(dim, mixing=mixing, **common)

    (mixing,) = (each for each in settings({**KINDS, "own": Own}) if each.name == "mixing")
    assert {"a", "b", *options_of(KINDS["hyper"])["mixing"].choices} == {*mixing.choices}
    with pytest.raises(ValueError, match="^option mixing of kind other is of another type"):
        settings({**KINDS, "other": Other})


def test_a_halting_skip_with_halves_keeps_its_mean_in_fp32():
    halting = create_skip("askip", 4, adapt="halting", dtype=torch.bfloat16).shares
    assert isinstance(halting, Halting) and halting.start.dtype == torch.bfloat16
    assert halting.mean_steps.dtype == halting.half().mean_steps.dtype == torch.float32


def test_layerscale_starts_at_zero_where_zero_is_asked_for():
    assert create_skip("layerscale", 4, init=0.0).weight.eq(0).all()
    place = Place(depth=36)
    assert create_skip("layerscale", 4, place=place).weight.tolist() == pytest.approx([1e-6] * 4)


def test_siamesenorm_reports_the_scale_by_its_number_of_sublayers():
    decoder = Place("decoder", "ffn", index=0, depth=6, position=2, sublayers=3)
    constants = create_skip("siamesenorm", 4, place=decoder).constants()
    assert constants == {"1/sqrt(3l)": pytest.approx(3**-0.5)}


def test_x0_starts_as_nanochat_over_the_layers():
    """nanochat has one r and s for each layer, here those of the layer's first block."""
    stack = skips(skip_stack("x0", 4, layers=3, x0_init="nanochat")).values()
    r = torch.tensor([1.15, 1, 1.10, 1, 1.05, 1])
    s = torch.tensor([0.20, 0, 0.125, 0, 0.05, 0])
    torch.testing.assert_close(torch.cat([skip.r.detach() for skip in stack]), r)
    torch.testing.assert_close(torch.cat([skip.s.detach() for skip in stack]), s)


@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        ("preln", "dyt"),
        ("preln", "derf"),
        ("rskip", "dyt"),
        ("askip", "dyt"),
        ("periln", "derf"),
    ],
)
def test_alpha_of_a_norm_has_the_initial_value_that_is_asked_for(kind, norm):
    skip = create_skip(kind, 4, norm=norm, norm_alpha=1.5)
    found = [module.alpha.item() for module in skip.modules() if isinstance(module, DyT)]
    assert found and set(found) == {1.5}
    default = create_skip(kind, 4, norm=norm)
    assert {m.alpha.item() for m in default.modules() if isinstance(m, DyT)} == {0.5}


def test_a_norm_without_alpha_refuses_one():
    with pytest.raises(
        ValueError, match="norm_alpha=1.0: expected no value with norm='layer' .only dyt and derf"
    ):
        create_skip("preln", 4, norm_alpha=1.0)


@pytest.mark.parametrize("kind", ["mhc", "ihc"])
def test_the_reading_gate_of_mhc_starts_at_its_bias(kind):
    first, second, *_ = skips(skip_stack(kind, 4, layers=2, read_bias=1.5)).values()
    assert first.b_pre.tolist() == [1.5, -1.5, -1.5, -1.5]
    assert second.b_pre.tolist() == [-1.5, 1.5, -1.5, -1.5]


def test_the_branches_of_single_pass_mhc_read_the_streams_of_mhc_at_first():
    """A block has the gate of the next one, the last block that of the stack's output."""
    *single, last = skips(skip_stack("single_pass_mhc", 4, layers=3, read_bias=1.5)).values()
    for gate, skip in zip(single, list(skips(skip_stack("mhc", 4, layers=3)).values())[1:]):
        assert gate.b_pre.argmax() == skip.b_pre.argmax()
        assert gate.constants()["b_pre"] == 1.5
    assert last.b_pre.tolist() == [-1.5, -1.5, 1.5, -1.5]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("hyper", ("s_a", "s_b")),
        ("fractional", ("s_a", "s_b")),
        ("mhc", ("alpha_pre", "alpha_post", "alpha_res")),
        ("ihc", ("alpha_pre", "alpha_post")),
    ],
)
def test_what_depends_on_the_position_starts_at_a_hundredth(kind, names):
    """As in the papers: it multiplies a map that starts at 0, and so the rate of its learning."""
    skip = create_skip(kind, 4, place=Place())
    found = [skip.get_parameter(name).item() for name in names]
    assert found == pytest.approx([0.01] * len(names))


def test_hyper_connections_start_with_outputs_over_the_root_of_n():
    for choice, factor in (("plain", 1.0), ("sqrt_n", 0.5)):
        skip = create_skip("hyper", 4, place=Place(), streams=4, output_init=choice)
        branch = {role: Weight(torch.ones(4, 4), 1.0) for role in ("fc1", "fc2", "v", "out")}
        skip.initialise(branch)
        found = {role: float(weight.tensor[0, 0]) for role, weight in branch.items()}
        assert found == {"fc1": 1.0, "fc2": factor, "v": 1.0, "out": factor}


def test_the_root_of_n_start_takes_it_from_the_branch_and_not_from_x():
    """The sum at the end of a block is n x + sqrt(n) F; it is n (x + F) with the plain start."""
    x, drawn = torch.randn(5, 2, 8), torch.randn(8, 8)
    ends = {}
    for choice in ("plain", "sqrt_n"):
        (layer,) = skip_stack("hyper", 8, layers=1, sublayers=("ffn",), output_init=choice)
        weight = torch.nn.Parameter(drawn.clone())
        layer["ffn"].initialise({"fc2": Weight(weight, 1.0)})
        h, carried = layer["ffn"].prepare(x)
        ends[choice] = layer["ffn"](x, h @ weight.T, carried)
    branches = {choice: end - 4 * x for choice, end in ends.items()}
    torch.testing.assert_close(branches["sqrt_n"], branches["plain"] / 2)


@pytest.mark.parametrize("kind", ["deepnorm", "fixup", "tfixup", "gpt2", "ngpt", "hyper", "rskip"])
def test_a_branch_of_modules_is_refused_in_one_line(kind):
    skip = create_skip(kind, 4, place=Place(depth=2, other_depth=2, other_sublayers=3))
    expected = r"expected Weight\(linear.weight, std\)"
    with pytest.raises(ValueError, match=f"'fc1' is a Linear; {expected}"):
        skip.initialise({"fc1": torch.nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=f"the weights are a Linear; {expected}"):
        skip.initialise(torch.nn.Linear(4, 4))


def test_a_role_that_no_rule_knows_is_refused():
    skip = create_skip("deepnorm", 4, place=Place(depth=2))
    with pytest.raises(ValueError, match="role 'linear1': expected one of q, k, v, out, fc1, fc2"):
        skip.initialise({"linear1": Weight(torch.ones(4, 4), 1.0)})


START = {kind: {} for kind in ("deepnorm", "fixup", "tfixup", "gpt2", "ngpt")}
START["hyper"] = {"output_init": "sqrt_n"}


@pytest.mark.parametrize("kind", START)
def test_a_branch_that_does_not_start_as_its_rule_wants_it_is_warned_of(kind):
    place = Place(depth=2, other_depth=2, other_sublayers=3)
    one, told, loaded = (create_skip(kind, 4, place=place, **START[kind]) for _ in range(3))
    x = torch.ones(3, 4 * one.widths[0])
    branch = torch.ones(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.eval()(x, branch, one.prepare(x)[1])
    missing = "to_unit_length does not know" if kind == "ngpt" else "the branch's weights are as"
    with pytest.warns(RuntimeWarning, match=f"kind {kind}: {missing}"):
        one.train()(x, branch, one.prepare(x)[1])
    told.initialise({"fc1": Weight(torch.nn.Parameter(torch.ones(4, 4)), 1.0)})
    loaded.load_state_dict(one.state_dict())
    plain = create_skip("hyper", 4, place=place)
    if kind == "ngpt":  # a state has no matrices
        with pytest.warns(RuntimeWarning, match=missing):
            loaded(x, branch, loaded.prepare(x)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for skip in (one, told, loaded):
            skip(x, branch, skip.prepare(x)[1])
        wide = torch.ones(3, 4 * plain.widths[0])
        plain(wide, branch, plain.prepare(wide)[1])


@pytest.mark.parametrize("kind", sorted(START.keys() - {"ngpt"}))
def test_a_second_start_is_refused_and_one_of_loaded_weights_warned_of(kind):
    skip, loaded = (
        create_skip(kind, 4, place=Place(depth=2, other_depth=2, other_sublayers=3), **START[kind])
        for _ in range(2)
    )
    weights = {role: Weight(torch.ones(4, 4), 1.0) for role in ("v", "out")}
    skip.initialise({"embedding": Weight(torch.ones(4, 4), 1.0)})
    skip.initialise(weights)
    with pytest.raises(ValueError, match=f"{kind}: initialise has already rescaled out, v"):
        skip.initialise(weights)
    loaded.load_state_dict(skip.state_dict())
    with pytest.warns(RuntimeWarning, match=f"{kind}: initialise after load_state_dict") as found:
        loaded.initialise(weights)
    assert found[0].filename == __file__


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_ngpt_keeps_its_lengths(before):
    """``initialise`` is called in every process, before or after the state is loaded."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    skip, resumed = create_skip("ngpt", 4), create_skip("ngpt", 4)
    skip.initialise({"fc1": Weight(first.weight, 0.5)})
    for step in ("initialise", "load") if before else ("load", "initialise"):
        if step == "load":
            resumed.load_state_dict(skip.state_dict())
            second.load_state_dict(first.state_dict())
        else:
            resumed.initialise({"fc1": Weight(second.weight, 0.5)})
    torch.testing.assert_close(second.weight, first.weight)
    with torch.no_grad():
        second.weight.mul_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    resumed.to_unit_length()
    torch.testing.assert_close(second.weight, first.weight)


def test_a_vector_of_zeros_is_no_nan_on_ngpts_sphere():
    linear = torch.nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight[0] = 0
    create_skip("ngpt", 4).initialise({"fc1": Weight(linear.weight, 0.5)})
    torch.testing.assert_close(linear.weight.norm(dim=1), torch.tensor([0.0, 1.0, 1.0]))


def test_ngpt_refuses_what_would_not_move_with_the_model():
    with pytest.raises(ValueError, match="^initialise: 'q' is a Tensor: expected Weight"):
        create_skip("ngpt", 4).initialise({"q": Weight(torch.ones(4, 4), 1.0)})


@pytest.mark.parametrize(("kind", "option"), [("admin", "omega"), ("askip", "adapt")])
def test_a_rule_without_its_profile_is_warned_of_once(kind, option):
    options = {"omega": "profile"} if option == "omega" else {"adapt": "gradient"}
    skip, profiled = (create_skip(kind, 4, **options) for _ in range(2))
    x = draw((3, 4), 1, torch.float32)
    with pytest.warns(RuntimeWarning, match=f"{kind}: no profile yet; call residual.initialise"):
        skip(x, x)
    initialise_from_batch(profiled, lambda: profiled(x.requires_grad_(), x).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skip(x, x), profiled(x, x)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match="^x and f_x are Tensor and NoneType: expected tensors"):
        create_skip("rskip", 4)(torch.ones(3, 4), None)
    for kind in ("rskip", "ngpt"):
        with pytest.raises(ValueError, match="^x has dtype torch.int64: expected floating point"):
            create_skip(kind, 4).prepare(torch.ones(3, 4, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["prores", "branchnorm"])
def test_a_loop_that_counts_no_updates_is_warned_once(kind):
    one, told, resumed = (create_skip(kind, 4, place=Place()) for _ in range(3))
    x = torch.ones(3, 4)
    with pytest.warns(RuntimeWarning, match=f"kind {kind}: the branch is left out at update 0"):
        one(x, x)
    told.set_num_updates(0)
    resumed.load_state_dict({**one.state_dict(), "updates": torch.tensor(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one(x, x), told(x, x), resumed(x, x), one.eval()(x, x)
    with pytest.raises(ValueError, match="^updates=-1: expected 0 or more$"):
        told.set_num_updates(-1)


@pytest.mark.parametrize("kind", ["prores", "branchnorm"])
def test_a_fine_tuning_that_counts_from_0_keeps_the_branch(kind):
    trained, tuned = (create_skip(kind, 4, place=Place()) for _ in range(2))
    trained.set_num_updates(100_000)
    tuned.load_state_dict(trained.state_dict())
    tuned.set_num_updates(0)
    x, f_x = draw((3, 4), 1, torch.float32), draw((3, 4), 2, torch.float32)
    assert torch.equal(tuned(x, f_x), trained(x, f_x))
    fresh = create_skip(kind, 4, place=Place())
    fresh.set_num_updates(5000)
    fresh.load_state_dict({}, strict=False)  # a state without it, such as an embedding alone
    fresh.set_num_updates(10)
    assert int(fresh.updates) == 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"side": "Encoder"}, "side='Encoder': expected one of encoder, decoder, resnet"),
        ({"other_depth": -1}, "other_depth=-1: expected an integer of at least 0"),
        ({"depth": 2.0}, "depth=2.0: expected an integer of at least 0"),
        ({"index": True, "depth": 2}, "index=True: expected an integer of at least 0"),
    ],
)
def test_what_is_no_place_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Place(**fields)


def test_fixup_asks_for_the_blocks_of_the_other_side():
    with pytest.raises(ValueError, match="^other_sublayers=0: expected .* has 6 layers$"):
        skip_stack("fixup", 4, layers=6, other_layers=6)[0]["ffn"].initialise(
            {"fc1": Weight(torch.ones(4, 4), 1.0)}
        )
    with pytest.raises(ValueError, match=r"^place=3: expected a Place"):
        create_skip("deepnorm", 4, place=3)


def test_a_state_without_a_rules_entries_is_not_its_start():
    """Of a partial state, such as an embedding alone, initialise is still missed."""
    model = torch.nn.ModuleDict({"embedding": torch.nn.Linear(4, 4)})
    model["skip"] = create_skip("deepnorm", 4, place=Place(depth=2))
    model.load_state_dict({"embedding.weight": torch.zeros(4, 4)}, strict=False)
    with pytest.warns(RuntimeWarning, match="kind deepnorm: the branch's weights are as"):
        model["skip"](torch.ones(3, 4), torch.ones(3, 4))


def test_a_rule_without_a_state_was_loaded_with_its_layer():
    """T-Fixup has nothing to save; a state without torch's metadata is of safetensors."""
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(4, 4)})
    model["skip"] = create_skip("tfixup", 4, place=Place(depth=2))
    model.load_state_dict(dict(model.state_dict()))
    assert model["skip"].missing_setup() == ""


def test_slots_may_be_a_property_of_an_image_kind():
    class Late(RSkip):
        @property
        def slots(self):
            return ("post",)

    assert len(Late(4, channel_dim=1).post) == 2


ON_META = [{"kind": kind} for kind in KINDS]
ON_META += [{"kind": "mhc", "matrix": name} for name in MATRICES]


@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
@pytest.mark.parametrize("options", ON_META, ids=lambda options: "-".join(options.values()))
def test_a_stack_from_the_meta_device_is_what_it_loads(options, assign):
    """As frameworks build large models: nothing that a rule needs may be outside its state."""

    def stack():
        made = skip_stack(options["kind"], 8, layers=2, sublayers=("ffn",), **extra)
        return torch.nn.ModuleList(torch.nn.ModuleDict(layer) for layer in made)

    def output(skips, x):
        for layer in skips:
            h, carried = layer["ffn"].prepare(x)
            x = layer["ffn"](x, h.sin(), carried)
        return x

    extra = {name: value for name, value in options.items() if name != "kind"}
    trained = stack().eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * draw(parameter.shape, 1, torch.float32))
    with torch.device("meta"):
        empty = stack().eval()
    if not assign:
        empty.to_empty(device="cpu")
        for tensor in empty.state_dict().values():
            tensor.fill_(3)  # in place of whatever the memory held
    empty.load_state_dict(trained.state_dict(), assign=assign)
    x = draw((3, 2, 8), 2, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules that rescale the branches' weights
        assert torch.equal(output(empty, x), output(trained, x))
