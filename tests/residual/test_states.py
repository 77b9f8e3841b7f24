"""State dicts and registration: whose parameters they are, and which kinds there are."""

import pytest
import torch

from fairseq_rskip.residual import KINDS, Place, SkipConnection, XSkip, create_skip, register


def test_a_second_class_of_one_kind_is_refused():
    with pytest.raises(
        ValueError,
        match="kind='rskip' of Mine: the name is taken by fairseq_rskip.residual.weighted.RSkip",
    ):
        register("rskip")(type("Mine", (SkipConnection,), {}))


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"kind='hihgway': .*did you mean highway\?"):
        create_skip("hihgway", 5)


def test_parameters_of_submodules_are_learned_and_those_of_norms_are_not():
    class Own(XSkip):
        def __init__(self, dim):
            super().__init__(dim)
            self.map = torch.nn.Linear(dim, dim)

    assert list(Own(3).learned()) == ["map.weight", "map.bias"]
    assert not create_skip("periln", 3).learned()
    for kind in ("dlcl", "hyper"):
        names = create_skip(kind, 3, place=Place()).learned()
        assert names and not any("norm" in name for name in names)


def test_a_rule_of_ones_own_is_built_by_name(monkeypatch):
    monkeypatch.setattr("fairseq_rskip.residual.registry.KINDS", {**KINDS})

    @register("own")
    class Own(XSkip):
        """The plain sum."""

    assert type(create_skip("own", 4, skip_lambda=3.0)) is Own
