"""The tables on the pages of all rules are those of the archived results."""

import importlib

import pytest
from conftest import ROOT

from fairseq_rskip.errors import UserError

REPORTS = ("rivals", "lm_rivals", "forest_rivals", "forest_lm_rivals")
PAGE = "# Rules\n\n<!-- page_tables.py: t -->\n\n| a | b |\n|---|---|\n| old | 1 |\n\nText.\n"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("page_tables")


def test_the_pages_have_the_figures_of_the_csv_files(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["page_tables.py", "--check"])
    assert script.main() == 0 and capsys.readouterr().out == ""


def test_only_the_table_below_its_mark_is_replaced(script):
    table = script.in_markdown([["a", "b"], ["new", "2"], ["more", "3"]])
    new = "| a | b |\n|---|---|\n| new | 2 |\n| more | 3 |"
    assert script.replaced(PAGE, "t", table) == PAGE.replace(
        "| a | b |\n|---|---|\n| old | 1 |", new
    )
    with pytest.raises(UserError, match="no line <!-- page_tables.py: u -->"):
        script.replaced(PAGE, "u", table)


def test_a_figure_that_is_out_of_date_is_named(script, monkeypatch, capsys, tmp_path):
    for folder in ("docs/studies", "results"):
        (tmp_path / folder).mkdir(parents=True)
    reports = [f"results/{name}.csv" for name in REPORTS]
    for file in (*script.PAGES, *reports):
        text = (ROOT / file).read_text("utf-8")
        (tmp_path / file).write_text(
            text.replace("| DeepNorm | LN(αx + F) | 7.", "| DeepNorm | y | 8."), "utf-8"
        )
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["page_tables.py", "--check"])
    assert script.main() == 1
    said = capsys.readouterr().out.splitlines()
    start = "studies/rivals-table.md: "
    named = [line.partition(start)[2][:12] for line in said if "/rivals-table" in line]
    assert named == ["- | DeepNorm", "+ | DeepNorm"]

    page = tmp_path / "docs/studies/rivals-table.md"
    rows = page.read_text("utf-8").splitlines(keepends=True)
    page.write_text("".join(row for row in rows if not row.startswith("| DeepNorm")), "utf-8")
    assert script.main() == 1
    assert "studies/rivals-table.md: + | DeepNorm" in capsys.readouterr().out

    monkeypatch.setattr("sys.argv", ["page_tables.py"])
    assert script.main() == 0
    for file in script.PAGES:
        assert (tmp_path / file).read_text("utf-8") == (ROOT / file).read_text("utf-8")
