"""YAML files as tables: what a file means."""

import pytest
from experiment_runs import IMAGES, PLAIN, TRANSLATION, refused, tables, write

from fairseq_rskip.tools import reproduce
from fairseq_rskip.tools.experiments import own_text, plan
from fairseq_rskip.tools.experiments.yaml_file import FOLDER

SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize(
    "name", [name for name in SHIPPED if name not in ("rivals", "lm-rivals", "deep", "table7")]
)
def test_a_shipped_table_passes_the_checks_of_the_training_commands(name):
    (table,) = tables(name)
    assert table.cells and all(cell.trials or not cell.run for cell in table.cells)


def test_merge_keys_and_a_row_by_its_label_alone(tmp_path):
    write(
        tmp_path,
        IMAGES,
        name="other",
        rows=[{"label": "plain", "equation": "x + F", "options": PLAIN}],
    )
    path = tmp_path / "mine.yaml"
    text = "rows_from: other.yaml\ndata: digits\noptions: {depth: 8}\nrows:\n- plain\n"
    path.write_text(
        text + "- &r {label: a, equation: y, options: {lr: 0.2}}\n- {<<: *r, label: b}\n"
    )
    (table,) = tables(path)
    assert [(row.label, row.equation) for row in table.rows] == [
        ("plain", "x + F"),
        ("a", "y"),
        ("b", "y"),
    ]
    assert table.rows[1].options == table.rows[2].options == {"lr": 0.2}


def test_a_merged_key_may_be_set_again_before_and_after_its_mapping_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: digits\n"
        "options: &all {depth: 8, lr: 0.1}\n"
        "columns: {a: {options: &fast {<<: *all, lr: 0.2}}, b: {options: {<<: *fast, lr: 0.3}}}\n"
        "rows: [{label: plain, options: {<<: *all, depth: 14}}]\n"
    )
    (table,) = tables(path)
    assert [cell.options for cell in table.cells] == [{"depth": 14, "lr": 0.1}] * 2
    columns = table.table.columns.values()
    assert [column.options["lr"] for column in columns] == [0.2, 0.3]


def test_the_arch_of_the_file_is_that_of_rows_without_one_and_is_among_the_keys(tmp_path):
    rows = [{"label": "a"}, {"label": "b", "arch": "transformer_xskip_ln_tiny"}]
    arch = "transformer_rskip_ln_tiny"
    (table,) = tables(write(tmp_path, TRANSLATION, rows=rows, arch=arch))
    assert [cell.arch for cell in table.cells] == [arch, "transformer_xskip_ln_tiny"]
    (line,) = refused(write(tmp_path, TRANSLATION, rows=rows, arch=3)).splitlines()
    assert "mine.yaml: arch is 3; expected" in line

    path = write(tmp_path, TRANSLATION, arhc=arch)
    assert refused(path).endswith("unknown key 'arhc'; did you mean arch?")
    keys = refused(write(tmp_path, TRANSLATION, zzz=1)).partition("the keys are ")[2]
    assert "arch" in keys.split(", ")


def test_one_experiment_is_a_table_of_one_row(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: multi30k-en-de\narch: transformer_rskip_ln_tiny\n"
        "options: {skip-lambda: 2, max-epoch: 3}\n"
    )
    (table,) = tables(path)
    (run,) = table.cells[0].runs
    assert (table.rows[0].label, run.arch, run.length, run.unit) == (
        "mine",
        "transformer_rskip_ln_tiny",
        3,
        "epochs",
    )
    assert table.seeds == [1] and table.metric == "sacreBLEU 13a"


def test_options_of_the_row_win_over_column_and_table_and_set_over_all(tmp_path):
    rows = [{"label": "r", "options": {"lr": 0.3}, "reported": {"a": 1.0}}]
    columns = {"a": {"options": {"lr": 0.2, "depth": 14}}, "b": {}}
    path = write(
        tmp_path,
        IMAGES,
        rows=rows,
        columns=columns,
        options={"lr": 0.1, "depth": 8, "iterations": 9},
    )
    first, second = tables(path, changes=["iterations=12", "warmup_iterations=1"])[0].cells
    assert (first.options["lr"], first.options["depth"], second.options["depth"]) == (0.3, 14, 8)
    assert first.options["iterations"] == second.options["iterations"] == 12
    assert (first.reported, second.reported) == (1.0, None)
    (table,) = tables(path, columns=["b"], changes=["warmup-iterations=1", "iterations=12"])
    assert [cell.column for cell in table.cells] == ["b"]


def test_an_option_that_is_set_more_narrowly_ends_the_sweep_of_the_table(tmp_path):
    rows = [
        {"label": "swept"},
        {"label": "own rate", "options": {"lr": 0.3}},
        {"label": "no sweep", "sweep": {}},
    ]
    columns = {"a": {}, "b": {"options": {"lr": 0.2}}}
    options = {**IMAGES["options"], "valid-images": 40}
    table = {"rows": rows, "columns": columns, "options": options, "sweep": {"lr": [0.1, 0.4]}}
    path = write(tmp_path, IMAGES, **table)

    def rates(**selection):
        (made,) = tables(path, **selection)
        return [[trial.run.options.get("lr") for trial in cell.trials] for cell in made.cells]

    assert rates() == [[0.1, 0.4], [0.2], [0.3], [0.3], [None], [0.2]]
    assert rates(changes=["lr=0.5"]) == [[0.5]] * 6


def test_the_evaluation_of_a_row_wins_and_seeds_of_the_command_line_over_its_own(tmp_path):
    rows = [{**row, "evaluate": {"beam": 5}, "seeds": [4]} for row in TRANSLATION["rows"]]
    path = write(tmp_path, TRANSLATION, rows=rows, evaluate={"beam": 4, "lenpen": 0.6})
    (table,) = tables(path)
    assert table.cells[0].evaluate == {"beam": 5, "lenpen": 0.6} and table.seeds == [4]
    assert tables(path, seeds=[7])[0].seeds == [7]


def test_a_scaled_rate_is_as_a_person_writes_it():
    assert plan._scaled({"lr": 0.003, "warmup": 9}, {"lr": 0.1}) == {"lr": 0.0003, "warmup": 9}


def test_own_text_has_its_own_folder_and_options_that_are_checked_early(
    tmp_path,
):
    data = {"source": "en", "target": "de", "folder": str(tmp_path / "text")}
    files = {split: [f"{split}.en", f"{split}.de"] for split in ("train", "valid", "test")}
    for _killed in (False, True):  # while it was prepared
        (table,) = tables(write(tmp_path, TRANSLATION, data={**data, **files}))
        assert {run.data for cell in table.cells for run in cell.runs} == {str(tmp_path / "text")}
        (tmp_path / "text" / "data-bin.part").mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / "inputs.json").write_text("{}")
    rows = [{"label": "a", "arch": "transformer_lm_preln_tiny"}]
    line = refused(write(tmp_path, TRANSLATION, data={**data, **files}, rows=rows))
    assert "transformer_lm_preln_tiny is a language model: the task of this table is trans" in line
    wrong = {**data, **files, "train": ["one"], "tst": 1}
    lines = refused(write(tmp_path, TRANSLATION, data=wrong, options={"lrr": 1})).splitlines()
    assert lines[0].endswith(
        "data: train is ['one']; expected a list of two files, source and target"
    )
    assert len(lines) == 2 and "tst" in lines[1]


def test_a_copied_file_finds_the_same_prepared_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {split: [f"{split}.en", f"{split}.de"] for split in ("train", "valid", "test")}
    for pair in names.values():
        for name in pair:
            (tmp_path / name).write_text(f"{name}\n")

    def folder(file, **changes):
        data = {"source": "en", "target": "de", **names, **changes}
        (table,) = tables(write(tmp_path, TRANSLATION, file, data=data))
        (data_folder,) = {run.data for cell in table.cells for run in cell.runs}
        return data_folder

    first = folder("one")
    assert first.startswith(f"{tmp_path}/data/train-en-de-")
    assert folder("copy") == first
    monkeypatch.chdir(tmp_path / "..")  # the texts are where the file is
    elsewhere = folder("one")
    assert elsewhere == first.replace(f"{tmp_path}/", f"{tmp_path.parent}/")
    monkeypatch.chdir(tmp_path)
    assert folder("one", options={"bpe-size": 50}) != first
    misspelled = {"source": "en", "target": "de", **names, "options": {"bpe-sise": 3}}
    message = refused(write(tmp_path, TRANSLATION, "misspelled", data=misspelled))
    assert "unrecognized argument --bpe-sise; did you mean --bpe-size?" in message
    (tmp_path / "valid.de").write_text("another text\n")
    assert folder("one") != first
    (tmp_path / "valid.de").unlink()
    wrong = {"source": "en", "target": "de", **names}
    message = refused(write(tmp_path, TRANSLATION, data=wrong))
    assert "data: " in message and f"{tmp_path}/valid.de does not exist" in message


def test_a_published_corpus_with_options_has_runs_and_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"corpus": "multi30k-en-de", "options": {"bpe-size": 10000}}
    (table,) = tables(write(tmp_path, TRANSLATION, data=data))
    (plain,) = tables(write(tmp_path, TRANSLATION))
    (folder,) = table.texts
    assert folder.startswith(f"{tmp_path}/data/multi30k-en-de-")
    words = own_text.prepare_words(table.texts[folder], folder)
    assert words == ["prepare", "multi30k-en-de", "--bpe-size", "10000", folder]

    run, default = (each.cells[0].trials[0].run for each in (table, plain))
    assert run.data == folder and default.data == "multi30k-en-de"
    assert run.folder_in(tmp_path, 1) != default.folder_in(tmp_path, 1)

    message = refused(write(tmp_path, TRANSLATION, data={"corpus": "multi30k"}))
    assert "data: no corpus named 'multi30k'; the corpora are " in message


def test_a_short_training_with_a_long_warm_up_is_warned_of_once(tmp_path):
    options = {"max-update": 300, "warmup-updates": 800}
    (table,) = tables(write(tmp_path, TRANSLATION, options=options))
    assert (
        len([warning for warning in table.warnings if "800" in warning and "300" in warning]) == 1
    )


def test_a_row_without_an_arch_for_a_column_is_named(tmp_path):
    columns = {"a": {}, "b": {"options": {"lr": 0.1}}}
    architectures = {"a": "transformer_xskip_ln_tiny"}
    rows = [*TRANSLATION["rows"], {"label": "x", "arch": architectures}]
    (table,) = tables(write(tmp_path, TRANSLATION, columns=columns, rows=rows))
    named = [warning for warning in table.warnings if "no arch" in warning]
    assert named == ["row 'x' has no arch for column 'b': not run there"]

    columns["a"]["sweep_of"] = "b"
    path = write(tmp_path, TRANSLATION, columns=columns, rows=rows, sweep={"lr": [0.1, 0.2]})
    assert "column 'a': sweep_of 'b', where the row 'x' has no arch" in refused(path)


def test_list_counts_a_sweeps_seed_that_is_not_asked_for(tmp_path, monkeypatch, capsys):
    """With seeds 2 and 3 both values are tried with seed 1, and the best is trained twice."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, TRANSLATION, sweep={"lr": [0.1, 0.2]}, seeds=[1, 2, 3])
    networks = len(tables(path)[0].cells)
    for seeds, each in (([], 4), (["--seeds", "2", "3"], 4), (["--seeds", "1"], 2)):
        assert reproduce.main(["list", str(path), *seeds]) == 0
        assert f"{networks} networks, {each * networks} runs" in capsys.readouterr().out


def test_tables_are_listed_by_title_and_all_wrong_names_are_said(capsys):
    """Planning every table builds many models: a minute's work for a list of names."""
    assert reproduce.main(["list"]) == 0
    titles = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert titles["cifar"] == "CIFAR-10 to the end of a schedule, PreAct-ResNet-20"
    assert reproduce.main(["list", "nothing-1", "nothing-2"]) == 1
    errors = capsys.readouterr().err
    assert "no table 'nothing-1'" in errors and "no table 'nothing-2'" in errors
    assert reproduce.main(["list", "--rows", "x"]) == 1
    assert "need a TABLE" in capsys.readouterr().err
