"""What the analyses of models share: examples, a fresh network's statistics, means and errors."""

import csv

import pytest
import torch
from torch import nn

from fairseq_rskip.analysis import figures, gradients, study
from fairseq_rskip.analysis.study import Quantity, Study
from fairseq_rskip.residual import create_skip


def test_an_error_is_that_of_the_mean():
    """1 and 3 have the sample deviation sqrt(2); one example has none."""
    assert study.estimate(torch.tensor([1.0, 3.0])) == pytest.approx((2, 1))
    assert study.estimate(torch.tensor([5.0])) == pytest.approx((5, float("nan")), nan_ok=True)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(40, range(0, 40, 4)), (10, range(10)), (3, range(3))],
    ids=["spread", "ten", "few"],
)
def test_a_fresh_networks_statistics_are_the_means_over_ten_batches(count, expected):
    """Batch k is k - 1 and k + 1: its mean is k, its variance 2."""
    seen = []

    def losses(model, batch):
        seen.append(int(batch.mean()))
        return model(batch)

    def batches():
        return iter([torch.tensor([[k - 1.0], [k + 1.0]]) for k in range(count)])

    norm = nn.BatchNorm1d(1, momentum=0.3)
    model = nn.Sequential(norm, nn.Dropout()).eval()
    everything = Study({"m": model}, batches, count, "data", losses, lambda name, skip: "")
    everything.calibrate("m", seed=1)
    assert seen == list(expected)
    actual = float(norm.running_mean), float(norm.running_var)
    assert actual == pytest.approx((sum(seen) / len(seen), 2))
    assert norm.momentum == 0.3 and not any(module.training for module in model.modules())


def test_the_table_ends_with_the_mean_over_the_blocks():
    values = {"a": (1.0, 2.0, 9.0), "b": (5.0, 5.0, 8.0)}
    rows = [
        {"model": model, "group": "stage1", "index": index, "block": "", "value": value}
        for model, of_blocks in values.items()
        for index, value in enumerate(of_blocks, 1)
    ]
    lines = [line.split() for line in study.table(rows, "value", "x").splitlines()]
    assert lines[-1] == ["mean", "over", "blocks", "4", "6"]
    assert lines[-2] == ["stage1", "block", "3", "9", "8"]


def test_examples_are_drawn_once_each_and_in_order():
    drawn = study.draw_examples(1000, 50, seed=3).tolist()
    assert len(drawn) == 50 and drawn == sorted(set(drawn)) and drawn[-1] < 1000
    assert drawn != study.draw_examples(1000, 50, seed=4).tolist()
    assert study.draw_examples(5, 50, seed=3).tolist() == [0, 1, 2, 3, 4]


def test_the_gradients_of_examples_have_their_mean_and_its_standard_error(tmp_path, monkeypatch):
    """Of 5 positions of 8 features; dL/dy is 1 everywhere in one example, 3 in the other."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.skip = create_skip("xskip", 8, norm="none")

        def forward(self, x):
            return self.skip(x, torch.tanh(x))

    def losses(model, batch):
        return model(batch).sum((0, 2)) * torch.tensor([1.0, 3.0])

    def batches():
        return iter([torch.randn(5, 2, 8, requires_grad=True)])

    monkeypatch.setattr(figures, "save", lambda figure, stem: None)
    everything = Study({"m": Block()}, batches, 1, "two", losses, lambda name, skip: "stage1")
    gradients.report(everything, tmp_path / "f")
    (row,) = csv.DictReader((tmp_path / "f.csv").open(encoding="utf-8"))
    assert float(row["gradient_norm"]) == pytest.approx(2 * 40**0.5)
    assert float(row["standard_error"]) == pytest.approx(40**0.5)


def test_a_fresh_networks_statistics_are_those_of_its_seed():
    """Dropout draws: an analysis is repeatable whatever was drawn before."""

    def batches():
        return iter([torch.ones(50, 4)])

    means = []
    for drawn_before in (0, 100):
        torch.manual_seed(7)
        torch.rand(drawn_before)
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Dropout(0.5), norm)
        everything = Study({"m": model}, batches, 1, "", lambda m, x: m(x), lambda name, skip: "")
        everything.calibrate("m", seed=1)
        means.append(norm.running_mean)
    assert torch.equal(*means)


def test_the_bars_of_a_figure_are_one_standard_error_to_each_side():
    row = {"model": "m", "group": "stage1", "index": 3, "block": "b", "value": 5.0, "error": 0.25}
    figure = study.draw([row], [Quantity("value", "error", "a value")], "two examples")
    (points,) = figure.axes[0].containers
    _, _, (bars,) = points
    assert bars.get_segments()[0].tolist() == [[3.0, 4.75], [3.0, 5.25]]
