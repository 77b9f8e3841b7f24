"""The parts of rskip evaluate that need no trained model: choices, command lines, explanations."""

import argparse
import json

import pytest
import torch
from conftest import run_command

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import generation, weights
from fairseq_rskip.tools.process import explain
from fairseq_rskip.tools.systems import evaluations_of

EPOCHS = [f"checkpoint{n}.pt" for n in (1, 2, 9, 10)]
UPDATES = [f"checkpoint_{e}_{u}.pt" for e, u in ((1, 500), (2, 1000), (10, 9500))]
OFTEN = [f"checkpoint_{e}_{u}.pt" for e, u in ((9, 8500), (10, 9000), (10, 9500))]
LAST = ["checkpoint_best.pt", "checkpoint_last.pt"]


@pytest.mark.parametrize(
    "there, count, expected",
    [
        (EPOCHS + LAST, 3, ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt"]),
        (UPDATES, 2, ["checkpoint_10_9500.pt", "checkpoint_2_1000.pt"]),
        # of three the epochs reach back to the second, the updates into the first
        (EPOCHS + UPDATES, 3, ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt"]),
        (EPOCHS + OFTEN, 2, ["checkpoint_10_9500.pt", "checkpoint_10_9000.pt"]),
        (EPOCHS + OFTEN[:2], 2, ["checkpoint10.pt", "checkpoint9.pt"]),
        (
            EPOCHS + UPDATES,
            4,
            ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt", "checkpoint1.pt"],
        ),
        (
            EPOCHS + UPDATES[:1],
            5,
            ["checkpoint10.pt", "checkpoint9.pt", "checkpoint2.pt", "checkpoint1.pt"],
        ),
        (UPDATES[:1] + LAST, 5, ["checkpoint_best.pt"]),
        (EPOCHS + LAST[1:], 0, ["checkpoint_last.pt"]),
    ],
)
def test_the_last_checkpoints_are_chosen(tmp_path, there, count, expected):
    for name in [*there, "checkpoint11.pt.tmp", "averaged.pt"]:
        (tmp_path / name).touch()
    taken, which = weights.choose(tmp_path, count)
    assert [path.name for path in taken] == expected
    assert all(name in which for name in expected)
    least = count if len(taken) > 1 else 2  # of which an average is made
    assert (f"fewer than {least} are numbered" in which) == (len(taken) < count)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("translation", [f"checkpoint{n}.pt" for n in (12, 11, 10, 9, 8)]),
        ("language_modeling", ["checkpoint_best.pt"]),
    ],
    ids=["translation", "language model"],
)
def test_the_last_five_of_a_translation_model_are_averaged(tmp_path, task, expected):
    """Vaswani et al. 2017, section 6.1: five checkpoints of a base model."""
    state = {"cfg": {"task": {"_name": task}}, "model": {"w": torch.zeros(2)}}
    for name in [*(f"checkpoint{n}.pt" for n in range(1, 13)), *LAST]:
        torch.save(state, tmp_path / name)
    taken, _ = weights.choose_by_task(tmp_path)
    assert [path.name for path in taken] == expected


def test_the_checkpoints_of_a_run_folder_are_chosen(tmp_path):
    """seed1 of rskip run has them in checkpoints/; its own come first, where it has some."""
    inner = tmp_path / "seed1" / "checkpoints"
    inner.mkdir(parents=True)
    (inner / "checkpoint_best.pt").touch()
    assert weights.choose(tmp_path / "seed1", 5)[0] == [inner / "checkpoint_best.pt"]
    (tmp_path / "seed1" / "checkpoint_last.pt").touch()
    taken, _ = weights.choose(tmp_path / "seed1", 5)
    assert taken == [tmp_path / "seed1" / "checkpoint_last.pt"]


def test_a_missing_folder_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        weights.choose(tmp_path / "nowhere", 5)


def prepared(tmp_path, bpe="subword-nmt", tokenizer="moses", corpus="own"):
    return Corpus(tmp_path, corpus, "", "en", "vi", {"bpe": bpe, "tokenizer": tokenizer})


@pytest.mark.parametrize(
    ("corpus", "bpe", "tokenizer", "tokenised"),
    [
        ("own", "subword-nmt", "moses", False),
        ("own", "subword-nmt", "none", True),
        ("own", "sentencepiece", "none", False),
        ("iwslt15-en-vi", "sentencepiece", "none", True),
    ],
)
def test_text_that_is_published_as_tokens_is_scored_as_tokens(
    tmp_path, corpus, bpe, tokenizer, tokenised
):
    assert prepared(tmp_path, bpe, tokenizer, corpus).tokenised == tokenised


@pytest.mark.parametrize("direction", ["en-vi", "vi-en"])
def test_a_data_bin_serves_both_directions(tmp_path, direction):
    for suffix in ("bin", "idx"):
        (tmp_path / f"test.{direction}.en.{suffix}").touch()
    assert all(path.is_file() for path in prepared(tmp_path).binarised("test"))


def test_an_average_that_nobody_asked_to_keep_is_removed(tmp_path):
    paths = [tmp_path / f"checkpoint{number}.pt" for number in (2, 1)]
    for number, path in enumerate(paths):
        torch.save({"cfg": {"task": {}}, "model": {"w": torch.full((2,), 2.0 * number)}}, path)
    with weights.as_one(paths) as average:
        assert torch.load(average)["model"]["w"].tolist() == [1.0, 1.0]
    assert not average.parent.exists()


def test_the_command_names_the_plugin_and_refuses_misread_paths(tmp_path):
    command = generation.command(
        prepared(tmp_path / "a b's"), tmp_path / "é $x.pt", ["--beam", "4"]
    )
    assert (
        command[command.index("--user-dir") + 1]
        == run_command(["python", "-m", "fairseq_rskip"]).stdout.strip()
    )
    with pytest.raises(UserError, match="fairseq cannot take a colon in a path"):
        generation.command(prepared(tmp_path), tmp_path / "a:b" / "x.pt", [])


FAILURES = [
    (
        "INFO x\nTraceback\n  File y\nRuntimeError: size mismatch\n\tweight\n\n",
        1,
        "RuntimeError: size mismatch",
    ),
    ("usage: fairseq-generate\nfairseq-generate: error: argument --beam\n", 2, "argument --beam"),
    (
        "OSError: full\nException ignored in: <f>\nTraceback:\n  File y\nAttributeError: z\n",
        1,
        "OSError: full",
    ),
    ("H-0\t-1\tx\n", -9, "killed by SIGKILL, perhaps out of memory"),
]


@pytest.mark.parametrize(
    "log, status, expected", FAILURES, ids=[expected for _, _, expected in FAILURES]
)
def test_a_failure_is_explained_by_its_last_meaningful_line(log, status, expected):
    assert explain(status, log) == expected


def test_hypotheses_come_in_order_and_may_hold_anything_but_a_newline(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "S-1\tx\nH-1\t-0.5\tb\u2028 \x85c\nD-1\t-0.5\tno\nH-0\t-1e-05\t\nH-2\t-2\tz\n",
        encoding="utf-8",
    )
    assert generation.hypotheses(log, 3) == ["", "b\u2028 \x85c", "z"]
    for sentences in (2, 4):
        with pytest.raises(UserError, match=f"3 hypotheses .* {sentences} references"):
            generation.hypotheses(log, sentences)
    log.write_text("H-1\t-1\ta\nH-1\t-1\ta\n", encoding="utf-8")
    with pytest.raises(UserError, match="2 hypotheses for 2 references"):
        generation.hypotheses(log, 2)


def test_a_checkpoint_from_before_fairseq_0_10_has_its_task_among_all_options(tmp_path):
    path = tmp_path / "checkpoint_best.pt"
    options = argparse.Namespace(task="translation", data="data-bin", arch="transformer")
    torch.save({"args": options, "model": {"weight": torch.ones(2)}}, path)
    task = weights.task_of(path, "translation")
    assert (task["_name"], task["data"]) == ("translation", "data-bin")
    with pytest.raises(UserError, match="was trained for --task translation: expected language_m"):
        weights.task_of(path, "language_modeling")


def test_a_task_of_fairseqs_older_classes_is_a_namespace(tmp_path):
    path = tmp_path / "checkpoint_best.pt"
    name = "translation_multi_simple_epoch"
    cfg = {"task": argparse.Namespace(_name=name, data="data-bin"), "common": {"seed": 3}}
    torch.save({"cfg": cfg, "model": {"weight": torch.ones(2)}}, path)
    assert weights.task_of(path)["data"] == "data-bin"
    assert weights.training_options(path) == {"seed": 3}
    with pytest.raises(UserError, match=f"was trained for --task {name}: expected translation"):
        weights.task_of(path, "translation")


def test_scores_are_of_the_rules_files_as_they_are_now(tmp_path, monkeypatch):
    """A card would else have the scores of another equation: the weights alone do not tell."""
    checkpoint = tmp_path / "checkpoint_best.pt"
    checkpoint.touch()
    evaluation = {"checkpoints": cached.identity([checkpoint])}
    (tmp_path / "evaluation-test").mkdir()
    scores = tmp_path / "evaluation-test" / "scores.json"
    for written, now, known in (
        ([], [], True),
        (["abc"], ["abc"], True),
        (["abc"], ["def"], False),
        ([], ["def"], False),
        (["abc"], [], False),
    ):
        scores.write_text(json.dumps({"evaluation": {**evaluation, "rules": written}}))
        monkeypatch.setattr(weights, "own_rules_of", lambda path, now=now: now)
        assert bool(list(evaluations_of(checkpoint))) is known
