"""experiments/depth_law.py: the formula against gradients of autograd."""

import importlib.util
import math
import runpy

import pytest
from conftest import ROOT


@pytest.mark.parametrize("label", ["post-norm", "2rSkip+LN"])
def test_the_product_of_the_gains_is_the_measured_ratio(label):
    """Six layers, to a tenth: the formula takes x and F, and their gradients, as orthogonal."""
    script = runpy.run_path(str(ROOT / "experiments" / "depth_law.py"))
    rows, measured = script["branches"](script["ROWS"][label], 6, 1)
    gains = [row["gain"] for row in rows if row["layer"] > 0]
    assert 1 / math.prod(gains) == pytest.approx(measured, rel=0.1)


spec = importlib.util.spec_from_file_location("depth_law", ROOT / "experiments/depth_law.py")


depth_law = importlib.util.module_from_spec(spec)


spec.loader.exec_module(depth_law)


def test_a_ratio_is_the_geometric_mean_of_three_seeds(monkeypatch, capsys):
    """The gradient at the top over that at the bottom: 1, 10 and 1,000."""
    bottom = {1: 1.0, 2: 0.1, 3: 0.001}
    monkeypatch.setattr(depth_law, "build", lambda row, encoder, depth, seed: None)
    monkeypatch.setattr(depth_law, "backward", lambda model, seed: [bottom[seed], 7.0, 1.0])
    rows = depth_law.ratios()
    assert {row["top_over_bottom"] for row in rows} == {f"{10 ** (4 / 3):.4g}"}
    assert len(rows) == 10 * (6 + 2)
