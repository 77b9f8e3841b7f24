"""The test of the ladder on tables whose answer is known."""

import json
import runpy
import sys
from pathlib import Path

import pandas
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "ladder.py"
ROWS = ["pre-norm", "a", "b", "c", "d", "e", "f"]


def report(means_by_rung, seeds):
    """A report whose rows scatter by 0.001; over an even number of seeds that is 0 on average."""
    lines = []
    for rung, means in means_by_rung.items():
        for number, (row, mean) in enumerate(zip(ROWS, means)):
            values = {}
            for seed in range(1, seeds[rung] + 1):
                noise = 0.001 * (-1) ** (seed + number)
                values[seed] = round(mean + 0.1 * seed + noise, 4)
            line = {"column": rung, "row": row, "metric": "valid_loss"}
            line |= {"seeds_planned": seeds[rung], "values_by_seed": json.dumps(values)}
            lines.append(line)
    return pandas.DataFrame(lines)


def run(tmp_path, capsys, monkeypatch, table):
    path = tmp_path / "report.csv"
    table.to_csv(path, index=False)
    monkeypatch.setattr(sys, "argv", ["ladder", str(path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out, error = capsys.readouterr()
    return (out + error).splitlines()[-1]


SMALL = [5.0, 4.8, 4.9, 5.1, 5.2, 5.3, 5.4]
SAME = [4.0, 3.8, 3.9, 4.1, 4.2, 4.3, 4.4]
CROSSED = [4.0, 4.2, 3.9, 4.1, 4.2, 4.3, 4.4]  # a falls behind pre-norm
LEVEL = [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("large", "seeds", "said"),
    [
        (SAME, 3, "the order holds: no rule changes sides"),
        (SAME, 1, "the order holds: no rule changes sides"),
        (CROSSED, 3, "the order does not hold: a between small and large"),
        (CROSSED, 1, "the order does not hold: a between small and large"),
        (LEVEL, 4, "open: no rule changes sides, and the ranks agree too little or are too few"),
    ],
    ids=["same", "same, one seed", "crossed", "crossed, one seed", "level"],
)
def test_the_verdict_is_the_registered_one(tmp_path, capsys, monkeypatch, large, seeds, said):
    table = report({"small": SMALL, "large": large}, {"small": 3, "large": seeds})
    assert run(tmp_path, capsys, monkeypatch, table) == said
    sides = pandas.read_csv(tmp_path / "ladder_sides.csv")
    small = sides[(sides["rung"] == "small") & (sides["row"] == "a")].iloc[0]
    assert small["difference"] == pytest.approx(-0.2, abs=0.002) and small["side"] == -1
    assert sides["low"].isna().sum() == (6 if seeds == 1 else 0)
    assert (tmp_path / "ladder.png").stat().st_size > 5000


def test_a_rung_without_pre_norm_is_one_line(tmp_path, capsys, monkeypatch):
    table = report({"small": SMALL}, {"small": 2})
    line = run(tmp_path, capsys, monkeypatch, table[table["row"] != "pre-norm"])
    assert line.endswith("rung 'small' has no row 'pre-norm' with a result")
