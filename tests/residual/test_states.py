"""State dicts: those of the version before the norm slots (commit c088015), the rule they note, names and shapes."""

import io
import lzma
from pathlib import Path

import pytest
import torch

from fairseq_rskip.residual import KINDS, Place, SkipConnection
from fairseq_rskip.vision.model import preact_resnet

# by name: kind, options, state dict of four blocks (two layers of two) or of a ResNet-8, x, y in evaluation
FILE = Path(__file__).parent / "data" / "states-c088015.pt.xz"
SAVED = torch.load(io.BytesIO(lzma.decompress(FILE.read_bytes())), weights_only=True)


@pytest.mark.parametrize("name", SAVED)
def test_a_state_of_the_earlier_version_computes_what_it_did(name, stock_operators):
    kind, options, state, x, y = SAVED[name]
    if options is None:
        model = preact_resnet(8, 3, {"kind": kind}, width=2).eval()
        model.load_state_dict(state)
        torch.testing.assert_close(model(x), y)
        return
    places = [Place("encoder", "ffn", k // 2, 2, 2, k % 2, 2, 3) for k in range(4)]
    stack = torch.nn.ModuleList(SkipConnection(4, kind, place=place, **options) for place in places).eval()
    stack.load_state_dict(state)
    for skip in stack:
        h, carried = skip.prepare(x)
        x = skip(x, torch.tanh(h.flip(-1)), carried)
    torch.testing.assert_close(x, y)


def test_a_second_class_of_one_kind_is_refused():
    with pytest.raises(ValueError, match="kind='rskip' of Mine: fairseq_rskip.residual.weighted.RSkip has it"):
        type("Mine", (SkipConnection,), {}, kind="rskip")


def test_parameters_of_submodules_are_learned_and_those_of_norms_are_not():
    skip = type("Own", (KINDS["xskip"],), {"setup": lambda self: setattr(self, "map", torch.nn.Linear(3, 3))})(3)
    assert list(skip.learned()) == ["map.weight", "map.bias"]
    assert not SkipConnection(3, "periln").learned()
    assert not any("norm" in name for kind in ("dlcl", "hyper") for name in SkipConnection(3, kind).learned())
