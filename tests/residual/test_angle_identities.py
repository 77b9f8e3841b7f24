"""Rules that turn x or step across it: angles, lengths and starts, as their sources say."""

import math

import pytest
import torch
from skip_variants import IMAGE, SEQUENCE, draw

from fairseq_rskip.residual import Place, create_skip

DECODER = Place("decoder", "ffn", 5, 6, 6, 2, 3, 2)
FIRST, LAST = (Place(index=index, depth=6, position=1, sublayers=2) for index in (0, 5))


def test_a_fixed_angle_is_the_angle_between_y_and_an_orthogonal_x():
    """Whatever the size of F; c / N^e with the 18 residuals of a decoder of six layers."""
    x = torch.tensor([[[1.0, -1.0, 1.0, -1.0]]], dtype=torch.float64)
    f = 30 * torch.tensor([[[1.0, 1.0, -1.0, -1.0]]], dtype=torch.float64)
    for exponent, angle in ((0.5, 1.2 / 18**0.5), (1.0, 1.2 / 18), (0.0, 1.2)):
        options = {"angle": 1.2, "angle_exponent": exponent}
        skip = create_skip("angle", 4, place=DECODER, eps=1e-12, **options).double()
        cosine = torch.cosine_similarity(skip(x, f), x, dim=-1)
        torch.testing.assert_close(cosine.acos(), torch.full_like(cosine, angle))


def test_angle_zero_is_the_norm_of_x_and_a_quarter_turn_post_norm():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("angle", 5, angle=0.0, angle_exponent=0).double()
    assert torch.equal(skip(x, f), torch.layer_norm(x, [5]))
    options = {"angle": math.pi / 4, "angle_exponent": 0.0, "eps": 1e-12}
    skip = create_skip("angle", 5, **options).double()
    x, f_normalised = (torch.layer_norm(z, [5], eps=1e-12) for z in (x, f))
    post_norm = torch.layer_norm(x + f_normalised, [5], eps=1e-12)
    torch.testing.assert_close(skip(x, f), post_norm)


@pytest.mark.parametrize("angle", [1.0, 7.0])  # 7 / sqrt(18) is more than a right angle
def test_a_learned_angle_starts_as_the_fixed_one(angle):
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    fixed, learned = (
        create_skip(kind, 5, angle=angle, place=DECODER).double()
        for kind in ("angle", "learned_angle")
    )
    torch.testing.assert_close(learned(x, f), fixed(x, f), rtol=1e-6, atol=1e-6)  # θ in fp32


def test_a_fixed_angle_is_at_most_a_right_angle():
    x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    skip = create_skip("angle", 5, angle=7, place=DECODER).double()  # 7 / sqrt(18) = 1.65
    twice = torch.layer_norm(torch.layer_norm(f, [5]), [5])
    torch.testing.assert_close(skip(x, f), twice)


def test_norm_agnostic_shows_the_stream_itself():
    """What is logged is the length of x; only the branch reads the direction."""
    x = 3 * draw(SEQUENCE, 1)
    skip = create_skip("nag", 5, place=DECODER).double()
    assert torch.equal(skip.current(x)[0], x)
    expected = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(skip.prepare(x)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_geonorm_keeps_the_length_of_a_row(shape):
    axis = 1 if shape == IMAGE else -1
    skip = create_skip("geonorm", 5, place=LAST, channel_dim=axis, eps=1e-12).double()
    x, f = 3 * draw(shape, 1), draw(shape, 2)
    torch.testing.assert_close(skip(x, f).norm(dim=axis), x.norm(dim=axis))
    torch.testing.assert_close(skip(x, 2 * x), x)


def test_geonorm_turns_by_at_most_an_eighth_of_a_turn_over_the_layer():
    """A branch across x: the angle is |F| / |x|, then pi / 4, in layer l over l."""
    x = torch.tensor([[[2.0, 0.0, 0.0]]], dtype=torch.float64)
    f = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    for place, layer in ((FIRST, 1), (LAST, 6)):
        skip = create_skip("geonorm", 3, place=place, eps=1e-12).double()
        for size, angle in ((1.0, 0.5), (100.0, math.pi / 4)):
            y = skip(x, size * f)
            turned = torch.atan2(y[..., 1], y[..., 0])
            torch.testing.assert_close(turned, torch.full_like(turned, angle / layer))


def test_geonorm_leaves_a_row_of_zeros_finite_with_its_gradients():
    skip = create_skip("geonorm", 5, place=FIRST)
    x = torch.zeros(2, 5, requires_grad=True)
    f = torch.zeros(2, 5, requires_grad=True)
    y = skip(x, f)
    y.sum().backward()
    for value in (y, x.grad, f.grad):
        assert torch.isfinite(value).all()


def test_a_norm_agnostic_step_is_across_x_and_a_share_of_its_length():
    skip = create_skip("nag", 5, place=LAST, eps=1e-12).double()
    with torch.no_grad():
        skip.direction.copy_(draw(skip.direction.shape, 3))
    x, f = 3 * draw(SEQUENCE, 1), draw(SEQUENCE, 2)
    step = skip(x, f) - x
    inner = (step * x).sum(-1)
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-10)
    ratio = step.norm(dim=-1) / x.norm(dim=-1)
    assert ((ratio > 0) & (ratio < 12**-0.5)).all()
    torch.testing.assert_close(skip(x, 7 * f), x + step)  # the size of F does not count
    torch.testing.assert_close(skip(7 * x, f), 7 * (x + step))  # and that of x scales the step


def test_norm_agnostic_steps_start_at_half_weight_over_root_of_the_block():
    for place, number in ((FIRST, 2), (LAST, 12)):
        skip = create_skip("nag", 5, place=place).double()
        with torch.no_grad():
            skip.direction.zero_()
        x, f = draw(SEQUENCE, 1), draw(SEQUENCE, 2)
        ratio = (skip(x, f) - x).norm(dim=-1) / x.norm(dim=-1)
        torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5 * number**-0.5))


@pytest.mark.parametrize("shape", [SEQUENCE, IMAGE], ids=["sequence", "image"])
def test_an_orthogonal_update_is_orthogonal_and_drops_a_parallel_branch(shape):
    axis = 1 if shape == IMAGE else -1
    x, f = draw(shape, 1), draw(shape, 2)
    skip = create_skip("orthogonal", 5, channel_dim=axis, eps=1e-12).double()
    inner = ((skip(x, f) - x) * x).sum(axis)
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-10)
    torch.testing.assert_close(skip(x, 3 * x), x)
