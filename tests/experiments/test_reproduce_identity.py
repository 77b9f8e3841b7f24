"""Which runs `reproduce.py` takes for the same: what names a run's folder, and what does not count."""

import json
import shutil

import pytest
import yaml
from reproduce_helpers import TABLE, folders, plan, shipped, write_table

from fairseq_rskip.tools.reproduce import loading, plans
from fairseq_rskip.tools.reproduce.main import make_plan
from fairseq_rskip.tools.reproduce.options import parse


def test_identical_rows_of_different_tables_are_one_run(tmp_path):
    found = {name: folders(plan(name), tmp_path) for name, table in shipped().items() if table.source}
    first, second = found["table1"], found["table2"]
    assert found["table3"]["x + F", "", 2] == found["table4"]["1xSkip", "", 2] == first["1xSkip", "", 2]
    assert first["1rSkip+LN", "", 1] == first["1xSkip+LN", "", 1]
    for name in ("wskip", "figure3", "figure4"):
        assert found[name]["2rSkip+LN", "", 1] == first["2rSkip+LN", "", 1]
    assert found["table5"]["1xSkip+LN", "6 blocks", 1] == second["1xSkip+LN", "", 1] == second["1rSkip+LN", "", 1]
    assert found["table7"]["Transformer-Base", "EN-VI", 1] == second["1xSkip+LN", "", 1]


def test_different_settings_never_share_a_run(tmp_path):
    tables = [name for name, table in shipped().items() if table.source or name == "skips"]
    wanted = [(name, *words) for name in tables for words in ((), ("--scale", "0.5"))]
    wanted += [("table1", "--set", "depth=20"), ("table1", "--set", "lr=0.2"), ("table1", "--corpus", "digits")]
    wanted += [("table2", "--corpus", "multi30k"), ("table2", "--set", "dropout=0.3")]
    found = {}
    for words in wanted:
        made = plan(*words)
        for cell in made.cells:
            run = plans.make_run(made, cell.variants[0], 1, tmp_path)
            commands = [[word for word in command if str(tmp_path) not in word] for command in run.commands()]
            assert found.setdefault(run.folder, commands) == commands
    assert len({json.dumps(commands) for commands in found.values()}) == len(found) > 90


def test_the_folder_of_a_run_stays_the_one_that_it_was(tmp_path):
    """Finished runs are found by these names: a change of the hashing would train all of them again."""
    words = ("--corpus", "digits", "--set", "depth=8", "--scale", "0.0005", "--rows", "1xSkip", "2rSkip+LN")
    found = folders(plan("table1", *words, "--seeds", 1), tmp_path).values()
    names = ["digits-resnet8-xskip1-none-32-1f17d231", "digits-resnet8-rskip2-layer-32-5ef54a0b"]
    assert [path.parent.name for path in found] == names
    found = folders(plan("table2", "--rows", "2rSkip+LN"), tmp_path).values()
    arch = "iwslt15-en-vi-transformer_rskip_ln_iwslt_en_vi"
    assert [path.parent.name for path in found] == [f"{arch}-lambda2-100000-b5070dac"]


def test_one_number_is_one_run_however_it_is_written(tmp_path):
    found = set()
    for value in (2, 2.0, "2", "2e0"):
        write_table(
            tmp_path, rows=[{"label": "r", "options": {"skip-kind": "xskip", "skip-lambda": value}}], baseline=""
        )
        made = make_plan(loading.load(tmp_path / "small.yaml"), parse(["run", "small"]))
        found |= set(folders(made, tmp_path).values())
    assert len(found) == len(TABLE["seeds"])


def test_an_experiment_becomes_a_row_by_pasting(tmp_path):
    """One file each, and the same keys as rows of one table: the same runs."""
    text = {"source": "en", "target": "fr", "folder": str(tmp_path / "mine")}
    text.update({split: [f"{split}.en", f"{split}.fr"] for split in ("train", "valid", "test")})
    both = {"data": text, "seeds": [1, 2], "evaluate": {"beam": 5, "lenpen": 1.0}, "also": ["chrF"]}
    both["options"] = {"max-epoch": 3, "patience": 2}
    one = {**both, "label": "one", "arch": "transformer_xskip_ln_tiny"}
    two = {**both, "label": "two", "arch": "transformer_rskip_ln_tiny", "options": {"skip-lambda": 2, "max-update": 9}}
    found = {}
    for name, content in {"one": one, "two": two, "both": {"rows": [one, two]}}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        made = make_plan(loading.load(tmp_path / f"{name}.yaml"), parse(["run", name]))
        found[name] = {(row, seed): folder for (row, _, seed), folder in folders(made, tmp_path).items()}
    assert found["both"] == {**found["one"], **found["two"]} and len(found["both"]) == 4
    run = plans.make_run(made, made.cells[0].variants[0], 1, tmp_path)
    train, evaluate = run.commands()
    assert train[1:3] == [str(tmp_path / "mine"), "transformer_xskip_ln_tiny"] and "--patience" in train
    assert evaluate[-4:] == ["--beam", "5", "--lenpen", "1"]


FREE = [
    ("table1", "device=cpu", ["--device", "cpu"]),
    ("table1", "save-interval=7", ["--save-interval", "7"]),
    ("table1", "compile=true", ["--compile"]),
    ("table2", "skip-log-interval=100", ["--skip-log-interval", "100"]),
]


@pytest.mark.parametrize("table, change, words", FREE, ids=["device", "save-interval", "compile", "skip-log-interval"])
def test_what_does_not_change_a_training_leaves_run_and_table_alone(tmp_path, table, change, words):
    changed = plan(table, "--set", change)
    assert changed.whole and changed.name == table
    assert folders(changed, tmp_path) == folders(plan(table), tmp_path)
    for cell in changed.cells:
        command = plans.make_run(changed, cell.variants[0], 1, tmp_path).commands()[0]
        at = command.index(words[0])
        assert command[at : at + len(words)] == words


def test_where_a_folder_of_data_lies_does_not_count(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place / "ảnh của tôi").mkdir(parents=True)
    images = [plan("table1", "--corpus", tmp_path / place / "ảnh của tôi") for place in ("a", "b")]
    assert folders(images[0], tmp_path) == folders(images[1], tmp_path)
    prepared = tmp_path / "c" / "data-bin"
    prepared.mkdir(parents=True)
    (prepared / "preparation.json").write_text(json.dumps({"corpus": "multi30k-en-de", "src": "en", "tgt": "de"}))
    named, there = (plan("table2", "--corpus", corpus) for corpus in ("multi30k", tmp_path / "c"))
    shutil.rmtree(tmp_path / "c")  # finished runs are found all the same
    assert folders(there, tmp_path) == folders(named, tmp_path)  # the stand-in, by its path


DATA = [("table1", "cifar10"), ("table2", "iwslt15-en-vi")]


@pytest.mark.parametrize("table, name", DATA, ids=["images", "translation"])
def test_a_folder_that_is_called_like_the_data_is_not_the_data(tmp_path, table, name):
    (tmp_path / name).mkdir()
    own = plan(table, "--rows", "2xSkip+LN")
    other = plan(table, "--rows", "2xSkip+LN", "--corpus", tmp_path / name)
    assert own.whole and not other.whole and own.name != other.name
    assert set(folders(own, tmp_path).values()).isdisjoint(folders(other, tmp_path).values())


def test_the_tables_own_corpus_prepared_elsewhere_is_the_tables_own(tmp_path):
    (tmp_path / "preparation.json").write_text('{"corpus": "iwslt15-en-vi"}')
    own, moved = plan("table2"), plan("table2", "--corpus", tmp_path)
    assert moved.whole and moved.name == own.name == "table2"
    assert {cell.variants[0].settings.data for cell in moved.cells} == {str(tmp_path)}
    assert folders(moved, tmp_path) == folders(own, tmp_path)


def test_different_plans_have_different_names(tmp_path):
    for name in ("ảnh", "ẩnh", "a b", "a_b"):
        (tmp_path / name).mkdir()
    words = [("--corpus", tmp_path / name) for name in ("ảnh", "ẩnh", "a b", "a_b")]
    words += [("--scale", "0.12345678"), ("--scale", "0.12345679"), ("--set", "lr=0.1"), ("--set", "lr=0.2")]
    names = ("lr", "lr-factor", "momentum", "skip-branch-scale", "skip-lambda", "warmup-lr")
    many = [f"{name}=0.{'123456789' * 2}" for name in names]
    words += [("--set", *many, "weight-decay=0.1"), ("--set", *many, "weight-decay=0.2")]
    made = [plan("table1", "--rows", "1xSkip", *more) for more in words]
    assert len({one.name for one in made}) == len(made)
    assert all(len(one.name) < 200 and one.name.isascii() and "/" not in one.name for one in made)
    assert plan("table1", "--scale", "0.0125", "--set", "depth=20").name == "table1-scale0.0125-depth-20"
