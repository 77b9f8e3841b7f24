"""What a rule starts from, and what is said of a start that was missed or made twice."""

import warnings

import pytest
import torch
from skip_variants import draw

from fairseq_rskip.norms import DyT
from fairseq_rskip.residual import (
    KINDS,
    Place,
    create_skip,
    initialise_from_batch,
    skip_stack,
    skips,
)
from fairseq_rskip.residual.branch_weights import Weight


def test_layerscale_starts_at_zero_where_zero_is_asked_for():
    assert create_skip("layerscale", 4, init=0.0).weight.eq(0).all()
    place = Place(depth=36)
    assert create_skip("layerscale", 4, place=place).weight.tolist() == pytest.approx([1e-6] * 4)


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
    actual = [module.alpha.item() for module in skip.modules() if isinstance(module, DyT)]
    assert actual and set(actual) == {1.5}
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
    actual = [skip.get_parameter(name).item() for name in names]
    assert actual == pytest.approx([0.01] * len(names))


def test_hyper_connections_start_with_outputs_over_the_root_of_n():
    for choice, factor in (("plain", 1.0), ("sqrt_n", 0.5)):
        skip = create_skip("hyper", 4, place=Place(), streams=4, output_init=choice)
        branch = {role: Weight(torch.ones(4, 4), 1.0) for role in ("fc1", "fc2", "v", "out")}
        skip.initialise(branch)
        actual = {role: float(weight.tensor[0, 0]) for role, weight in branch.items()}
        assert actual == {"fc1": 1.0, "fc2": factor, "v": 1.0, "out": factor}


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


def test_a_compiled_model_is_warned_while_it_is_compiled():
    skip = create_skip("deepnorm", 4, place=Place(depth=2))
    compiled = torch.compile(skip, backend="eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="kind deepnorm: the branch's weights are as"):
        compiled(torch.ones(3, 4), torch.ones(3, 4))
    skip.initialise({"fc1": Weight(torch.nn.Parameter(torch.ones(4, 4)), 1.0)})
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(torch.ones(3, 4), torch.ones(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_prepare_is_warned_of_where_the_branch_reads_another_tensor(kind):
    """In training, at the first forward pass; another call that is missing is said instead."""
    stack, reference = (skips(skip_stack(kind, 8, layers=2, sublayers=("ffn",))) for _ in range(2))
    x, branch = draw((3, 2, 8), 1, torch.float32), torch.ones(3, 2, 8)
    for skip, prepared in zip(stack.values(), reference.values(), strict=True):
        h, _ = prepared.prepare(x)
        is_warned_of = h is not x and not skip.missing_setup()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = skip(x, branch)
            skip(x, branch)
            prepared(x, branch)
        said = [warning for warning in caught if "skip.prepare(x)" in str(warning.message)]
        assert len(said) == int(is_warned_of)
        x = y.detach()


def test_a_standard_deviation_that_is_not_that_of_the_weight_is_warned_of():
    """Such as torch's default given for a GPT-2 that was drawn at 0.02."""
    linear = torch.nn.Linear(16, 16)
    torch.nn.init.normal_(linear.weight, std=0.02)
    skip = create_skip("gpt2", 16, place=Place(depth=2))
    with pytest.warns(
        RuntimeWarning, match=r"standard deviation 0.0\d+, where Weight.*0.144\)"
    ) as w:
        skip.initialise({"fc1": Weight(linear.weight, 48**-0.5)})
    assert w[0].filename == __file__
    torch.nn.init.normal_(linear.weight, std=48**-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        create_skip("gpt2", 16, place=Place(depth=2)).initialise(
            {"fc1": Weight(linear.weight, 48**-0.5)}
        )
    assert float(linear.weight.std()) == pytest.approx(0.02, rel=0.2)


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
    with pytest.warns(RuntimeWarning, match=f"{kind}: initialise after load_state_dict") as caught:
        loaded.initialise(weights)
    assert caught[0].filename == __file__


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


@pytest.mark.parametrize("restored", [True, False])
def test_a_loop_that_leaves_out_to_unit_length_is_warned_once(restored):
    linear = torch.nn.Linear(4, 4)
    skip = create_skip("ngpt", 4)
    skip.initialise({"fc1": Weight(linear.weight, 0.5)})
    skip.load_state_dict(skip.state_dict())  # a change in place that keeps the lengths
    optimizer = torch.optim.SGD([*skip.parameters(), *linear.parameters()], lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x = draw((2, 3, 4), seed, torch.float32)
            h, carried = skip.prepare(x)
            skip(x, linear(h), carried).pow(2)[..., 0].sum().backward()
            optimizer.step()
            if restored:
                skip.to_unit_length()
        skip.eval().prepare(x)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (0 if restored else 1)
    assert restored or "than 1; call to_unit_length() after each update" in texts[0]
    assert all(warning.filename == __file__ for warning in caught)


def test_a_vector_of_zeros_is_no_nan_on_ngpts_sphere():
    linear = torch.nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight[0] = 0
    create_skip("ngpt", 4).initialise({"fc1": Weight(linear.weight, 0.5)})
    torch.testing.assert_close(linear.weight.norm(dim=1), torch.tensor([0.0, 1.0, 1.0]))


def test_ngpt_refuses_what_would_not_move_with_the_model():
    with pytest.raises(ValueError, match="^initialise: 'q' is a Tensor: expected Weight"):
        create_skip("ngpt", 4).initialise({"q": Weight(torch.ones(4, 4), 1.0)})


@pytest.mark.parametrize("options", [{"kind": "admin"}, {"kind": "askip", "adapt": "gradient"}])
def test_a_profile_of_a_loss_that_runs_none_is_refused_and_what_it_leaves_out_is_warned_of(options):
    model = torch.nn.ModuleDict(
        {name: create_skip(dim=4, **options) for name in ("used", "unused")}
    )
    x = draw((3, 4), 1, torch.float32).requires_grad_()
    with pytest.raises(ValueError, match="loss.. ran none of the 2 skip connections of"):
        initialise_from_batch(model, lambda: x.square().sum())
    initialise_from_batch(model, lambda: model["used"](x, x.sin()).square().sum())
    with pytest.warns(RuntimeWarning, match="no profile yet"):
        model["unused"](x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["used"](x, x)


def test_a_profile_behind_distributed_data_parallel_is_refused():
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(ValueError, match="expected the model before it is wrapped"):
        initialise_from_batch(wrapped, lambda: torch.zeros(()))


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


@pytest.mark.parametrize("kind", ["prores", "branchnorm"])
def test_a_loop_that_counts_no_updates_is_warned_once(kind):
    one, told, resumed = (create_skip(kind, 4, place=Place()) for _ in range(3))
    x = torch.ones(3, 4)
    with pytest.warns(RuntimeWarning, match=f"kind {kind}: the branch is left out at update 0"):
        one(x, x)
    for skip in (told, resumed):
        skip.prepare(x)
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
