"""experiments/depth_law.py: the formula against gradients of autograd."""

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
