"""experiments/angle_edge.py: the edge of a depth and the exponent, from runs whose law is known."""

import importlib.util
import json
import math

import numpy
import pandas
import pytest
import statsmodels.api
from conftest import ROOT

from fairseq_rskip.analysis import skip_log
from fairseq_rskip.tools.experiments.finished import finished_runs

spec = importlib.util.spec_from_file_location("angle_edge", ROOT / "experiments/angle_edge.py")
angle_edge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(angle_edge)

UPDATES = range(10, 260, 10)


def runs(exponent, constant=2.0):
    """Runs whose gradient's ratio is 30 (theta / edge)^8, with the edge constant / N^exponent."""
    rows = []
    for residuals in (6, 24, 96):
        for seed in (1, 2):
            for c in (0.7, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.6):
                theta = angle_edge.angle_of(c, residuals)
                ratio = 30 * (theta / (constant / residuals**exponent)) ** 8
                about = {"task": "language model", "rule": "angle", "layers": residuals // 2}
                about |= {"residuals": residuals, "lr": 0.003, "seed": seed, "c": c, "loss": 5.0}
                about |= angle_edge.REGISTERED
                for update in UPDATES:
                    late = ratio if update >= 50 else 1e9  # what is before update 50 does not count
                    rows.append({**about, "update": update, "ratio": late, "cos_gradients": 0.01})
    return pandas.DataFrame(rows)


@pytest.mark.parametrize("exponent", [0.5, 0.6])
def test_the_exponent_of_a_known_law_is_recovered(exponent):
    constant = 2.0 * 24 ** (exponent - 0.5)  # the edge of the middle depth is at c = 2
    table = runs(exponent, constant)
    actual = angle_edge.edges(table)
    expected = constant / actual["residuals"] ** exponent
    assert actual["edge"].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    fit = angle_edge.fit_exponent(actual)
    assert fit.exponent == pytest.approx(exponent, abs=1e-6)


def test_an_interval_refutes_the_exponents_that_it_excludes():
    assert angle_edge.verdict(angle_edge.Fit(0, 0.52, 0.48, 0.56)) == "refuted: 1/N"
    assert angle_edge.verdict(angle_edge.Fit(0, 0.8, 0.7, 0.9)) == "refuted: 1/√N, 1/N"
    assert angle_edge.verdict(angle_edge.Fit(0, 0.7, 0.4, 1.1)) == "nothing refuted"


def test_an_edge_under_another_setting_is_laid_beside_the_registered_one():
    wide = runs(0.5, constant=1.0)  # half of the others' edges
    wide = wide[wide["residuals"] == 24].assign(width=256)
    actual = angle_edge.edges(pandas.concat([runs(0.5), wide]))
    others = angle_edge.other_settings(actual)
    assert others["over_registered"].tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
    assert others["width"].tolist() == [256, 256] and others["seed"].tolist() == [1, 2]


def test_a_depth_whose_ratios_stay_on_one_side_has_no_edge():
    assert math.isnan(angle_edge.edge([0.1, 0.2, 0.3], [1.0, 2.0, 29.0]))
    assert math.isnan(angle_edge.edge([0.1, 0.2, 0.3], [31.0, 200.0, 900.0]))


def test_a_run_that_lacks_an_update_counts_as_lost():
    """The log leaves out updates whose gradients are not finite."""
    table = runs(0.5)
    run = table[(table["residuals"] == 6) & (table["seed"] == 1) & (table["c"] == 0.7)]
    assert angle_edge.largest_ratio(run) < 1
    assert angle_edge.largest_ratio(run[run["update"] != 120]) == math.inf
    assert angle_edge.edge([0.1, 0.4], [1.0, math.inf]) == pytest.approx(0.2)


def test_archived_runs_give_the_committed_edges_and_bound():
    table = pandas.read_csv(ROOT / "results/angle_runs.csv")
    actual = angle_edge.edges(table)
    committed = pandas.read_csv(ROOT / "results/angle_edge.csv")
    pandas.testing.assert_frame_equal(actual.round(4), committed, check_dtype=False)
    inside = actual[angle_edge.as_registered(actual) & (actual["lr"] == 0.003)]  # both tasks
    inside = inside.dropna(subset="edge")
    fit = angle_edge.fit_exponent(inside)
    assert (round(fit.constant, 1), round(fit.exponent, 2)) == (5.0, 0.8)


def test_rounded_cosines_and_a_gradient_of_zero_are_read(tmp_path):
    """A cosine may be rounded to more than 1, and no gradient may be left at the bottom."""
    options = {"decoder-layers": 1, "lr": 0.003, "decoder-embed-dim": 64, "skip-angle": 1.0}
    options |= {"warmup-updates": 60, "max-update": 250}
    settings = {"arch": "transformer_lm_angle", "options": options}
    record = {"settings": settings, "seed": 1, "metrics": {"values": {"valid_loss": 5.0}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    top, bottom = "decoder.layers.0.final_skip", "decoder.layers.0.self_attn_skip"
    values = {f"skip_cos_y_x/{top}": 1.0000001, f"skip_cos_y_x/{bottom}": math.cos(0.4)}
    values |= {f"skip_grad_norm/{top}": 0.1, f"skip_grad_norm/{bottom}": 0.0}
    skip_log.SkipLines(tmp_path, first=1).write(10, values)
    (run,) = finished_runs(tmp_path)
    (row,) = angle_edge.read_run(run)
    assert (row["update"], row["mean_angle"], row["ratio"]) == (10, "0.2", "inf")
    assert row["cos_gradients"] == "nan" and row["residuals"] == 2


def test_the_interval_of_the_exponent_is_statsmodels_of_95_percent():
    table = pandas.DataFrame({"residuals": [6, 6, 24, 24, 96, 96]})
    table["edge"] = [0.80, 0.91, 0.38, 0.33, 0.16, 0.12]
    logarithms = numpy.log(table)
    design = statsmodels.api.add_constant(logarithms["residuals"])
    model = statsmodels.api.OLS(logarithms["edge"], design).fit()
    low, high = model.conf_int(0.05).loc["residuals"]
    fit = angle_edge.fit_exponent(table)
    assert fit.exponent == pytest.approx(-model.params["residuals"])
    assert (fit.low, fit.high) == pytest.approx((-high, -low))


def run(c, ratio, cosine, rule="angle", seed=1, loss=5.0):
    """A logged run of 250 updates, whose ratio and cosine stay the same."""
    about = {"task": "translation", "rule": rule, "layers": 6, "residuals": 18, "lr": 0.003}
    about |= {**angle_edge.REGISTERED, "seed": seed, "c": c, "loss": loss}
    updates = range(50, 260, 10)
    values = {"ratio": ratio, "cos_gradients": cosine}
    return pandas.DataFrame([{**about, "update": update, **values} for update in updates])


def test_the_cosine_of_the_two_gradients_is_that_of_the_runs_that_keep_it():
    table = pandas.concat([run(0.7, 2.0, 0.1), run(1.0, 9.0, 0.3), run(2.0, 11.0, 0.9)])
    assert angle_edge.path_cosine(table) == (pytest.approx(0.2), 2)


def test_a_loss_of_c_1_below_pre_norms_is_a_negative_difference_with_each_seed():
    table = pandas.concat(
        [
            run(1.0, 2.0, 0.0, seed=1, loss=4.9),
            run(1.0, 2.0, 0.0, seed=2, loss=5.0),
            run(0.7, 2.0, 0.0, seed=1, loss=4.8),
            run(numpy.nan, 2.0, 0.0, rule="pre-norm", seed=1, loss=5.0),
            run(numpy.nan, 2.0, 0.0, rule="pre-norm", seed=2, loss=5.3),
        ]
    )
    (row,) = angle_edge.losses(table)
    assert row["by seed"] == "-0.100 -0.300"
    assert (row["c = 1"], row["pre-norm"], row["best c"]) == ("4.950", "5.150", "0.7 (4.800)")


def test_a_law_of_residuals_is_one_for_both_tasks_at_equal_residuals():
    """Translation has 3 residuals a layer, the language model 2: (2 / 3)^0.8 = 0.72 by layers."""
    tasks = [("translation", 3), ("language model", 2)]
    rows = []
    for task, count in tasks:
        for layers in (6, 12, 24):
            residuals = count * layers
            rows.append({"task": task, "residuals": residuals, "edge": 5.0 / residuals**0.8})
    by_residuals, by_layers = angle_edge.by_residuals_and_layers(pandas.DataFrame(rows))
    assert by_residuals.startswith("at equal residuals 1.00 (")
    assert by_layers.startswith("at equal layers 0.72 (")
