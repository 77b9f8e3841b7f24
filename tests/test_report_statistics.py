"""The statistics of a report against formulas written out, the sacrebleu command, and counts by hand."""

import json
import math
import random

import pytest
from conftest import run_checked
from report_tree import Tree
from sacrebleu.metrics import BLEU, CHRF
from scipy.special import betainc

from fairseq_rskip.tools.report import ordering, paired
from fairseq_rskip.tools.report.model import Group, Line, build
from fairseq_rskip.tools.report.paired import PairedTests, System, Untested, make_metric
from fairseq_rskip.tools.report.significance import Comparison, correct, holm, welch
from fairseq_rskip.tools.reproduce.results import collect

WORDS = "a b c d e f g h".split()


def welch_by_hand(a, b):
    """Welch 1947: t with the Welch-Satterthwaite degrees of freedom, p from the incomplete beta function."""
    means = [sum(x) / len(x) for x in (a, b)]
    shares = [sum((v - m) ** 2 for v in x) / (len(x) - 1) / len(x) for x, m in zip((a, b), means)]
    t = (means[0] - means[1]) / math.sqrt(sum(shares))
    degrees = sum(shares) ** 2 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (a, b)))
    return betainc(degrees / 2, 0.5, degrees / (degrees + t * t))


@pytest.mark.parametrize(
    "a,b", [([6.1, 6.3, 6.2], [6.9, 7.4, 7.0, 8.1]), ([1.0, 2.0], [3.0, 3.5]), ([5.0, 5.0], [5.1, 5.3])]
)
def test_welch(a, b):
    assert welch(a, b).p[""] == pytest.approx(welch_by_hand(a, b), rel=1e-9)


@pytest.mark.parametrize(
    "a,b,reason",
    [
        ([1.0], [2.0, 3.0], "needs 2 seeds"),
        ([1.0, 2.0], [3.0], "needs 2 seeds"),
        ([2.0, 2.0], [2.0, 2.0], "no variance"),
        ([1.0, 1.0], [2.0, 2.0], "no variance"),
    ],
)
def test_no_test_without_a_sample(a, b, reason):
    assert welch(a, b) == Comparison(reason=reason)


def test_holm():
    # Holm 1979: the smallest of m times m, the next m - 1, ..., never falling, at most 1
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert correct({"a": Comparison({"1": 0.02, "2": 0.5}), "b": Comparison({"1": 0.04}), "c": Comparison()}) == {
        "a": {"1": 0.04, "2": 0.5},
        "b": {"1": 0.04},
        "c": {},
    }


def systems(seed, sentences=60):
    """A reference and two systems that change some of its words, more and fewer."""
    rng = random.Random(seed)
    reference = [" ".join(rng.choices(WORDS, k=rng.randint(5, 12))) for _ in range(sentences)]
    made = [
        [" ".join(rng.choice(WORDS) if rng.random() < share else word for word in line.split()) for line in reference]
        for share in (0.3, 0.25)
    ]
    return reference, *made


def as_system(hypotheses, reference, metric=None):
    metric = metric or BLEU(tokenize="intl", force=True)
    score = metric.corpus_score(hypotheses, [reference]).score
    return System(hypotheses, [reference], "de", "sacreBLEU intl", str(metric.get_signature()), score)


@pytest.mark.parametrize("kind,words", [("bootstrap", ("bs", 200)), ("randomisation", ("ar", 300))])
def test_paired_test_is_the_sacrebleu_commands(tmp_path, monkeypatch, kind, words):
    monkeypatch.setenv("SACREBLEU_SEED", "7")  # reports do not depend on it
    reference, base, better = systems(1)
    paths = []
    for name, lines in (("ref", reference), ("base", base), ("better", better)):
        paths.append(tmp_path / name)
        paths[-1].write_text("\n".join(lines) + "\n")
    option = [f"--paired-{words[0]}", f"--paired-{words[0]}-n", words[1], "-tok", "intl", "-f", "json", "--force"]
    command = ["sacrebleu", paths[0], "-i", *paths[1:], *option, "-m", "bleu"]
    said = run_checked(command, env={"SACREBLEU_SEED": "12345"})
    expected = json.loads(said[said.index("[") : said.rindex("]") + 1])[1]["BLEU"]["p_value"]
    cache = tmp_path / "cache.json"
    p = PairedTests(cache, kind, words[1]).p_value(as_system(better, reference), as_system(base, reference))
    assert p == pytest.approx(expected, abs=1e-4) and 0 < p < 1

    monkeypatch.setattr(paired, "PairedTest", None)  # the second time it is read
    again = PairedTests(cache, kind, words[1])
    assert again.p_value(as_system(better, reference), as_system(base, reference)) == p
    with pytest.raises(TypeError):  # other text is computed anew
        again.p_value(as_system([*better[:-1], "a"], reference), as_system(base, reference))


def test_equal_systems_are_not_told_apart(tmp_path):
    # the same translations of a text that stands there twice, good ones of one half and worse ones of the other
    reference, worse, good = systems(4)
    reference, halves = reference * 2, ([*good, *worse], [*worse, *good])
    near = [*halves[1][:-1], "a b"]
    default = PairedTests(tmp_path / "cache.json", samples=1000)
    p = [default.p_value(as_system(other, reference), as_system(halves[0], reference)) for other in (halves[1], near)]
    assert default.kind == "randomisation" and p[0] > 0.99 and p[1] > 0.8
    bootstrap = PairedTests(tmp_path / "cache.json", "bootstrap", 200)
    assert 0.3 < bootstrap.p_value(as_system(halves[1], reference), as_system(halves[0], reference)) < 0.6
    with pytest.raises(Untested, match="only 1 translations differ"):
        default.p_value(as_system(near, reference), as_system(halves[1], reference))


def test_what_cannot_be_tested(tmp_path):
    reference, base, better = systems(2)
    tests = PairedTests(tmp_path / "cache.json", samples=10)
    ours, theirs = as_system(better, reference), as_system(base, reference)
    cases = [
        (as_system(base, reference), "same translations"),
        (as_system(better[:-1], reference[:-1]), "other test set"),
        (as_system(better, [*reference[:-1], "a b"]), "other test set"),
        (as_system(better, reference, CHRF()), "other metric"),
        (System(better, [reference], "de", ours.name, ours.signature, ours.score + 0.01), "another score"),
    ]
    for system, reason in cases:
        with pytest.raises(Untested, match=reason):
            tests.p_value(system, theirs)


@pytest.mark.parametrize(
    "metric", [BLEU(tokenize="13a"), BLEU(tokenize="none", lowercase=True, force=True), CHRF(), CHRF(word_order=2)]
)
def test_a_metric_is_made_from_its_signature(metric):
    reference, base, _ = systems(3)
    made = make_metric(str(_signed(metric, base, reference)))
    assert made.corpus_score(base, [reference]).score == metric.corpus_score(base, [reference]).score
    with pytest.raises(Untested):
        make_metric("case:mixed")


def _signed(metric, hypotheses, reference):
    metric.corpus_score(hypotheses, [reference])
    return metric.get_signature()


def lines(*rows):
    """Lines of (label, the paper's value, ours by seed)."""
    return [
        Line(
            label=label,
            equation="",
            column="",
            reported=reported,
            values=dict(enumerate(values)),
            planned=2,
            folders={seed: label for seed in range(len(values))},
            metrics={},
        )
        for label, reported, values in rows
    ]


def test_ordering(tmp_path):
    table = Tree(tmp_path).table()
    # the paper: a < b < c < d; pairs turned round: c before b (far apart), d before c (close); e has no runs
    rows = lines(
        ("a", 1.0, [1.0, 1.1]), ("b", 2.0, [9.0, 9.1]), ("c", 3.0, [5.0, 5.1]), ("d", 4.0, [4.9, 5.15]), ("e", 5.0, [])
    )
    text = ordering.describe(Group("ResNet-20", "cifar10", rows), table, PairedTests(tmp_path / "c.json"))
    # of 6 pairs a-b, a-c, a-d are kept and b-c, b-d, c-d turned: tau = (3 - 3) / 6
    assert text.startswith(
        "Ordering, ResNet-20: of the pairs of rows that the paper tells apart, 3 of 6 stand in its order"
    )
    assert (
        "(Kendall's tau 0.00); 3 of those in order are beyond the noise" in text
        and "Some of these rows lack" not in text
    )
    assert "beyond the noise (p < 0.05, uncorrected) c better than b, d better than b; within the noise 1." in text
    assert ordering.describe(Group("", "", rows[:1]), table, None) == ""


def test_rows_that_share_runs_count_once_and_are_one_test(tmp_path):
    rows = [{"label": name, "reported": value} for name, value in (("1xSkip", 6.0), ("1xSkip+LN", 7.0), ("again", 7.0))]
    tree = Tree(tmp_path)
    table = tree.table(rows=[*rows, {"label": "2rSkip+LN", "reported": 8.0}])
    from report_tree import image_settings

    names = {"1xSkip": "1xSkip", "1xSkip+LN": "1xSkip+LN", "again": "1xSkip+LN", "2rSkip+LN": "2rSkip+LN"}
    plan = tree.plan(settings={(label, ""): image_settings(kind) for label, kind in names.items()})
    tree.finish(plan, "1xSkip", {1: 5.0, 2: 5.1, 3: 5.2})
    tree.finish(plan, "1xSkip+LN", {1: 5.5, 2: 5.4, 3: 5.8})
    tree.finish(plan, "2rSkip+LN", {1: 5.1, 2: 5.3, 3: 5.6})
    group = build(collect(plan, table, tree.out), PairedTests(tmp_path / "c.json"))[0]
    _, first, again, last = group.lines
    assert first.comparison == again.comparison and first.adjusted == again.adjusted
    assert [first.adjusted[""], last.adjusted[""]] == holm([first.comparison.p[""], last.comparison.p[""]])
    text = ordering.describe(group, table, PairedTests(tmp_path / "c.json"))
    assert "2 of 3 stand in its order" in text
