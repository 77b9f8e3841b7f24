"""reproduce.py's command line: what it refuses, before anything is written or run, and what it prints."""

import pytest
import yaml
from reproduce_helpers import error_line, reproduce, write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import experiment, local, plans
from fairseq_rskip.tools.reproduce.main import parse_changes
from fairseq_rskip.tools.reproduce.runs import BROKEN, State
from fairseq_rskip.tools.reproduce.tables import ROOT


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"table": "table1"}'],
    ids=["empty", "half", "list", "nothing", "of an earlier version"],
)
def test_a_damaged_plan_is_named(tmp_path, capfd, content):
    (tmp_path / plans.PLANS).mkdir()
    (tmp_path / plans.PLANS / "table1.json").write_text(content)
    status, _, error = reproduce(capfd, "status", "--output", tmp_path)
    assert status == 1 and "table1.json: " in error_line(error) and "its runs stay" in error


def test_set_takes_values_as_yaml_has_them():
    words = [
        "depth=20",
        "lr=0.1",
        "flip=false",
        "skip-norm=none",
        "adam-betas=(0.9, 0.98)",
        "--skip_kind=xskip",
        "a=b=c",
    ]
    assert parse_changes(words) == {
        **{"depth": 20, "lr": 0.1, "flip": False, "skip-norm": "none", "adam-betas": "(0.9, 0.98)"},
        **{"skip-kind": "xskip", "a": "b=c"},
    }
    for word in ("depth", "=8", "depth=", "depth={a: 1}", "depth=2020-01-01", "depth=~"):
        with pytest.raises(UserError, match="expected NAME=VALUE"):
            parse_changes([word])
    with pytest.raises(UserError, match="depth is given twice"):
        parse_changes(["depth=8", "depth=20"])


@pytest.mark.parametrize(
    "words",
    [*(("--scale", x) for x in ("0", "-1", "nan", "x")), ("--seeds", "x"), ("--jobs", "0")],
    ids=["scale 0", "scale -1", "scale nan", "scale x", "seeds x", "jobs 0"],
)
def test_options_that_make_no_sense_are_one_line(capfd, words):
    status, out, error = reproduce(capfd, "run", "table1", *words)
    assert status == 2 and words[0] in error_line(error) and repr(words[1]) in error


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path, capfd):
    write_table(tmp_path / "e")
    words = ("run", "small", "--dry-run", "--experiments", tmp_path / "e", "--output", tmp_path / "đầu ra")
    status, out, error = reproduce(capfd, *words)
    assert (status, error) == (0, "") and not (tmp_path / "đầu ra").exists()
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(lines) == 4 and all("train_cifar.py --data digits " in line and " --depth 8 " in line for line in lines)


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, capfd):
    write_table(tmp_path / "e")
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        status, _, error = reproduce(capfd, "run", "small", "--experiments", tmp_path / "e", "--output", output)
        assert status == 1 and str(tmp_path / "file") in error_line(error)


@pytest.mark.parametrize(
    ("corpus", "task", "part"),
    [
        ("wmt14-en-de", "translation", "run: data-prep/prepare-wmt14-en-de.sh"),
        ("empty", "translation", "lacks train.SRC-TGT.SRC.idx"),
        ("empty", "images", "is no folder of images: it holds none of train, train.tar.gz"),
    ],
)
def test_data_that_is_not_prepared_stops_before_anything_runs(tmp_path, capfd, corpus, task, part):
    (tmp_path / "empty").mkdir()
    folder = write_table(tmp_path / "e")
    if task == "translation":
        rows = [{"label": "a", "arch": "transformer_xskip_iwslt_en_vi"}]
        write_table(tmp_path / "e", task=task, metric="chrF", data="numbers", rows=rows, options={}, baseline="")
    corpus = tmp_path / "empty" if corpus == "empty" else corpus
    words = ("small", "--experiments", folder, "--output", tmp_path / "out", "--corpus", corpus)
    if (ROOT / "data" / str(corpus) / "data-bin").is_dir():
        pytest.skip(f"{corpus} is prepared here")
    status, _, error = reproduce(capfd, "run", *words)
    line = error_line(error.splitlines()[-1])
    assert status == 1 and line.startswith("small cannot run: ") and part in line
    assert not (tmp_path / "out").exists()


def test_status_names_what_it_does_not_know(tmp_path, capfd):
    folder = write_table(tmp_path / "e")
    options = ("--experiments", folder, "--output", tmp_path / "out")
    assert "nothing has been run in" in reproduce(capfd, "status", *options)[1]
    said = "no table named 'table9' has been run here; there are none"
    assert error_line(reproduce(capfd, "status", "table9", *options)[2]) == said
    assert not (tmp_path / "out").exists()


def run_experiment(capfd, *words):
    """``rskip run`` in this process: (exit status, stdout, stderr)."""
    capfd.readouterr()
    status = experiment.main([str(word) for word in words])
    out, error = capfd.readouterr()
    assert "reproduce.py" not in out + error
    return status, out, error


def test_a_named_corpus_is_prepared_first(tmp_path, capfd):
    if (ROOT / "data" / "iwslt15-en-vi" / "data-bin").is_dir():
        pytest.skip("it is prepared here")
    words = ("table2", "--rows", "1xSkip", "--dry-run", "--output", tmp_path / "out")
    status, out, _ = run_experiment(capfd, *words)
    prepare, run, train, evaluate = out.splitlines()
    assert status == 0 and prepare == str(ROOT / "data-prep" / "prepare-iwslt15-en-vi.sh")
    assert run.startswith("# iwslt15-en-vi-") and "train.sh" in train and "evaluate.sh" in evaluate
    assert not (tmp_path / "out").exists()


def test_what_rskip_run_says_of_a_failed_run_names_its_reason_and_no_other_command(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(local, "run_all", lambda runs, places: [State(BROKEN, detail="too hot") for _ in runs])
    path = write_table(tmp_path) / "small.yaml"
    status, out, error = run_experiment(capfd, path, "--output", tmp_path / "out")
    assert status == 1 and "plain, seed 1: not run" in out and (tmp_path / "out" / "report" / "report.html").exists()
    assert error_line(error) == "4 of 4 runs failed: too hot; the same command tries again"


def test_text_that_cannot_be_prepared_is_one_line(tmp_path, capfd):
    text = {"source": "en", "target": "fr", "folder": str(tmp_path / "mine"), "options": {"bpe-sise": 50}}
    text.update({split: [str(tmp_path / "a"), str(tmp_path / "b")] for split in ("train", "valid", "test")})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"data": text, "arch": "transformer_xskip_ln_tiny"}))
    words = (tmp_path / "mine.yaml", "--output", tmp_path / "out")
    status, _, error = run_experiment(capfd, *words)
    assert status == 1 and "data: train names" in error_line(error.splitlines()[-1])
    assert not (tmp_path / "mine").exists()
    for name in "ab":
        (tmp_path / name).write_text("one\n")
    status, _, error = run_experiment(capfd, *words)
    line = error_line(error.splitlines()[-1])
    assert status == 1 and line.startswith("prepare-corpus.sh ended with status 1: error: unknown option --bpe-sise")
    assert not (tmp_path / "out").exists()
