"""rskip analyze reads: the weights are those of the mixture, and what the sentences say of them."""

import csv

import pytest
import torch
from conftest import ROOT
from skip_variants import draw
from stream_rules import Stack
from test_analysis_streams import study_of

from fairseq_rskip.analysis import figures, reads, streams
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import KINDS, create_skip

MEASURED = {"attnres", "delta_attnres", "denseformer", "dlcl", "mhar", "mudd", "multi_gate"}


@pytest.mark.parametrize("rule", [*sorted(MEASURED), "mhar-blocks"])
def test_the_weights_give_what_is_read(rule):
    """In a rule that makes its mixture in the block, that of its branch; else that behind it."""
    skip = Stack(rule, 3, 2).randomise().double().skips[3]
    x, f_x = draw((5, 3, skip.widths[0] * 9), 1), draw((5, 3, 9), 2)
    h, carried = skip.prepare(x)
    members = skip.members(f_x, carried)
    weights = skip.weights(members)
    if weights.dim() < members.dim():
        weights = weights.unsqueeze(-2)
    by_head = members.unflatten(-1, (weights.size(-2), -1))  # (..., k, heads, width)
    mixture = torch.einsum("...hk,...khd->...hd", weights.expand(5, 3, -1, -1), by_head)
    if rule == "delta_attnres":
        read, start = skip.current(x)[0], x[..., :9]
        torch.testing.assert_close(start + mixture.flatten(-2), read)
    else:
        y = skip(x, f_x, carried)
        torch.testing.assert_close(mixture.flatten(-2), y[..., :9])


def test_the_docs_name_the_rules_that_are_measured():
    assert {kind for kind, rule in KINDS.items() if reads.is_measured(rule)} == MEASURED
    text = (ROOT / "docs/analysis.md").read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("`rskip analyze reads`")]
    assert all(f"`{kind}`" in line for kind in MEASURED)


def test_signs_do_not_count_and_shares_add_up_to_one():
    members = draw((5, 3, 4, 9), 1)
    shares = reads.shares_of(torch.tensor([1.0, -2.0, 1.0, 0.0]).double(), members)
    assert shares.shape == (5, 3, 1, 4)
    assert shares[0, 0, 0].tolist() == [0.25, 0.5, 0.25, 0.0]


def test_the_variation_of_two_halves_that_read_other_outputs_is_a_half():
    one_hot = torch.eye(2).double().view(2, 1, 1, 2)  # two positions of one example, one head
    assert reads.variation(one_hot, None).flatten().tolist() == [0.5, 0.5]
    padded = torch.tensor([[False], [True]])
    assert float(reads.variation(one_hot, padded)[0]) == 0.0


def measured(stack, mask=None):
    with reads.ReadProbe(stack) as probe:
        for seed in (1, 2):
            stack(draw((4, 3, 9), seed, torch.float32))
    return probe


def test_at_the_start_attention_reads_all_alike_and_a_one_hot_the_newest():
    probe = measured(Stack("attnres", 2, 2))
    rows = [probe.columns(name) for name in probe.skips]
    assert [row["outputs"] for row in rows] == [2, 3, 4, 5]
    for row in rows:
        assert row["effective_outputs"] == pytest.approx(row["outputs"])
        assert row["newest"] == row["input"] == pytest.approx(1 / row["outputs"])
        assert row["varies"] < 1e-12  # rounding of a mean, in float64
    assert reads.verdict(rows) == "all nearly alike"
    assert probe.mean_shares("skips.1") == pytest.approx([1 / 3] * 3)

    probe = measured(Stack("mudd", 3, 2))
    rows = [probe.columns(name) for name in probe.skips]
    assert [row and row["outputs"] for row in rows] == [None, 2, None, 3, None, 4]
    rows = [row for row in rows if row]
    assert all(row["newest"] == row["effective_outputs"] == 1 for row in rows)
    assert reads.verdict(rows).startswith("nearly the newest alone")


def test_padding_is_left_out():
    skip = Stack("attnres", 3, 2).randomise().skips[3]
    x, f_x = draw((5, 3, skip.widths[0] * 9), 1, torch.float32), draw((5, 3, 9), 2, torch.float32)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[3:, 1] = True
    actual = []
    for fill in (0.0, 7.0):
        x[3:, 1], f_x[3:, 1] = fill, -fill
        with reads.ReadProbe(skip) as probe:
            skip(x, f_x, skip.prepare(x)[1], mask)
        actual.append((probe.columns(""), probe.mean_shares("")))
    assert actual[0] == actual[1]


def test_heads_are_measured_one_by_one():
    """One head reads h_0 alone, the other both outputs alike: 1 and 2 outputs in effect."""
    skip = Stack("mhar", 1, 2, dim=4, heads=2).skips[0]
    with torch.no_grad():
        skip.query.copy_(torch.tensor([50.0, 50.0, 0.0, 0.0]))
    x = torch.ones(5, 3, 4)
    with reads.ReadProbe(skip) as probe:
        skip(x, -x, skip.prepare(x)[1])
    row = probe.columns("")
    actual = [row[q.column] for q in (reads.NUMBER, reads.NEWEST, reads.INPUT, reads.VARIES)]
    assert actual == pytest.approx([1.5, 0.25, 0.75, 0.0], abs=1e-6)
    assert probe.mean_shares("") == pytest.approx([0.75, 0.25])


def test_the_verdict_is_by_the_mean_over_the_mixtures():
    values = [(0.95, 1.2), (0.3, 1.95)]
    rows = [{"newest": share, "effective_outputs": n, "outputs": 2} for share, n in values]
    assert reads.verdict(rows) == "some more than others"
    assert reads.verdict(rows[:1]).startswith("nearly the newest alone")


@pytest.mark.parametrize(
    ("kind", "report", "kinds"),
    [("gated_residual", streams.report, 4), ("mudd", reads.report, 3)],
    ids=["streams", "reads"],
)
def test_what_the_trainings_own_seed_drew_has_not_moved(
    tmp_path, capsys, monkeypatch, kind, report, kinds
):
    monkeypatch.setattr(figures, "save", lambda figure, stem: None)
    torch.manual_seed(7)
    study = study_of(Stack(kind, 2, 2), seeds={"m": 7})
    torch.manual_seed(1)
    report(study, tmp_path / "f")
    assert f"m: since the start 0 of {kinds} kinds of para" in capsys.readouterr().out


def test_the_report_says_what_is_read(tmp_path, capsys):
    stack = Stack("mudd", 3, 2)
    with torch.no_grad():
        for skip in stack.skips:
            if skip.stores:
                skip.weight.fill_(1.0)
        skip.w2.normal_(std=3.0)
    reads.report(study_of(stack), tmp_path / "f")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("m: ")]
    assert len(lines) == 3
    assert "% of its outputs (effective number, mean of 3 mixtures; the fewest, " in lines[0]
    assert " of 4, at skips.5): some more than others." in lines[0]
    assert "; a position's shares differ from the mean by " in lines[1]
    assert ": since the start 2 of 3 kinds of parameters have moved, all but w1" in lines[2]
    shares = list(csv.DictReader((tmp_path / "f-shares.csv").open(encoding="utf-8")))
    first = [float(row["share"]) for row in shares if row["block"] == "skips.1"]
    assert first == [0.5, 0.5] and len(shares) == 2 + 3 + 4
    assert (tmp_path / "f-shares.png").stat().st_size > 5_000


@pytest.mark.parametrize("kind", ["rskip", "hyper"])
def test_a_rule_that_stores_no_outputs_is_refused(tmp_path, kind):
    stack = Stack("hyper", 2, 2) if kind == "hyper" else torch.nn.Sequential(create_skip(kind, 9))
    says = f" .{kind}. reads no mixture of earlier outputs: expected a rule of attnres, delta_"
    with pytest.raises(UserError, match=says):
        reads.report(study_of(stack), tmp_path / "f")


def test_streams_sends_a_rule_that_keeps_outputs_to_reads(tmp_path):
    with pytest.raises(UserError, match="keeps outputs, which rskip analyze reads measures"):
        streams.report(study_of(Stack("attnres", 2, 2)), tmp_path / "f")


def test_a_stack_of_one_block_reads_one_output(tmp_path):
    with pytest.raises(UserError, match="m: no block reads two outputs"):
        reads.report(study_of(Stack("delta_attnres", 1, 1)), tmp_path / "f")


def row_of(newest, number, outputs, block="b"):
    row = {"newest": newest, "effective_outputs": number, "outputs": outputs, "block": block}
    return {**row, "input": 0.0, "varies": 0.0}


@pytest.mark.parametrize(
    ("newest", "number", "verdict"),
    [
        (0.90, 1.5, "nearly the newest alone"),
        (0.89, 1.5, "some more than others"),
        (0.25, 3.80, "all nearly alike"),
        (0.25, 3.79, "some more than others"),
    ],
)
def test_the_newest_is_alone_from_90_percent_and_all_are_alike_from_95(newest, number, verdict):
    assert reads.verdict([row_of(newest, number, outputs=4)]).startswith(verdict)


def test_the_share_that_is_read_is_the_mean_over_the_mixtures_and_the_fewest_are_named():
    """All of two outputs, and two of four: 75 % on average."""
    rows = [row_of(0.5, 2.0, outputs=2, block="first"), row_of(0.5, 2.0, outputs=4, block="last")]
    first, *_ = reads.sentences("m", rows, [])
    assert first.startswith("m: a mixture reads 75% of its outputs (effective number, mean of 2 ")
    assert "the fewest, 2.00 of 4, at last)" in first
