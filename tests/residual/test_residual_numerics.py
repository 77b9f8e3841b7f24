"""Values and gradients of every skip variant against its equation in float64.

They are compared per layout, mask and dtype.
"""

import pytest
import torch
from skip_variants import (
    CASES,
    IMAGED,
    MIXING,
    PLACE,
    SEQUENCE,
    VARIANTS,
    WITHOUT_RATIO,
    Case,
    draw,
    gradients,
    reference,
)

from fairseq_rskip.residual import create_skip

# Absolute and relative: a few roundings of a unit-scale value in the type.
TOLERANCE = {
    torch.float64: dict(rtol=1e-10, atol=1e-10),
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.float16: dict(rtol=4e-3, atol=6e-3),
    torch.bfloat16: dict(rtol=3e-2, atol=5e-2),
}
WITH_RATIO = [case for case in CASES if case.variant.name not in WITHOUT_RATIO]


def leaves(skip, x, f):
    """float64 leaf copies of inputs and parameters, for the reference."""
    parameters = {name: p.detach().double().requires_grad_() for name, p in skip.named_parameters()}
    return x.detach().double().requires_grad_(), f.detach().double().requires_grad_(), parameters


def check_against_reference(case, skip, x, f, dtype, check_gradients=True):
    mask = case.mask()
    upstream = draw(case.shape, 3, dtype)
    x, f = x.requires_grad_(), f.requires_grad_()
    y = skip(x, f, None, mask)
    assert y.shape == x.shape and y.dtype == x.dtype
    rx, rf, parameters = leaves(skip, x, f)
    expected = reference(case, skip, rx, rf, parameters)
    if mask is not None:  # under batch norm: padding comes out as zero and sends no gradient
        assert not y.movedim(case.channel_dim, -1)[mask].any()
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(y.double() / scale, expected / scale, **TOLERANCE[dtype])
    if not check_gradients:
        return
    ours = gradients(y, upstream, [x, f, *skip.parameters()])
    theirs = gradients(expected, upstream.double(), [rx, rf, *parameters.values()])
    for name, a, b in zip(["x", "f_x", *parameters], ours, theirs):
        scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(
            a.double() / scale, b / scale, msg=lambda m, n=name: f"{n}: {m}", **TOLERANCE[dtype]
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equation_and_all_gradients_in_float64(case):
    check_against_reference(
        case, case.build().double(), draw(case.shape, 1), draw(case.shape, 2), torch.float64
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_odd_sizes_in_float32(variant):
    for shape in [
        (5, 1, 33),
        (3, 2, 1),
        (2, 2, 1023),
        (2, 33, 1, 3) if variant in IMAGED else (33, 2, 3),
    ]:
        case = Case(variant, shape)
        gradients_too = shape[-1] != 1  # one feature: gradients of 0 / sqrt(eps) amplify rounding
        x, f = draw(shape, 1, torch.float32), draw(shape, 2, torch.float32)
        check_against_reference(case, case.build(), x, f, torch.float32, gradients_too)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_precision(case):
    """Compare with float64 on the same rounded inputs and parameters.

    This is for a .half() model and for fp32 parameters.
    """
    for dtype, half_module in (
        (torch.float16, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        skip = case.build().to(dtype if half_module else torch.float32)
        check_against_reference(
            case, skip, draw(case.shape, 1, dtype), draw(case.shape, 2, dtype), dtype
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_mixed_types_return_the_type_of_x(variant):
    half, single = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)
    pairs = [(half[0], single[0]), (single[0], half[0]), half[::-1], single, single[::-1]]
    for x_type, f_type in pairs:
        case = Case(variant, SEQUENCE, masked=variant.norm == "batch")
        skip, x, f = case.build(), draw(SEQUENCE, 1, x_type), draw(SEQUENCE, 2, f_type)
        y = skip(x, f, None, case.mask())
        assert y.dtype == x_type
        tolerance = TOLERANCE[x_type if x_type in half else torch.float32]
        torch.testing.assert_close(
            y.double(), reference(case, skip, *leaves(skip, x, f)), **tolerance
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(variant, x_type):
    case = Case(variant, SEQUENCE)
    skip, x, f = case.build(), draw(SEQUENCE, 1, x_type), draw(SEQUENCE, 2, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = skip(x, f)
    assert y.dtype == x_type
    kinds = (
        "highway",
        "exclusive_gate",
        "shortcut_gate",
        *MIXING,
    )  # with products, which autocast runs in bf16
    products = variant.kind in kinds or variant.options.get("adapt") == "halting"
    tolerance = TOLERANCE[torch.bfloat16 if products else x_type]
    torch.testing.assert_close(y.double(), reference(case, skip, *leaves(skip, x, f)), **tolerance)


@pytest.mark.parametrize("case", WITH_RATIO, ids=lambda case: case.name)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_skip_ratio_is_the_ratio_of_the_derivatives_at_fixed_statistics(case, training):
    """With the statistics held, y is linear in x and F per entry.

    The two slopes' quotient is the ratio.
    """
    skip, mask = case.build().double(), case.mask()
    x, f, parameters = leaves(skip, draw(case.shape, 1), draw(case.shape, 2))
    if case.variant.norm == "batch" and not training:
        for k, norm in enumerate(skip.post):
            norm.running_mean.copy_(draw(norm.dim, 10 + k))
            norm.running_var.copy_(draw(norm.dim, 20 + k).abs() + 0.5)
        skip.eval()
        y = skip(x, f, None, mask)  # already linear: the running statistics are constants
    else:
        skip.train(training)
        y = reference(case, skip, x, f, parameters, freeze=True)
    before = {k: v.clone() for k, v in skip.state_dict().items()}
    ratio = skip.ratio(x, f, mask)
    assert ratio.shape == x.shape
    for name, value in skip.state_dict().items():
        assert torch.equal(value, before[name]), name
    by_x, by_f = gradients(y, torch.ones_like(y), [x, f])
    keep = by_f != 0  # batch norm zeroes padded rows
    assert keep.any()
    torch.testing.assert_close(ratio[keep], (by_x / by_f)[keep], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", MIXING)
def test_a_kind_that_mixes_features_has_no_ratio(kind):
    x, skip = draw(SEQUENCE, 1), create_skip(kind, 5, place=PLACE).double()
    for ask in (skip.ratio, skip.coefficients):
        with pytest.raises(ValueError, match=f"{kind} mixes features"):
            ask(x, x)
