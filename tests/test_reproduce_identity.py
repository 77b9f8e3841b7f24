"""What may stand as the paper's own experiment: which data, which settings, and which cells share a run."""

import pytest
from reproduce_helpers import TABLE, error_line, reproduce, write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import plans, tables
from fairseq_rskip.tools.reproduce.main import make_plan
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.tools.reproduce.results import collect


@pytest.fixture(scope="module")
def shipped():
    return tables.load_all()


def plan(shipped, name, *words):
    return make_plan(shipped[name], parse(["run", name, *map(str, words)]))


def only_folder(made, task, out):
    (folder,) = {plans.run_folder(out, task, settings, 1) for settings in made.settings.values()}
    return folder


@pytest.mark.parametrize(
    "table, name, task", [("table1", "cifar10", "images"), ("table2", "iwslt15-en-vi", "translation")]
)
def test_a_folder_that_is_called_like_the_data_is_not_the_data(shipped, tmp_path, table, name, task):
    (tmp_path / name).mkdir()
    own = plan(shipped, table, "--rows", "2xSkip+LN")
    other = plan(shipped, table, "--rows", "2xSkip+LN", "--corpus", tmp_path / name)
    assert own.whole and not other.whole and own.name != other.name
    assert only_folder(own, task, tmp_path) != only_folder(other, task, tmp_path)


def test_the_tables_own_corpus_prepared_elsewhere_is_the_tables_own(shipped, tmp_path):
    (tmp_path / "preparation.json").write_text('{"corpus": "iwslt15-en-vi"}')
    own, moved = plan(shipped, "table2"), plan(shipped, "table2", "--corpus", tmp_path)
    assert moved.whole and moved.name == own.name == "table2"
    for cell, settings in moved.settings.items():
        assert settings["data"] == str(tmp_path)
        assert plans.run_folder(tmp_path, "translation", settings, 1) == plans.run_folder(
            tmp_path, "translation", own.settings[cell], 1
        )


def test_other_data_goes_into_columns_of_one_corpus_only(shipped):
    with pytest.raises(
        UserError, match="table7 has columns of iwslt15-en-vi, wmt14-en-de, wmt14-en-fr: --corpus needs"
    ):
        plan(shipped, "table7", "--corpus", "iwslt15-en-vi")
    assert plan(shipped, "table7", "--corpus", "iwslt15-en-vi", "--columns", "EN-VI").whole
    assert not plan(shipped, "table7", "--corpus", "iwslt15-en-vi", "--columns", "EN-DE").whole


def test_rows_that_are_one_network_are_chosen_together(shipped):
    assert list(plan(shipped, "table1", "--rows", "1rSkip+LN").settings) == [("1xSkip+LN", ""), ("1rSkip+LN", "")]
    assert list(plan(shipped, "table1", "--rows", "2rSkip+LN").settings) == [("2rSkip+LN", "")]


def test_a_table_whose_file_changed_since_is_not_the_papers_any_more(tmp_path):
    write_table(tmp_path)
    before = tables.load(tmp_path / "small.yaml")
    made = make_plan(before, parse(["run", "small", "--experiments", str(tmp_path)]))
    assert collect(made, before, tmp_path).whole and collect(made, before, tmp_path).outdated == []
    write_table(tmp_path, options={**TABLE["options"], "depth": 14})
    result = collect(made, tables.load(tmp_path / "small.yaml"), tmp_path)
    assert not result.whole and result.outdated == ["plain", "recursive"]


def test_an_option_that_a_figure_lacks_is_refused_before_anything_runs(tmp_path, capfd):
    write_table(tmp_path, figure="gradients", figure_options={"exmples": 10})
    status, _, error = reproduce(capfd, "list", "--experiments", tmp_path)
    assert status == 1 and "small.yaml: figure_options names 'exmples'; analyze.py takes" in error_line(error)
