"""The reader of a report.csv, and the ends of a sweep."""

import csv
import io
import json

import pytest
from conftest import ROOT

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.report.reading import by_column, by_row, read_report, read_rows
from fairseq_rskip.tools.report.sweep import ends

HEADER = "column,row,metric,seeds_planned,values_by_seed,swept,chosen,ours_minus_baseline,low,high"
TWO = [
    {"options": {"lr": 0.1, "skip-lambda": 2}, "result": 5.5},
    {"options": {"lr": 0.1, "skip-lambda": "auto"}, "result": "failed: loss: nan; try a lower lr"},
    {"options": {"lr": 0.2, "skip-lambda": 2}, "result": 6.0},
]


def line(column, row, planned, values, swept=(), chosen=None, *compared):
    """A line of a report's CSV."""
    cells = [column, row, "valid_loss", planned, *map(json.dumps, (values, swept, chosen or {}))]
    file = io.StringIO()
    csv.writer(file, lineterminator="").writerow([*cells, *(compared or ("", "", ""))])
    return file.getvalue()


LINES = [
    line("a", "plain", 3, {1: 5.5, 2: 6.5}),
    line("a", "deep", 1, {1: 5.0}, TWO, {"lr": 0.1, "skip-lambda": 2}, -1.0, -1.5, -0.5),
    line("b", "plain", 0, {}),
    line("b", "deep", 1, {1: 4.0}),
]


def write(path, *lines):
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return path


def test_the_lines_of_a_report_have_numbers_and_options(tmp_path):
    plain, deep, empty, _ = read_report(write(tmp_path / "report.csv", *LINES))
    assert (plain.row, plain.column, plain.metric) == ("plain", "a", "valid_loss")
    assert plain.values == {1: 5.5, 2: 6.5} and plain.mean == 6.0
    assert plain.deviation == pytest.approx(0.5**0.5)
    assert not plain.is_whole and deep.is_whole and not empty.is_whole
    assert (plain.chosen, plain.swept, plain.difference, plain.interval) == ({}, [], None, None)
    assert deep.chosen == {"lr": 0.1, "skip-lambda": 2}
    assert deep.swept == [
        {"lr": 0.1, "skip-lambda": 2},
        {"lr": 0.1, "skip-lambda": "auto"},
        {"lr": 0.2, "skip-lambda": 2},
    ]
    assert deep.difference == -1.0 and deep.interval == (-1.5, -0.5)


def test_the_lines_are_laid_out_by_row_and_by_column(tmp_path):
    path = write(tmp_path / "report.csv", *LINES)
    rows, columns = by_row(read_report(path)), by_column(read_report(path))
    assert {row: list(lines) for row, lines in rows.items()} == {"plain": ["a"], "deep": ["a", "b"]}
    assert {name: list(lines) for name, lines in columns.items()} == {
        "a": ["plain", "deep"],
        "b": ["deep"],
    }
    with pytest.raises(UserError, match=r"report.csv has several lines for the row 'plain'"):
        read_rows(path)
    with pytest.raises(UserError, match="two lines for the row 'deep' in the column 'b'"):
        by_row(read_report(write(tmp_path / "two.csv", *LINES, LINES[-1])))
    assert list(read_rows(write(tmp_path / "one.csv", *LINES[:2]))) == ["plain", "deep"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no column 'column'"),
        (b"row,mean\na,5\n", "has no column 'column'"),
        (HEADER.encode() + b"\n", "has no rows"),
        (HEADER.encode() + b"\na,b,c,x,{},[],{}\n", "is not a report .*'x'.*: expected the report"),
        (HEADER.encode() + b"\na,b,c,1,5.5,[],{}\n", "is not a report"),
        (HEADER.encode() + b"\na,b,c,1,1:5.5 2:6.5,[],{}\n", "is not a report"),
        (HEADER.encode() + b"\na,b,c,1,{},[5],{}\n", "is not a report"),
        (b"\xff\xfe", "is not a report"),
    ],
    ids=["empty", "columns", "no rows", "no number", "no seed", "no JSON", "no sweep", "no text"],
)
def test_a_file_that_is_no_report_is_one_line(tmp_path, content, said):
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"other.csv {said}"):
        read_report(path)


@pytest.mark.parametrize("name", ["rivals", "lm_rivals", "depth_runs", "scaled_tables", "deep"])
def test_the_archived_reports_are_read_to_the_last_digit(name):
    path = ROOT / "results" / f"{name}.csv"
    with open(path, encoding="utf-8", newline="") as file:
        expected = list(csv.DictReader(file))
    lines = read_report(path)
    assert len(lines) == len(expected)
    for line, cells in zip(lines, expected):
        assert len(line.values) == int(cells["seeds_done"])
        if line.values:
            assert line.mean == float(cells["mean"])
        if len(line.values) > 1:
            assert line.deviation == float(cells["standard_deviation"])


TRIED = [{"lr": lr, "skip-lambda": scale} for lr in (0.4, 0.1, 0.2) for scale in (2, 3, 4)]


@pytest.mark.parametrize(
    ("chosen", "at_an_end"),
    [
        ({"lr": 0.1, "skip-lambda": 4}, ["lr", "skip-lambda"]),
        ({"lr": 0.1, "skip-lambda": 3}, ["lr"]),
        ({"lr": 0.2, "skip-lambda": 2}, ["skip-lambda"]),
        ({"lr": 0.2, "skip-lambda": 3}, []),
        ({}, []),
    ],
    ids=["both", "lowest lr", "smallest lambda", "inside", "undecided"],
)
def test_each_option_of_a_sweep_has_its_own_ends(chosen, at_an_end):
    """The order of the values does not matter."""
    assert ends(TRIED, chosen) == at_an_end


def test_values_that_are_not_numbers_have_no_ends():
    assert ends([{"amp": "off"}, {"amp": "bf16"}], {"amp": "off"}) == []
    assert ends([{"skip-lambda": 2}, {"skip-lambda": "auto"}], {"skip-lambda": 2}) == []
    with_a_word = [{"skip-lambda": value} for value in (2, "auto", 4)]
    assert ends(with_a_word, {"skip-lambda": "auto"}) == []
    assert ends(with_a_word, {"skip-lambda": 4}) == ["skip-lambda"]
