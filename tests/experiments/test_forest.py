"""The figures of all rules: their CSVs are those of the reports, every rule is in the legend."""

import importlib

import pandas
import pytest
from conftest import ROOT
from matplotlib.colors import to_hex

TABLES = {"rivals": "rivals", "lm_rivals": "lm-rivals"}  # report -> table


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("forest")


def archived(report):
    return pandas.read_csv(ROOT / f"results/forest_{report}.csv")


@pytest.mark.parametrize("report", TABLES)
def test_the_differences_are_those_of_the_report(script, report):
    expected = script.differences(ROOT / f"results/{report}.csv").set_index("row")
    shown = archived(report).set_index("row")
    assert shown.index.to_list() == expected.index.to_list()
    numbers = ["difference", "low", "high"]  # rounded to four digits
    assert (shown[numbers] - expected[numbers]).abs().to_numpy().max() < 1.01e-4
    assert shown["scattered"].to_list() == expected["scattered"].to_list()


@pytest.mark.parametrize("report", TABLES)
def test_every_rule_has_a_family_of_the_legend(script, report):
    table = archived(report)
    families = script.family_of_rows(TABLES[report])
    assert set(table["row"]) <= families.keys()
    assert "weighted branch" in families["GPT-2"]
    assert families["GPT-2"] == families["DeepNorm"]

    figure = script.draw(table, families)
    (legend,) = figure.legends
    titles = [text.get_text() for text in legend.get_texts()]
    named = {families[row] for row in table["row"]}
    assert titles == [
        *(family for family in script.FAMILIES if family in named),
        "seeds scatter: own interval",
    ]
    *filled, is_open = legend.legend_handles
    assert all(handle.get_mfc() == handle.get_color() for handle in filled)
    assert is_open.get_mfc() == "white"


def test_a_rule_far_behind_is_written_at_the_edge(script):
    lines = [("near", -0.1, False), ("open", 0.2, True), ("far", 2.79, False)]
    table = pandas.DataFrame(
        {"row": row, "difference": value, "low": value - 0.02, "high": value + 0.02, "scattered": s}
        for row, value, s in lines
    )
    near, far = [*script.FAMILIES][:2]
    (axis,) = script.draw(table, {"near": near, "far": far}).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["far", "open", "near"]
    (text,) = axis.texts
    assert text.get_text() == "+2.79 (+2.77 to +2.81) →" and text.get_position()[1] == 0
    assert to_hex(text.get_color()) == to_hex(script.colour_of(far))
    assert axis.get_xlim()[1] < 1
    markers = {line.get_ydata()[0]: line for line in axis.lines if len(line.get_ydata()) == 1}
    assert markers.keys() == {1, 2}
    assert markers[1].get_mfc() == "white" and markers[1].get_color() == "grey"
    assert markers[2].get_mfc() == markers[2].get_color() == script.colour_of(near)
