"""Coefficients of x and F(x) in y.

They are compared with float64 references with frozen statistics, and with the closed form.
"""

import math

import pytest
import torch
from skip_variants import CASES, MIXING, draw, gradients, reference
from transformer_helpers import TINY, batch, build, randomise, sentences

from fairseq_rskip.analysis.ratio import (
    CoefficientProbe,
    columns_of,
    means_of_readings,
    readings_of,
)
from fairseq_rskip.residual import create_skip
from fairseq_rskip.vision.model import PreActResNet

NOT_AFFINE = ("dyt", "derf")
RATIO_CASES = [
    c for c in CASES if c.variant.kind not in MIXING and c.variant.norm not in NOT_AFFINE
]
LAYER_CASES = [case for case in RATIO_CASES if case.variant.norm != "batch"]


def kept(case, tensor):
    mask = case.mask()
    return (
        tensor if mask is None else tensor[(~mask).unsqueeze(case.channel_dim).expand(case.shape)]
    )


@pytest.mark.parametrize("case", LAYER_CASES, ids=lambda case: case.name)
def test_coefficients_are_the_derivatives_of_the_frozen_equation(case):
    skip = case.build().double().eval()
    x, f_x = (draw(case.shape, seed).requires_grad_() for seed in (1, 2))
    frozen = reference(case, skip, x, f_x, dict(skip.named_parameters()), freeze=True)
    expected = gradients(frozen, torch.ones_like(frozen), (x, f_x))
    a, b, c = skip.coefficients(x, f_x, case.mask())
    torch.testing.assert_close((a, b), tuple(expected))
    torch.testing.assert_close(a * x + b * f_x + c, skip(x, f_x, None, case.mask()))


@pytest.mark.parametrize("case", RATIO_CASES, ids=lambda case: case.name)
def test_closed_form_and_probe_agree(case):
    skip = case.build().double().eval()
    for name, buffer in skip.named_buffers():
        if "running" in name:
            buffer.copy_(draw(buffer.shape, 3).abs() + 0.5)
    x, f_x = draw(case.shape, 1), draw(case.shape, 2)
    a, b, c = skip.coefficients(x, f_x, case.mask())
    closed = skip.ratio(x, f_x, case.mask())
    torch.testing.assert_close(kept(case, a / b), kept(case, closed), rtol=1e-12, atol=0)
    y = skip(x, f_x, None, case.mask())
    torch.testing.assert_close(
        kept(case, a * x + b * f_x + c), kept(case, y), rtol=1e-10, atol=1e-12
    )


def test_coefficients_in_numbers():
    """y = LN(2x + F) with row (2x + F) = (0, 2, 4, 6), so sigma = sqrt(5), and gains 1, -2, 3, 4.

    |a| is 2 |w| / sigma.
    """
    skip = create_skip("xskip", 4, skip_lambda=2, eps=1e-20).double().eval()
    with torch.no_grad():
        skip.post[0].weight.copy_(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    x, f_x = (
        torch.tensor([[[0.0, 0.5, 1.0, 1.5]]]).double(),
        torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]).double(),
    )
    a, b, _ = skip.coefficients(x, f_x)
    torch.testing.assert_close(b.flatten(), torch.tensor([1.0, -2.0, 3.0, 4.0]).double() / 5**0.5)
    torch.testing.assert_close(a, 2 * b)
    with CoefficientProbe(skip) as probe:
        skip(x, f_x)
    mean_a, norm_a, *others = readings_of(skip, columns_of(probe.values(""), 2.0)).values()
    assert (mean_a, norm_a) == pytest.approx(
        (5 / 5**0.5, 2 * 6**0.5)
    )  # 2 * mean |w| / sigma; its norm
    assert others == pytest.approx(
        [3, 30**0.5, 2 * 30**0.5, 2, 1]
    )  # mean λw, norms of w and λw; x:F; a = 2b, x = F/2


@pytest.mark.parametrize(
    ("skip_lambda", "readings"),
    [(1.0, [1, 2, 2]), (2.0, [20, 20, 40]), (1.5, [math.nan] * 3)],
    ids=["one", "two", "between"],
)
def test_at_a_whole_lambda_the_gain_is_that_of_its_step(skip_lambda, readings):
    """Of four features each 1, 10 and 100, of norm 2, 20 and 200; between two steps of none."""
    skip = create_skip("askip", 4, skip_lambda=skip_lambda, max_steps=3).double()
    with torch.no_grad():
        for norm, gain in zip(skip.post, (1.0, 10.0, 100.0)):
            norm.weight.fill_(gain)
    with CoefficientProbe(skip) as probe:
        skip(draw((4, 3, 4), 1), draw((4, 3, 4), 2))
    actual = readings_of(skip, columns_of(probe.values(""), skip_lambda))
    names = ("mean λw", "norm of w", "norm of λw")
    assert [actual[name] for name in names] == pytest.approx(readings, nan_ok=True)


def test_a_training_batch_norm_uses_batch_statistics_and_keeps_none():
    skip = create_skip("rskip", 4, norm="batch").double()
    x, f_x = draw((2, 3, 4), 1), draw((2, 3, 4), 2)
    before = skip.post[0].running_mean.clone()
    a, b, c = skip.coefficients(x, f_x)
    assert torch.equal(skip.post[0].running_mean, before)
    torch.testing.assert_close(a * x + b * f_x + c, skip(x, f_x))


OPTIONS_OF_KIND = {"rskip": {"skip_lambda": 3}, "xskip": {}, "wskip": {"init": 2.0}}


@pytest.mark.parametrize("kind, options", OPTIONS_OF_KIND.items(), ids=OPTIONS_OF_KIND)
def test_the_probe_in_a_resnet(kind, options):
    torch.manual_seed(0)
    model = PreActResNet(8, 4, {"kind": kind, **options}).eval()
    randomise(model)
    x = draw((3, 3, 32, 32), 1, torch.float32)
    with CoefficientProbe(model) as probe, torch.no_grad():
        expected = model(x)
        model(x[:1])
    assert torch.equal(model(x), expected)
    for scales in map(probe.values, ("blocks.0.skip", "blocks.1.skip", "blocks.2.skip")):
        assert scales["ratio"].shape == (4,) and scales["ratio"].dtype == torch.float64
        torch.testing.assert_close(
            scales["ratio"][0], scales["ratio"][3], rtol=1e-5, atol=0
        )  # the same image
        if kind == "xskip":
            torch.testing.assert_close(scales["effective_scale"], 2 * scales["branch_coefficient"])


def test_the_probe_leaves_padding_out(exact_attention):
    """A sentence measures the same alone and beside a longer one."""
    model = build("transformer_rskip_ln_tiny", **TINY).double()
    randomise(model)
    pairs = sentences(lengths=(9, 2))
    actual = []
    for batches in ([pairs], [pairs[:1], pairs[1:]]):
        with CoefficientProbe(model) as probe, torch.no_grad():
            for each in batches:
                model(*batch(each))
        actual.append([probe.values(name) for name in probe.skips])
    for together, alone in zip(*actual):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=0)


def test_each_quantity_has_the_standard_error_of_its_own_examples():
    """1 and 3 have the error 1, 2.0 and 2.2 the error 0.1."""
    scales = {"ratio": torch.tensor([1.0, 3.0]), "effective_scale": torch.tensor([2.0, 2.2])}
    columns = columns_of(scales, math.nan)
    assert columns["ratio_standard_error"] == pytest.approx(1.0)
    assert columns["effective_scale_standard_error"] == pytest.approx(0.1)


def test_a_negative_gain_counts_by_its_size_in_the_coefficient_of_the_branch():
    """b = w / sigma, of the row (0, 2, 4, 6) with sigma = sqrt(5): the mean of |b|."""
    skip = create_skip("xskip", 4, skip_lambda=1, eps=1e-20).double()
    with torch.no_grad():
        skip.post[0].weight.copy_(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    half = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]).double()
    with CoefficientProbe(skip) as probe:
        skip(half, half)
    assert float(probe.values("")["branch_coefficient"]) == pytest.approx(2.5 / 5**0.5)


def test_a_reading_of_a_model_is_the_mean_over_its_blocks_beside_the_papers_value():
    (row,) = means_of_readings("2rSkip+LN", [{"mean |a|": 1.0}, {"mean |a|": 4.0}])
    assert (row["value"], row["blocks"], row["paper"]) == (2.5, 2, 2.64)
