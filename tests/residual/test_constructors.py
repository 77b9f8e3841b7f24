"""What a constructor accepts: devices and types, options, slots."""

import inspect
import re
from typing import Annotated, Literal

import pytest
import torch
from skip_variants import draw

from fairseq_rskip.flags import settings
from fairseq_rskip.residual import KINDS, Place, RSkip, XSkip, create_skip
from fairseq_rskip.residual.adaptive import SHARES, AdaptiveSkip
from fairseq_rskip.residual.gates import Highway
from fairseq_rskip.residual.halting import Halting
from fairseq_rskip.residual.options import Choice, Real, options_of


def test_a_constant_skip_does_not_drop_an_equation_of_its_own():
    with pytest.raises(TypeError, match="Doubled: a ConstantSkip's sum .* derive from Weighted"):

        class Doubled(XSkip):
            def combine(self, x, f_x, carried):
                return 2 * x + f_x


def test_several_steps_repeat_the_scale_of_x():
    """The coefficients of y = G_2(2x + G_1(2x + F))."""

    class Twice(XSkip):
        kind, steps = "xskip", 2

    skip, x, f_x = Twice(5, skip_lambda=2.0).double(), draw((3, 5), 1), draw((3, 5), 2)
    a, b, c = skip.coefficients(x, f_x)
    torch.testing.assert_close(a * x + b * f_x + c, skip(x, f_x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(skip.ratio(x, f_x), a / b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_device_and_dtype_are_those_of_every_parameter(kind):
    place = Place(other_depth=1)
    skip = create_skip(kind, 8, place=place, device="meta", dtype=torch.bfloat16)
    for parameter in skip.parameters():
        assert parameter.is_meta and parameter.dtype == torch.bfloat16
    assert all(buffer.is_meta for buffer in skip.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_has_a_memory_of_its_own(kind):
    """A part of a larger tensor would be saved with the whole, and safetensors refuses it."""
    for parameter in create_skip(kind, 8, place=Place(other_depth=1)).parameters():
        size = parameter.numel() * parameter.element_size()
        assert parameter.untyped_storage().nbytes() == size


def test_two_gates_without_a_place_have_draws_of_their_own():
    torch.manual_seed(1)
    first, second = (create_skip("highway", 8).gate_weight for _ in range(2))
    torch.manual_seed(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, create_skip("highway", 8).gate_weight)


def test_the_options_of_a_rule_are_those_of_its_constructor():
    signature = inspect.signature(Highway)
    assert signature.parameters["gate_bias"].default == -1.0
    assert list(options_of(Highway)) == ["norm", "norm_alpha", "drop_path", "gate_bias"]
    assert Highway(4, gate_bias=-3.0).gate_bias.tolist() == [-3.0] * 4


def test_an_option_that_a_subclass_sets_is_checked_all_the_same():
    class Fixed(XSkip):
        def __init__(self, dim, **common):
            super().__init__(dim, skip_lambda=-2.0, **common)

    with pytest.raises(ValueError, match="skip_lambda=-2.0: expected a finite real number > 0"):
        Fixed(4)


@pytest.mark.parametrize("adapt", SHARES)
def test_askip_has_the_shares_of_its_option(adapt):
    for skip in (create_skip("askip", 4, adapt=adapt, max_steps=3), AdaptiveSkip(4, adapt=adapt)):
        assert type(skip) is AdaptiveSkip and skip.options.adapt == adapt
        assert type(skip.shares) is SHARES[adapt]
        assert skip.wants_profile == (adapt == "gradient") and bool(skip.learned()) == (
            adapt != "gradient"
        )
    if adapt != "halting":
        with pytest.raises(ValueError, match=f"halt_cost=0.1: expected 0 with adapt='{adapt}'"):
            create_skip("askip", 4, adapt=adapt, halt_cost=0.1)


@pytest.mark.parametrize("adapt", ["other", None, ["halting"]])
def test_askip_refuses_another_adapt(adapt):
    expected = "expected one of fraction, mixture, halting, gradient for askip"
    with pytest.raises(ValueError, match=re.escape(f"adapt={adapt!r}: {expected}")):
        create_skip("askip", 4, adapt=adapt)


def test_the_help_says_what_lambda_is_in_askip():
    texts = {setting.name: setting.help for setting in settings(KINDS)}
    assert "in askip the initial λ" in texts["skip_lambda"]


def test_an_option_of_two_kinds_is_one_option_of_the_command_line():
    class Own(XSkip):
        def __init__(
            self, dim, *, mixing: Annotated[Literal["a", "b"], Choice("which")] = "a", **common
        ):
            super().__init__(dim, mixing=mixing, **common)

    class Other(XSkip):
        def __init__(self, dim, *, mixing: Annotated[float, Real("how much")] = 1.0, **common):
            super().__init__(dim, mixing=mixing, **common)

    (mixing,) = (each for each in settings({**KINDS, "own": Own}) if each.name == "mixing")
    assert {"a", "b", *options_of(KINDS["hyper"])["mixing"].choices} == {*mixing.choices}
    with pytest.raises(ValueError, match="^option mixing of kind other is of another type"):
        settings({**KINDS, "other": Other})


def test_a_halting_skip_with_halves_keeps_its_mean_in_fp32():
    halting = create_skip("askip", 4, adapt="halting", dtype=torch.bfloat16).shares
    assert isinstance(halting, Halting) and halting.start.dtype == torch.bfloat16
    assert halting.mean_steps.dtype == halting.half().mean_steps.dtype == torch.float32


def test_siamesenorm_reports_the_scale_by_its_number_of_sublayers():
    decoder = Place("decoder", "ffn", index=0, depth=6, position=2, sublayers=3)
    constants = create_skip("siamesenorm", 4, place=decoder).constants()
    assert constants == {"1/sqrt(3l)": pytest.approx(3**-0.5)}


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match="^x and f_x are Tensor and NoneType: expected tensors"):
        create_skip("rskip", 4)(torch.ones(3, 4), None)
    for kind in ("rskip", "ngpt"):
        with pytest.raises(ValueError, match="^x has dtype torch.int64: expected floating point"):
            create_skip(kind, 4).prepare(torch.ones(3, 4, dtype=torch.int64))


def test_slots_may_be_a_property_of_an_image_kind():
    class Late(RSkip):
        @property
        def slots(self):
            return ("post",)

    assert len(Late(4, channel_dim=1).post) == 2
