"""The parts of rskip evaluate that need no trained model: choices, command lines, explanations."""

import argparse
import json
from argparse import Namespace

import numpy
import pytest
import torch
from conftest import run_command

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import generation, language_model, weights
from fairseq_rskip.tools.evaluate import main as evaluate_main
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


def test_scores_of_other_weights_beside_a_checkpoint_are_not_its_own(tmp_path):
    checkpoint, other = tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint8.pt"
    checkpoint.write_text("best")
    other.write_text("another")
    (tmp_path / "evaluation-test").mkdir()
    evaluation = {"checkpoints": cached.identity([other])}
    scores = {"evaluation": evaluation, "scores": []}
    (tmp_path / "evaluation-test" / "scores.json").write_text(json.dumps(scores))
    assert list(evaluations_of(checkpoint)) == []
    assert len(list(evaluations_of(other))) == 1


TRAINED_WITH = {  # docs/evaluation.md: length, batch, learning rate, warm-up, seed, processes
    "optimization": {"max_update": 300, "max_epoch": 7, "update_freq": [2], "lr": [0.001]},
    "dataset": {"max_tokens": 4096, "batch_size": 16},
    "distributed_training": {"distributed_world_size": 4},
    "lr_scheduler": {"warmup_updates": 60},
    "common": {"seed": 3, "log_interval": 100},
}


def test_the_options_whose_differences_a_comparison_names_are_those_of_the_page(tmp_path):
    path = tmp_path / "checkpoint_best.pt"
    torch.save({"cfg": TRAINED_WITH, "model": {"weight": torch.ones(2)}}, path)
    assert weights.training_options(path) == {
        "max-update": 300,
        "max-epoch": 7,
        "update-freq": [2],
        "lr": [0.001],
        "max-tokens": 4096,
        "batch-size": 16,
        "distributed-world-size": 4,
        "warmup-updates": 60,
        "seed": 3,
    }


@pytest.mark.parametrize("is_monolingual", [True, False], ids=["text", "translation"])
def test_by_default_a_language_model_is_its_best_checkpoint_and_no_average(
    tmp_path, is_monolingual
):
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_best.pt"):
        (tmp_path / name).touch()
    options = Namespace(folder=tmp_path, average=None, checkpoint=None)
    taken, _ = evaluate_main.choose_checkpoints(options, Namespace(is_monolingual=is_monolingual))
    expected = ["checkpoint_best.pt"] if is_monolingual else ["checkpoint2.pt", "checkpoint1.pt"]
    assert [path.name for path in taken] == expected


@pytest.mark.parametrize(
    ("has_gpu", "words", "expected"),
    [
        (True, [], ["--fp16"]),
        (True, ["--fp32"], []),
        (True, ["--cpu"], ["--cpu"]),
        (False, [], ["--cpu"]),
    ],
    ids=["GPU", "GPU, fp32", "GPU, --cpu", "no GPU"],
)
def test_a_gpu_computes_in_fp16_unless_fp32_is_asked_for(
    tmp_path, monkeypatch, has_gpu, words, expected
):
    checkpoint = tmp_path / "checkpoint_best.pt"
    checkpoint.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(cached, "is_made", lambda path, key: True)  # nothing is run
    options = evaluate_main.parse(["data", str(tmp_path), *words])
    shown = generation.Shown(b"", 1, "translated", "sent")
    program = generation.Program("fairseq-generate", tmp_path / "log", ["--beam", "4"], shown)
    corpus = Namespace(checksums=lambda subset: {})
    key = evaluate_main.run_fairseq(options, corpus, [checkpoint], program)
    assert key["options"] == ["--beam", "4", *expected]


@pytest.fixture
def two_lines(tmp_path):
    """A text of 2 lines, 3 words and 7 bytes, line ends included: in 6 subwords and line ends."""
    raw = tmp_path / "test.en"
    raw.write_text("é b\nc\n", encoding="utf-8")
    return Namespace(
        source="en",
        reference=lambda subset: raw,
        lengths=lambda subset, language: numpy.array([4, 2]),
        text_sha256=lambda subset: "0",
    )


def test_perplexity_per_subword_and_per_word_and_bits_per_byte_are_of_one_probability(two_lines):
    """Each of 6 tokens has probability 1/2: 6 bits over 3 words and 2 line ends, and 7 bytes."""
    measured = language_model.measure(two_lines, "test", [-numpy.log(2)] * 6)
    assert measured["perplexity"]["subword"] == pytest.approx(2.0)
    assert measured["perplexity"]["word"] == pytest.approx(2 ** (6 / 5))
    assert measured["bits"]["byte"] == pytest.approx(6 / 7)


@pytest.mark.parametrize("count", [5, 7])
def test_every_token_of_the_text_has_one_probability(two_lines, count):
    with pytest.raises(UserError, match=f"scored {count} of 6 tokens of test"):
        language_model.measure(two_lines, "test", [-1.0] * count)


def test_windows_are_read_in_the_order_of_the_text_however_they_were_batched(tmp_path):
    line = "2026-01-01 12:00:00 | INFO | fairseq_cli.eval_lm | {} {}\n".format
    text = line(10, "d [-4.0]") + line(2, "c [-3.0]") + line(0, "a [-1.0]\tb [-2.0]")
    (tmp_path / "log").write_text(text)
    assert language_model.log_probabilities(tmp_path / "log") == [-1.0, -2.0, -3.0, -4.0]


def test_a_dictionary_that_the_corpus_lacks_is_another_vocabulary(tmp_path):
    """From English to French was trained, and the corpus has German."""
    training, data = tmp_path / "training", tmp_path / "data"
    for folder, languages in ((training, ("en", "fr")), (data, ("en", "de"))):
        folder.mkdir()
        for language in languages:
            (folder / f"dict.{language}.txt").write_text("a 2\n")
    (training / "checkpoint_best.pt").touch()
    with pytest.raises(UserError, match="dict.fr.txt is not that of"):
        Corpus(data, "mine", source="en", target="de").check_vocabulary(training)
