"""experiments/depth_angles.py: the angles of a run whose log is written down here."""

import importlib.util
import json
import math

import pandas
import pytest
from conftest import ROOT

from fairseq_rskip.analysis import skip_log
from fairseq_rskip.tools.experiments.finished import finished_runs

spec = importlib.util.spec_from_file_location("depth_angles", ROOT / "experiments/depth_angles.py")
depth_angles = importlib.util.module_from_spec(spec)
spec.loader.exec_module(depth_angles)


@pytest.fixture
def run(tmp_path):
    """2rSkip+LN in two layers, of which one residual each is logged."""
    options = {"decoder-layers": 2, "lr": 0.003, "skip-lambda": 2}
    settings = {"arch": "transformer_rskip_ln", "options": options}
    record = {"settings": settings, "seed": 1, "metrics": {"values": {"valid_loss": 5.0}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    lines = skip_log.SkipLines(tmp_path, first=1)
    for step, bottom in ((10, 0.5), (20, 0.0)):
        gradients = {"skip_grad_norm/decoder.layers.0.final_skip": bottom}
        gradients |= {"skip_grad_norm/decoder.layers.1.final_skip": 1.0}
        shares = {f"skip_F_over_x/decoder.layers.{layer}.final_skip": 1.0 for layer in (0, 1)}
        cosines = {f"skip_cos_y_x/decoder.layers.{layer}.final_skip": 0.5 for layer in (0, 1)}
        other = {
            "skip_F_over_x/encoder.layers.0.final_skip": 9.0,
            "skip_cos_y_x/encoder.layers.0.final_skip": 0.0,
        }
        lines.write(step, {**gradients, **shares, **cosines, **other})
    (finished,) = finished_runs(tmp_path)
    return finished


def test_each_step_halves_the_estimate_and_a_gradient_may_be_zero(run):
    """|F| = |x| is 45 degrees, which the second step halves; the encoder does not count."""
    first, second = depth_angles.read_run(run)
    assert first["angle_from_norms"] == second["angle_from_norms"] == f"{math.pi / 8:.4g}"
    assert first["angle"] == f"{math.pi / 3:.4g}"
    assert (first["gradient"], second["gradient"]) == ("2", "inf")
    assert (first["rule"], first["lambda"], first["update"]) == ("rskip", 2, 10)


def test_a_sentence_is_counted_wrong_where_its_angle_and_the_gradient_disagree(capsys):
    """Three runs of 6 layers, N = 18, made up: lost beyond every limit, kept within, lost within.

    The largest value of the updates from 50 on counts; DeepNorm, which has no λ, is a run, too.
    """
    table = pandas.DataFrame(
        [
            # rule, λ, update, angle, its estimate, gradient
            ("rskip", 1.0, 10, 1.0, 1.0, 1e9),
            ("rskip", 1.0, 50, 1.0, 1.0, 29.0),
            ("rskip", 1.0, 100, 0.9, 0.9, 30.0),
            ("xskip", 8.0, 10, 1.0, 1.0, 1e9),
            ("xskip", 8.0, 50, 0.1, 0.1, 2.0),
            ("deepnorm", math.nan, 50, 0.4, 0.3, math.inf),
        ],
        columns=["rule", "lambda", "update", "angle", "angle_from_norms", "gradient"],
    ).assign(layers=6, lr=0.003, seed=1)
    runs = depth_angles.largest_of_runs(table).set_index("rule")
    assert runs.lost.to_dict() == {"deepnorm": True, "rskip": True, "xskip": False}
    depth_angles.print_answer(runs)
    printed = capsys.readouterr().out
    assert "3 runs, 2 of them lost" in printed
    # N = 18: DeepNorm's 0.3 is below 10 / 18 and above 1 / sqrt(18), 0.4 below 5.0 / 18^0.80
    assert [line.split()[-4:] for line in printed.splitlines()[-3:]] == [
        ["1", "0", "1", "1.000"],
        ["0", "0", "0", "1.000"],
        ["1", "0", "1", "1.000"],
    ]
