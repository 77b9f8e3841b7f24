"""YAML files as tables: what is read, and that every mistake is named at once."""

import pytest
from experiment_runs import IMAGES, PLAIN, TRANSLATION, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import reproduce
from fairseq_rskip.tools.experiments import own_text, plan
from fairseq_rskip.tools.experiments.yaml_file import FOLDER

SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def refused(path, **options):
    with pytest.raises(UserError) as raised:
        tables(path, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    "name", [name for name in SHIPPED if name not in ("rivals", "lm-rivals", "deep", "table7")]
)
def test_a_shipped_table_passes_the_checks_of_the_training_commands(name):
    (table,) = tables(name)
    assert table.cells and all(cell.trials or not cell.run for cell in table.cells)


def test_all_mistakes_are_named_at_once_with_row_and_near_name(tmp_path):
    rows = [
        {"label": "a", "arch": "transformer_xskip_ln", "optoins": {"skip-lambda": 1}},
        {"label": "b", "arch": "transformer_xskip_ln", "options": {"skip-lamda": 2}},
        {"label": "c", "arch": "transformer_rskip_lm", "reported": "high"},
        {"label": "c", "arch": "transformer", "baseline": "d"},
    ]
    message = refused(write(tmp_path, TRANSLATION, rows=rows, sedes=[1]))
    for named in (
        ["row 1 ('a')", "optoins", "options"], ["row 'b'", "skip-lamda", "skip-lambda"],
        ["sedes", "seeds"], ["row 3 ('c')", "reported", "high"],
        ["row 'c'", "transformer_rskip_lm", "transformer_rskip_ln"],
        ["row 4 ('c')", "row 3"], ["row 4 ('c')", "baseline", "'d'"],
    ):  # fmt: skip
        assert any(all(word in line for word in named) for line in message.splitlines()), (
            named,
            message,
        )


def test_a_wrong_metric_does_not_hide_what_is_wrong_in_rows(tmp_path):
    """The rows are checked with the default metric."""
    rows = [
        {"label": "a", "arch": "transformer_rskp_ln_tiny"},
        {"label": "b", "arch": "transformer_rskip_ln_tiny", "options": {"lrr": 3}},
        {"label": "c", "arch": "transformer_rskip_ln_tiny", "evaluate": {"beem": 3}},
    ]
    lines = refused(write(tmp_path, TRANSLATION, rows=rows, metric="BLEW")).splitlines()
    for named, line in zip(("BLEW", "transformer_rskp_ln_tiny", "lrr", "beem"), lines, strict=True):
        assert named in line


def test_an_option_of_preparing_belongs_to_its_options(tmp_path):
    (tmp_path / "text").write_text("a b\n")
    data = {"text": str(tmp_path / "text"), "lang": "cs"}
    said = "unknown key 'lang'; the keys are text, folder, options; an option of rskip prepare is "
    assert said in refused(write(tmp_path, TRANSLATION, data=data))


def test_a_row_without_a_label_does_not_hide_the_mistakes_of_others(tmp_path):
    rows = [{"arch": "transformer_xskip_ln"}, {"label": "b", "arch": "transformer_xskip_lm"}, 7]
    message = refused(write(tmp_path, TRANSLATION, rows=rows))
    assert "row 1: 'label' is missing" in message and "row 3 is 7" in message
    assert "row 'b': no architecture named 'transformer_xskip_lm'" in message


def test_options_of_a_misspelled_kind_are_not_refused_beside_it(tmp_path):
    options = {"skip-kind": "highwya", "skip-gate-bias": -1}
    rows = [{"label": "a", "arch": "transformer_skip", "options": options}]
    message = refused(write(tmp_path, TRANSLATION, rows=rows))
    assert "highwya" in message and "gate-bias" not in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seeds": [1, 1]}, "seeds"), ({"seeds": [True]}, "seeds"), ({"seeds": []}, "seeds"),
        ({"seeds": "one"}, "seeds is 'one'; expected integers from 0: one or a list"),
        ({"metric": "eror"}, "error"),
        ({"columns": ["a", "b"]},
         "columns is ['a', 'b']; expected a mapping, name: {data, options, …}"),
        ({"columns": {"a": ["x"]}},
         "column 'a' is ['x']; expected a mapping with the keys data, options"),
        ({"rows": ["a"]}, "row 1 is 'a'; expected a mapping with the keys label, equation, "),
        ({"rows": "a"}, "rows is 'a'; expected a list with at least one row"),
        ({"rows": []}, "rows"),
        ({"task": "speech"}, "task"), ({"test": "welch"}, "seeds"),
        ({"figure": "pie"}, "curves"), ({"path": "x"}, "path"),
        ({"columns": {"a": {"dta": "x"}}}, "data"), ({"options": {"depth": 9}}, "depth"),
        ({"data": "nowhere"}, "digits"), ({"rows_from": "mine.yaml"}, "circle"),
        ({"rows_from": "none.yaml"}, "mine.yaml: rows_from is 'none.yaml', and /"),
        ({"sweep": {"lr": [0.1]}}, "sweep"),
        ({"sweep": {"lr": [0.1, 0.1]}, "options": {"depth": 8, "valid-images": 99}}, "lr"),
        ({"sweep": {"lr": [0.1, 0.2]}}, "valid-images"),
        ({"metric": "valid_loss"}, "valid_loss is of held-out images; set valid-images"),
        ({"options": {"seeds": 3}}, "seeds"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.partition(" ")[0],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key(tmp_path, changes, named):
    message = refused(write(tmp_path, IMAGES, **changes))
    assert named in message and "\n" not in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluate": {"beem": 5}}, "evaluate has no option 'beem'; did you mean beam?"),
        (
            {"metric": "valid_loss", "options": {"best-checkpoint-metric": "bleu"}},
            "option 'best-checkpoint-metric' is 'bleu': a sweep, and the metrics valid_loss and "
            "last_valid_loss, need the held-out loss; expected no such option",
        ),
        (
            {"sweep": {"lr": [0.1, 0.2]}, "options": {"best-checkpoint-metric": "bleu"}},
            "need the held-out loss",
        ),
        ({"evaluate": {"out": "elsewhere"}}, "evaluate has no option 'out'"),
        ({"evaluate": {"beam": 0}}, "evaluate: --beam: '0' is not a whole number"),
        (
            {"rows": [*TRANSLATION["rows"], {"label": "lm", "arch": "transformer_lm_preln_tiny"}]},
            "row 'lm': multi30k-en-de has two languages: expected a translation model",
        ),
        (
            {
                "rows": [
                    {"label": "a", "arch": "transformer_ngpt_tiny", "options": {"fix-norm": False}}
                ]
            },
            "option 'fix-norm' is false, but transformer_ngpt_tiny, the recipe or",
        ),
        (
            {"options": {"share-all-embeddings": False}},
            "option 'share-all-embeddings' is false, but transformer_",
        ),
    ],
    ids=[
        "an option",
        "another loss",
        "another loss of a sweep",
        "a reserved option",
        "a value",
        "a language model",
        "of arch",
        "of recipe",
    ],
)
def test_a_mistake_of_evaluation_or_one_row_is_named(tmp_path, changes, words):
    message = refused(write(tmp_path, TRANSLATION, **changes))
    assert words in message and "\n" not in message


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "{a: 1}", "data: \xe9"], ids=["broken", "list", "keys", "latin"]
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert "mine.yaml" in refused(path)


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


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rows": ["recursiv"]}, "recursive"), ({"columns": ["x"]}, "column"),
     ({"changes": ["depth"]}, "NAME=VALUE"),
     ({"changes": ["dept=8"]}, "depth"), ({"corpus": "nowhere"}, "nowhere"),
     ({"changes": ["batch_size=8", "--batch-size=4"]}, "once for each option")],
    ids=["rows", "columns", "set", "option", "corpus", "twice"],
)  # fmt: skip
def test_the_command_line_is_checked(tmp_path, options, named):
    assert named in refused(write(tmp_path, IMAGES), **options)


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["rows_from: /dev/zero"], "is not a file"),
        (["data: " + "[" * 5000], "cannot read"),
        (["data: a", "rows: [{label: a}]", "data: b"], "the key 'data' twice, in lines 1 and 3"),
    ],
    ids=["device", "brackets", "duplicate"],
)
def test_a_file_that_cannot_be_meant_is_refused_in_one_line(tmp_path, lines, said):
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines) + "\n")
    message = refused(path)
    assert said in message and "\n" not in message and len(message) < 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: a\nrows:\n\t- {label: x}\n", "line 3, column 1: a tab; expected blanks"),
        ("title: a: b\n", "line 1, column 9: a second colon; expected quotes"),
        ('title: "a\nrows: []\n', "that begins in line 1"),
    ],
    ids=["tab", "colon", "quote"],
)
def test_a_mistake_in_yamls_syntax_has_its_line_and_a_remedy(tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refused(path)
    assert said in message and "\n" not in message


def test_a_row_of_rows_from_is_its_label_alone(tmp_path):
    """A mapping with that label is another row, which needs its own arch."""
    write(tmp_path, TRANSLATION, name="other")
    file = {"rows_from": "other.yaml", "data": "multi30k-en-de", "rows": [{"label": "rSkip"}]}
    path = write(tmp_path, file)
    said = "row 1 ('rSkip'): expected 'arch', 'run: false', or '- rSkip' alone for that row of "
    assert said in refused(path)


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


def test_a_row_of_images_with_an_arch_is_told_what_images_take(tmp_path):
    rows = [{"label": "plain", "arch": "transformer_xskip_ln"}, IMAGES["rows"][1]]
    (line,) = refused(write(tmp_path, IMAGES, rows=rows, also=["test_loss"])).splitlines()
    said = "images take no 'arch'; expected a rule in 'options', as skip-kind: xskip"
    assert line.endswith(f"row 1 ('plain'): {said}")


def test_a_missing_file_does_not_hide_the_mistakes_of_another(tmp_path):
    path = write(tmp_path, TRANSLATION, sedes=[1])
    with pytest.raises(UserError) as raised:
        tables(path, tmp_path / "none.yaml")
    lines = str(raised.value).splitlines()
    assert len(lines) == 2 and "sedes" in lines[0] and "none.yaml does not exist" in lines[1]


def test_a_misspelt_rows_is_one_mistake(tmp_path):
    path = write(tmp_path, TRANSLATION)
    path.write_text(path.read_text("utf-8").replace("rows:", "row:"), "utf-8")
    (line,) = refused(path).splitlines()
    assert line.endswith("unknown key 'row'; did you mean rows?")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"also": "chrF"}, "also is 'chrF'; expected a list of metrics, such as [valid_loss]"),
        ({"also": ["chrf"]}, "also is 'chrf'; did you mean chrF? expected one of "),
        ({"metric": "none"}, "metric is 'none'; expected one of "),
        ({"sweep": {"lr": 0.1}}, "expected a list of two values or more for each option"),
        (
            {"rows": [{"label": "a", "sweep": {"lr": 0.1}}]},
            "expected a list of two values or more for each option",
        ),
    ],
    ids=["list", "also", "metric", "sweep", "sweep of a row"],
)
def test_the_key_that_is_wrong_is_named_with_what_it_takes(tmp_path, keys, said):
    assert said in refused(write(tmp_path, TRANSLATION, **keys))


def test_all_missing_files_of_a_text_are_named_at_once(tmp_path):
    data = {"source": "a", "target": "b"}
    for split in ("train", "valid", "test"):
        data[split] = [f"{split}.a", f"{split}.b"]
    message = refused(write(tmp_path, TRANSLATION, data=data))
    assert all(
        f"{split}.{side}" in message for split in ("train", "valid", "test") for side in "ab"
    )


ADAPTIVE = "transformer_askip_ln_tiny"


@pytest.mark.parametrize(
    ("arch", "options", "said"),
    [
        (
            ADAPTIVE,
            {"skip-adapt": "mixture", "skip-halt-cost": 0.1, "skip-max-steps": 3},
            "skip-halt-cost: 0.1; expected 0 with skip-adapt: mixture",
        ),
        (
            ADAPTIVE,
            {"skip-adapt": "fraction", "skip-lambda": 5, "skip-max-steps": 3},
            "skip-lambda: 5; expected a number from 1 to 3 with skip-max-steps: 3",
        ),
        (
            "transformer_ngpt_tiny",
            {"encoder-normalize-before": True},
            "encoder-normalize-before: true; expected no pre-norm (kind ngpt normalises x itself)",
        ),
        (
            "transformer_xskip_ln_tiny",
            {"decoder-normalize-before": True},
            "transformer_xskip_ln_tiny has skip-norm: layer; expected 'none' with "
            "decoder-normalize-before: true (pre-norm is y = λx + αF(LN(x)), without a "
            "normalisation after the sum)",
        ),
        (
            "transformer_rskip_ln_tiny",
            {"skip-rank": 2},
            "skip-rank: 2; kind rskip has no such option; it has skip-norm, skip-norm-alpha, "
            "skip-drop-path, skip-lambda, skip-branch-scale",
        ),
        (ADAPTIVE, {"dropout": 2}, "dropout: 2; expected a number from 0 to below 1"),
        (ADAPTIVE, {"dropout": "much"}, "dropout: much; expected a number from 0 to below 1"),
    ],
    ids=["halt cost", "lambda", "pre-norm", "norm of arch", "no such option", "dropout", "text"],
)
def test_one_wrong_option_is_one_line_in_yamls_spelling(tmp_path, arch, options, said):
    path = write(tmp_path, TRANSLATION, rows=[{"label": "a", "arch": arch, "options": options}])
    assert refused(path) == f"{path}, row 'a': {said}"


def test_each_row_has_its_first_mistake_and_rows_with_the_same_one_are_one_line(tmp_path):
    wrong = {"depth": 8, "dept": 8, "iteratons": 3}
    rows = [{"label": label, "options": wrong} for label in "ab"]
    rows.append({"label": "c", "options": {"depth": 9}})
    path = write(tmp_path, IMAGES, rows=rows)
    first, second = refused(path).splitlines()
    assert "row 'a' and 1 more: train_cifar.py has no option 'dept'; did you mean depth?" in first
    assert "iteratons" not in first
    assert second.startswith(f"error: {path}, row 'c': depth: 9; expected 6n+2")


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


def test_a_wrong_baseline_of_the_table_is_not_a_rows(tmp_path, capsys):
    path = write(tmp_path, IMAGES, baseline="nope")
    assert reproduce.main(["list", str(path)]) == 1
    errors = capsys.readouterr().err
    assert f"{path}: baseline is 'nope'; expected one of plain, recursive" in errors
    assert ", row " not in errors
