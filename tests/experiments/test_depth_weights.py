"""experiments/depth_weights.py: how far a training moved a Transformer's matrices."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import ROOT
from torch import nn

SCRIPT = ROOT / "experiments" / "depth_weights.py"
spec = importlib.util.spec_from_file_location("depth_weights", SCRIPT)
depth_weights = importlib.util.module_from_spec(spec)
spec.loader.exec_module(depth_weights)

SEED = 3


class Network(nn.Module):
    """Six decoder layers of one matrix each, and an embedding, which does not count."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))


def test_a_matrix_has_moved_by_its_change_over_its_size_when_the_seed_drew_it(monkeypatch):
    """The lower third is as the seed drew it, the middle third three times that, the upper 0."""
    torch.manual_seed(SEED)
    drawn = Network().state_dict()
    factors = [1.0, 1.0, 3.0, 3.0, 0.0, 0.0]
    for layer, factor in enumerate(factors):
        drawn[f"decoder.layers.{layer}.weight"] *= factor
    cfg = SimpleNamespace(
        task=None,
        common=SimpleNamespace(seed=SEED),
        model=SimpleNamespace(encoder_layers=2, decoder_layers=6),
    )
    task = SimpleNamespace(build_model=lambda settings: Network())
    state = {"cfg": cfg, "model": drawn}
    monkeypatch.setattr(depth_weights.checkpoint_utils, "load_checkpoint_to_cpu", lambda _: state)
    monkeypatch.setattr(depth_weights.tasks, "setup_task", lambda settings: task)

    torch.manual_seed(SEED + 1)  # whatever was drawn before
    rows, coefficients = depth_weights.measure("a", Path("run"))
    assert [(row["layers"], round(row["moved"], 6), round(row["norm"], 6)) for row in rows] == [
        *[("lower", 0.0, 1.0)] * 2,
        *[("middle", 2.0, 3.0)] * 2,
        *[("upper", 1.0, 0.0)] * 2,
    ]
    assert coefficients == []
