"""rskip analyze streams: its measures on streams made by hand, and its sentences on a model."""

import csv

import pytest
import torch
from skip_variants import draw
from stream_rules import Stack

from fairseq_rskip.analysis import streams
from fairseq_rskip.analysis.study import Study
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import Place, create_skip


def test_parallel_streams_count_as_one_and_orthogonal_ones_as_many():
    row = draw((1, 8), 1)
    for count in (1, 2, 4):
        h = torch.cat([row] * count)
        torch.testing.assert_close(streams.effective_number(h), torch.ones(()).double())
        h = 3 * torch.eye(8, dtype=torch.float64)[:count]
        expected = torch.full((), float(count)).double()
        torch.testing.assert_close(streams.effective_number(h), expected)


def test_the_effective_number_of_two_sizes_is_the_entropys_exponential():
    """Orthogonal streams of squares 9 and 1: shares 0.9 and 0.1."""
    h = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    expected = 0.9**-0.9 * 0.1**-0.1
    assert float(streams.effective_number(h)) == pytest.approx(expected)
    assert float(streams.dominant_share(h)) == pytest.approx(0.9)


def test_the_distance_from_the_identity_is_that_of_a_swap_and_of_the_mean():
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    mean = torch.full((2, 2), 0.5, dtype=torch.float64)
    distances = streams.distance_from_identity(torch.stack([swap, mean, torch.eye(2).double()]))
    torch.testing.assert_close(distances, torch.tensor([2.0**0.5, 0.5**0.5, 0.0]).double())


def test_streams_of_nothing_are_finite():
    h = torch.zeros(3, 4, 8, dtype=torch.float64)
    for measure in (streams.effective_number, streams.dominant_share):
        assert torch.isfinite(measure(h)).all()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("hyper", "b"),
        ("mhc", "b_post"),
        ("single_pass_mhc", "b_post"),
        ("ihc", "b_post"),
        ("gated_residual", "gain"),
    ],
)
def test_only_what_was_changed_has_moved(kind, name):
    torch.manual_seed(7)
    skip = create_skip(kind, 6, place=Place(index=1, depth=3))
    torch.manual_seed(1)  # an analysis has a seed of its own
    before = torch.get_rng_state()
    start = streams.as_at_the_start(skip, seed=7)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 1
    assert all(row["change"] == 0 for row in streams.moved(skip, start))
    with torch.no_grad():
        skip.get_parameter(name).view(-1)[0] += 2
    changes = {row["parameter"]: row["change"] for row in streams.moved(skip, start)}
    assert changes.pop(name) == pytest.approx(2 / skip.get_parameter(name).numel() ** 0.5)
    assert set(changes.values()) == {0}


def study_of(model):
    """Two batches of random inputs; a loss for each example."""

    def batches():
        return iter([draw((4, 3, 9), seed, torch.float32) for seed in (1, 2)])

    def losses(model, batch):
        return model(batch).square().mean((0, 2))

    return Study({"m": model}, batches, 2, "6 examples", losses, lambda name, skip: "stage")


def test_the_report_says_what_streams_do(tmp_path, capsys):
    stack = Stack("mhc", 2, 2, streams=4)
    with torch.no_grad():
        for skip in stack.skips:
            skip.b_post.copy_(torch.tensor([3.0, -3.0, 0.0, 0.0]))
        stack.skips[2].b_res.zero_()  # the mean of all streams
    streams.report(study_of(stack), tmp_path / "f")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("m: ")]
    assert len(lines) == 3
    assert "effective streams" in lines[0] and lines[0].endswith(": they differ.")
    assert "at most 0.87 from the identity, in skips.2 " in lines[1]  # sqrt(n - 1) / sqrt(n)
    assert "its start, in skips.2." in lines[1]  # in the others R is as it was
    assert "2 of 9 kinds of parameters have moved, all but b_pre, phi_pre" in lines[2]
    assert "; b_post the least, by at most 2.1." in lines[2]  # (9 + 9 + 0 + 0) / 4, its root

    rows = list(csv.DictReader((tmp_path / "f.csv").open(encoding="utf-8")))
    numbers = [float(row["effective_streams"]) for row in rows]
    assert numbers[0] == pytest.approx(1) and min(numbers[1:]) > 1
    assert (tmp_path / "f.png").stat().st_size > 10_000


@pytest.mark.parametrize(("layers", "streams_of_each"), [(2, 1), (1, 4)], ids=["one", "short"])
def test_a_stack_that_carries_one_tensor_is_measured(tmp_path, capsys, layers, streams_of_each):
    stack = Stack("hyper", layers, 1, streams=streams_of_each)
    streams.report(study_of(stack), tmp_path / "f")
    assert "m: since the start 0 of " in capsys.readouterr().out


def test_streams_that_never_differed_are_called_copies(tmp_path, capsys):
    streams.report(study_of(Stack("mhc", 2, 2, streams=4)), tmp_path / "f")
    out = capsys.readouterr().out
    assert ": they are copies of one another, which no matrix can mix." in out
    assert "m: since the start 0 of 9 kinds of parameters have moved." in out


def test_a_model_of_one_stream_is_refused(tmp_path):
    stack = Stack("x0", 1, 2)
    with pytest.raises(UserError, match="m: skips.0 has one stream: expected hyper, mhc"):
        streams.report(study_of(stack), tmp_path / "f")


def test_the_distance_from_the_start_is_that_of_the_change_of_r():
    skip = Stack("hyper", 2, 2, streams=4, mixing="static").skips[1]
    start = streams.as_at_the_start(skip)
    with torch.no_grad():
        skip.a_r[0, 1] += 0.5
    x = draw((5, 3, 4 * 9), 1, torch.float32)
    with streams.StreamProbe(skip, {"": start}) as probe:
        skip(x, draw((5, 3, 9), 2, torch.float32), skip.prepare(x)[1])
    row = probe.columns("")
    assert row["moved"] == pytest.approx(0.5 / 2) == row["distance"]


def test_a_training_is_warned_once_of_streams_that_do_not_differ():
    stack = Stack("mhc", 2, 2, streams=4)
    with streams.StreamProbe(stack) as probe:
        stack(draw((5, 3, 9), 1, torch.float32))
    warning = streams.StreamWarning()
    assert warning.line(99, probe) == ""
    assert "at update 100 the streams of the skip connections count as 1.00: they are copies" in (
        warning.line(100, probe)
    )
    assert warning.line(101, probe) == ""


def test_a_dominant_stream_has_collapsed_the_others():
    assert streams.verdict(1.01, 0.97) == "they have collapsed, one has 97% of the squares"
    assert streams.verdict(1.01, 0.25) == "they are copies of one another, which no matrix can mix"
    assert streams.verdict(1.3, 0.95) == "they differ"
