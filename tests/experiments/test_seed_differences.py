"""experiments/seed_differences.py: rates of several commands, each with further changes."""

import re
import runpy
import sys

import pytest
from conftest import ROOT
from experiment_runs import IMAGES, finish, tables, write
from scipy import stats
from vision_helpers import write_folder

from fairseq_rskip.errors import UserError

SCRIPT = ROOT / "experiments" / "seed_differences.py"
HELD_OUT = {**IMAGES["options"], "valid-images": 40}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, metric):
    """The finished runs of two rates with 24 iterations; a call runs the script on them."""
    path = write(tmp_path, IMAGES, seeds=[3, 1], metric=metric, options=HELD_OUT)
    of_rates = {  # the first seed, 3, has the lowest error at the rate 0.1
        0.1: {"plain": {3: 10.0, 1: 30.0}, "recursive": {3: 14.0, 1: 34.1}},
        0.2: {"plain": {3: 20.0, 1: 5.0}, "recursive": {3: 24.0, 1: 5.1}},
    }
    for rate, values in of_rates.items():
        (table,) = tables(path, changes=["iterations=24", f"lr={rate}"])
        finish(table, tmp_path, values, metric=metric)

    def call(*words):
        argv = ["seed_differences", path, "--runs", tmp_path, "--rates", "0.1", "0.2", *words]
        monkeypatch.setattr(sys, "argv", [*map(str, argv)])
        with pytest.raises(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return "".join(capsys.readouterr())

    return call


@pytest.mark.parametrize("metric", ["valid_error"])
def test_rates_are_chosen_by_the_first_seed_among_runs_with_the_changes(run):
    row = run("--set", "iterations=24", "--against", "plain").splitlines()[2]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1:3] == ["recursive", "plain"] and float(cells[3]) == pytest.approx(4.05)
    assert "has no finished run" in run()
    assert "--set lr=0.1: expected NAME=VALUE, once for each option" in run("--set", "lr=0.1")


@pytest.mark.parametrize("metric", ["error"])
def test_rates_are_not_chosen_on_the_test_set(run):
    assert "--rates chooses by valid_error, and the metric of" in run("--set", "iterations=24")


def test_tests_against_one_row_are_corrected_and_the_fewest_seeds_are_said():
    script = runpy.run_path(str(SCRIPT))
    rows = {
        "base": {1: 1.0, 2: 1.2, 3: 1.1},
        "far": {1: 2.0, 2: 2.1, 3: 2.2},
        "near": {1: 1.3, 2: 1.2},
    }
    table = script["differences"]("", rows, ["base"]).set_index("row")
    p = table["p"]
    assert p["far"] < p["near"]
    assert table["p_holm"]["far"] == pytest.approx(2 * p["far"])
    assert table["p_holm"]["near"] == pytest.approx(max(2 * p["far"], p["near"]))
    assert "3 rows, 2 seeds or more" in script["describe"]("", rows)


def test_a_row_may_be_left_out_of_the_model():
    leave_out = runpy.run_path(str(SCRIPT))["leave_out"]
    columns = {"shallow": {"base": {1: 1.0}, "far": {1: 2.0}}, "deep": {"base": {1: 3.0}}}
    leave_out(columns, ["far"])
    assert columns == {"shallow": {"base": {1: 1.0}}, "deep": {"base": {1: 3.0}}}
    with pytest.raises(UserError, match="no finished row 'near'; expected base"):
        leave_out(columns, ["near"])


def test_the_runs_may_be_those_of_other_data(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, IMAGES)
    folder = write_folder(tmp_path / "set")
    (table,) = tables(path, corpus=str(folder))
    finish(table, tmp_path, {"plain": {1: 10.0, 2: 12.0}, "recursive": {1: 13.0, 2: 15.1}})
    argv = ["seed_differences", str(path), "--runs", str(tmp_path)]
    for words, said in (
        (["--corpus", str(folder)], "2 rows, 2 seeds or more"),
        ([], "no finished run"),
    ):
        monkeypatch.setattr(sys, "argv", [*argv, *words])
        with pytest.raises(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert said in "".join(capsys.readouterr())


FUNCTIONS = runpy.run_path(str(ROOT / "experiments" / "seed_differences.py"))


ROWS = {
    "base": {1: 1.0, 2: 1.2, 3: 1.1},
    "far": {1: 2.0, 2: 2.1, 3: 2.2},
    "near": {1: 1.3, 2: 1.2, 3: 1.4},
}


def test_the_p_of_a_pair_alone_is_scipys_whatever_the_third_row_is():
    table = FUNCTIONS["differences"]("", ROWS, ["base"]).set_index("row")
    for row in ("far", "near"):
        pair = stats.ttest_rel([*ROWS[row].values()], [*ROWS["base"].values()])
        assert table["p_pair_alone"][row] == pytest.approx(pair.pvalue, rel=1e-9)
        assert table["p"][row] != pytest.approx(pair.pvalue, rel=1e-2)


def test_the_interval_of_two_rows_is_that_of_scipys_paired_t_test():
    two = {row: ROWS[row] for row in ("base", "far")}
    (line,) = FUNCTIONS["differences"]("", two, ["base"]).to_dict("records")
    pair = stats.ttest_rel([*ROWS["far"].values()], [*ROWS["base"].values()])
    low, high = pair.confidence_interval(0.95)
    assert [line["difference"], line["low"], line["high"]] == pytest.approx([1.0, low, high])


def test_the_tests_against_each_row_are_a_family_of_their_own():
    table = FUNCTIONS["differences"]("", ROWS, ["base", "far"])
    for baseline in ("base", "far"):
        family = table[table["baseline"] == baseline]
        assert len(family) == 2
        smallest = family["p"].min()
        assert family["p_holm"].min() == pytest.approx(2 * smallest)


def test_the_difference_that_is_detected_has_four_of_five_chances():
    """Two rows, three seeds: 2 degrees of freedom, whose t at 97.5 % is 4.302653."""
    text = FUNCTIONS["describe"]("", {row: ROWS[row] for row in ("base", "far")})
    deviation, least = map(float, re.findall(r"deviation ([\d.]+),.*detects ([\d.]+)", text)[0])
    assert "2 degrees of freedom" in text
    shift = least / (deviation * (2 / 3) ** 0.5)
    assert stats.nct.sf(4.302653, 2, shift) == pytest.approx(0.8, abs=0.01)


def test_the_same_runs_under_two_labels_count_once(tmp_path, capsys):
    same = {**IMAGES["rows"][1], "label": "same"}
    (table,) = tables(write(tmp_path, IMAGES, rows=[*IMAGES["rows"], same]))
    finish(table, tmp_path, {"plain": {1: 10.0, 2: 12.0}, "recursive": {1: 13.0, 2: 15.1}})
    columns = FUNCTIONS["read_runs"](table, tmp_path)
    assert [list(rows) for rows in columns.values()] == [["plain", "recursive"]]
    assert "same: the same runs as another row, left out" in capsys.readouterr().out
