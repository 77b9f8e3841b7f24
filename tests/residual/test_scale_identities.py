"""Rules that scale or normalise: identities, constants and starts, as their sources say."""

import math

import pytest
import torch
from skip_variants import SEQUENCE, draw
from stream_rules import Stack

from fairseq_rskip.residual import Place, create_skip, initialise_from_batch

ENCODER, DECODER = (
    Place("encoder", "ffn", 5, 6, 6, 1, 2, 3),
    Place("decoder", "ffn", 5, 6, 6, 2, 3, 2),
)
LAST = Place(index=5, depth=6, position=1, sublayers=2)


def test_keel_keeps_a_stream_whose_branches_are_zero():
    skip, x = create_skip("keel", 5, place=DECODER).double(), 3 * draw(SEQUENCE, 1)
    assert skip.constants() == {"lambda": 18}
    assert torch.equal(skip.prepare(x)[0], torch.layer_norm(x, [5], skip.pre.weight, skip.pre.bias))
    torch.testing.assert_close(
        skip(x, torch.zeros_like(x)), torch.layer_norm(x, [5]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "warm_up", "plain"), [("prores", 6000, "preln"), ("branchnorm", 4000, "xskip")]
)
def test_a_schedule_ends_as_the_plain_rule_and_is_in_checkpoints(kind, warm_up, plain):
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip(kind, 5, place=ENCODER).double()
    plain = create_skip(
        plain, 5, norm="layer", **({} if plain == "preln" else {"skip_lambda": 1})
    ).double()
    start = x if skip.pre is not None else torch.layer_norm(x, [5])
    assert torch.equal(skip(x, f), start)
    skip.set_num_updates(warm_up - 1)
    assert not torch.equal(skip(x, f), plain(x, f))
    for updates in (warm_up, 3 * warm_up):
        skip.set_num_updates(updates)
        loaded = create_skip(kind, 5, place=ENCODER).double()
        loaded.load_state_dict(skip.state_dict())
        assert torch.equal(loaded(x, f), plain(x, f))


@pytest.mark.parametrize("kind", ["prores", "branchnorm"])
def test_a_long_schedule_is_the_same_in_halves(kind):
    """fp16 has no number of 70,000 updates."""
    skip = create_skip(kind, 5, warmup=100_000, place=Place())
    skip.set_num_updates(70_000)
    x, f = draw(SEQUENCE, 1, torch.float16), draw(SEQUENCE, 2, torch.float16)
    expected = x.double() + 0.7 * f.double()
    if kind == "branchnorm":
        expected = torch.layer_norm(expected, [5])
    torch.testing.assert_close(skip(x, f).double(), expected, rtol=4e-3, atol=4e-3)


def test_the_delta_rule_writes_its_value_and_reflects():
    x, f, skip = draw(SEQUENCE, 1), draw(SEQUENCE, 2), create_skip("ddl", 5).double()
    k = torch.nn.functional.normalize(f, dim=-1)
    torch.testing.assert_close(
        (k * skip(x, f)).sum(-1), torch.full((4, 3), 2.0).double()
    )  # b = 1: <k, y> = v
    torch.nn.init.constant_(skip.gate_bias, 50.0), torch.nn.init.constant_(skip.value_bias, -50.0)
    torch.testing.assert_close(skip(x, f).norm(dim=-1), x.norm(dim=-1))  # b = 2, v = 0


def test_layerscale_of_one_is_pre_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("layerscale", 5, init=1.0).double()
    assert torch.equal(skip(x, f), x + f)
    assert torch.equal(skip.prepare(x)[0], torch.layer_norm(x, [5], skip.pre.weight, skip.pre.bias))
    starts = {
        depth: create_skip("layerscale", 5, place=Place(depth=depth)).weight[0]
        for depth in (18, 19, 24, 25, 36)
    }
    expected = [0.1, 1e-5, 1e-5, 1e-6, 1e-6]
    assert [float(start) for start in starts.values()] == pytest.approx(expected)


def test_the_variance_of_a_scaled_stream_stays_bounded():
    blocks = 200
    x = start = draw((1000, 64), 0)
    for number in range(blocks):
        skip = create_skip("scaled", 64, place=Place(index=number, depth=blocks))
        x = skip(x, draw((1000, 64), number + 1))
    assert float(x.var() / start.var()) == pytest.approx(2, rel=0.05)


def test_constants_at_six_and_six_layers():
    def of(kind, place, **options):
        return create_skip(kind, 4, place=place, **options).constants()

    near = {"abs": 5e-5}
    assert of("deepnorm", ENCODER) == pytest.approx({"lambda": 1.4179, "beta": 0.4970}, **near)
    assert of("deepnorm", DECODER) == pytest.approx({"lambda": 2.0598, "beta": 0.3433}, **near)
    alone = Place("decoder", "ffn", 0, 6, 0, 1, 2)
    assert of("deepnorm", alone) == pytest.approx({"lambda": 12**0.25, "beta": 48**-0.25})
    assert of("tfixup", ENCODER) == pytest.approx(
        {"beta": 0.4281, "embedding_scale": 0.3689}, **near
    )
    assert of("tfixup", DECODER) == pytest.approx(
        {"beta": 0.3689, "embedding_scale": 0.3689}, **near
    )
    assert of("admin", ENCODER, omega="formula") == pytest.approx({"weight": 2.0170}, **near)
    assert of("admin", DECODER, omega="formula") == pytest.approx({"weight": 2.3351}, **near)


@pytest.mark.parametrize(
    ("kind", "name", "deviation"),
    [
        ("conv_shortcut", "weight", math.sqrt(2 / 256)),  # He et al. 2015, Eq. 14
        ("highway", "gate_weight", 1 / 16),
        ("laurel", "low", 1 / 16),
        ("mudd", "w1", 1 / 16),
        ("gru_gate", "branch_weight", 1 / 16),
        ("gru_gate", "stream_weight", 1 / 16),
        ("gtrxl", "branch_weight", 1 / 16),
        ("gtrxl", "stream_weight", 1 / 16),
        ("nag", "direction", 0.02),
        ("gated_residual", "gate_down", 0.02),
        ("gated_residual", "gate_up", 0.02),
        ("gated_residual", "write", 0.02),
    ],
)
def test_a_random_matrix_starts_as_wide_as_its_rule_says(kind, name, deviation):
    torch.manual_seed(1)
    start = create_skip(kind, 256, place=LAST).get_parameter(name).detach()
    # of at least 4,096 values, whose estimate has a deviation of 1.1 % of it
    assert float(start.std()) == pytest.approx(deviation, rel=0.06)


def test_laurel_starts_plain():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    torch.testing.assert_close(
        create_skip("laurel", 5).double()(x, f), x + f, rtol=1e-14, atol=1e-14
    )


def test_dropout_is_on_the_shortcut_alone():
    x, f = draw((50, 20, 5), 1), draw((50, 20, 5), 2)
    skip = create_skip("dropout_shortcut", 5)
    torch.manual_seed(0)
    kept = (skip(x, f) - f) / x
    assert set(kept.round(decimals=9).unique().tolist()) == {0.0, 2.0} and 0.9 < kept.mean() < 1.1
    torch.testing.assert_close(skip.eval()(x, f), x + f)


def test_admin_takes_its_start_from_one_batch():
    """The recursion, from the outputs of every block, padding left out."""
    torch.manual_seed(0)
    blocks = 6
    chain = [create_skip("admin", 8, place=Place(index=i, depth=blocks)) for i in range(blocks)]
    layers = [torch.nn.Linear(8, 8) for _ in chain]
    model = torch.nn.ModuleList([*chain, *layers])
    x, mask = 3 * torch.randn(5, 4, 8), torch.zeros(5, 4, dtype=torch.bool)
    mask[3:, 1] = True

    def forward():
        y = x.masked_fill(mask.unsqueeze(-1), 1e3)
        for skip, layer in zip(chain, layers):
            y = skip(y, layer(y), padding_mask=mask)

    initialise_from_batch(model, forward)
    omega, y = 1.0, x
    for skip, layer in zip(chain, layers):
        assert skip.weight.detach().unique().item() == pytest.approx(omega, rel=1e-5)
        f_x = layer(y)
        parts = [part[~mask].detach().double().var(unbiased=False) for part in (omega * y, f_x)]
        omega = math.sqrt(sum(parts))
        y = skip(y, f_x)
    mask[:] = True
    initialise_from_batch(model, forward)
    assert all(skip.weight.eq(1).all() for skip in chain)  # nothing but padding says nothing


@pytest.mark.parametrize(("kind", "options"), [("admin", {}), ("askip", {"adapt": "gradient"})])
def test_a_start_from_one_batch_leaves_running_statistics_as_they_were(kind, options):
    skip, x = create_skip(kind, 8, norm="batch", **options), draw((6, 4, 8), 1, torch.float32)
    x.requires_grad_()
    statistics = {name: b.clone() for name, b in skip.named_buffers() if name.startswith("post.")}
    initialise_from_batch(skip, lambda: skip(x, x.sin() + 1).square().sum())
    assert statistics
    for name, value in statistics.items():
        assert torch.equal(skip.get_buffer(name), value), name


def test_spannorm_with_a_last_branch_of_zero_normalises_the_layers_input():
    first, last = Stack("spannorm", 1, 2).double().skips
    x, f = draw((4, 9), 1), draw((4, 9), 2)
    assert torch.equal(first.prepare(x)[0], torch.layer_norm(x, [9]))
    y = last(first(x, f), torch.zeros_like(f))
    torch.testing.assert_close(y, torch.layer_norm(x, [9]), rtol=1e-12, atol=1e-12)


def test_completep_at_its_base_depth_is_pre_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    for exponent in (0.5, 1.0):
        options = {"depth_exponent": exponent, "base_depth": 6, "place": LAST}
        skip = create_skip("completep", 5, **options).double()
        assert torch.equal(skip(x, f), x + f)
        assert skip.constants() == {"alpha": 1, "factor of adam-eps": 1, "factor of lr": 1}


def test_completep_with_exponent_one_half_and_base_one_is_the_fixed_scale():
    """Of one block a layer, where the fixed scale counts blocks and CompleteP layers."""
    x, f, place = draw(SEQUENCE, 1), draw(SEQUENCE, 2), Place(index=2, depth=7)
    options = {"depth_exponent": 0.5, "base_depth": 1, "norm": "none", "place": place}
    ours = create_skip("completep", 5, **options).double()
    scaled = create_skip("scaled", 5, place=place).double()
    torch.testing.assert_close(ours(x, f), scaled(x, f), rtol=1e-14, atol=1e-14)


def test_completep_leaves_the_rates_of_a_resnet_alone():
    place = Place("resnet", "block", index=0, depth=8)
    options = {"depth_exponent": 0.5, "channel_dim": 1, "place": place}
    assert create_skip("completep", 5, **options).layer_factors() == (1, 1)


def test_completep_names_the_factors_of_the_optimizer():
    place = Place(index=0, depth=32)
    actual = create_skip("completep", 5, place=place).constants()
    expected = {"alpha": 1 / 16, "factor of adam-eps": 1 / 16, "factor of lr": 1}
    assert actual == pytest.approx(expected)
    actual = create_skip("completep", 5, depth_exponent=0.5, place=place).constants()
    expected = {"alpha": 1 / 4, "factor of adam-eps": 1 / 4, "factor of lr": 1 / 4}
    assert actual == pytest.approx(expected)
