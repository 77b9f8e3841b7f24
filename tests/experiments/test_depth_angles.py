"""experiments/depth_angles.py: the angles of a run whose log is written down here."""

import importlib.util
import json
import math

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
        lines.write(step, {**gradients, **shares, "skip_F_over_x/encoder.layers.0.final_skip": 9.0})
    (finished,) = finished_runs(tmp_path)
    return finished


def test_the_angle_is_halved_by_each_step_and_a_gradient_may_be_zero(run):
    """|F| = |x| is 45 degrees, which the second step halves; the encoder does not count."""
    first, second = depth_angles.measure(run)
    assert first["angle_from_norms"] == second["angle_from_norms"] == f"{math.pi / 8:.3f}"
    assert first["by_law"] == f"{math.pi / 8 * math.sqrt(2):.2f}"
    assert (first["gradient"], second["gradient"]) == ("2", "inf")
    assert (first["rule"], first["lambda"], first["update"]) == ("rskip", "2", 10)
