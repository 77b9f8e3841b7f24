"""The statistics against published results, scipy and statsmodels' formulas.

They are also compared with sums written out and with simulation.
"""

import csv
import json
import random

import numpy as np
import pandas
import pytest
from conftest import ROOT
from sacrebleu.metrics import BLEU
from scipy import stats
from statsmodels.formula.api import ols

from fairseq_rskip.tools import significance
from fairseq_rskip.tools.significance import SeedModel, paired_values

THREE = {
    "a": {1: 30.1, 2: 30.4, 3: 29.9},
    "b": {1: 31.0, 2: 31.5, 3: 30.6},
    "c": {1: 29.5, 2: 29.7, 3: 29.6},
}


def test_published_differences_come_out_again():
    """Each table of results/scaled_tables.csv is one family: rule + seed, adjusted by Holm."""
    with open(ROOT / "results" / "scaled_tables.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    families = {}
    for row in rows:
        by_seed = json.loads(row["values_by_seed"])
        family = families.setdefault((row["plan"], row["column"]), {})
        if by_seed and by_seed not in family.values():
            family[row["row"]] = by_seed
    tested = [row for row in rows if row["test"] == "by seed" and row["row"] != "1rSkip+LN"]
    for row in tested:
        model = SeedModel(families[row["plan"], row["column"]])
        difference = model.difference(row["row"], row["baseline"])
        assert difference.value == pytest.approx(float(row["ours_minus_baseline"]), abs=1e-9)
        assert difference.p == pytest.approx(float(row["p"]), rel=1e-6)
        assert difference.low == pytest.approx(float(row["low"]), abs=1e-9)
    assert len(tested) == 9


def test_two_rules_are_compared_as_scipys_paired_t_test_does():
    difference = SeedModel({name: THREE[name] for name in "ab"}).difference("b", "a")
    test = stats.ttest_rel([*THREE["b"].values()], [*THREE["a"].values()])
    low, high = test.confidence_interval()
    assert difference.p == pytest.approx(test.pvalue, rel=1e-9)
    assert (difference.low, difference.high) == pytest.approx((low, high), rel=1e-9)
    assert difference.value == pytest.approx(0.9)


def fitted(values):
    """rule + seed, by statsmodels' formula."""
    lines = []
    for rule, by_seed in values.items():
        lines += [{"rule": rule, "seed": seed, "y": value} for seed, value in by_seed.items()]
    return ols("y ~ C(rule) + C(seed)", pandas.DataFrame(lines)).fit()


def test_three_rules_are_a_two_way_model():
    """Also where a third rule lacks a seed: the two that are compared have the same ones."""
    for values in (THREE, {**THREE, "b": {1: 31.0, 3: 30.6}}):
        model = fitted(values)
        difference = SeedModel(values).difference("c", "a")
        low, high = model.conf_int().loc["C(rule)[T.c]"]
        assert difference.value == pytest.approx(model.params["C(rule)[T.c]"], rel=1e-9)
        assert difference.p == pytest.approx(model.pvalues["C(rule)[T.c]"], rel=1e-9)
        assert (difference.low, difference.high) == pytest.approx((low, high), rel=1e-9)


def test_a_missing_seed_leaves_the_mean_of_the_pairs_and_the_scatter_of_all():
    """Least squares alone would bring in the values of other rules: here -0.425."""
    values = {
        "a": {1: 10.0, 2: 12.0, 3: 20.0},
        "b": {1: 10.2, 2: 12.1, 3: 11.0},
        "c": {1: 11.0, 2: 13.2},
    }
    model = fitted(values)
    assert model.params["C(rule)[T.c]"] == pytest.approx(-0.425)
    difference = SeedModel(values).difference("c", "a")
    error = model.mse_resid**0.5  # times the root of 2 / 2 pairs
    assert difference.value == pytest.approx((1.0 + 1.2) / 2)
    margin = stats.t.isf(0.025, model.df_resid) * error
    assert difference.high - difference.value == pytest.approx(margin, rel=1e-9)
    p = 2 * stats.t.sf(1.1 / error, model.df_resid)
    assert difference.p == pytest.approx(p, rel=1e-9)


def test_a_seed_effect_that_all_rules_share_does_not_count():
    shift = {1: 0.0, 2: 5.0, 3: -4.0}
    moved = {
        rule: {seed: value + shift[seed] for seed, value in by_seed.items()}
        for rule, by_seed in THREE.items()
    }
    assert SeedModel(moved).difference("b", "a").p == pytest.approx(
        SeedModel(THREE).difference("b", "a").p, rel=1e-6
    )


@pytest.mark.parametrize(
    "values",
    [
        {"a": {1: 1.0}, "b": {1: 2.0, 2: 3.0}},
        {"a": {1: 1.0, 2: 2.0}, "b": {3: 1.0, 4: 3.0}},
        {"a": {1: 1.0, 2: 1.0}, "b": {1: 2.0, 2: 2.0}},
        {"a": {1: 1.0, 2: 2.0}},
        {},
    ],
    ids=["one seed", "no seed in common", "no variance", "one rule", "nothing"],
)
def test_what_cannot_be_tested_has_no_difference(values):
    assert SeedModel(values).difference("b", "a") is None


def test_a_rule_that_scatters_is_left_out_and_compared_by_its_own_pairs():
    draws = np.random.default_rng(1).normal(0, 0.01, (12, 3))
    values = {f"r{n}": dict(enumerate(row)) for n, row in enumerate(draws)}
    values["wild"] = {0: 2.0, 1: -1.0, 2: 0.5}
    model = SeedModel(values)
    assert model.scattered == ["wild"] and model.residuals.deviation < 0.02
    pair = stats.ttest_rel([*values["wild"].values()], [*values["r0"].values()])
    assert model.difference("wild", "r0").p == pytest.approx(pair.pvalue, rel=1e-9)


def test_one_rule_of_three_that_diverges_is_left_out():
    """The others' own fit tells: in the fit of all three its seeds' effects would reach them."""
    values = {
        "pre-norm": {1: 4.101, 2: 4.112, 3: 4.108},
        "post-norm": {1: 4.151, 2: 4.160, 3: 4.159},
        "diverges": {1: 5.0, 2: 9.0, 3: 4.2},
    }
    model = SeedModel(values)
    assert model.scattered == ["diverges"]
    pair = stats.ttest_rel([*values["post-norm"].values()], [*values["pre-norm"].values()])
    assert model.difference("post-norm", "pre-norm").p == pytest.approx(pair.pvalue, rel=1e-9)


@pytest.mark.parametrize("rules", [3, 8])
def test_rules_of_one_variance_are_left_out_once_in_a_hundred_at_most(rules):
    """Of 200 draws two are expected, and more than seven in one of a thousand such tests."""
    draws = np.random.default_rng(3).normal(0, 1, (200, rules, 3))
    left_out = 0
    for draw in draws:
        model = SeedModel({f"r{n}": dict(enumerate(row)) for n, row in enumerate(draw)})
        left_out += bool(model.scattered)
    assert left_out <= 7


def test_holm_is_the_step_down_by_hand():
    # Holm 1979: the smallest of m times m, the next m - 1, ..., never falling, at most 1
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.7, 0.6]) == [1.0, 1.0] and significance.holm([]) == []


def test_a_detectable_difference_is_found_four_times_of_five():
    """The runs of two rules share seeds.

    A paired t-test is made of differences with deviation 0.2 times the root of two.
    """
    for seeds in (2, 3, 5, 40):
        draws = np.random.default_rng(1).normal(0, 0.2, (2, 40_000, seeds))
        difference = significance.detectable(0.2, seeds, seeds - 1)
        p = stats.ttest_rel(draws[0] + difference, draws[1], axis=1).pvalue
        assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.01)  # five standard errors


def test_two_useless_systems_of_one_score_have_p_1():
    reference = [f"the {n} dogs run over the red house" for n in range(40)]
    first, second = ["."] * 40, ["."] * 20 + [","] * 20
    p = significance.paired(first, second, [reference], {"BLEU": BLEU()}, trials=200)
    assert p == {"BLEU": 1.0}


def test_a_difference_that_every_trial_has_is_not_significant():
    """One sentence of twelve that differ decides the score: it swaps its sign, never its size."""
    rng = random.Random(1)
    reference = [" ".join(rng.choices("abcdefgh", k=9)) for _ in range(30)]
    first = [line if n >= 12 else "x" * 9 for n, line in enumerate(reference)]
    second = [line if n >= 12 else "z" * 9 for n, line in enumerate(reference)]
    second[0] = reference[0]
    p = significance.paired(first, second, [reference], {"BLEU": BLEU()}, trials=200)
    assert p["BLEU"] > 0.9


def test_a_worse_system_is_tested_as_a_better_one_is():
    rng = random.Random(1)
    reference = [" ".join(rng.choices("abcdefgh", k=9)) for _ in range(40)]
    worse = [line if n % 2 else "x " * 9 for n, line in enumerate(reference)]
    args = [reference], {"BLEU": BLEU()}, 200
    p = significance.paired(reference, worse, *args)
    assert p == significance.paired(worse, reference, *args) and p["BLEU"] < 0.05


def test_ten_sentences_have_to_differ():
    assert significance.are_tested(["a"] * 12, ["b"] * 10 + ["a"] * 2)
    assert not significance.are_tested(["a"] * 12, ["b"] * 9 + ["a"] * 3)


TABLE_OF_T = 4.302653  # Student's t, 2 degrees of freedom, 97.5 %; a table's


WILD = {0: 2.0, 1: -1.0, 2: 0.8}


@pytest.fixture
def calm():
    """Twelve rules whose three seeds scatter by 0.01."""
    draws = np.random.default_rng(1).normal(0, 0.01, (12, 3))
    return {f"r{n}": dict(enumerate(row)) for n, row in enumerate(draws)}


def test_the_difference_of_a_rule_that_scatters_has_the_95_percent_interval_of_its_pairs(calm):
    difference = SeedModel({**calm, "wild": WILD}).difference("wild", "r0")
    pairs = np.array([WILD[seed] - calm["r0"][seed] for seed in range(3)])
    margin = TABLE_OF_T * pairs.std(ddof=1) / 3**0.5
    assert difference.value == pytest.approx(pairs.mean())
    assert difference.low == pytest.approx(pairs.mean() - margin, rel=1e-6)
    assert difference.high == pytest.approx(pairs.mean() + margin, rel=1e-6)


def test_every_rule_that_scatters_is_left_out(calm):
    wilder = {0: -30.0, 1: 10.0, 2: 50.0}
    model = SeedModel({**calm, "wild": WILD, "wilder": wilder})
    assert model.scattered == ["wilder", "wild"]
    assert model.residuals.deviation < 0.02


def test_rules_that_scatter_alike_have_no_variance_to_test(calm):
    """Left out by their scatter, and one apart with each seed: their paired t-test divides by 0."""
    higher = {seed: value + 1.0 for seed, value in WILD.items()}
    model = SeedModel({**calm, "wild": WILD, "higher": higher})
    assert sorted(model.scattered) == ["higher", "wild"]
    assert model.difference("higher", "wild") is None


def test_one_seed_in_common_is_no_test_whatever_other_rules_say_of_the_scatter(calm):
    model = SeedModel({**calm, "one seed": {0: 1.0}})
    assert model.shared_seeds("one seed", "r0") == [0]
    assert model.difference("one seed", "r0") is None


def test_a_comparison_of_documents_is_repeatable():
    """Of 30 documents a hundred draws of the signs are taken."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(0.0, 1.0, 30), rng.normal(0.2, 1.0, 30)
    p_values = {paired_values(list(first), list(second), 100) for _ in range(5)}
    assert len(p_values) == 1


@pytest.mark.parametrize(
    ("values", "side"),
    [
        ({1: 1.0, 2: 1.1, 3: 0.9}, 1),
        ({1: 1.0, 2: -0.5, 3: 0.4}, 0),
        ({1: -1.0, 2: 0.5, 3: -0.4}, 0),
        ({1: -1.0, 2: -1.1, 3: -0.9}, -1),
    ],
    ids=["above", "open, above", "open, below", "below"],
)
def test_a_difference_is_on_a_side_of_0_only_with_its_whole_interval(values, side):
    model = SeedModel({"rule": values, "baseline": dict.fromkeys(values, 0.0)})
    assert model.difference("rule", "baseline").side == side
