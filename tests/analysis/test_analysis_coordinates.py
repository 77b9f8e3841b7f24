"""The coordinate check: sizes of activations against width."""

import csv
from argparse import Namespace

import pytest

from fairseq_rskip.analysis import coordinates
from fairseq_rskip.residual import KINDS


def test_a_norm_after_the_sum_makes_the_size_independent_of_width():
    sizes = list(coordinates.measure("rskip", (16, 64), steps=1, blocks=2))
    assert len(sizes) == 2 * 2 * 2
    for row in sizes:
        assert row["size"] == pytest.approx(1, abs=0.05)


def test_the_slope_is_that_of_a_power_law():
    sizes = [{"width": width, "size": 3 * width**0.5} for width in (64, 128, 512)]
    assert coordinates.slope(sizes) == pytest.approx(0.5)


def test_every_kind_is_in_one_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coordinates, "WIDTHS", (8, 16))
    monkeypatch.setattr(coordinates.measure, "__defaults__", ((8, 16), 3, 6))
    coordinates.report(Namespace(), tmp_path / "width")
    rows = list(csv.DictReader((tmp_path / "width.csv").open()))
    assert list(dict.fromkeys(row["kind"] for row in rows)) == list(KINDS)
    assert (tmp_path / "width.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) == len(KINDS) + 2
