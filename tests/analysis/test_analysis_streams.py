"""rskip analyze streams: its measures on streams made by hand, and its sentences on a model."""

import csv
import re

import pytest
import torch
from conftest import ROOT
from skip_variants import draw
from stream_rules import Stack

from fairseq_rskip.analysis import streams
from fairseq_rskip.analysis.study import Study
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import KINDS, Place, create_skip

UNMIXED = {"ihc", "gated_residual", "siamesenorm"}
MIXED = {"single_pass_mhc", "hyper", "mhc", "fractional", "multi_gate"}


def middle_block(kind):
    """The fifth of six blocks of ``kind``, off its start, and an input of it."""
    skip = Stack(kind, 3, 2).randomise().double().skips[4]
    return skip, draw((5, 3, skip.widths[0] * skip.dim), 1)


@pytest.mark.parametrize("kind", sorted(MIXED | {"ihc", "gated_residual"}))
def test_a_branch_of_zero_leaves_the_streams_times_their_matrix(kind):
    skip, x = middle_block(kind)
    h, matrix = skip.streams(x)
    y = skip(x, torch.zeros(5, 3, skip.dim, dtype=x.dtype), skip.prepare(x)[1])
    if kind in ("multi_gate", "single_pass_mhc"):  # the first channels are what is read next
        y = y[..., skip.dim :]
    torch.testing.assert_close(y, (matrix @ h).flatten(-2))
    assert skip.mixes_streams == (kind in MIXED)


def test_the_streams_of_siamesenorm_are_what_its_branch_reads():
    skip, x = middle_block("siamesenorm")
    h, matrix = skip.streams(x)
    torch.testing.assert_close(h.sum(-2), skip.current(x)[0])
    torch.testing.assert_close(h[..., 0, :], skip.x_norm(x[..., :9]))
    assert torch.equal(matrix, torch.eye(2, dtype=x.dtype)) and not skip.mixes_streams


def test_the_first_blocks_of_multi_gate_residuals_keep_their_streams():
    stack = Stack("multi_gate", 3, 2, streams=3).randomise()
    with streams.StreamProbe(stack) as probe:
        stack(draw((5, 3, 9), 1, torch.float32))
    rows = [probe.columns(name) for name in probe.skips]
    assert [row["streams"] for row in rows] == [1, 2, 3, 3, 3, 3]
    assert [row["distance"] > 0 for row in rows] == [False, False, True, True, True, True]


def test_the_docs_name_the_rules_that_are_measured():
    measured = {kind for kind, rule in KINDS.items() if streams.is_measured(rule)}
    assert measured == MIXED | UNMIXED
    text = (ROOT / "docs/analysis.md").read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("`rskip analyze streams`")]
    assert all(f"`{kind}`" in line for kind in measured)


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


def test_streams_that_are_not_finite_stop_no_training():
    stack = Stack("mhc", 2, 2, streams=4)
    x = draw((5, 3, 9), 1, torch.float32)
    x[0, 0] = float("inf")
    with streams.StreamProbe(stack) as probe:
        stack(x)
    number = probe.columns("skips.1")["effective_streams"]
    assert number != number  # NaN
    assert streams.StreamWarning().line(100, probe) == ""


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


def study_of(model, **options):
    """Two batches of random inputs; a loss for each example."""

    def batches():
        return iter([draw((4, 3, 9), seed, torch.float32) for seed in (1, 2)])

    def losses(model, batch):
        return model(batch).square().mean((0, 2))

    def group(name, skip):
        return "stage"

    return Study({"m": model}, batches, 2, "6 examples", losses, group, **options)


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
    assert " of 4 effective streams (mean of 3 blocks behind the first; " in lines[0]
    assert lines[0].endswith(": they differ little.")
    assert "farthest from the identity, 0.87, in skips.2 " in lines[1]  # sqrt(n - 1) / sqrt(n)
    assert "farthest from its start, 0.86, in skips.2." in lines[1]  # in the others R is as it was
    assert "2 of 9 kinds of parameters have moved, all but b_pre, phi_pre" in lines[2]
    assert "; b_post the least, by 2.1 where most." in lines[2]  # (9 + 9 + 0 + 0) / 4, its root

    rows = list(csv.DictReader((tmp_path / "f.csv").open(encoding="utf-8")))
    numbers = [float(row["effective_streams"]) for row in rows]
    assert numbers[0] == pytest.approx(1) and min(numbers[1:]) > 1
    fewest = numbers.index(min(numbers[1:]))
    assert f"; the fewest, {numbers[fewest]:.2f}, in skips.{fewest}): " in lines[0]
    assert (tmp_path / "f.png").stat().st_size > 10_000


@pytest.mark.parametrize(("layers", "streams_of_each"), [(2, 1), (1, 4)], ids=["one", "short"])
def test_a_stack_that_carries_one_tensor_is_measured(tmp_path, capsys, layers, streams_of_each):
    stack = Stack("hyper", layers, 1, streams=streams_of_each)
    streams.report(study_of(stack), tmp_path / "f")
    assert "m: since the start 0 of " in capsys.readouterr().out


def test_streams_that_never_differed_are_called_copies(tmp_path, capsys):
    streams.report(study_of(Stack("mhc", 2, 2, streams=4)), tmp_path / "f")
    out = capsys.readouterr().out
    assert "m: stage 1.00 of 4 effective streams" in out
    assert ": they are copies of one another." in out
    assert re.search(r"from its start, .*, next to nothing\.\n", out)
    assert "m: since the start 0 of 9 kinds of parameters have moved." in out


@pytest.mark.parametrize("kind", sorted(UNMIXED))
def test_rules_that_do_not_mix_have_no_panels_of_a_matrix(tmp_path, capsys, monkeypatch, kind):
    shown = []
    show = Study.show

    def show_and_note(study, rows, quantities, stem):
        shown.append(quantities)
        show(study, rows, quantities, stem)

    monkeypatch.setattr(Study, "show", show_and_note)
    streams.report(study_of(Stack(kind, 2, 2)), tmp_path / "f")
    out = capsys.readouterr().out
    assert f"m: {kind} does not mix its streams." in out and "identity" not in out
    assert shown == [(streams.NUMBER, streams.SHARE)]
    learns = kind != "siamesenorm"
    assert (tmp_path / "f-moved.csv").exists() == learns
    assert ("m: the rule learns nothing but its norms." in out) != learns


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (Stack("x0", 1, 2), "m: the tensors that skips.0 keeps are not measured for x0"),
        (torch.nn.Sequential(create_skip("rskip", 9)), "m: 0 has one stream"),
    ],
    ids=["x0", "rskip"],
)
def test_a_rule_that_is_not_measured_is_refused(tmp_path, stack, reason):
    with pytest.raises(UserError, match=f"{reason}: expected a rule of fractional, gated_residual"):
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


def test_padding_is_left_out():
    skip = Stack("mhc", 3, 2).randomise().skips[3]
    start = streams.as_at_the_start(skip)
    x, f_x = draw((5, 3, skip.widths[0] * 9), 1, torch.float32), draw((5, 3, 9), 2, torch.float32)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[3:, 1] = True
    actual = []
    for fill in (x[3:, 1].clone(), 0.0):
        x[3:, 1] = fill
        with streams.StreamProbe(skip, {"": start}) as probe:
            skip(x, f_x, skip.prepare(x)[1], mask)
        actual.append(probe.columns(""))
    assert actual[0] == actual[1] and set(actual[0]) > {"effective_streams", "distance", "moved"}


def test_what_moved_least_is_by_the_block_where_it_moved_most():
    changes = {"a": (0.1, 0.5), "b": (0.3, 0.2), "c": (5e-7, 0.0)}
    rows = []
    for name, of_blocks in changes.items():
        rows += [{"parameter": name, "start": 0.0, "change": change} for change in of_blocks]
    says = "2 of 3 kinds of parameters have moved, all but c; b the least, by 0.3 where most"
    assert streams.what_moved(rows) == f"since the start {says}"


def probe_of(stack):
    with streams.StreamProbe(stack) as probe:
        stack(draw((5, 3, 9), 1, torch.float32))
    return probe


def test_a_training_is_warned_of_copies_and_of_a_collapse_once_each():
    copies = probe_of(Stack("mhc", 2, 2, streams=4))
    apart = Stack("mhc", 2, 2, streams=4)
    with torch.no_grad():
        for skip in apart.skips:
            skip.b_post.copy_(torch.tensor([4.0, -4.0, 0.0, 2.0]))
    apart = probe_of(apart)
    assert len(streams.later_blocks(apart)["encoder"]) == 3  # of 4 blocks
    warning = streams.StreamWarning()
    assert warning.line(100, copies, warms_up=True) == warning.line(900, copies, True) == ""
    assert warning.line(1000, copies) == warning.line(1099, copies) == ""
    says = "at update 1100 the streams of the encoder count as 1.00 of 4: they are copies of one"
    assert warning.line(1100, copies).startswith(says)
    assert warning.line(1200, copies) == ""
    assert warning.line(1300, apart) == warning.line(1400, copies) == ""
    assert " another, and had differed (rskip " in warning.line(1500, copies)
    assert warning.line(1600, copies) == ""


def test_a_stack_that_has_collapsed_is_not_hidden_by_another():
    rows = []
    for group, number in (("encoder", 1.0), ("decoder", 1.9)):
        for index in (1, 2):
            row = {"group": group, "index": index, "block": f"{group}.{index}", "streams": 4}
            rows.append({**row, "effective_streams": number, "dominant_share": 0.3})
    said = [streams.do_they_differ(rows[:2]), streams.do_they_differ(rows[2:])]
    assert said[0].startswith("encoder 1.00 of 4") and said[0].endswith("copies of one another")
    assert said[1].startswith("decoder 1.90 of 4") and said[1].endswith(": they differ")


def test_a_stack_has_not_collapsed_where_one_block_has():
    row = {"streams": 4, "effective_streams": 1.9}
    mean = streams.Mean([{**row, "dominant_share": share} for share in (0.95, 0.3)])
    assert mean.share == pytest.approx(0.625) and mean.verdict() == "they differ"


def mean_of(h):
    """The mean of one block with the streams ``h``."""
    row = {
        "streams": h.size(-2),
        "effective_streams": float(streams.effective_number(h)),
        "dominant_share": float(streams.dominant_share(h)),
    }
    return streams.Mean([row])


def with_cosine(count, cosine):
    """``count`` streams of length 1, each pair at ``cosine``."""
    inner = torch.full((count, count), cosine, dtype=torch.float64)
    return torch.linalg.cholesky(inner.fill_diagonal_(1.0))


@pytest.mark.parametrize(
    ("h", "number", "verdict"),
    [
        (torch.diag(torch.tensor([99.0, 1.0]).sqrt()), 1.06, "have collapsed, one has 99% of"),
        (torch.diag(torch.tensor([95.0, 5.0]).sqrt()), 1.22, "have collapsed, one has 95% of"),
        (with_cosine(4, 0.995), 1.03, "are copies of one another"),
        (with_cosine(4, 0.95), 1.223, "differ little"),
        (with_cosine(4, 0.9), 1.417, "differ"),
        (with_cosine(2, 0.9), 1.22, "differ"),
    ],
    ids=["99", "95", "copies", "little", "four", "two"],
)
def test_a_verdict_is_of_the_dominant_share_first_and_of_n(h, number, verdict):
    mean = mean_of(h)
    assert mean.number == pytest.approx(number, abs=0.005)
    assert mean.verdict().startswith(f"they {verdict}")
    assert mean.differ() == (" differ" in mean.verdict())


def test_the_thresholds_are_those_of_four_streams_at_the_cosines_of_the_docstring():
    assert mean_of(with_cosine(4, 0.99)).number == pytest.approx(streams.COLLAPSED, abs=0.005)
    at_little = 1 + streams.LITTLE * 3
    assert mean_of(with_cosine(4, 0.93)).number == pytest.approx(at_little, abs=0.01)


def test_a_dominant_stream_is_warned_of_in_a_training():
    skip = Stack("hyper", 2, 2, streams=2).skips[1]
    h = torch.stack([10 * draw((5, 3, 9), 1, torch.float32), draw((5, 3, 9), 2, torch.float32)], -2)
    x = h.flatten(-2)
    with streams.StreamProbe(skip) as probe:
        skip(x, draw((5, 3, 9), 3, torch.float32), skip.prepare(x)[1])
    warning = streams.StreamWarning()
    assert warning.line(100, probe) == ""
    assert ": they have collapsed, one has 99% of the squares" in warning.line(200, probe)


@pytest.mark.parametrize(
    ("matrix", "still"), [("permutations", True), ("kronecker", True), ("quaternions", False)]
)
def test_a_matrix_that_keeps_equal_streams_has_no_gradient_in_the_first_block(matrix, still):
    """So a training does not say of it that it never moved; a rotation changes equal streams."""
    stack = Stack("mhc", 3, 2, matrix=matrix, streams=4).randomise().double()
    stack(draw((5, 3, 9), 1)).square().sum().backward()
    first, second = stack.skips[0], stack.skips[1]
    names = ("b_res", "phi_res", "alpha_res")
    assert first.without_gradient() == (names if still else ())
    assert second.without_gradient() == ()
    for name in names:
        size = first.learned()[name].grad.abs().max()
        assert (size < 1e-9) == still, (name, size)
        assert second.learned()[name].grad.abs().max() > 1e-6


@pytest.mark.parametrize(
    ("count", "number", "verdict"),
    [
        (2, 1.09, "they differ little"),
        (2, 1.11, "they differ"),
        (4, 1.29, "they differ little"),
        (4, 1.31, "they differ"),
    ],
)
def test_streams_differ_from_a_tenth_of_the_way_to_n(count, number, verdict):
    row = {"streams": count, "effective_streams": number, "dominant_share": 0.5}
    assert streams.Mean([row]).verdict() == verdict


@pytest.mark.parametrize(
    ("start", "change", "has_moved"),
    [(100.0, 5e-5, False), (100.0, 2e-4, True), (0.0, 5e-7, False), (0.0, 2e-6, True)],
    ids=["rounding of 100", "beyond it", "rounding of 1", "from 0"],
)
def test_a_parameter_has_not_moved_by_the_rounding_of_its_size(start, change, has_moved):
    assert streams.has_moved([{"start": start, "change": change}]) is has_moved
