"""The skip module's contract.

That is identities, layouts, padding, state, errors, scripting and compilation.
"""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from skip_variants import CASES, IMAGE, NAMES, SEQUENCE, VARIANTS, Case, draw, gradients, row
from test_fsdp import Block

from fairseq_rskip.residual import KINDS, PLAIN, Place, create_skip
from fairseq_rskip.residual.options import short

BATCH_CASES = [case for case in CASES if case.masked and case.variant.norm == "batch"]
BATCH_CASES += [  # their norm behind the branch has to leave padding out, too
    Case(row(kind, None, norm="batch", angle=0.5, angle_exponent=0.0), shape, masked=True)
    for kind in ("angle", "learned_angle")
    for shape in (SEQUENCE, IMAGE)
]


def inputs(case, dtype=torch.float32):
    return draw(case.shape, 1, dtype), draw(case.shape, 2, dtype)


@pytest.mark.parametrize("kind", ["rskip", "xskip"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_one_step_with_layer_norm_is_exactly_post_norm(kind, dtype, stock_operators):
    skip = Case(VARIANTS[NAMES.index("rskip1-layer")], SEQUENCE).build().to(dtype)
    other = create_skip(kind, 5, norm="layer", skip_lambda=1).to(dtype)
    other.load_state_dict(skip.state_dict())
    x, f = draw(SEQUENCE, 1, dtype), draw(SEQUENCE, 2, dtype)
    assert torch.equal(
        other(x, f), F.layer_norm(x + f, (5,), skip.post[0].weight, skip.post[0].bias, 1e-5)
    )


ADAPTIVE = [
    row("askip", None, norm="batch", adapt=mode) for mode in ("fraction", "mixture", "halting")
]


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.channel_dim == 1] + [Case(v, IMAGE) for v in ADAPTIVE],
    ids=lambda c: c.name,
)
def test_image_memory_format_is_kept(case):
    (x, f), skip = inputs(case), case.build()
    plain = skip(x, f, None, case.mask())
    last = skip(
        *(t.contiguous(memory_format=torch.channels_last) for t in (x, f)), None, case.mask()
    )
    assert plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain, last)


@pytest.mark.parametrize("case", BATCH_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_padding_holds_reaches_nothing_under_batch_norm(case, training, poison):
    """Also when the gradient that arrives at padded positions is NaN."""
    mask, results = case.mask(), []
    padded = mask.unsqueeze(case.channel_dim)
    for fill in (0.0, poison):
        skip = case.build().train(training)
        x, f = (t.masked_fill(padded, fill).requires_grad_() for t in inputs(case))
        y = skip(x, f, None, mask)
        upstream = draw(case.shape, 3, torch.float32).masked_fill(padded, fill)
        results.append([y, *gradients(y, upstream, [x, f, *skip.parameters()]), *skip.buffers()])
    for clean, poisoned in zip(*results):
        assert torch.isfinite(poisoned).all() and torch.equal(clean, poisoned)


@pytest.mark.parametrize("name", ["rskip2-layer", "xskip2-layer", "wskip2-layer", "laurel2-layer"])
def test_a_hook_on_post_sees_y_whatever_computes_it(name, cpu_operator):
    skip = create_skip("laurel", 16, norm="layer")
    if name in NAMES:
        skip = VARIANTS[NAMES.index(name)].build(16)
    seen = []
    skip.post.register_forward_hook(lambda _module, _inputs, y: seen.append(y))
    y = skip(draw((4, 16), 1, torch.float32), draw((4, 16), 2, torch.float32))
    assert len(seen) == 1 and torch.equal(seen[0], y)


UNPADDED = [case for case in CASES if case.shape == SEQUENCE and not case.masked]
ONE_OF_A_KIND = {
    (v.kind, v.options.get("adapt"), v.kind == "xskip" and v.norm): case
    for case in UNPADDED
    for v in [case.variant]
}


@pytest.mark.parametrize("case", ONE_OF_A_KIND.values(), ids=lambda case: case.name)
def test_torch_compile_sees_one_graph(case):
    """The graph is seen in the operator, where the rule has it.

    The module is training, so that running statistics change inside the graph.
    """
    torch._dynamo.reset()
    x, f = (draw((*SEQUENCE[:-1], 16), seed, torch.float32) for seed in (1, 2))
    skip = case.variant.build(16)
    traced = copy.deepcopy(skip)
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, f, None, case.mask()), skip(x, f, None, case.mask()))
    torch.testing.assert_close(traced.state_dict(), skip.state_dict())


@pytest.mark.parametrize(
    "kind", ["rskip", "wskip", "askip", "highway", "periln", "fixup", "b2t", "dlcl", "mhc"]
)
def test_torch_export_gives_the_same_numbers(kind):
    block, inputs = Block(kind, 0, {}).eval(), (draw((4, 3, 4), 1, torch.float32),)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.export.export(block, inputs).module()(*inputs), block(*inputs)
        )


each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)


def inputs_of(dim=33):
    return draw((4, dim), 1, torch.float32), draw((4, dim), 2, torch.float32)


@each_variant
def test_a_forward_pass_does_not_change_its_inputs(variant):
    x, f = inputs_of()
    x_before, f_before = x.clone(), f.clone()
    variant.build(33)(x, f)
    assert torch.equal(x, x_before) and torch.equal(f, f_before)


@each_variant
def test_every_parameter_has_a_gradient(variant):
    """DistributedDataParallel waits for every one."""
    skip = variant.build(33)
    x, f = inputs_of()
    h, carried = skip.prepare(x.requires_grad_())
    skip(x, f * h, carried).sum().backward()
    assert [name for name, p in skip.named_parameters() if p.grad is None] == []


def by_state_dict(variant, skip):
    file = io.BytesIO()
    torch.save(skip.state_dict(), file)
    file.seek(0)
    loaded = variant.build(33, seed=2).eval()  # other random parameters
    loaded.load_state_dict(torch.load(file, weights_only=True))
    return loaded


COPIES = {
    "state dict": by_state_dict,
    "deepcopy": lambda variant, skip: copy.deepcopy(skip),
    "pickle": lambda variant, skip: pickle.loads(pickle.dumps(skip)),
}


@each_variant
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_the_same(variant, way):
    skip = variant.build(33, seed=1)
    x, f = inputs_of()
    skip(x, f)  # moves running statistics off their start
    copied = COPIES[way](variant, skip.eval())
    assert type(copied) is KINDS[variant.kind]
    assert torch.equal(copied.eval()(x, f), skip(x, f))


@each_variant
def test_a_representation_has_every_option(variant):
    shown = repr(variant.build(33))
    for name, value in variant.options.items():
        if name != "place":
            assert f"{name}={short(value)}" in shown


def changed_examples(skip, x, f, axis):
    """Which examples have a branch: one boolean for each index of ``axis``.

    Fails if a position differs from the others of its example.
    """
    changed = (skip(x, f) != x).any(-1)
    others = [dim for dim in range(changed.dim()) if dim != axis]
    per_example = changed.float().mean(others)
    assert set(per_example.tolist()) <= {0.0, 1.0}
    return per_example.bool()


@pytest.mark.parametrize(
    ("batch_dim", "shape", "axis"),
    [(-2, (4, 200, 5), 1), (1, (4, 200, 5), 1), (0, (200, 4, 5), 0), (-3, (200, 4, 5), 0)],
)
def test_stochastic_depth_drops_whole_examples_at_its_rate(batch_dim, shape, axis):
    torch.manual_seed(1)
    skip = create_skip(dim=5, **PLAIN, drop_path=0.5, batch_dim=batch_dim)
    x, f = draw(shape, 1, torch.float32), draw(shape, 2, torch.float32)
    kept = changed_examples(skip, x, f, axis).sum()
    assert 70 < kept < 130  # of 200: 100 +- 4.2 standard deviations


def test_a_branch_that_stochastic_depth_keeps_is_divided_by_the_chance_to_keep_it():
    torch.manual_seed(1)
    skip = create_skip(dim=5, **PLAIN, drop_path=0.75)
    x, f = draw((4, 200, 5), 1, torch.float32), draw((4, 200, 5), 2, torch.float32)
    y = skip(x, f)
    kept = (y != x).any(-1)
    torch.testing.assert_close(y[kept], (x + 4 * f)[kept])


def test_stochastic_depth_is_off_in_evaluation():
    skip = create_skip(dim=5, **PLAIN, drop_path=0.5).eval()
    x, f = draw(SEQUENCE, 1, torch.float32), draw(SEQUENCE, 2, torch.float32)
    assert torch.equal(skip(x, f), x + f)


def test_the_rate_of_stochastic_depth_grows_linearly_to_that_of_the_last_block():
    rates = []
    for index in range(2):
        for position in range(2):
            place = Place(index=index, depth=2, position=position, sublayers=2)
            rates.append(create_skip(dim=5, **PLAIN, drop_path=0.4, place=place).drop_rate)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("batch_dim", [-2, 0])
def test_stochastic_depth_drops_an_example_without_a_batch_as_a_whole(batch_dim):
    torch.manual_seed(1)
    skip = create_skip(dim=5, **PLAIN, drop_path=0.5, batch_dim=batch_dim)
    x, f = draw((5,), 1, torch.float32), draw((5,), 2, torch.float32)
    changed = {tuple((skip(x, f) != x).tolist()) for _ in range(40)}
    assert changed == {(True,) * 5, (False,) * 5}


@pytest.mark.parametrize("norm", ["layer", "rms", "scale", "ada"])
@pytest.mark.parametrize("kind", ["periln", "outln"])
def test_a_norm_behind_the_branch_takes_the_scale_from_it(kind, norm):
    skip, x, f = (
        create_skip(kind, 5, norm=norm, eps=1e-12).double(),
        draw(SEQUENCE, 1),
        draw(SEQUENCE, 2),
    )
    torch.testing.assert_close(skip(x, 1e3 * f), skip(x, f))
    assert (skip(x, f) - x - f).abs().max() > 0.1


THIRD_OF_TEN = Place(index=2, depth=10)


@pytest.mark.parametrize(
    ("kind", "options", "reads"),
    [
        ("preln", {}, lambda x: F.layer_norm(x, (5,))),
        ("periln", {}, lambda x: F.layer_norm(x, (5,))),
        ("outln", {}, lambda x: x),
        ("lnscale", {}, lambda x: F.layer_norm(x, (5,)) / math.sqrt(3)),
        ("fixup", {"pre_norm": True}, lambda x: F.layer_norm(x, (5,))),
        ("rezero", {"pre_norm": True}, lambda x: F.layer_norm(x, (5,))),
        ("x0", {"pre_norm": True, "place": Place()}, lambda x: F.layer_norm(x, (5,))),
    ],
)
def test_a_branch_reads_what_its_kind_says(kind, options, reads):
    x = 3 * draw(SEQUENCE, 1, torch.float32)
    skip = create_skip(kind, 5, **{"place": THIRD_OF_TEN, **options})
    torch.testing.assert_close(skip.prepare(x)[0], reads(x))


def test_lnscale_divides_nothing_in_the_first_layer():
    x = 3 * draw(SEQUENCE, 1, torch.float32)
    first = create_skip("lnscale", 5, place=Place(index=0, depth=10))
    assert torch.equal(first.prepare(x)[0], create_skip("preln", 5).prepare(x)[0])


@pytest.mark.parametrize("kind", ["ngpt", "nag"])
def test_a_rule_that_normalises_x_itself_refuses_another_width(kind):
    with pytest.raises(ValueError, match="expected 5 at dimension -1"):
        create_skip(kind, 5, place=THIRD_OF_TEN).prepare(torch.ones(3, 4))


def test_a_branch_of_fixup_reads_x_plus_its_bias():
    x, skip = draw(SEQUENCE, 1, torch.float32), create_skip("fixup", 5, place=Place())
    torch.nn.init.constant_(skip.bias_in, 0.25)
    torch.testing.assert_close(skip.prepare(x)[0], x + 0.25)


@pytest.mark.parametrize(
    ("share", "depth", "post_norm_layers"),
    [(0.0, 10, 0), (0.29, 10, 2), (0.3, 10, 3), (1.0, 10, 10), (0.29, 100, 29)],
)  # 0.29 * 100 is 28.999999999999996 in float64
def test_mixln_is_post_norm_in_the_first_share_of_the_layers(share, depth, post_norm_layers):
    x = 3 * draw(SEQUENCE, 1, torch.float32)
    is_post_norm = []
    for index in range(depth):
        skip = create_skip("mixln", 5, post_share=share, place=Place(index=index, depth=depth))
        is_post_norm.append(torch.equal(skip.prepare(x)[0], x))
        assert is_post_norm[-1] == (len(skip.post) == 1)
    assert is_post_norm == [index < post_norm_layers for index in range(depth)]


def test_a_rule_that_needs_a_norm_before_the_branch_is_refused_in_a_resnet():
    class NormFirst(type(create_skip("preln", 5))):
        kind = "norm_first"
        norms = ("layer", "rms")
        for_images = True

    NormFirst(5)
    with pytest.raises(ValueError, match="expected a rule that takes norm='none', for a ResNet"):
        NormFirst(5, channel_dim=1)


def test_a_mask_in_the_place_of_carried_is_refused():
    x, mask = torch.ones(3, 2, 4), torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"^carried is a Tensor: expected the second result of pre"
    ):
        create_skip("rskip", 4)(x, x, mask)


NAN, INF = float("nan"), float("inf")
# refused with a line that names the last option and its value
INVALID: list[dict] = [
    *(dict(kind=kind) for kind in ("yskip", 3)),
    dict(kind="wskip", skip_lambda=3),
    dict(kind="xskip", init=7),
    dict(drop_path=1),
    *(dict(kind=kind, place=Place(), drop_path=0.5) for kind in ("ngpt", "ddl", "nag")),
    dict(norm="instance"),
    *(dict(kind=kind, place=Place(), norm="none") for kind in ("rskip", "keel", "deepnorm")),
    *(
        dict(kind=kind, place=Place(), norm="batch")
        for kind in ("mixln", "x0", "layerscale", "hyper")
    ),
    dict(kind="xskip", pre_norm=True, norm="layer"),
    *(dict(kind=kind, norm="layer", pre_norm=True) for kind in ("rskip", "outln")),
    dict(kind="fixup", place=Place(), norm="layer"),
    *(dict(kind=kind, place=Place(), pre_norm=True) for kind in ("ngpt", "nag")),
    dict(kind="askip", skip_lambda=5.0),
    dict(kind="constant", skip_lambda=1.0),
    dict(kind="askip", halt_cost=0.1),
    *(
        dict(kind="mhc", place=Place(), matrix=matrix, streams=6)
        for matrix in ("permutations", "kronecker")
    ),
    dict(kind="mixln", place=Place(), post_share=1.5),
    *(dict(kind=kind, place=None) for kind in ("hyper", "deepnorm", "layerscale", "b2t")),
    *(dict(norm="dyt", norm_alpha=value) for value in (0.0, -1.0)),
    dict(channel_dim=1, kind="periln"),
    dict(channel_dim=1, kind="gpas", norm="layer"),
    *(dict(norm="layer", norm_axes=axes) for axes in ("chw", "hw")),
    *(dict(dim=d) for d in (0, -3, 5.0, "5", True, None)),
    *(dict(channel_dim=c) for c in (0, 2, None, True, "1")),
    *(
        dict(kind="xskip", skip_lambda=v)
        for v in (0, -1, NAN, INF, True, "2", None, 1j, 1e300, 10**400, 1e-50)
    ),
    *(
        dict(kind="rskip", skip_lambda=v)
        for v in (0, -1, 1.5, 1001, 10**400, NAN, INF, True, "2", None, "auto")
    ),
    *(dict(kind="wskip", init=v) for v in (NAN, INF, 1e39, True, "1")),
    *(dict(eps=v) for v in (-1e-5, 0, NAN, 10**400)),
    *(dict(batch_dim=v) for v in (2, -1, None, True, "0")),
    *(dict(kind="angle", place=Place(), angle_exponent=v) for v in (400, -400, NAN)),
]


@pytest.mark.parametrize(
    "options", INVALID, ids=["-".join((str(k), *row)) for k, row in enumerate(INVALID)]
)
def test_invalid_options(options):
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError) as refused:
        create_skip(**{"kind": "rskip", "dim": 5, **options})
    message = str(refused.value)
    assert message.startswith(f"{name}={value!r}") and (
        "expected" in message or "has no such option" in message
    )
    assert "\n" not in message


MASK = torch.zeros(4, 3, dtype=torch.bool)
# channel_dim, shapes of x and F, mask, the argument that is named
INVALID_CALLS = {
    "shapes differ": (-1, SEQUENCE, (4, 1, 5), None, "f_x"),
    "dim": (-1, (4, 3, 6), (4, 3, 6), None, "x"),
    "scalar": (-1, (), (), None, "x"),
    "image rank": (1, (4, 5, 3), (4, 5, 3), None, "x"),
    "image dim": (1, (2, 6, 3, 2), (2, 6, 3, 2), None, "x"),
    "mask transposed": (-1, SEQUENCE, SEQUENCE, MASK.t(), "padding_mask"),
    "mask with channels": (-1, SEQUENCE, SEQUENCE, MASK.unsqueeze(-1), "padding_mask"),
    "mask type": (-1, SEQUENCE, SEQUENCE, MASK.long(), "padding_mask"),
    "image mask": (1, IMAGE, IMAGE, torch.zeros(IMAGE).bool(), "padding_mask"),
}


@pytest.mark.parametrize("call", INVALID_CALLS)
def test_invalid_calls(call):
    channel_dim, x_shape, f_shape, mask, named = INVALID_CALLS[call]
    skip = create_skip("rskip", 5, channel_dim=channel_dim)
    for function in (skip, skip.ratio):
        with pytest.raises(ValueError, match=f"^{named} has .*shape .*: expected "):
            function(torch.zeros(x_shape), torch.zeros(f_shape), padding_mask=mask)


def test_integer_inputs_are_refused():
    with pytest.raises(ValueError, match="expected floating point"):
        create_skip("rskip", 5)(torch.zeros(SEQUENCE).long(), torch.zeros(SEQUENCE))


RULES = {
    "lambda": (
        dict(kind="xskip", skip_lambda=2),
        dict(kind="xskip", skip_lambda=3),
        "skip_lambda=2: expected 3",
    ),
    "alpha": (dict(), dict(branch_scale=2.0), "branch_scale=1.0: expected 2.0"),
    "norm": (
        dict(kind="xskip", norm="ada"),
        dict(kind="xskip", norm="none"),
        "norm='ada': expected 'none'",
    ),
    "kind": (
        dict(kind="highway"),
        dict(kind="shortcut_gate"),
        "kind='highway': expected 'shortcut_gate'",
    ),
    "eps": (dict(eps=1e-6), dict(), "eps=1e-06: expected 1e-05"),
    "axes": (
        dict(channel_dim=1, norm_axes="chw"),
        dict(channel_dim=1),
        "norm_axes='chw': expected 'c'",
    ),
}


def test_a_state_with_an_option_that_the_rule_does_not_have_is_refused():
    skip = create_skip("xskip", 5)
    assert skip.mismatch(skip.rule()) == ""
    actual = skip.mismatch({**skip.rule(), "gate_bias": -1.0})
    assert actual == "gate_bias=-1.0: expected no such option"


def test_a_recursive_skip_of_one_step_differs_from_others_in_lambda():
    """It stores itself as xskip, which it equals."""
    one, two = (create_skip("rskip", 5, skip_lambda=steps) for steps in (1, 2))
    assert two.mismatch(one.rule()) == "skip_lambda=1: expected 2"
    assert one.mismatch(two.rule()) == "skip_lambda=2: expected 1"
    assert two.mismatch(create_skip("xskip", 5).rule()) == "kind='xskip': expected 'rskip'"


@pytest.mark.parametrize("saved,built,message", RULES.values(), ids=RULES)
def test_the_state_of_another_rule_is_refused_in_one_line(saved, built, message, tmp_path):
    """All names and shapes fit. Without the stored rule it loads."""
    made = [
        torch.nn.Sequential(
            *(create_skip(**{"kind": "rskip", "dim": 5, **options}) for _ in range(2))
        )
        for options in (saved, built)
    ]
    torch.save(made[0].state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises(RuntimeError) as refused:
        made[1].load_state_dict(state)
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        f"0 was saved with {message}"
    ]
    made[0].load_state_dict(state)
    made[1].load_state_dict(dict(state))


SAME = {
    "one-step": (dict(kind="rskip", skip_lambda=1), dict(kind="xskip", skip_lambda=1.0)),
    "initial value": (dict(kind="wskip", init=1.0), dict(kind="wskip", init=2.0)),
    "stochastic depth": (dict(kind="wskip", drop_path=0.5), dict(kind="wskip", drop_path=0.1)),
}


@pytest.mark.parametrize("saved,built", SAME.values(), ids=SAME)
def test_what_y_does_not_depend_on_may_differ(saved, built):
    one, other = (create_skip(dim=5, **options).eval() for options in (saved, built))
    for parameter in one.parameters():
        torch.nn.init.uniform_(parameter)
    other.load_state_dict(one.state_dict())
    x, f = draw(SEQUENCE, 1, torch.float32), draw(SEQUENCE, 2, torch.float32)
    assert torch.equal(one(x, f), other(x, f))
