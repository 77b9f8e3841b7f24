"""The rivals in whole models: what training tells them, profiles, starts."""

import pickle

import pytest
import torch
from skip_variants import SEQUENCE, draw
from transformer_helpers import TINY, batch, build, sentences
from vision_helpers import train

from fairseq_rskip.residual import create_skip, skips
from fairseq_rskip.vision.model import PreActResNet

BASE = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
}


XAVIER = {
    "fc1": (2 / 96) ** 0.5,
    "fc2": (2 / 96) ** 0.5,
    **dict.fromkeys(("q", "k", "v", "out"), 32**-0.5),
}


def test_keels_first_layer_is_pre_norm():
    model = build("transformer_keel", **BASE)
    for layers in (model.encoder.layers, model.decoder.layers):
        first, second = layers[0].final_skip, layers[1].final_skip
        assert first.constants() == {"lambda": 1} and not first.post and len(second.post) == 1


def test_fairseq_and_train_cifar_tell_a_schedule_the_number_of_updates(images, tmp_path):
    model = build("transformer_prores_tiny", **TINY)
    model.set_num_updates(17)  # what fairseq's task calls before every update
    assert {int(skip.updates) for skip in skips(model).values()} == {17}
    assert (
        train(
            None, tmp_path / "run", images, skip_kind="branchnorm", skip_warmup=4, skip_norm="layer"
        )[0]
        == 0
    )
    state = torch.load(next((tmp_path / "run").rglob("*.pt")), weights_only=True)
    counts = {int(value) for name, value in state["model"].items() if name.endswith("updates")}
    assert counts == {state["iteration"] - 1}


def test_ngpt_stays_on_its_sphere_and_keeps_branch_vectors_at_length_1():
    x, f, skip = draw(SEQUENCE, 1), draw(SEQUENCE, 2), create_skip("ngpt", 5).double()
    y = skip(x, f)
    torch.testing.assert_close(y.square().sum(-1), torch.full((4, 3), 5.0).double())
    for sign in (1, -1):  # a = 1, whatever the sign of its weight: y = N(F)
        torch.nn.init.constant_(skip.weight, sign * 20 / 5**0.5)
        torch.testing.assert_close(skip(x, f), skip.unit(f))
    model = build("transformer_ngpt_tiny", **TINY)
    matrices = {
        name: weight
        for name, weight in model.named_parameters()
        if ".layers." in name and weight.dim() == 2
    }
    assert len(matrices) == 2 * (6 + 10)
    with torch.no_grad():  # an update
        for matrix in matrices.values():
            matrix.add_(0.1)
    for skip in skips(model).values():
        skip.to_unit_length()
    for name, matrix in matrices.items():
        axis = 0 if "out_proj" in name or "fc2" in name else 1
        torch.testing.assert_close(matrix.norm(dim=axis), torch.ones(matrix.size(1 - axis)))


@pytest.mark.parametrize("kind", ["rezero", "skipinit", "fixup"])
def test_the_stack_starts_as_the_identity(kind):
    """Bit for bit: what leaves the last layer is what entered the first."""
    model = build(f"transformer_{kind}_tiny", **TINY)
    src, _, _ = batch(sentences())
    x, _ = model.encoder.forward_embedding(src)
    mask = src.eq(model.encoder.padding_idx)
    x = x * (1 - mask.unsqueeze(-1).type_as(x))
    assert torch.equal(model.encoder(src)["encoder_out"][0], x.transpose(0, 1))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("xskip", dict(q=0.5**0.5, k=0.5**0.5, v=0.5**0.5, out=1)),
        ("deepnorm", dict(q=1, k=1, v=0.4970, out=0.4970, fc1=0.4970, fc2=0.4970)),
        ("tfixup", dict(q=1, k=1, v=0.4281, out=0.4281, fc1=0.4281, fc2=0.4281)),
        (
            "fixup",
            dict(q=30 ** (-1 / 6), k=30 ** (-1 / 6), v=30 ** (-1 / 6), out=0, fc1=30**-0.5, fc2=0),
        ),
        (
            "gpt2",
            {
                role: (0.02 / 12**0.5 if role in ("out", "fc2") else 0.02) / XAVIER[role]
                for role in XAVIER
            },
        ),
    ],
    ids=["stock", "deepnorm", "tfixup", "fixup", "gpt2"],
)
def test_branches_start_with_the_papers_standard_deviations(kind, expected):
    layer = build(f"transformer_{kind}_tiny", **BASE).encoder.layers[3]
    branch = {**layer.branch_weights("self_attn"), **layer.branch_weights("ffn")}
    actual = {role: float(weight.tensor.std()) / XAVIER[role] for role, weight in branch.items()}
    assert {role: actual[role] for role in expected} == pytest.approx(expected, rel=0.05)


def test_attention_between_two_widths_starts_with_the_papers_standard_deviations():
    """fairseq draws it with another gain than that of one width."""
    widths = {**BASE, "encoder_embed_dim": 64, "decoder_embed_dim": 32}
    attention = build("transformer_deepnorm_tiny", **widths).decoder.layers[3].encoder_attn
    expected = {"q": 1 / 32, "k": 2 / 96, "v": 0.3433**2 * 2 / 96, "out": 0.3433**2 / 32}
    for role, variance in expected.items():
        actual = getattr(attention, f"{role}_proj").weight.std().item()
        assert actual == pytest.approx(variance**0.5, rel=0.05), role


def test_a_rule_rescales_and_does_not_redraw():
    """From one seed every kind draws what stock draws: its weights are stock's times a constant."""
    stock, scaled = (
        build(f"transformer_{kind}_tiny", **TINY).state_dict() for kind in ("xskip_ln", "deepnorm")
    )
    gate = build("transformer_highway_tiny", **TINY).state_dict()
    small = build("transformer_gpt2_tiny", **TINY).state_dict()
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        assert torch.equal(small[name], stock[name]) and torch.equal(scaled[name], stock[name])
    for name, weight in stock.items():
        if name.endswith(("proj.weight", "fc1.weight", "fc2.weight")):
            ratio = scaled[name] / weight
            torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=0)
            assert torch.equal(gate[name], weight)


def test_tfixup_scales_embeddings_and_fixups_own_output_starts_at_zero():
    plain, scaled = (build(f"transformer_{kind}_tiny", **BASE) for kind in ("xskip", "tfixup"))
    for side in ("encoder", "decoder"):
        before, after = (getattr(model, side).embed_tokens.weight for model in (plain, scaled))
        torch.testing.assert_close(after, before * 54**-0.25)
    plain, scaled = (
        build(f"transformer_{kind}_tiny", **BASE, share_all_embeddings=True).encoder
        for kind in ("xskip", "tfixup")
    )
    torch.testing.assert_close(
        scaled.embed_tokens.weight, plain.embed_tokens.weight * 54**-0.25
    )  # once
    for shared in (False, True):
        model = build("transformer_fixup_tiny", **TINY, share_decoder_input_output_embed=shared)
        assert bool(model.decoder.output_projection.weight.eq(0).all()) is not shared


def test_a_whole_model_can_be_pickled():
    model = build("transformer_rskip_ln_tiny", **TINY)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ["highway", "conv_shortcut", "laurel"])
def test_every_place_has_draws_of_its_own(kind):
    name = {"highway": "gate_weight", "conv_shortcut": "weight", "laurel": "low"}[kind]
    model, again = (build(f"transformer_{kind}_tiny", **TINY) for _ in range(2))
    other = build(f"transformer_{kind}_tiny", seed=2, **TINY)
    actual = [getattr(skip, name).detach() for skip in skips(model).values()]
    assert len({tuple(weight[0].tolist()) for weight in actual}) == len(actual) == 10
    assert all(torch.equal(a, getattr(b, name)) for a, b in zip(actual, skips(again).values()))
    for weight, skip in zip(actual, skips(other).values()):  # of another seed
        assert not torch.isclose(weight, getattr(skip, name)).any()


@pytest.mark.parametrize("kind", ["fixup", "skipinit"])
def test_a_resnet_without_batch_norm(kind):
    torch.manual_seed(0)
    model = PreActResNet(20, 10, {"kind": kind})
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())
    last = model.blocks[-1]
    x = torch.randn(2, 64, 8, 8)
    assert torch.equal(last.skip.prepare(x)[0], x)  # the network has the biases
    if kind == "fixup":
        assert last.conv2.weight.eq(0).all() and model.fc.weight.eq(0).all()
        assert float(last.conv1.weight.std()) == pytest.approx((2 / (9 * 64)) ** 0.5 / 3, rel=0.05)
    x = draw((2, 64, 8, 8), 1, torch.float32)
    assert torch.equal(last(x), x)
