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
    """Six rows with ranks 1 to 6 and 2, 1, 3, 4, 6, 5: ρ = 1 − 6·4 / (6·35) = 0.89; a row of one table is left out."""
    b = [*"vuwxzy", "unfinished"]
    for name, rows in {"a": [*"uvwxyz", "only here"], "b": b, "up": b}.items():
        means, metric = [*range(6), 9 if name == "a" else None], "chrF" if name == "up" else "valid_loss"
        report = pandas.DataFrame({"row": rows, "mean": means, "metric": metric})
        report.to_csv(tmp_path / f"{name}.csv", index=False)
    for name, text in {"twice": "row,mean,metric\nu,1,chrF\nu,2,chrF\n", "other": "name,mean\nu,1\n"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["rank_correlation", *(str(tmp_path / f"{name}.csv") for name in ("a", second))])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    out, error = capsys.readouterr()
    assert said in out + error and "only here" not in out and ("6 rows" in out) == (not exit.value.code)
