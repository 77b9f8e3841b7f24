"""Figures and the CSV behind them: what is in the files, and what stays when writing fails."""

import csv
import math
import re
import struct
import sys

import pytest

from fairseq_rskip.analysis import figures
from fairseq_rskip.errors import UserError


def drawn():
    figure, axes = figures.new_figure(2, width=4.0, height=3.0)
    axes[0].plot([0, 1], [1, 2], label=figures.label_text("_2rSkip $x$ học"))
    axes[0].legend()
    return figure


def test_png_and_pdf_have_the_size_asked_for_and_are_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it, with its global state, would fail
    for folder in ("một", "hai"):
        (tmp_path / folder).mkdir()
        figures.save(drawn(), tmp_path / folder / "hình 1.5")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("một", "hai"))
    assert one == two and sorted(one) == ["hình 1.5.pdf", "hình 1.5.png"]
    png = one["hình 1.5.png"]
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (1200, 450)  # 8 x 3 inches, 150 dpi
    assert one["hình 1.5.pdf"].startswith(b"%PDF") and b"CreationDate" not in one["hình 1.5.pdf"]


@pytest.mark.parametrize(
    "values, scale",
    [([1.2, 1.9], "linear"), ([0.1, 3, math.nan], "log"), ([0, 5], "linear"), ([], "linear")],
    ids=["near", "a decade", "zero", "none"],
)
def test_a_scale_is_logarithmic_from_a_decade_on_and_its_labels_are_plain_numbers(values, scale):
    figure, (axis,) = figures.new_figure()
    axis.plot(range(len(values)), values)
    figures.scale_values(axis, values)
    figure.canvas.draw()
    assert axis.get_yscale() == scale
    labels = [label.get_text().replace("\u2212", "-") for label in axis.get_yticklabels(which="both")]
    assert labels and all(re.fullmatch(r"-?[\d.]+", label) for label in labels)


def test_a_csv_reads_back_as_exactly_what_was_written(tmp_path):
    values = [0.1 + 0.2, 2.0**-1000, 1e300, math.pi, -0.0]
    rows = [{"name": 'a, "b"\nλ', "value": value, "none": None} for value in values]
    figures.write_csv(tmp_path / "x.csv", rows)
    with open(tmp_path / "x.csv", newline="", encoding="utf-8") as file:
        back = list(csv.DictReader(file))
    assert list(back[0]) == ["name", "value", "none"]
    assert [float(row["value"]) for row in back] == values and math.copysign(1, float(back[4]["value"])) == -1
    assert {row["name"] for row in back} == {'a, "b"\nλ'} and {row["none"] for row in back} == {""}


def test_a_stem_is_checked_before_anything_is_computed(tmp_path):
    assert figures.check_stem(tmp_path / "một" / "v1.5") == tmp_path / "một" / "v1.5"
    assert (tmp_path / "một").is_dir() and list((tmp_path / "một").iterdir()) == []
    assert figures.check_stem(tmp_path / "depth.PDF") == tmp_path / "depth"
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.png").mkdir()
    for path, message in (
        (tmp_path / "file" / "x", "cannot write into .*file: "),
        (tmp_path / "taken", "expected the name of a figure"),
        (tmp_path / ("x" * 300), "cannot write into .*File name too long"),
        ("/", "--output /: expected the name of a figure"),
    ):
        with pytest.raises(UserError, match=message):
            figures.check_stem(path)
