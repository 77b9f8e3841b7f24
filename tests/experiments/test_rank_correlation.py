import runpy
import sys
from pathlib import Path

import pandas
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "rank_correlation.py"


def test_the_rows_of_both_tables_are_ranked(tmp_path, monkeypatch, capsys):
    """Six rows with ranks 1 to 6 and 2, 1, 3, 4, 6, 5: ρ = 1 − 6·4 / (6·35) = 0.89; a row of one table is left out."""
    tables = {"a": [*"uvwxyz", "only here"], "b": [*"vuwxzy", "unfinished"]}
    for name, rows in tables.items():
        means = [*range(6), None if name == "b" else 9]
        pandas.DataFrame({"row": rows, "mean": means}).to_csv(tmp_path / f"{name}.csv", index=False)
    monkeypatch.setattr(sys, "argv", ["rank_correlation", *(str(tmp_path / f"{name}.csv") for name in tables)])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not exit.value.code
    assert "ρ = 0.89" in (out := capsys.readouterr().out) and "6 rows" in out and "only here" not in out
