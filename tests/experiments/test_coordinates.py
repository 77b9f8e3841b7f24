import csv
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "coordinates.py"


def read(path):
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def printed(monkeypatch, capsys, *argv):
    """The slopes by rule: of the size at the start, of the change by one to three steps."""
    monkeypatch.setattr(sys, "argv", ["coordinates", *argv])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {
        words[0]: [float(word) for word in words[1:]]
        for line in lines[1:]
        if len(words := line.split()) == 5
    }


def test_adam_changes_wide_blocks_more_unless_they_start_as_the_identity(
    tmp_path, monkeypatch, capsys
):
    """As torch draws a matrix, Adam's first step changes its output in proportion to the width.

    This is from Yang et al.
    """
    slopes = printed(
        monkeypatch, capsys, "preln", "rezero", "fixup", "--output", str(tmp_path / "width")
    )
    rows = read(tmp_path / "width.csv")
    assert len(rows) == 3 * 4 * 4 * 6 and (tmp_path / "width.png").stat().st_size > 10_000
    assert all((row["change"] == "0.0") == (row["step"] == "0") for row in rows)
    fresh = [float(row["size"]) for row in rows if row["kind"] != "preln" and row["step"] == "0"]
    by_width = [fresh[i : i + 6] for i in range(0, 48, 6)]
    assert all(sizes == [sizes[0]] * 6 for sizes in by_width)  # every block hands its input on
    assert slopes["preln"][1] == pytest.approx(1, abs=0.2) and slopes["fixup"][1] == pytest.approx(
        1, abs=0.2
    )
    assert abs(slopes["rezero"][1]) < 0.1


def test_the_same_in_fairseqs_decoder(tmp_path, monkeypatch, capsys):
    argv = ["--language-models", "rskip_ln", "preln", "--output", str(tmp_path / "width")]
    slopes = printed(monkeypatch, capsys, *argv)
    assert all(each[1] > 0.4 for each in slopes.values()) and set(slopes) == {"rskip_ln", "preln"}


def test_an_unknown_rule_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["coordinates", "rskipp"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "rskipp" in capsys.readouterr().err
