"""Whole stacks: every block's place, what blocks share, and stacks of the meta device."""

import subprocess
import sys
import warnings

import pytest
import torch
from skip_variants import draw

from fairseq_rskip.residual import KINDS, Place, create_skip, skip_stack, skips
from fairseq_rskip.residual.branch_weights import Weight
from fairseq_rskip.residual.mixing_matrices import MATRICES

DEPEND_ON_PLACE = set(
    "angle attnres b2t completep deepnorm delta_attnres denseformer dlcl fixup gated_residual "
    "geonorm gpt2 hyper ihc keel layerscale learned_angle lnscale mhar mhc mixln mudd multi_gate "
    "nag prores residual_dual scaled siamesenorm single_pass_mhc spannorm tfixup x0".split()
)


def test_exactly_the_rules_that_depend_on_their_position_are_refused_without_a_place():
    refused = set()
    for kind, rule in KINDS.items():
        if not rule.__module__.startswith("fairseq_rskip."):
            continue  # one that another test has registered
        try:
            create_skip(kind, 8)
        except ValueError as error:
            message = str(error)
            assert message.startswith(f"place=None: kind {kind} depends on its position")
            assert f'skip_stack("{kind}", 8, layers=6' in message and "\n" not in message
            refused.add(kind)
    assert refused == DEPEND_ON_PLACE


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


@pytest.mark.parametrize("options", [{"kind": "rskip", "skip_lambda": 2}, {"kind": "attnres"}])
def test_a_trace_can_be_saved_and_run_without_this_package(options, tmp_path):
    """A trace holds torch's own operators; the operator and its autograd function do not save."""
    made = skip_stack(dim=16, layers=2, sublayers=("ffn",), **options)
    stack = torch.nn.ModuleList(skips(made).values())

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, x):
            for skip in self.stack:
                h, carried = skip.prepare(x)
                x = skip(x, h.sin(), carried)
            return x

    model, x = Model().eval(), draw((3, 2, 16), 1, torch.float32)
    torch.jit.trace(model, x).save(tmp_path / "model.pt")
    program = (
        "import sys, torch; model, x, y = sys.argv[1:]; "
        "torch.save(torch.jit.load(model)(torch.load(x)), y)"
    )
    torch.save(x, tmp_path / "x")
    files = [str(tmp_path / name) for name in ("model.pt", "x", "y")]
    subprocess.run([sys.executable, "-c", program, *files], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y"), model(x), rtol=1e-5, atol=1e-6)
