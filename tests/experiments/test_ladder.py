"""The test of the ladder on tables whose answer is known."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest

from fairseq_rskip.tools.report.reading import Line
from fairseq_rskip.tools.significance import SeedModel

SCRIPT = Path(__file__).parents[2] / "experiments" / "ladder.py"
LADDER = runpy.run_path(str(SCRIPT))
ROWS = list(LADDER["REGISTERED"])
RUNGS = list(LADDER["RUNGS"])
PRE_NORM, POST_NORM = ROWS[:2]


def report(means_by_rung, seeds, scatter=None):
    """A report whose rows scatter by 0.001; over an even number of seeds that is 0 on average.

    ``scatter``: row -> a larger one.
    """
    scatter = scatter or {}
    lines = []
    for rung, means in means_by_rung.items():
        for number, (row, mean) in enumerate(zip(ROWS, means)):
            values = {}
            for seed in range(1, seeds[rung] + 1):
                noise = scatter.get(row, 0.001) * (-1) ** (seed + number)
                values[seed] = round(mean + 0.1 * seed + noise, 4)
            line = {"column": rung, "row": row, "metric": "valid_loss"}
            line |= {"seeds_planned": seeds[rung], "values_by_seed": json.dumps(values)}
            lines.append(line)
    return pandas.DataFrame(lines)


def run(tmp_path, capsys, monkeypatch, table, *words):
    path = tmp_path / "report.csv"
    table.to_csv(path, index=False)
    argv = ["ladder", str(path), *map(str, words), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out, error = capsys.readouterr()
    return (out + error).splitlines()


SMALL = [5.0, 4.8, 4.9, 5.1, 5.2, 5.3, 5.4]
SAME = [4.0, 3.8, 3.9, 4.1, 4.2, 4.3, 4.4]
CROSSED = [4.0, 4.2, 3.9, 4.1, 4.2, 4.3, 4.4]  # post-norm falls behind pre-norm
LEVEL = [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
REVERSED = [4.0, 3.8, 3.9, 4.4, 4.3, 4.2, 4.1]  # the last four, all behind pre-norm: ρ 0.64


@pytest.mark.parametrize(
    ("large", "seeds", "said"),
    [
        (SAME, 3, "the order holds: no rule changes sides"),
        (SAME, 1, "the order holds: no rule changes sides"),
        (CROSSED, 3, "the order does not hold: post-norm between 0.5 M and 1.8 M"),
        (CROSSED, 1, "the order does not hold: post-norm between 0.5 M and 1.8 M"),
        (LEVEL, 4, "open: no rule changes sides, and the ranks agree too little"),
        (REVERSED, 4, "open: no rule changes sides, and the ranks agree too little"),
    ],
    ids=["same", "same, one seed", "crossed", "crossed, one seed", "level", "reversed"],
)
def test_the_verdict_is_the_registered_one(tmp_path, capsys, monkeypatch, large, seeds, said):
    means = dict(zip(RUNGS, [SMALL, SMALL, large]))
    table = report(means, dict(zip(RUNGS, [3, 3, seeds])))
    lines = run(tmp_path, capsys, monkeypatch, table)
    assert lines[-1] == said
    if large is REVERSED:
        assert "0.5 M and 1.8 M: Spearman's ρ = 0.64, 7 rules" in lines
    sides = pandas.read_csv(tmp_path / "ladder_sides.csv")
    small = sides[(sides["rung"] == RUNGS[0]) & (sides["row"] == POST_NORM)].iloc[0]
    assert small["difference"] == pytest.approx(-0.2, abs=0.002) and small["side"] == -1
    assert sides["low"].isna().sum() == (6 if seeds == 1 else 0)
    assert (tmp_path / "ladder.png").stat().st_size > 5000


def test_a_further_report_adds_the_seeds_that_are_missing(tmp_path, capsys, monkeypatch):
    table = report(dict(zip(RUNGS, [SMALL, SMALL, CROSSED])), dict.fromkeys(RUNGS, 3))
    last = table[table["column"] == RUNGS[2]]
    again = {seed: value + 0.02 for seed, value in json.loads(last.iloc[0].values_by_seed).items()}
    table.loc[last.index, "values_by_seed"] = [
        json.dumps({"1": json.loads(values)["1"]}) for values in last["values_by_seed"]
    ]
    last.loc[last.index[0], "values_by_seed"] = json.dumps(again)
    further = tmp_path / "further.csv"
    last.to_csv(further, index=False)
    lines = run(tmp_path, capsys, monkeypatch, table, further)
    assert lines[0] == f"pre-norm, {RUNGS[2]}, seed 1, trained again: +0.020"
    assert lines[1] == f"post-norm, {RUNGS[2]}, seed 1, trained again: +0.000"
    sides = pandas.read_csv(tmp_path / "ladder_sides.csv")
    of_last = sides[sides["rung"] == RUNGS[2]]
    assert (of_last["seeds"] == 3).all() and of_last["low"].notna().all()
    # seed 1 is the first report's, 2 and 3 the second's, where pre-norm has 0.02 more
    post_norm = of_last[of_last["row"] == POST_NORM].iloc[0]
    assert post_norm["difference"] == pytest.approx(0.2 - 0.02 * 2 / 3, abs=0.002)


def test_the_rungs_are_in_order_of_size_whatever_the_order_of_the_files(
    tmp_path, capsys, monkeypatch
):
    table = report(dict(zip(RUNGS, [SMALL, SMALL, CROSSED])), dict.fromkeys(RUNGS, 3))
    smaller = tmp_path / "smaller.csv"
    table[table["column"] != RUNGS[2]].to_csv(smaller, index=False)
    lines = run(tmp_path, capsys, monkeypatch, table[table["column"] == RUNGS[2]], smaller)
    assert lines[-1] == "the order does not hold: post-norm between 0.5 M and 1.8 M"
    sides = pandas.read_csv(tmp_path / "ladder_sides.csv")
    assert list(dict.fromkeys(sides["rung"])) == RUNGS


def test_without_a_rung_or_a_rule_there_is_no_verdict(tmp_path, capsys, monkeypatch):
    table = report(dict(zip(RUNGS, [SMALL, SAME])), dict.fromkeys(RUNGS, 3))
    table = table[(table["row"] != "Keel") | (table["column"] != RUNGS[1])]
    assert run(tmp_path, capsys, monkeypatch, table)[-1] == (
        "no verdict yet, without Keel on rung 0.5 M; all rules on rung 1.8 M; "
        "so far the order holds: no rule changes sides"
    )


@pytest.mark.parametrize("noisy", [POST_NORM, PRE_NORM])
def test_one_seed_of_a_rule_that_scatters_is_no_change_of_sides(
    tmp_path, capsys, monkeypatch, noisy
):
    """By four of the other rules' deviations it would be; its own are two hundred times theirs."""
    far_ahead = [5.0, 3.0, *SMALL[2:]]
    means = dict(zip(RUNGS, [far_ahead, far_ahead, CROSSED]))
    table = report(means, dict(zip(RUNGS, [3, 3, 1])), {noisy: 0.2})
    last = table["column"] == RUNGS[2]
    exact = json.dumps({1: CROSSED[0]}), json.dumps({1: CROSSED[1]})
    table.loc[last & (table["row"] == PRE_NORM), "values_by_seed"] = exact[0]
    table.loc[last & (table["row"] == POST_NORM), "values_by_seed"] = exact[1]
    lines = run(tmp_path, capsys, monkeypatch, table)
    assert f"0.5 M: {noisy} scatter more than the model allows" in lines
    assert "does not hold" not in lines[-1]


@pytest.mark.parametrize(
    ("half", "said"),
    [
        (3.9, "-0.100 bits, the transferred rate is wrong"),
        (3.999, "-0.001 bits, no better"),
        (4.0, "+0.000 bits, no better"),
    ],
)
def test_another_rate_that_is_better_is_named(tmp_path, capsys, monkeypatch, half, said):
    table = report(dict(zip(RUNGS, [SMALL, SAME, SAME])), dict.fromkeys(RUNGS, 3))
    line = {"column": "0.5 M, half", "row": PRE_NORM, "metric": "valid_loss", "seeds_planned": 1}
    mine = (table["column"] == RUNGS[1]) & (table["row"] == PRE_NORM)
    (values,) = table[mine]["values_by_seed"]
    line["values_by_seed"] = json.dumps({1: json.loads(values)["1"] + half - 4.0})
    rates = tmp_path / "rates.csv"
    pandas.DataFrame([line]).to_csv(rates, index=False)
    lines = run(tmp_path, capsys, monkeypatch, table, "--rates", rates)
    assert lines[-2] == f"pre-norm, 0.5 M, half the rate: {said}"


def test_a_rung_without_pre_norm_is_one_line(tmp_path, capsys, monkeypatch):
    """In the only report, or as a rung that a further report adds."""
    table = report({"small": SMALL}, {"small": 2})
    without = table[table["row"] != PRE_NORM]
    further = tmp_path / "further.csv"
    without.replace("small", "large").to_csv(further, index=False)
    for words, rung in (((without,), "small"), ((table, further), "large")):
        *_, line = run(tmp_path, capsys, monkeypatch, *words)
        assert line.endswith(f"rung '{rung}' has no row 'pre-norm' with a result")


FIRST, SECOND, THIRD = LADDER["RUNGS"]


def rung(deviation):
    """Two rows of two seeds, whose runs have this standard deviation."""
    first = {1: 5.0, 2: 5.2}
    second = {1: 4.9 + deviation, 2: 5.1 - deviation}
    model = SeedModel({"pre-norm": first, "Keel": second})
    assert model.residuals.deviation == pytest.approx(deviation)
    return model


def one_seed(difference):
    return SeedModel({"pre-norm": {1: 4.0}, "Keel": {1: 4.0 + difference}})


@pytest.mark.parametrize(
    ("difference", "side"), [(-0.041, -1), (-0.039, 0), (0.039, 0), (0.041, 1)]
)
def test_one_seed_is_on_a_side_beyond_four_deviations_of_the_rung_below(difference, side):
    *_, last = LADDER["sides"]({FIRST: rung(0.01), SECOND: one_seed(difference)})
    assert (last.rung, last.row, last.side) == (SECOND, "Keel", side)


@pytest.mark.parametrize(("deviation", "side"), [(0.01, -1), (0.03, 0)])
def test_the_deviation_is_that_of_the_rung_directly_below(deviation, side):
    rungs = {FIRST: rung(0.02), SECOND: rung(deviation), THIRD: one_seed(-0.06)}
    *_, last = LADDER["sides"](rungs)
    assert (last.rung, last.side) == (THIRD, side)


def test_the_deviation_of_a_rule_that_scatters_is_that_of_its_differences_over_root_two():
    """The difference of two runs has the variance of both."""
    draws = np.random.default_rng(1).normal(0, 0.01, (12, 3))
    values = {f"r{n}": dict(enumerate(row)) for n, row in enumerate(draws)}
    values["pre-norm"] = dict.fromkeys(range(3), 0.0)
    model = SeedModel({**values, "wild": {0: -2.0, 1: 0.0, 2: 2.0}})
    assert model.scattered == ["wild"]
    assert LADDER["_deviation"](model, "wild") == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("rho", "said"), [(0.8, "the order holds"), (0.79, "open: no rule changes sides")]
)
def test_the_order_holds_from_a_rank_correlation_of_eight_tenths(rho, said):
    correlations = [(f"{FIRST} and {SECOND}", 1.0, 7), (f"{SECOND} and {THIRD}", rho, 7)]
    assert LADDER["verdict"]([], correlations, []).startswith(said)


@pytest.mark.parametrize(
    ("change", "said"), [(-0.021, "the transferred rate is wrong"), (-0.019, "no better")]
)
def test_another_rate_is_better_beyond_two_deviations(change, said):
    line = Line("Keel", SECOND, "", "valid_loss", {1: 4.0}, 1, {}, [], [], None, None, "")
    half = dataclasses.replace(line, column=f"{SECOND}, half", values={1: 4.0 + change})
    rungs, models = {SECOND: {"Keel": line}}, {SECOND: rung(0.01)}
    (sentence,) = LADDER["wrong_rates"](rungs, models, [half])
    assert sentence.endswith(said)
