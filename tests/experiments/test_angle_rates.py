"""The answers about the fixed angle at its own rate, on a table whose answers are known."""

import json
import runpy
import sys

import pandas
import pytest
from conftest import ROOT
from scipy import stats

from fairseq_rskip.tools.report.reading import Line

SCRIPT = ROOT / "experiments" / "angle_rates.py"
DEPTHS = ("6 layers", "12 layers", "72 layers")


def run(path, capsys, monkeypatch):
    """The two tables' lines, without headers, and the sentences."""
    monkeypatch.setattr(sys, "argv", ["angle_rates", str(path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    first, second, _, sentences = capsys.readouterr().out.split("\n\n")
    return first.splitlines()[2:], second.splitlines()[2:], sentences.splitlines()


def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def report(path, **rules):
    """``rules``: rule -> the means at the depths and the rates that were chosen."""
    lines = []
    for rule, (means, rates) in rules.items():
        for depth, mean, rate in zip(DEPTHS, means, rates):
            noise = {seed: 0.002 * (-1) ** (seed + len(rule)) for seed in (1, 2, 3)}
            values = {seed: round(mean + 0.1 * seed + noise[seed], 4) for seed in noise}
            line = {"row": rule.replace("_", " ").replace("pre norm", "pre-norm"), "column": depth}
            line |= {"metric": "valid_loss", "seeds_planned": 3}
            cells = {"chosen": {"lr": rate}, "values_by_seed": values}
            lines.append({**line, **{name: json.dumps(cell) for name, cell in cells.items()}})
    pandas.DataFrame(lines).to_csv(path, index=False)


def test_the_answers_are_the_registered_ones(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.csv"
    report(
        path,
        pre_norm=([5.0, 5.0, 5.0], [0.006, 0.012, 0.006]),
        fixed_angle=([4.9, 5.0, 5.1], [0.012, 0.006, 0.003]),
    )
    table, _, sentences = run(path, capsys, monkeypatch)
    assert [cells(line)[-1] for line in table] == ["better", "open", "not better"]
    assert sentences[0] == "pre-norm: rates 0.006, 0.012, 0.006: one rate for all depths"
    assert sentences[1].startswith("pre-norm: 72 layers minus 6 layers +0.000, +0.000, +0.000: doe")
    assert sentences[2] == "pre-norm: 3 layers or 48 layers is missing"
    assert sentences[3] == "fixed angle: rates 0.012, 0.006, 0.003: no one rate for all depths"
    assert sentences[4].endswith("does not gain from depth")


def test_every_rule_is_compared_with_the_fixed_angle(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.csv"
    report(
        path,
        pre_norm=([5.0, 5.2, 5.0], [0.006, 0.012, 0.006]),
        fixed_angle=([4.9, 5.0, 5.1], [0.012, 0.006, 0.003]),
        Keel=([5.1, 4.9, 5.1], [0.012, 0.006, 0.003]),
        DeepNorm=([5.1, 8.4, 8.4], [0.012, 0.006, 0.003]),
    )
    path.write_text(path.read_text().replace("6 layers", "3 layers").replace("72 lay", "48 lay"))
    _, table, sentences = run(path, capsys, monkeypatch)
    answers = {tuple(cells(line)[:2]): cells(line)[-2] for line in table}
    assert answers["3 layers", "Keel"] == "behind"
    assert answers["12 layers", "Keel"] == "ahead"
    assert answers["48 layers", "Keel"] == "open"
    assert answers["48 layers", "fixed angle"] == ""
    assert answers["48 layers", "pre-norm"] == "ahead"
    assert answers["3 layers", "DeepNorm"] == "behind"
    assert answers["48 layers", "DeepNorm"] == "did not learn"
    assert "fixed angle: 48 layers minus 3 layers +0.200 (3 seeds)" in sentences


def test_depths_without_a_common_seed_are_named(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.csv"
    means = [5.0, 5.1, 5.2], [0.006, 0.006, 0.006]
    report(path, pre_norm=means, fixed_angle=means)
    table = pandas.read_csv(path)
    table["column"] = table["column"].replace({"6 layers": "3 layers", "72 layers": "48 layers"})
    deepest = table["column"] == "48 layers"
    table.loc[deepest, "values_by_seed"] = json.dumps({4: 5.2, 5: 5.3})
    table.to_csv(path, index=False)
    *_, sentences = run(path, capsys, monkeypatch)
    assert sentences[2] == "pre-norm: 48 layers and 3 layers share no seed"


RATES = runpy.run_path(str(SCRIPT))


def line_of(values, rate=0.006):
    values = dict(enumerate(values, start=1))
    number = len(values)
    return Line("", "", "", "valid_loss", values, number, {"lr": rate}, [], [], None, None, "")


@pytest.mark.parametrize(("rate", "said"), [(0.012, ": one rate for"), (0.013, ": no one rate")])
def test_rates_are_one_up_to_a_factor_of_two(rate, said):
    lines = {"6 layers": line_of([5.0], 0.006), "72 layers": line_of([5.0], rate)}
    assert said in RATES["rates"](lines)


@pytest.mark.parametrize(
    ("deep", "said"), [([4.9, 4.8], "gains from depth"), ([4.9, 5.1], "does not gain")]
)
def test_a_rule_gains_from_depth_only_with_every_seed(deep, said):
    lines = {"6 layers": line_of([5.0, 5.0]), "72 layers": line_of(deep)}
    assert said in RATES["gain"](lines)


@pytest.mark.parametrize(("behind", "learned"), [(0.99, True), (1.01, False)])
def test_a_rule_a_bit_behind_the_best_did_not_learn(behind, learned):
    rules = {"pre-norm": [5.0, 5.1, 5.3], "fixed angle": [5.2, 5.2, 5.6]}
    rules["Keel"] = [value + behind for value in (5.0, 5.2, 5.2)]
    lines = {rule: {"6 layers": line_of(values)} for rule, values in rules.items()}
    table = RATES["beside"]("pre-norm", lines).set_index("rule")
    assert (table["answer"]["Keel"] != "did not learn") is learned


def test_the_two_rules_of_question_1_are_compared_by_their_pair_alone():
    """A third rule of the same depth, whose seeds scatter otherwise, changes no interval."""
    values = {"pre-norm": [5.0, 5.1, 5.3], "fixed angle": [4.9, 5.2, 5.0], "Keel": [6.0, 6.5, 6.9]}
    lines = {rule: {"6 layers": line_of(each)} for rule, each in values.items()}
    (row,) = RATES["better_start"](lines).to_dict("records")
    pair = stats.ttest_rel(values["fixed angle"], values["pre-norm"])
    interval = pair.confidence_interval(0.95)
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("page", "baseline"), [("fixed-angle.md", "pre-norm"), ("depth-history.md", "fixed angle")]
)
def test_a_page_has_the_differences_that_the_archive_gives(page, baseline):
    rules = RATES["read"](ROOT / "results" / "angle_rates.csv")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("−", "-")
    compared = RATES["beside"](baseline, rules).dropna(subset="low")
    assert len(compared) > 20
    for line in compared.to_dict("records"):
        difference, low, high = line[f"minus {baseline}"], line["low"], line["high"]
        assert f"{difference:+.3f} ({low:.3f} to {high:.3f})" in text, line
