import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "coordinates.py"


def read(path):
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_a_norm_after_the_sum_makes_the_size_independent_of_width(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coordinates", "rskip", "ngpt", "preln", "--output", str(tmp_path / "width")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = read(tmp_path / "width.csv")
    assert len(rows) == 3 * 4 * 4 * 6 and (tmp_path / "width.png").stat().st_size > 10_000
    assert [float(row["size"]) for row in rows if row["kind"] != "preln"] == pytest.approx([1] * 192, abs=0.05)
    slopes = {words[0]: words[1:] for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert set(slopes["rskip"]) <= {"+0.00", "-0.00"} and float(slopes["preln"][-1]) < -0.05


def test_the_same_in_fairseqs_decoder(tmp_path, monkeypatch):
    argv = ["coordinates", "--language-models", "rskip_ln", "preln", "--output", str(tmp_path / "width")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = read(tmp_path / "width.csv")
    last = {
        (row["kind"], row["width"]): float(row["size"]) for row in rows if (row["step"], row["block"]) == ("3", "6")
    }
    assert [last["rskip_ln", width] for width in ("64", "512")] == pytest.approx([1, 1], abs=0.05)
    assert last["preln", "512"] > 1.5 * last["preln", "64"]


def test_an_unknown_rule_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coordinates", "rskipp"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "rskipp" in capsys.readouterr().err
