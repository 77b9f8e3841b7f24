"""What is wrong in a table's YAML file: every mistake is named at once."""

import pytest
from experiment_runs import IMAGES, TRANSLATION, refused, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import reproduce


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
            {"evaluate": {"context-window": 8}},
            "evaluate: --context-window 8 is for a text, and the data are a translation",
        ),
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
        "an option of texts",
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


def test_a_wrong_baseline_of_the_table_is_not_a_rows(tmp_path, capsys):
    path = write(tmp_path, IMAGES, baseline="nope")
    assert reproduce.main(["list", str(path)]) == 1
    errors = capsys.readouterr().err
    assert f"{path}: baseline is 'nope'; expected one of plain, recursive" in errors
    assert ", row " not in errors
