"""rskip analyze depth-check.

Its weights are compared with a gradient and with values computed by hand; the rest is what it says
of them and refuses.
"""

import csv
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformer_helpers import TINY, batch, build, randomise, sentences

from fairseq_rskip.analysis import depth_check, skip_log
from fairseq_rskip.analysis.depth_check import GradientWarning, Losses, Residual
from fairseq_rskip.analysis.live import summarise
from fairseq_rskip.analysis.paths import PathProbe
from fairseq_rskip.analysis.probe import SkipProbe
from fairseq_rskip.analysis.study import Study
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import create_skip, skip_stack
from fairseq_rskip.tools import analyze

SUBLAYERS = ("self_attn_skip", "final_skip")
LAYERS = 8
DIM = 64


def values_of(weights, layers=LAYERS):
    """Tags of a decoder of two residuals a layer; ``weights``: layer -> p, 1 where unsaid.

    F points along x, so that p = 1 / (1 + t), and x:F in y is 2.
    """
    values = {}
    for layer in range(layers):
        p = weights.get(layer + 1, 1.0)
        for sublayer in SUBLAYERS:
            block = f"decoder.layers.{layer}.{sublayer}"
            values[f"skip_x_to_F/{block}"] = 2.0
            values[f"skip_F_over_x/{block}"] = 2.0 * (1 / p - 1)
            values[f"skip_cos_x_F/{block}"] = 1.0
            values[f"skip_norm_after_sum/{block}"] = 1.0
    return values


def write_log(folder, weights_of_updates):
    folder.mkdir()
    lines = [
        json.dumps({"step": step, **values_of(weights)})
        for step, weights in weights_of_updates.items()
    ]
    (folder / "skips.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def check(tmp_path, capsys):
    """``rskip analyze depth-check MODEL``: what it prints, and the rows of its CSV."""

    def run(model):
        analyze.run(["depth-check", str(model), "--output", str(tmp_path / "out")])
        rows = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
        return capsys.readouterr().out, rows

    return run


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("xskip", {"skip_lambda": 3}),
        ("rskip", {"skip_lambda": 4}),
        ("angle", {"angle": 0.6, "angle_exponent": 0.0}),
    ],
)
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.6, 1.0])
def test_the_weight_is_what_a_gradient_across_x_and_F_keeps(kind, options, cosine):
    """Autograd of the skip, at |F| = 2 |x| and a gradient at right angles to x, F and the mean."""
    torch.manual_seed(1)
    dim = 64
    vectors = torch.randn(3, dim, dtype=torch.float64)
    vectors -= vectors.mean(-1, keepdim=True)
    x, across, gradient = torch.linalg.qr(vectors.T)[0].T * math.sqrt(dim)
    f_x = 2 * (cosine * x + math.sqrt(1 - cosine**2) * across)
    skip = create_skip(kind, dim, **options).double()
    x, f_x = x[None].clone().requires_grad_(), f_x[None]
    skip(x, f_x).backward(gradient[None])

    values = {
        "skip_x_to_F/b": float(skip.ratio(x.detach(), f_x).detach().mean()),
        "skip_F_over_x/b": 2.0,
        "skip_cos_x_F/b": cosine,
    }
    (weight,) = depth_check.residuals_in(values).values()
    assert x.grad.norm() / gradient.norm() == pytest.approx(weight.factor, rel=1e-4)  # G's eps


class Residuals(nn.Module):
    """Twelve residuals whose branches send back no gradient."""

    def __init__(self, kind, options, gain):
        super().__init__()
        torch.manual_seed(1)
        layers = skip_stack(kind, DIM, layers=12, sublayers=("ffn",), **options)
        self.skips = nn.ModuleList(layer["ffn"] for layer in layers)
        self.weights = torch.randn(12, DIM, DIM) / 8
        for skip in self.skips:
            norm = skip.branch if kind == "angle" else skip.post[0]
            nn.init.constant_(norm.weight[:1], gain)

    def forward(self, x):
        for skip, weight in zip(self.skips, self.weights, strict=True):
            h, carried = skip.prepare(x)
            x = skip(x, torch.tanh(h @ weight).detach(), carried)
        return x


@pytest.mark.parametrize(("kind", "options"), [("rskip", {"skip_lambda": 2}), ("angle", {})])
@pytest.mark.parametrize("gain", [1.0, 0.01, -1e-4])
def test_one_gain_near_zero_hides_no_loss(kind, options, gain):
    """Of 64 gains; autograd of the stack. With the mean of a / b, the second would pass on all.

    Ten percent: means over positions, and a gradient that is not quite across x and F.
    """
    model = Residuals(kind, options, gain)
    x = torch.randn(10, 8, DIM, requires_grad=True)
    with SkipProbe(model) as probe, PathProbe(model) as paths:
        y = model(x)
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    passed = math.prod(
        residual.factor
        for residual in depth_check.residuals_in(summarise(probe, paths=paths)).values()
    )
    assert passed < 0.9
    assert passed == pytest.approx(float(gradient.norm() / upstream.norm()), rel=0.1)


def test_a_branch_of_zero_and_a_sum_without_a_norm_take_nothing():
    values = values_of({1: 0.5}, layers=2)
    del values["skip_cos_x_F/decoder.layers.0.final_skip"]  # undefined where F is zero
    values["skip_norm_after_sum/decoder.layers.1.final_skip"] = 0.0
    weights = depth_check.residuals_in(values)
    assert {block: weight.factor for block, weight in weights.items()} == {
        "decoder.layers.0.self_attn_skip": pytest.approx(0.5),
        "decoder.layers.1.self_attn_skip": 1.0,
    }
    assert [*depth_check.passed_on(weights).values()] == pytest.approx([0.5, 1.0])


def test_what_the_branch_returns_counts_where_it_is_logged():
    """Two gradients at 60 degrees, the second half as long: |a + b|^2 = 1 + 1/4 + 1/2."""
    values = values_of({1: 0.5}, layers=1)
    values["skip_branch_over_skip_gradient/decoder.layers.0.final_skip"] = 0.5
    values["skip_cos_gradients/decoder.layers.0.final_skip"] = 0.5
    factors = [residual.factor for residual in depth_check.residuals_in(values).values()]
    assert factors == pytest.approx([0.5, 0.5 * math.sqrt(1.75)])


def test_a_loss_needs_every_logged_update_of_a_hundred():
    losses = Losses()

    def see(step, of_x):
        losses.see(step, {"decoder.layers.0.final_skip": Residual(of_x, 0.5)})
        return bool(losses.long)

    assert not see(10, 0.01) and not see(60, 0.01) and not see(100, 0.5)
    assert not see(150, 0.01) and not see(200, 0.02)
    assert see(250, 0.02)
    assert see(300, 1.0)
    worst = losses.worst["decoder"]
    assert (worst.update, worst.passed) == (10, 0.01)


def test_a_log_says_what_is_passed_on_and_where_it_is_lost(check, tmp_path):
    """Layers 1 to 4 keep half, twice each: 1/256; a share of ln 30 for each of 16 is 0.213."""
    lossy = dict.fromkeys((1, 2, 4, 5), 0.5)
    updates = {50: lossy, 100: lossy, 150: {**lossy, 8: 0.81}, 200: lossy}
    out, rows = check(write_log(tmp_path / "run", updates))
    assert (
        "The residuals of the decoder pass on 1/390 of the gradient at update 150, most of "
        "it lost in layers 1-2, 4-5: expect it to vanish. The cosine of x and F is 1.00 on "
        "average; about 1.8 times the λ of xSkip, or 1 more in rSkip, would be enough "
        "(docs/depth.md)."
    ) in out
    assert len(rows) == 4 * 16
    first = [row for row in rows if row["update"] == "50"]
    assert [float(row["passed_on"]) for row in first] == pytest.approx(
        [1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2] + [1.0] * 6
    )
    assert [row["residual"] for row in first] == [str(number) for number in range(1, 17)]
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_gradient_that_is_lost_for_a_moment_and_one_that_is_kept(check, tmp_path):
    out, _ = check(write_log(tmp_path / "run", {50: {1: 0.1}, 100: {}, 200: {}}))
    assert (
        "The residuals of the decoder pass on 1/100 of the gradient at update 50, but less "
        "than 1/30 not for 100 updates in a row."
    ) in out
    out, _ = check(write_log(tmp_path / "other", {50: {1: 0.5}, 200: {}}))
    assert (
        "The residuals of the decoder pass on 1/4 of the gradient at update 50: it reaches "
        "the first layer (docs/depth.md)."
    ) in out


def test_a_log_without_cosines_says_which_option_writes_them(check, tmp_path):
    (tmp_path / "skips.jsonl").write_text('{"step": 1, "skip_x_to_F/blocks.0.skip": 2.0}\n')
    says = (
        r"has no tag skip_cos_x_F/.*--skip-log-interval N and skip connections .* which writes them"
    )
    with pytest.raises(UserError, match=says):
        check(tmp_path / "skips.jsonl")


def test_a_log_without_one_of_the_tags_names_it(check, tmp_path):
    values = {tag: 1.0 for tag in values_of({}) if not tag.startswith("skip_x_to_F")}
    (tmp_path / "skips.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")
    with pytest.raises(UserError, match="has no tag skip_x_to_F/"):
        check(tmp_path / "skips.jsonl")


def test_residuals_without_a_norm_after_the_sum_are_refused(check, tmp_path):
    values = values_of({})
    values |= {tag: 0.0 for tag in values if tag.startswith("skip_norm_after_sum")}
    log = tmp_path / "skips.jsonl"
    log.write_text(json.dumps({"step": 50, **values}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="no skip connection a x .* with a norm after the sum"):
        check(log)


def test_a_folder_of_several_logs_is_refused(check, tmp_path):
    for seed in ("seed1", "seed2"):
        write_log(tmp_path / seed, {100: {}})
    with pytest.raises(UserError, match=r"holds 2 of skips\.jsonl: expected one of .*seed1"):
        check(tmp_path)


def study_of(model):
    """One batch of sentences for ``model``."""
    sample = batch(sentences())
    return Study(
        {"m": model},
        lambda: iter([sample]),
        1,
        "one batch",
        lambda m, inputs: m(*inputs),
        lambda name, _: name,
    )


def test_the_weight_in_a_model_is_that_of_x_before_the_norm():
    """xSkip with λ = 2: |2 x| / |2 x + F|, by the lengths of each sentence and the mean cosine."""
    model = build("transformer_xskip_ln_tiny", skip_lambda=2, **TINY).eval()
    randomise(model)
    measured = depth_check.measure(study_of(model), "m")
    seen = {}
    skip = model.decoder.layers[1].final_skip
    skip.register_forward_hook(lambda _, args, y: seen.update(x=args[0], f_x=args[1]))
    sample = batch(sentences())
    model(*sample)
    kept = sample[2].ne(model.decoder.padding_idx).T
    x, f_x = (seen[name].double().where(kept[..., None], 0.0) for name in ("x", "f_x"))
    cosine = ((x * f_x).sum(-1) / (x.norm(dim=-1) * f_x.norm(dim=-1)))[kept].mean()
    t = (f_x.norm(dim=(0, 2)) / x.norm(dim=(0, 2))).mean() / 2
    expected = 1 / math.sqrt(1 + 2 * t.item() * cosine.item() + t.item() ** 2)
    weight = measured["decoder.layers.1.final_skip"]
    assert weight.factor == pytest.approx(expected, rel=1e-4)
    assert weight.cosine == pytest.approx(cosine.item(), rel=1e-4)


def test_a_model_without_a_norm_after_the_sum_is_refused():
    model = build("transformer_preln_tiny", **TINY).eval()
    with pytest.raises(UserError, match="with a norm after the sum"):
        depth_check.measure(study_of(model), "m")


def test_a_fresh_model_is_measured_on_the_examples(monkeypatch, check):
    model = build("transformer_rskip_ln_tiny", **TINY).eval()
    models = SimpleNamespace(load_study=lambda options: study_of(model))
    monkeypatch.setitem(sys.modules, "fairseq_rskip.tools.models", models)
    out, rows = check("m=fresh:transformer_rskip_ln_tiny")
    assert [row["stack"] for row in rows] == ["encoder"] * 4 + ["decoder"] * 6
    assert {row["update"] for row in rows} == {""}
    for side in ("encoder", "decoder"):
        assert f"The residuals of the {side} pass on 1/" in out
    assert out.count("of the gradient: it reaches the first layer") == 2


def test_a_training_is_warned_once():
    warning = GradientWarning()
    lossy = values_of(dict.fromkeys(range(1, 9), 0.5))
    assert [warning.line(step, lossy) for step in (1, 50, 100)] == ["", "", ""]
    line = warning.line(101, lossy)
    assert line.startswith("too little for 100 updates or more: the residuals of the decoder")
    assert "pass on 1/65,536 of the gradient at update 1" in line
    assert line.endswith("(rskip analyze depth-check)")
    assert warning.line(300, lossy) == ""
    of_encoder = {tag.replace("decoder", "encoder"): value for tag, value in lossy.items()}
    of_one_stack = GradientWarning()
    lines = [of_one_stack.line(step, {**of_encoder, **values_of({})}) for step in (1, 101)]
    assert "the residuals of the encoder pass on" in lines[1] and "decoder" not in lines[1]
    kept = GradientWarning()
    assert [kept.line(step, values_of({})) for step in (100, 200, 300)] == ["", "", ""]


@pytest.mark.parametrize("factor", [0.0, 1e-10])
def test_a_gradient_of_which_nothing_is_left_is_reported(factor):
    """The product of 80 factors of 1e-10 underflows to 0."""
    blocks = [f"decoder.layers.{layer}.final_skip" for layer in range(80)]
    losses = Losses()
    for step in (1, 101):
        losses.see(step, {block: Residual(factor, 0.5) for block in blocks})
    line = depth_check.sentence("decoder", losses.worst["decoder"])
    assert "pass on nothing of the gradient" in line
    assert "lost in layers 1-80:" in line


def test_a_training_that_diverged_is_not_taken_for_a_loss():
    losses = Losses()
    for step in (1, 101):
        losses.see(step, {"decoder.layers.0.final_skip": Residual(math.nan, math.nan)})
    assert not losses.worst and not losses.long


def test_the_cosine_is_the_mean_of_the_residuals():
    losses, blocks = Losses(), [f"decoder.layers.0.{sublayer}" for sublayer in SUBLAYERS]
    losses.see(None, {block: Residual(0.1, cosine) for block, cosine in zip(blocks, (1.0, 0.5))})
    said = depth_check.sentence("decoder", losses.worst["decoder"])
    assert "The cosine of x and F is 0.75 on average" in said
    assert depth_check.table_of(losses)[1] == ["decoder", "2", "1/100", "", "0.75"]


@pytest.mark.parametrize(("factor", "steps"), [(1.1, 1), (4, 2), (5, 3), (9, 4)])
def test_each_step_of_rskip_halves_the_loss_until_it_is_enough(factor, steps):
    said = depth_check.advice(depth_check.LEAST**factor)
    assert said.startswith(f"about {factor} times the λ of xSkip, or {steps} more in rSkip")


def test_the_figure_shows_five_updates_the_first_and_the_last_among_them():
    assert depth_check.shown_updates(list(range(9))) == [0, 2, 4, 6, 8]
    assert depth_check.shown_updates([7, 7, 9]) == [7, 9]


def test_fractions_are_short():
    shares = (1234.0, 1.5, 1.04, 1.0, 0.8, 1 / 30, 1 / 12_345, 1e-7, 0.0)
    written = ["1,234 times", "1.5 times", "all", "all", "1/1.2", "1/30", "1/12,345", "1/1.0e+07"]
    assert [depth_check.fraction(share) for share in shares] == [*written, "nothing"]
    grown = depth_check.Worst(None, 1234.0, {})
    assert " pass on 1,234 times the gradient: it reaches" in depth_check.sentence("decoder", grown)


def test_a_cosine_that_is_not_a_number_is_no_angle():
    angles = skip_log.angles({"skip_cos_y_x/a": math.nan, "skip_cos_y_x/b": 1.0000001})
    assert math.isnan(angles["a"]) and angles["b"] == 0
