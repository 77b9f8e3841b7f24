"""Tables that cannot be read: one line for each mistake, with the file and the row."""

import pytest
import yaml
from reproduce_helpers import TABLE, error_line, reproduce, write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import loading


def row(**changes):
    return {"rows": [TABLE["rows"][0], {**TABLE["rows"][1], **changes}]}


TEXT = {"source": "en", "target": "fr", **{split: ["a", "b"] for split in ("train", "valid", "test")}}

TWO = {"columns": {"a": None, "b": {}}}

REFUSED = [
    ({"colour": 1}, "unknown key 'colour'; did you mean 'columns'? The keys are data, rows, rows_from"),
    ({"name": "x"}, "unknown key 'name'"),
    ({1: 2}, "unknown key 1"),
    ({"task": "speech"}, "task is 'speech'; expected one of images, translation"),
    ({"metric": "eror"}, "metric is 'eror'; expected one of error, best_error"),
    ({"figure": "pie"}, "figure is 'pie'; expected one of gradients, ratio, curves"),
    ({"seeds": []}, "seeds are []; expected different integers >= 0"),
    ({"seeds": [1, 1]}, "seeds are [1, 1]"),
    ({"seeds": ["1"]}, "seeds is ['1']; expected different integers >= 0"),
    ({"seeds": "1"}, "seeds is '1'; expected different integers >= 0, as [1, 2, 3]"),
    ({"seeds": -1}, "seeds are [-1]; expected different integers >= 0"),
    ({"seeds": True}, "seeds is True; expected different integers >= 0"),
    ({"rows_from": "gone.yaml"}, "rows_from: cannot read "),
    ({"rows_from": "small.yaml"}, "rows_from goes round in a circle: small.yaml takes rows from small.yaml"),
    ({"rows_from": "other.yaml"}, "circle: small.yaml takes rows from other.yaml takes rows from small.yaml"),
    ({"rows_from": 1}, "rows_from: cannot read "),
    ({"rows_from": "good.yaml", "rows": ["plan"]}, "row 1: good.yaml has no row 'plan'; did you mean 'plain'?"),
    ({"rows_from": "good.yaml", "rows": ["x"]}, "row 1: good.yaml has no row 'x'; it has plain, recursive"),
    ({"title": None}, "title is None; expected text"),
    ({"sweep": {"lr": 0.1}}, "sweep is {'lr': 0.1}; expected a mapping, from an option to two values or more"),
    ({"sweep": {"lr": [0.1]}}, "sweep of lr is [0.1]; expected different values, two or more"),
    (
        {"sweep": {"lr": [0.1, 0.2]}},
        "decided on a held-out set, never on the test set; expected options: {valid-images",
    ),
    ({"sweep_seeds": 0}, "sweep_seeds is 0; expected an integer >= 1"),
    ({"also": ["BLEU"]}, "metric is 'BLEU'; expected one of error"),
    ({"test": "bootstrap"}, "test is 'bootstrap', of sentences; expected welch for error"),
    ({"rows": []}, "expected 'rows', a list with at least one row"),
    ({"rows": {"label": "a"}}, "expected 'rows', a list"),
    ({"rows": ["plain"]}, "row 1: expected a mapping with the keys label"),
    ({"columns": []}, "expected 'columns' to be a mapping"),
    ({"columns": {"a": 0}}, "column 'a': expected a mapping with the keys data, options"),
    ({"columns": {"a": {"dtaa": "x"}}}, "column 'a': unknown key 'dtaa'"),
    ({"options": ["depth"]}, "options"),
    ({"options": {"depth": None}}, "options"),
    (
        {"baseline": "none such"},
        "row 1 ('plain'): its baseline 'none such' is no row's label; they are plain, ",
    ),
    (row(label="plain"), "row 2 ('plain'): there is a row of that label already, row 1"),
    (row(label=1), "row 2 (1): label is 1; expected text"),
    (row(label=" "), "row 2 (' '): its label is empty"),
    (row(lable="x"), "row 2 ('recursive'): unknown key 'lable'; did you mean 'label'? The keys are label, equation"),
    (row(options={"depth": {"a": 1}}), "row 2 ('recursive')"),
    (row(arch="transformer"), "row 2 ('recursive'): 'arch' is for translation"),
    (row(reported="6.31"), "row 2 ('recursive')"),
    (row(reported=True), "row 2 ('recursive'): reported is True; expected a number"),
    (row(reported=float("nan")), "row 2 ('recursive'): reported is nan"),
    (row(reported={"a": 1}), "row 2 ('recursive'): reported names a column 'a'"),
    (row(run="no"), "row 2 ('recursive')"),
    (TWO, "row 1 ('plain'): reported is 6.31; expected a mapping, from the columns a, b"),
    (
        row(data="cifar10"),
        "row 2 ('recursive'): data is 'cifar10', before it 'digits'; expected one for the",
    ),
    (row(sedes=[1]), "row 2 ('recursive'): unknown key 'sedes'"),
    ({"data": 3}, "data is 3; expected the name of a corpus or data set, a folder, or a mapping with the files of"),
    (
        {"data": {**TEXT, "tets": []}},
        "data: unknown key 'tets'; did you mean 'test'? The keys are source, target",
    ),
    ({"data": {**TEXT, "test": ["a"]}}, "data: test is ['a']; expected two files, [SOURCE, TARGET]"),
    ({"data": {**TEXT, "valid": "a"}}, "data: valid is 'a'; expected two files, [SOURCE, TARGET]"),
    ({"data": {"source": "en"}}, "data: 'target' is missing"),
    (
        {"data": {**TEXT, "folder": "/x/multi30k-en-de"}},
        "data: folder is /x/multi30k-en-de, named like a corpus",
    ),
    ({"evaluate": {"beam": 5}}, "evaluate is for scores of translations; nothing is translated for error"),
    ({"task": "translation", "metric": "chrF"}, "row 1 ('plain'): expected 'arch', an architecture, or 'run: false'"),
]


@pytest.mark.parametrize(("changes", "part"), REFUSED, ids=[f"{n} {part[:30]}" for n, (_, part) in enumerate(REFUSED)])
def test_what_is_wrong_is_one_line_with_the_file_and_the_row(tmp_path, changes, part):
    path = write_table(tmp_path / "bảng của tôi", "good") / "small.yaml"
    write_table(path.parent, "other", rows_from="small.yaml")
    path.write_text(yaml.safe_dump({**TABLE, **changes}), encoding="utf-8")
    with pytest.raises(UserError) as error:
        loading.load(path)
    lines = str(error.value).split("\nerror: ")
    assert part in lines[0] and all(line.startswith(str(path)) and "\n" not in line for line in lines), error.value


def test_several_mistakes_are_shown_at_once(tmp_path):
    def refused(**changes):
        path = write_table(tmp_path, **changes) / "small.yaml"
        with pytest.raises(UserError) as error:
            loading.load(path)
        return [line[len(str(path)) :] for line in str(error.value).split("\nerror: ")]

    rows = [{"lable": "a", "label": "x"}, {"label": 2, "reported": "3"}]
    found = refused(colour=1, title=2, seeds="1", rows=rows)
    starts = [", row 1 ('x'): unknown key 'lable'", ", row 2 (2): label is 2;", ", row 2 (2): reported is '3';"]
    starts += [": unknown key 'colour'", ": seeds is '1';", ": title is 2;"]
    assert len(found) == len(starts) and all(map(str.startswith, found, starts)), found
    found = refused(metric="eror", rows=[{"label": "a"}, {"label": "a", "arch": "b"}])
    starts = [": metric is 'eror'", ", row 1 ('a'): its baseline 'plain'", ", row 2 ('a'): there is a row of that"]
    assert len(found) == 5 and all(map(str.startswith, found, starts)), found


def test_yamls_aliases_do_not_multiply_into_the_message(tmp_path):
    levels = "".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
    (tmp_path / "bomb.yaml").write_text(f"data: digits\nrows: [{{label: a}}]\noptions:\n  l0: &l0 [a]\n{levels}")
    with pytest.raises(UserError, match="bomb.yaml: options is ") as error:
        loading.load(tmp_path / "bomb.yaml")
    assert len(str(error.value)) < 500


def test_one_half_written_table_blocks_no_other(tmp_path, capfd):
    write_table(tmp_path)
    (tmp_path / "half.yaml").write_text("title: [half")
    status, out, error = reproduce(capfd, "list", "--experiments", tmp_path)
    assert status == 0 and "small " in out and error.startswith(f"warning: left out: {tmp_path}/half.yaml, line 1: ")
    status, out, _ = reproduce(capfd, "run", "small", "--dry-run", "--experiments", tmp_path)
    assert status == 0 and "train_cifar.py" in out
    status, _, error = reproduce(capfd, "run", "half", "--dry-run", "--experiments", tmp_path)
    assert status == 1 and "half.yaml, line 1: " in error_line(error)


def test_an_option_that_a_figure_lacks_is_refused_before_anything_runs(tmp_path):
    write_table(tmp_path, figure="gradients", figure_options={"exmples": 10})
    with pytest.raises(UserError, match="small.yaml: figure_options names 'exmples'; analyze.py takes"):
        loading.load(tmp_path / "small.yaml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: 1\n\tb: 2\n", ", line 2: "),
        ("title: a\ntitle: b\n", ", line 2: key 'title' is given twice"),
        ("rows:\n- {label: a, label: b}\n", ", line 2: key 'label' is given twice"),
        ("? [1, 2]\n: 3\n", ", line 1: found unhashable key"),
        ("title: 2020-13-45\n", "not YAML: month must be in 1..12"),
        ("title: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("title: !!map [1]\n", "expected a mapping node"),
        ("- a\n- b\n", "expected a mapping with the keys data"),
        ("", "expected a mapping with the keys data"),
        ("a: [1\n", ", line 2: "),
        ("a: \0\n", "not YAML"),
        ("[" * 900, "not YAML"),
    ],
)
def test_what_is_not_yaml_is_one_line_with_the_file(tmp_path, text, part):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        loading.load(path)
    assert str(path) in str(error.value) and part in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_a_text_file_is_one_line(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"title: \xff\n")
    with pytest.raises(UserError, match="cannot read .*a.yaml: it is not UTF-8 text"):
        loading.load(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").mkdir()
    with pytest.raises(UserError, match="cannot read .*b.yaml: Is a directory"):
        loading.load(tmp_path / "b.yaml")
    with pytest.raises(UserError, match="holds no tables: expected files such as table1.yaml"):
        loading.load_all(tmp_path / "nowhere", None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- digits\n", "expected a mapping, from a name for --corpus"),
        ("a: 1\n", "'a': expected a mapping with the keys task, data"),
        ("a: {task: images}\n", "'a': 'data' is missing"),
        ("a: {task: image, data: digits}\n", "'a': task is 'image'; expected one of images, translation"),
        ("a: {task: images, data: digits, update: 1}\n", "'a': unknown key 'update'"),
    ],
)
def test_stand_ins_are_checked_as_tables_are(tmp_path, capfd, text, part):
    write_table(tmp_path)
    (tmp_path / loading.STAND_INS).write_text(text)
    status, out, error = reproduce(capfd, "list", "--experiments", tmp_path)
    assert status == 1 and "stand-ins.yaml" in error and part in error_line(error)
