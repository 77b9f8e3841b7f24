import json
import runpy
import sys
from pathlib import Path

import pandas
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "rank_correlation.py"

TWICE, OTHER = "twice.csv has several lines for the row 'u'", "other.csv has no column 'row'"
FEW = "the tables share 6 rows with a result; a rank correlation needs 10 or more"
SAID = [
    ("b", "ρ = 0.98"),
    ("up", "ρ = -0.98"),
    ("few", FEW),
    ("twice", TWICE),
    ("other", OTHER),
    ("a", "twice:"),
]


@pytest.mark.parametrize(("second", "said"), SAID)
def test_the_rows_of_both_tables_are_ranked(tmp_path, monkeypatch, capsys, second, said):
    """Ten rows have the ranks 1 to 10 and 2, 1, 3, …, 8, 10, 9: ρ = 1 − 6·4 / (10·99) = 0.98.

    A row of one table is left out, as is one that lacks seeds.
    """
    for name, rows in {
        "a": [*"qrstuvwxyz", "only here", "lacks"],
        "b": [*"rqstuvwxzy", "lacks"],
        "few": [*"vuwxzy"],
        "up": [*"rqstuvwxzy"],
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
        and ("10 rows" in out) == (not exit.value.code)
    )
