"""rskip analyze depth-check.

Its angles are compared with hand-computed ones; the rest is what it says of them and refuses.
"""

import csv
import json
import math
import sys
from types import SimpleNamespace

import pytest
from transformer_helpers import TINY, batch, build, randomise, sentences

from fairseq_rskip.analysis import depth_check
from fairseq_rskip.analysis.depth_check import AngleWarning, Crossings, largest_angle, least_lambda
from fairseq_rskip.analysis.study import Study
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import skips
from fairseq_rskip.tools import analyze

SUBLAYERS = ("self_attn_skip", "final_skip")


def write_log(folder, angles_of_updates, layers=8):
    """Write a skip log of a decoder of two residuals a layer.

    ``angles_of_updates`` is update -> layer -> angle, 0.1 where unsaid.
    """
    folder.mkdir()
    lines = []
    for step, angles in angles_of_updates.items():
        line = {"step": step}
        for layer in range(layers):
            for sublayer in SUBLAYERS:
                tag = f"skip_cos_y_x/decoder.layers.{layer}.{sublayer}"
                line[tag] = math.cos(angles.get(layer + 1, 0.1))
        lines.append(json.dumps(line))
    (folder / "skips.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def round_bound(monkeypatch):
    """A bound of 2 / sqrt(N), whose values are easy to check by hand."""
    monkeypatch.setattr(depth_check, "CONSTANT", 2.0)
    monkeypatch.setattr(depth_check, "EXPONENT", 0.5)


@pytest.fixture
def check(tmp_path, capsys):
    """``rskip analyze depth-check MODEL``: what it prints, and the rows of its CSV."""

    def run(model):
        analyze.run(["depth-check", str(model), "--output", str(tmp_path / "out")])
        rows = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
        return capsys.readouterr().out, rows

    return run


def test_the_bound_is_the_constant_over_a_power_of_the_residuals(monkeypatch):
    monkeypatch.setattr(depth_check, "CONSTANT", 3.0)
    monkeypatch.setattr(depth_check, "EXPONENT", 0.5)
    assert [largest_angle(residuals) for residuals in (1, 9, 36)] == [3.0, 1.0, 0.5]
    monkeypatch.setattr(depth_check, "EXPONENT", 1.0)
    assert largest_angle(6) == 0.5


def test_least_lambda_is_the_first_whose_angle_fits():
    for angle in (2.0, 1.5, 0.8, 0.33, 0.19, 0.01):
        steps = least_lambda(angle)
        assert math.pi / 2**steps <= angle
        assert steps == 1 or math.pi / 2 ** (steps - 1) > angle


def test_crossings_need_every_logged_update_of_a_hundred():
    crossings = Crossings({"decoder.layers.0.final_skip": 0.5})

    def see(step, angle):
        crossings.see(step, {"decoder.layers.0.final_skip": angle, "encoder.unknown": 9.0})
        return bool(crossings.long)

    assert not see(10, 0.6) and not see(60, 0.6) and not see(100, 0.4)
    assert not see(150, 0.6) and not see(200, 0.6)
    assert see(250, 0.6)
    assert see(300, 0.1)


def test_a_log_names_the_layers_that_are_beyond_for_long(check, tmp_path):
    far = dict.fromkeys((1, 2, 3, 6, 7, 8), 1.0)
    updates = {50: far, 100: far, 150: far, 200: {**far, 5: 1.0}}
    out, rows = check(write_log(tmp_path / "run", updates))
    assert (
        "Layers 1-3, 6-8 of the decoder are beyond 0.50, the largest angle for its depth "
        "(docs/depth.md): expect the gradient to vanish; λ ≥ 3 in rSkip keeps within it."
    ) in out
    assert len(rows) == 4 * 16
    first = [row for row in rows if row["update"] == "50"]
    assert [float(row["angle"]) for row in first] == pytest.approx(
        [1.0] * 6 + [0.1] * 4 + [1.0] * 6
    )
    assert [row["residual"] for row in first] == [str(number) for number in range(1, 17)]
    assert {row["bound"] for row in rows} == {"0.5"}
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_one_large_angle_in_a_stack_that_is_within_the_bound(check, tmp_path):
    out, _ = check(write_log(tmp_path / "run", {100: {1: 0.8}, 200: {1: 0.8}}))
    assert "Layer 1 of the decoder is beyond 0.50" in out
    assert "but the stack as a whole is within it." in out
    assert "vanish" not in out


def test_a_log_whose_angles_are_all_small(check, tmp_path):
    out, _ = check(write_log(tmp_path / "run", {100: {}, 200: {}}))
    assert "No layer of the decoder is beyond 0.50, the largest angle" in out


def test_a_log_without_angles_says_which_option_writes_them(check, tmp_path):
    (tmp_path / "skips.jsonl").write_text('{"step": 1, "skip_x_to_F/blocks.0.skip": 2.0}\n')
    with pytest.raises(UserError, match=r"has no angles.*--skip-log-interval N, which writes them"):
        check(tmp_path / "skips.jsonl")


def test_residuals_without_a_norm_after_the_sum_are_not_judged(check, tmp_path):
    far = dict.fromkeys(range(1, 9), 1.0)
    folder = write_log(tmp_path / "run", {50: far, 200: far})
    log = folder / "skips.jsonl"

    def without_norm(layers):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            for layer in range(8):
                for sublayer in SUBLAYERS:
                    tag = f"skip_norm_after_sum/decoder.layers.{layer}.{sublayer}"
                    line[tag] = float(layer + 1 not in layers)
        log.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")

    without_norm((1, 2, 3))
    out, rows = check(folder)
    assert "Layers 4-8 of the decoder are beyond 0.50" in out  # 2 / sqrt(16): all residuals count
    assert len(rows) == 2 * 10
    without_norm(range(1, 9))
    with pytest.raises(UserError, match="no skip connection with a norm after the sum"):
        check(folder)


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


def test_angles_of_a_model_are_those_between_y_and_x():
    model = build("transformer_rskip_ln_tiny", **TINY).eval()
    randomise(model)
    measured = depth_check.angles_of(study_of(model), "m")
    seen = {}
    skip = model.decoder.layers[1].final_skip
    skip.register_forward_hook(lambda _, args, y: seen.update(x=args[0], y=y))
    sample = batch(sentences())
    model(*sample)
    x, y = seen["x"].double(), seen["y"].double()
    cosines = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    kept = sample[2].ne(model.decoder.padding_idx).T
    expected = math.acos(cosines[kept].mean().item())
    assert measured["decoder.layers.1.final_skip"] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_a_norm_after_the_sum_is_refused():
    model = build("transformer_preln_tiny", **TINY).eval()
    with pytest.raises(UserError, match="no skip connection with a norm after the sum"):
        depth_check.angles_of(study_of(model), "m")


def test_a_fresh_model_is_measured_on_the_examples(monkeypatch, check):
    model = build("transformer_rskip_ln_tiny", **TINY).eval()
    models = SimpleNamespace(load_study=lambda options: study_of(model))
    monkeypatch.setitem(sys.modules, "fairseq_rskip.tools.models", models)
    out, rows = check("m=fresh:transformer_rskip_ln_tiny")
    assert [row["stack"] for row in rows] == ["encoder"] * 4 + ["decoder"] * 6
    assert {row["update"] for row in rows} == {""}
    assert "of the encoder is beyond 1.00" in out and "of the decoder is beyond 0.82" in out
    assert "extrapolated: docs/depth.md measured 6 residuals and more" in out  # the encoder has 4


def test_a_training_is_warned_once_and_only_where_a_norm_follows():
    model = build("transformer_rskip_ln_tiny", **TINY)
    warning = AngleWarning(model)
    blocks = [name for name in skips(model) if name.startswith("decoder")]
    values = {f"skip_cos_y_x/{block}": math.cos(0.5) for block in blocks}
    values["skip_cos_y_x/decoder.layers.1.final_skip"] = math.cos(1.0)
    assert [warning.line(step, values) for step in (1, 50, 150)] == ["", "", ""]  # one alone
    values = {**values, "skip_cos_y_x/decoder.layers.1.self_attn_skip": math.cos(2.0)}
    assert warning.line(100, values) == ""
    line = warning.line(200, values)
    assert line.startswith("since 100 updates or more layer 2 of the decoder is beyond 0.82")
    assert line.endswith("(rskip analyze depth-check)")
    assert warning.line(300, values) == ""
    plain = AngleWarning(build("transformer_preln_tiny", **TINY))
    assert [plain.line(step, values) for step in (100, 200, 300)] == ["", "", ""]


def test_a_stack_can_be_beyond_while_its_large_angle_moves_between_layers():
    bounds = dict.fromkeys((f"decoder.layers.{layer}.final_skip" for layer in range(4)), 0.3)
    crossings = Crossings(bounds)
    for step in range(0, 210, 10):
        large = list(bounds)[step // 10 % 4]
        crossings.see(step, {block: 1.5 if block == large else 0.1 for block in bounds})
    assert crossings.long == {"decoder"}
    line = depth_check.sentence("decoder", crossings.long, bounds)
    assert line.startswith("the decoder as a whole is beyond 0.30")


def test_a_cosine_that_is_not_a_number_is_no_angle():
    assert math.isnan(depth_check.angle_of(math.nan))
    assert depth_check.angle_of(1.0000001) == 0
