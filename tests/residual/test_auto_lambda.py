"""``skip_lambda="auto"``: the estimate for the depth (docs/depth.md)."""

import math

import pytest
import torch

from fairseq_rskip.residual import Place, create_skip

STEPS = {1: 2, 6: 3, 18: 4, 36: 5, 72: 5, 144: 6}  # of a decoder; the page's table, rounded up


@pytest.mark.parametrize("depth", STEPS)
def test_the_estimate_at_the_depths_of_the_page(depth):
    place = Place(depth=depth, sublayers=3)
    assert create_skip("rskip", 8, skip_lambda="auto", place=place).steps == STEPS[depth]
    scaled = create_skip("xskip", 8, skip_lambda="auto", place=place)
    assert scaled.skip_scale == scaled.options.skip_lambda == math.sqrt(3 * depth)


@pytest.mark.parametrize("depth", STEPS)
def test_residuals_keep_what_the_estimate_says(depth):
    """The weight of x in y, cos θ, to the power of N is at least e^(-1/2).

    One step less loses more.
    """

    def kept(steps):
        x, f_x = torch.eye(2, dtype=torch.float64)  # of one length, uncorrelated
        y = f_x
        for _ in range(steps):
            y = (x + y) / (x + y).norm()
        return float(y @ x) ** (3 * depth)

    assert kept(STEPS[depth]) >= math.exp(-0.5) - 0.01
    assert kept(STEPS[depth] - 1) < math.exp(-0.5)


def test_both_command_lines_know_it(capsys):
    pytest.importorskip("fairseq")
    from fairseq_rskip.__main__ import main
    from fairseq_rskip.vision.config import parse

    layers = ["--encoder-layers", "18", "--decoder-layers", "36"]
    assert main(["describe", "transformer_rskip_ln_tiny", "--skip-lambda", "auto", *layers]) == 0
    shown = capsys.readouterr().out
    assert "rskip λ=4" in shown and "rskip λ=5" in shown
    assert main(["describe", "transformer_rskip_ln_tiny", "--skip-lambda", "x"]) == 1
    assert "--skip-lambda x: expected a number, or auto" in capsys.readouterr().err
    config = parse(["--depth", "56", "--skip-lambda", "auto"])
    assert (
        config.skip_lambda == 4.0
        and config.name() == parse(["--depth", "56", "--skip-lambda", "4"]).name()
    )
