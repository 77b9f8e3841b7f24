"""The rank correlation of two tables: experiments/rank_correlation.py."""

import json
import runpy
import sys
from types import MappingProxyType

import numpy
import pandas
import pytest
from conftest import ROOT
from scipy import stats

SCRIPT = ROOT / "experiments" / "rank_correlation.py"
TEN = [*"qrstuvwxyz"]


def save_report(path, rows, seeds=MappingProxyType({}), metric="valid_loss"):
    """A report whose rows have the means 0, 1, 2, …, of 3 seeds each or what ``seeds`` says."""
    lines = []
    for mean, row in enumerate(rows):
        values = json.dumps(dict.fromkeys(range(seeds.get(row, 3)), mean))
        lines.append({"row": row, "column": "", "values_by_seed": values})
    table = pandas.DataFrame(lines).assign(seeds_planned=3, metric=metric)
    table.to_csv(path, index=False)
    return table


@pytest.fixture
def correlate(tmp_path, monkeypatch, capsys):
    """Run the script on two reports; returns its exit status and what it says."""

    def call(first, second):
        monkeypatch.setattr(sys, "argv", ["rank_correlation", str(first), str(second)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code, "".join(capsys.readouterr())

    return call


@pytest.fixture
def ten_rows(tmp_path):
    save_report(tmp_path / "ten.csv", TEN)
    return tmp_path / "ten.csv"


SWAPPED = [*"rqstuvwxzy"]  # two pairs of neighbours swapped: 1 - 6 * 4 / (10 * 99) = 0.976


def test_the_rows_of_two_tables_are_ranked(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "swapped.csv", SWAPPED)
    status, said = correlate(ten_rows, tmp_path / "swapped.csv")
    assert not status and "ρ = 0.98" in said and "10 rows" in said


def test_a_metric_of_which_more_is_better_is_ranked_the_other_way_round(
    tmp_path, correlate, ten_rows
):
    save_report(tmp_path / "up.csv", SWAPPED, metric="chrF")
    assert "ρ = -0.98" in correlate(ten_rows, tmp_path / "up.csv")[1]


def test_a_row_of_one_table_alone_is_left_out(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "more.csv", [*SWAPPED, "only here"])
    said = correlate(ten_rows, tmp_path / "more.csv")[1]
    assert "10 rows" in said and "only here" not in said


def test_a_row_that_lacks_seeds_is_left_out(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "ten.csv", [*TEN, "lacks"], seeds={"lacks": 2})
    save_report(tmp_path / "swapped.csv", [*SWAPPED, "lacks"], seeds={"lacks": 2})
    said = correlate(ten_rows, tmp_path / "swapped.csv")[1]
    assert "10 rows" in said and "ρ = 0.98" in said


def test_fewer_than_ten_rows_in_common_are_refused(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "few.csv", TEN[:6])
    status, said = correlate(ten_rows, tmp_path / "few.csv")
    assert status and "the tables share 6 rows with a result" in said


def test_a_table_without_its_columns_is_refused(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "t.csv", TEN).drop(columns="row").to_csv(tmp_path / "other.csv")
    status, said = correlate(ten_rows, tmp_path / "other.csv")
    assert status and "other.csv has no column 'row'" in said


def test_a_row_that_is_there_twice_is_refused(tmp_path, correlate, ten_rows):
    save_report(tmp_path / "twice.csv", [*TEN, "u"])
    status, said = correlate(ten_rows, tmp_path / "twice.csv")
    assert status and "twice.csv has several lines for the row 'u'" in said


FIRST = numpy.arange(12.0)


SECOND = FIRST[[1, 0, 4, 3, 2, 8, 6, 5, 7, 11, 10, 9]]


@pytest.fixture(scope="module")
def correlation():
    """ρ, p and the interval's ends."""
    script = runpy.run_path(str(ROOT / "experiments" / "rank_correlation.py"))
    return script["rank_correlation"](FIRST, SECOND)


def test_p_is_two_sided_by_students_t(correlation):
    rho, p, _, _ = correlation
    squares = ((FIRST - SECOND) ** 2).sum()
    assert rho == pytest.approx(1 - 6 * squares / (12 * (12**2 - 1)))
    t = rho * (10 / (1 - rho**2)) ** 0.5
    assert p == pytest.approx(2 * stats.t.sf(t, 10))


def test_the_interval_has_95_percent_of_the_resampled_rows(correlation):
    """Rows are drawn with both of their ranks; other draws here than the script's, and fewer."""
    _, _, low, high = correlation
    values = []
    for rows in numpy.random.default_rng(2).integers(12, size=(2000, 12)):
        ranks = stats.rankdata(FIRST[rows]), stats.rankdata(SECOND[rows])
        values.append(numpy.corrcoef(*ranks)[0, 1])
    expected = numpy.quantile(values, [0.025, 0.975])
    assert [low, high] == pytest.approx(expected.tolist(), abs=0.03)
