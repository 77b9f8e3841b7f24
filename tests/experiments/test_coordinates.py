import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "coordinates.py"


def test_a_norm_after_the_sum_makes_the_size_independent_of_width(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coordinates", "rskip", "ngpt", "preln", "--output", str(tmp_path / "width")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = list(csv.DictReader((tmp_path / "width.csv").open()))
    assert len(rows) == 3 * 4 * 4 * 6 and (tmp_path / "width.png").stat().st_size > 10_000
    assert [float(row["size"]) for row in rows if row["kind"] != "preln"] == pytest.approx([1] * 192, abs=0.05)
    slopes = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert set(slopes["rskip"]) <= {"+0.00", "-0.00"} and float(slopes["preln"][-1]) < -0.05
