"""The statistics against published results, scipy, formulas written out and simulation."""

import csv
import math

import numpy as np
import pytest
from conftest import ROOT
from scipy import stats

from fairseq_rskip.tools import significance


def test_published_p_values_come_out_again():
    """Each table of results/scaled_tables.csv is one family: p of Welch's test over seeds, adjusted by Holm."""
    with open(ROOT / "results" / "scaled_tables.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    values = {
        (row["plan"], row["column"], row["row"]): [float(v.split(":")[1]) for v in row["values_by_seed"].split()]
        for row in rows
    }
    tested = [row for row in rows if row["test"] == "over seeds"]
    families = {(row["plan"], row["column"]): {} for row in tested}
    for row in tested:
        place = (row["plan"], row["column"])
        p = significance.welch(values[(*place, row["row"])], values[(*place, row["baseline"])])
        assert p == pytest.approx(float(row["p"]), rel=1e-12)
        families[place][p] = float(row["p_holm"])
    assert len(tested) == 10
    for family in families.values():
        assert significance.holm(list(family)) == pytest.approx(list(family.values()), rel=1e-12)


def test_welch_is_scipys_and_holm_is_the_step_down_by_hand():
    a, b = [30.1, 30.4, 29.9], [31.0, 30.8]
    assert significance.welch(a, b) == stats.ttest_ind(a, b, equal_var=False).pvalue
    for a, b in (([1.0], [2.0, 3.0]), ([1.0, 2.0], [3.0]), ([], []), ([1.0, 1.0], [2.0, 2.0])):
        assert significance.welch(a, b) is None  # one seed, or no variance
    # Holm 1979: the smallest of m times m, the next m - 1, ..., never falling, at most 1
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.7, 0.6]) == [1.0, 1.0] and significance.holm([]) == []


def test_a_detectable_difference_is_found_four_times_of_five():
    for seeds in (2, 3, 5, 40):
        draws = np.random.default_rng(1).normal(0, 0.2, (2, 40_000, seeds))
        difference = significance.detectable(0.2, seeds)
        p = stats.ttest_ind(draws[0] + difference, draws[1], axis=1, equal_var=False).pvalue
        assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.01)  # five standard errors
    assert significance.pooled_deviation([[1.0, 3.0], [5.0, 5.0, 8.0], [7.0]]) == pytest.approx(math.sqrt((2 + 6) / 3))
    assert significance.pooled_deviation([[1.0], []]) is None
