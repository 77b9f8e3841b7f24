"""``rskip reproduce`` and ``rskip run``: where the tables are found, what is refused first."""

import pytest

from fairseq_rskip.tools import process, reproduce


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package in site-packages, and a checkout beside it."""
    monkeypatch.setattr(process, "PLUGIN", tmp_path / "site-packages" / "fairseq_rskip")
    for folder in ("site-packages/fairseq_rskip", "clone/fairseq_rskip", "clone/experiments"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_an_installed_package_finds_the_checkout_that_is_the_current_folder(installed, monkeypatch):
    monkeypatch.chdir(installed / "clone")
    assert process.find_checkout() == installed / "clone"
    monkeypatch.chdir(installed)
    assert process.find_checkout() == installed / "site-packages"


def test_a_checkout_is_its_own_wherever_it_is_called(installed, monkeypatch):
    monkeypatch.setattr(process, "PLUGIN", installed / "clone" / "fairseq_rskip")
    monkeypatch.chdir(installed)
    assert process.find_checkout() == installed / "clone"


def test_options_that_a_figure_does_not_have_are_refused_before_any_run(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "data: digits\nmetric: error\nfigure: ratio\nfigure_options: {example: 3}\n"
        "options: {depth: 8, iterations: 10}\nrows: [{label: a, options: {skip-lambda: 2}}]\n"
    )
    assert reproduce.main(["run", str(file), "--dry-run"]) == 1
    error = capsys.readouterr().err
    assert "mine.yaml: figure_options of ratio: unrecognized argument --example" in error


def test_without_a_checkout_the_list_of_tables_is_an_error(installed, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "FOLDER", installed / "site-packages" / "experiments")
    assert reproduce.main(["list"]) == 1
    assert "the paper's tables are in a checkout" in capsys.readouterr().err
