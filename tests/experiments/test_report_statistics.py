"""The statistics of a report against formulas written out, simulation, the sacrebleu command, and counts by hand."""

import json
import math

import numpy as np
import pytest
from conftest import run_checked
from report_tree import Tree, systems
from sacrebleu.metrics import BLEU, CHRF
from scipy import stats

from fairseq_rskip.tools import score
from fairseq_rskip.tools.report import numbers, significance
from fairseq_rskip.tools.report.significance import (
    Comparison,
    PairedTests,
    System,
    Untested,
    correct,
    detectable,
    pooled_deviation,
    welch,
)


@pytest.mark.parametrize(
    "ours, theirs, reason",
    [
        ([1.0], [2.0, 3.0], "needs 2 seeds"),
        ([1.0, 2.0], [3.0], "needs 2 seeds"),
        ([1.0, 1.0], [2.0, 2.0], "no variance"),
    ],
    ids=["one of ours", "one of theirs", "equal seeds"],
)
def test_what_has_no_p(ours, theirs, reason):
    assert welch(ours, theirs) == Comparison(reason=reason)


def test_holm():
    # Holm 1979: the smallest of m times m, the next m - 1, ..., never falling, at most 1
    one_seed = correct([Comparison({"": p}) for p in (0.01, 0.04, 0.03, 0.005)])
    assert [adjusted[""] for adjusted in one_seed] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct([Comparison({"": 0.7}), Comparison({"": 0.6})]) == [{"": 1.0}, {"": 1.0}]
    several = [Comparison({"1": 0.02, "2": 0.5}), Comparison({"1": 0.04}), Comparison()]
    assert correct(several) == [{"1": 0.04, "2": 0.5}, {"1": 0.04}, {}]


def test_a_detectable_difference_is_found_four_times_of_five():
    difference = detectable(0.2, 3)
    draws = np.random.default_rng(1).normal(0, 0.2, (2, 20_000, 3))
    p = stats.ttest_ind(draws[0] + difference, draws[1], axis=1).pvalue  # equal variances: Welch's with those known
    assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.01)
    assert detectable(0.4, 3) == pytest.approx(2 * difference)
    # deviations are pooled by their degrees of freedom
    assert pooled_deviation([[1.0, 3.0], [5.0, 5.0, 8.0], [7.0]]) == pytest.approx(math.sqrt((2 + 6) / 3))
    assert pooled_deviation([[1.0], []]) is None


def as_system(hypotheses, reference, metric=None):
    score = (metric or BLEU(tokenize="intl", force=True)).corpus_score(hypotheses, [reference]).score
    return System(hypotheses, [reference], "de", "sacreBLEU intl", score)


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
    cache, ours, theirs = tmp_path / "cache.json", as_system(better, reference), as_system(base, reference)
    p = PairedTests(cache, samples=words[1]).p_value(ours, theirs, kind)
    assert p == pytest.approx(expected, abs=1e-4) and 0 < p < 1

    monkeypatch.setattr(significance, "PairedTest", None)  # the second time it is read
    again = PairedTests(cache, samples=words[1])
    assert again.p_value(ours, theirs, kind) == p
    with pytest.raises(TypeError):  # other text is computed anew
        again.p_value(as_system([*better[:-1], "a"], reference), theirs, kind)


def test_equal_systems_are_not_told_apart(tmp_path):
    # the same translations of a text that stands there twice, good ones of one half and worse ones of the other
    reference, worse, good = systems(4)
    reference, halves = reference * 2, ([*good, *worse], [*worse, *good])
    near = [*halves[1][:-1], "a b"]
    tests = PairedTests(tmp_path / "cache.json", samples=1000)
    p = [tests.p_value(as_system(other, reference), as_system(halves[0], reference)) for other in (halves[1], near)]
    assert p[0] > 0.99 and p[1] > 0.8  # by default two-sided
    p = tests.p_value(as_system(halves[1], reference), as_system(halves[0], reference), "bootstrap")
    assert 0.3 < p < 0.6
    with pytest.raises(Untested, match="only 1 translations differ"):
        tests.p_value(as_system(near, reference), as_system(halves[1], reference))


def test_what_cannot_be_tested(tmp_path):
    reference, base, better = systems(2)
    tests = PairedTests(tmp_path / "cache.json", samples=10)
    ours, theirs = as_system(better, reference), as_system(base, reference)
    cases = [
        (as_system(base, reference), "same translations"),
        (as_system(better[:-1], reference[:-1]), "other test set"),
        (as_system(better, [*reference[:-1], "a b"]), "other test set"),
        (as_system(better, reference, CHRF()), "another score"),
        (System(better, [reference], "de", ours.name, ours.score + 0.01), "another score"),
    ]
    for system, reason in cases:
        with pytest.raises(Untested, match=reason):
            tests.p_value(system, theirs)


@pytest.mark.parametrize("tokenised", [False, True], ids=["plain", "tokens"])
def test_every_score_of_evaluate_is_found_again(tokenised):
    """What is tested is the text as the score took it; one that gives another score raises ``Untested``."""
    reference, base, _ = ([line.replace("a", "rich-text,") for line in lines] for lines in systems(3))
    rows = score.compute(base, [reference], "de", "en", tokenised)
    found = {row.name: System(base, [reference], "de", row.name, row.score).prepared()[0] for row in rows}
    assert "rich ##AT##-##AT## text" in " ".join(found.pop("compound-split BLEU"))
    assert (found.pop("tokenised BLEU") == base) == tokenised and list(found.values()) == [base] * 4


def build(tree, plan):
    return numbers.build(plan, plan.table, tree.out, PairedTests(tree.out / "c.json"))


def test_ordering(tmp_path):
    tree = Tree(tmp_path)
    tree.table(rows=[{"label": label, "reported": n} for n, label in enumerate("abcde", 1)])
    plan = tree.plan(seeds=[1, 2])
    # the paper: a < b < c < d; pairs turned round: c before b (far apart), d before c (close); e has no runs
    for label, values in (("a", [1.0, 1.1]), ("b", [9.0, 9.1]), ("c", [5.0, 5.1]), ("d", [4.9, 5.15])):
        tree.finish(plan, label, dict(enumerate(values, 1)))
    text = numbers.ordering(build(tree, plan), "", None)
    # of 6 pairs a-b, a-c, a-d are kept and b-c, b-d, c-d turned: tau = (3 - 3) / 6
    assert text.startswith("Ordering: of the pairs of rows that the paper tells apart, 3 of 6 stand in its order here")
    assert "(Kendall's tau 0.00); 3 of those in order are beyond the noise" in text and "lack seeds" not in text
    assert "beyond the noise (p < 0.05, uncorrected) c better than b, d better than b; within the noise 1." in text


def test_rows_that_share_runs_count_once_and_are_one_test(tmp_path):
    tree = Tree(tmp_path)
    tree.table(rows=[{"label": label, "reported": n} for label, n in (("a", 6), ("b", 7), ("again", 7), ("d", 8))])
    plan = tree.plan(rows={"a": "a", "b": "b", "again": "b", "d": "d"})
    for label, values in (("a", (5.0, 5.1, 5.2)), ("b", (5.5, 5.4, 5.8)), ("d", (5.1, 5.3, 5.6))):
        tree.finish(plan, label, dict(enumerate(values, 1)))
    result = build(tree, plan)
    _, first, again, last = result.lines
    assert first.comparison == again.comparison and first.adjusted == again.adjusted
    assert [first.adjusted, last.adjusted] == correct([first.comparison, last.comparison])
    assert "2 of 3 stand in its order" in numbers.ordering(result, "", None)
