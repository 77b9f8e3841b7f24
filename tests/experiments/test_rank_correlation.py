import json
import runpy
import sys
from pathlib import Path

import pandas
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "rank_correlation.py"

TWICE, OTHER = "twice.csv has several lines for the row 'u'", "other.csv has no column 'row'"
SAID = [("b", "ρ = 0.89"), ("up", "ρ = -0.89"), ("twice", TWICE), ("other", OTHER), ("a", "twice:")]


@pytest.mark.parametrize(("second", "said"), SAID)
def test_the_rows_of_both_tables_are_ranked(tmp_path, monkeypatch, capsys, second, said):
    """Six rows have the ranks 1 to 6 and 2, 1, 3, 4, 6, 5: ρ = 1 − 6·4 / (6·35) = 0.89.

    A row of one table is left out, as is one that lacks seeds.
    """
    for name, rows in {
        "a": [*"uvwxyz", "only here", "lacks"],
        "b": [*"vuwxzy", "lacks"],
        "up": [*"vuwxzy"],
    }.items():
        values = []
        for mean, row in enumerate(rows):
            seeds = range(2 if row == "lacks" else 3)
            values.append(json.dumps(dict.fromkeys(seeds, mean)))
        report = pandas.DataFrame({"column": "", "row": rows, "values_by_seed": values})
        report["seeds_planned"], report["metric"] = 3, "chrF" if name == "up" else "valid_loss"
        report.to_csv(tmp_path / f"{name}.csv", index=False)
    report.assign(row="u").to_csv(tmp_path / "twice.csv")
    report.drop(columns="row").to_csv(tmp_path / "other.csv")
    monkeypatch.setattr(
        sys,
        "argv",
        ["rank_correlation", *(str(tmp_path / f"{name}.csv") for name in ("a", second))],
    )
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out, error = capsys.readouterr()
    assert (
        said in out + error
        and "only here" not in out
        and ("6 rows" in out) == (not exit.value.code)
    )
