"""scripts/evaluate.sh on a model trained for seconds.

It is compared with the commands of fairseq, sacremoses and sacreBLEU.
"""

import json
import os
import re
import shutil

import pytest
import torch
from conftest import ROOT, run_checked, run_command
from evaluation_corpus import follow_in_server
from fairseq import options
from sacremoses import MosesDetokenizer
from spoilt_evaluation import SPOILT, longer_dictionary
from training_corpus import lengthen

from fairseq_rskip.files import locked
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools import cached, score
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate import generation, weights
from fairseq_rskip.tools.evaluate import main as evaluate_main
from fairseq_rskip.tools.evaluate.main import main

pytestmark = pytest.mark.slow

PLUGIN = ["--user-dir", ROOT / "fairseq_rskip"]


@pytest.fixture
def copy(translator, translated, tmp_path):
    """Data and checkpoints to spoil, not evaluated yet."""
    data, folder = tmp_path / "data", tmp_path / "model"
    shutil.copytree(translator[0] / "data-bin", data)
    shutil.copytree(translator[1], folder, ignore=shutil.ignore_patterns("evaluation-*"))
    return data, folder


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setattr(generation, "follow", follow_in_server)


@pytest.fixture
def calls(translated, monkeypatch):
    """Replace generation.run by a copy of the log that was generated for real.

    Returns the commands it was given.
    """
    commands, text = [], (translated[1] / "generate.log").read_bytes()

    def run(command, log, sentences):
        commands.append(command)
        log.write_bytes(text)

    monkeypatch.setattr(generation, "run", run)
    return commands


def evaluate(*words):
    return main([str(word) for word in words])


def test_translations_and_score_are_those_of_the_plain_commands(translator, translated, tmp_path):
    """rskip average, fairseq-generate, sort, cut, sacremoses and sacrebleu are run by hand.

    That is as in docs/results.md.
    """
    data, folder = translator[0] / "data-bin", translator[1]
    average = tmp_path / "average.pt"
    words = ["average", "--inputs", folder, "--last", 5, "--output", average]
    assert rskip([str(word) for word in words]) == 0
    options = (
        "--beam 4 --lenpen 0.5 --max-len-a 1 --max-len-b 50 --remove-bpe --batch-size 7 --cpu"
    ).split()
    log = run_checked(["fairseq-generate", data, *PLUGIN, "--path", average, *options])
    actual = [line.split("\t") for line in log.splitlines() if line.startswith("H-")]
    tokens = [text for _, _, text in sorted(actual, key=lambda fields: int(fields[0][2:]))]
    command = ["sacremoses", "-q", "-l", "de", "-j", "1", "detokenize"]
    plain = run_command(command, input="".join(line + "\n" for line in tokens)).stdout
    ids = [
        int(number)
        for number in re.findall(r"^H-(\d+)\t", (translated[1] / "generate.log").read_text(), re.M)
    ]
    assert ids != sorted(ids) and sorted(ids) == list(range(33))
    assert (translated[1] / "hyp.tok").read_text(encoding="utf-8").split("\n") == [*tokens, ""]
    assert (translated[1] / "hyp.txt").read_text(encoding="utf-8") == plain
    assert (
        "@-@" in " ".join(tokens) and "&quot;" in " ".join(tokens) and "@@" not in " ".join(tokens)
    )
    assert "schwarz-weißes" in plain and '"' in plain and "&quot;" not in plain
    bleu = run_command(
        ["sacrebleu", data / "raw" / "test.de", "-i", translated[1] / "hyp.txt", "-b", "-w", "6"]
    ).stdout
    row = json.loads((translated[1] / "scores.json").read_text(encoding="utf-8"))["scores"][0]
    assert row["score"] == pytest.approx(float(bleu), abs=1e-5) and float(bleu) > 40
    assert f"{row['score']:.2f}  {row['signature']}" in translated[0]
    assert (
        f"length ratio {row['length_ratio']:.3f}, brevity penalty {row['brevity_penalty']:.3f}"
        in translated[0]
    )


def test_compare_takes_checkpoints_and_evaluates_each_once(
    translator, translated, capsys, monkeypatch
):
    """A training's folder, whose evaluation is there, and one of its checkpoints are compared.

    Then again: nothing is left to do.
    """
    words = ["compare", str(translator[1]), str(translator[1] / "checkpoint8.pt"), "--trials", "20"]
    assert rskip(words) == 0
    out, err = capsys.readouterr()
    made = translator[1] / "evaluation-test-checkpoint8"
    for folder, line in zip((translated[1], made), out.splitlines()[1:]):
        actual = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        score, chrf = (
            row["score"] for row in actual["scores"] if row["name"] in ("sacreBLEU 13a", "chrF")
        )
        assert re.split("  +", line)[1:3] == [f"{score:.2f}", f"{chrf:.2f}"]
    assert f"checkpoint8.pt: checkpoint {words[2]}\n" in out and err.count("on 33 lines") == 1
    monkeypatch.setattr(generation, "run", None)
    assert rskip(words) == 0 and capsys.readouterr().out == out


def test_a_finished_generation_is_not_repeated_until_something_changes(
    copy, calls, capsys, monkeypatch
):
    data, folder = copy
    assert evaluate(*copy) == 0 and len(calls) == 1
    assert "average of the last 5 epoch checkpoints" in capsys.readouterr().out
    assert evaluate(*copy) == 0 and len(calls) == 1
    assert "up to date" in capsys.readouterr().out
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 2
    os.utime(folder / "checkpoint20.pt", ns=(1, 1))
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 3
    binarised = data / "test.en-de.en.bin"
    binarised.write_bytes(binarised.read_bytes()[::-1])
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 4
    (folder / "evaluation-test" / "generate.log").unlink()
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 5
    for each in copy:  # a word of the dictionary was counted once more
        dictionary = each / "dict.en.txt"
        dictionary.write_text(re.sub(r" (\d+)\n\Z", r" 9\1\n", dictionary.read_text("utf-8")))
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 6
    monkeypatch.setattr(evaluate_main, "fairseq_version", lambda: "another")
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 7
    monkeypatch.setattr(weights, "own_rules_of", lambda path: ["of another file"])
    assert evaluate(*copy, "--lenpen", "0.6") == 0 and len(calls) == 8


def test_options_reach_fairseq_generate_and_the_scores_are_of_their_subset(copy, monkeypatch):
    """English's detokeniser would leave other blanks in the output."""
    tokens, commands = ["ein &apos;s Haus , d&apos; Haus"] * 20, []

    def run(command, log, shown):
        commands.append(command)
        log.write_text("".join(f"H-{n}\t-1\t{line}\n" for n, line in enumerate(tokens)))

    monkeypatch.setattr(generation, "run", run)
    words = ["--subset", "valid", "--beam", 7, "--lenpen", 0.3, "--max-tokens", 900]
    assert evaluate(*copy, "--average", 0, *words) == 0
    args = options.parse_args_and_arch(options.get_generation_parser(), commands[0][1:])
    assert (args.gen_subset, args.beam, args.lenpen, args.max_tokens) == ("valid", 7, 0.3, 900)
    assert (args.max_len_a, args.max_len_b) == (1, 50)  # Vaswani et al. 2017, section 6.1

    out = copy[1] / "evaluation-valid"
    german, english = (
        MosesDetokenizer(lang).detokenize(tokens[0].split()) for lang in ("de", "en")
    )
    assert (out / "hyp.txt").read_text("utf-8") == f"{german}\n" * 20 and german != english
    actual = json.loads((out / "scores.json").read_text("utf-8"))
    assert actual["ref"] == [str(copy[0] / "raw" / "valid.de")]
    assert actual["evaluation"]["subset"] == "valid"
    assert actual["scores"][-1]["name"] == "compound-split BLEU"  # from English to German only


def test_a_useless_output_is_warned_of_and_noted(copy, capsys, monkeypatch):
    monkeypatch.setattr(score, "degenerate", lambda hypotheses, references: "it is empty")
    evaluate(*copy)
    assert "WARNING: the output is degenerate: it is empty\n" in capsys.readouterr().err


def test_text_published_as_tokens_is_scored_as_it_is(copy, calls, capsys, translated):
    """The raw text is Moses tokens now."""
    about = json.loads((copy[0] / "preparation.json").read_text(encoding="utf-8"))
    about.update(tokenizer="none", corpus="iwslt15-en-vi")
    (copy[0] / "preparation.json").write_text(json.dumps(about), encoding="utf-8")
    reference = copy[0] / "raw" / "test.de"
    command = ["sacremoses", "-q", "-l", "de", "-j", "1", "tokenize", "-a"]
    reference.write_text(run_command(command, input=reference.read_text("utf-8")).stdout, "utf-8")
    assert (
        evaluate(*copy, "--checkpoint", "checkpoint8.pt") == 0
        and str(copy[1] / "checkpoint8.pt") in calls[0]
    )
    out = copy[1] / "evaluation-test"
    assert (out / "hyp.txt").read_bytes() == (out / "hyp.tok").read_bytes()
    actual = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    plain = json.loads((translated[1] / "scores.json").read_text(encoding="utf-8"))
    command = [
        "sacrebleu",
        reference,
        "-i",
        out / "hyp.tok",
        "-b",
        "-w",
        "6",
        "--tokenize",
        "intl",
        "--force",
    ]
    assert actual["scores"][1]["score"] == pytest.approx(
        float(run_command(command).stdout), abs=1e-5
    )
    assert actual["scores"][1]["score"] != plain["scores"][1]["score"]
    assert "as published, which is tokenised already" in capsys.readouterr().out


def test_a_failing_generator_is_one_line_and_keeps_earlier_scores(copy, translated, capsys):
    """The sentences' file is cut off, which only fairseq-generate finds out."""
    out = copy[1] / "evaluation-test"
    shutil.copytree(translated[1], out)
    before = (out / "scores.json").read_bytes()
    binarised = copy[0] / "test.en-de.en.bin"
    binarised.write_bytes(binarised.read_bytes()[:40])
    assert evaluate(*copy) == 1
    assert_one_line(capsys.readouterr().err, "fairseq-generate failed: ", "Error", "generate.log")
    assert "Traceback" in (out / "generate.log").read_text(encoding="utf-8")
    assert (out / "scores.json").read_bytes() == before and not cached.key_path(
        out / "generate.log"
    ).exists()


@pytest.mark.parametrize("spoil, words", SPOILT.values(), ids=SPOILT)
def test_what_cannot_be_used_is_one_line_before_generating(copy, calls, capsys, spoil, words):
    spoil(*copy)
    options = ["--average", 0] if "checkpoint" in (words[0].split()[-1], words[-1]) else []
    assert evaluate(*copy, *options) == 1
    assert calls == [] and not (copy[1] / "ran").exists()
    assert_one_line(capsys.readouterr().err, *words)


def test_a_model_for_longer_sentences_translates_them(copy, capsys):
    """fairseq-generate's own limit is 1,024, whatever the model was trained for."""
    state = load_checkpoint(copy[1] / "checkpoint_best.pt")
    state["cfg"]["model"]["max_source_positions"] = 1100
    torch.save(state, copy[1] / "checkpoint_best.pt")
    lengthen(copy[0] / "test.en-de.en", 18, 1100)
    assert evaluate(*copy, "--average", 0, "--beam", 1) == 0
    assert "written to" in capsys.readouterr().out
    assert evaluate(*copy, "--checkpoint", "checkpoint_last.pt", "--beam", 1) == 1
    assert_one_line(
        capsys.readouterr().err, "sample #17 is invalid", "1100", "max_positions=(1024, 1024)"
    )


def test_a_checkpoint_that_does_not_fit_names_the_tensor(copy, capsys):
    """Without the copies of the dictionaries, with which the corpus's are compared otherwise."""
    longer_dictionary(*copy)
    assert evaluate(*copy, "--average", 0) == 1
    assert_one_line(capsys.readouterr().err, "size mismatch for encoder.embed_tokens.weight")


def test_interrupted_it_leaves_nothing_half_done(copy, calls, capsys, monkeypatch):
    def interrupted(command, log, *more):
        log.write_text("H-0\t", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "run", interrupted)
    assert evaluate(*copy) == 130
    assert_one_line(capsys.readouterr().err, "interrupted")
    files = sorted(path.name for path in (copy[1] / "evaluation-test").iterdir())
    assert files == [
        ".lock",
        "averaged.pt",
        "averaged.pt.key",
        "generate.log",
    ]  # without a key: it is made again


def test_two_evaluations_do_not_write_to_one_folder(copy, capsys):
    out = copy[1] / "evaluation-test"
    with locked(out):
        pass  # an earlier one
    with locked(out):
        assert evaluate(*copy) == 1
    named = f"another evaluation writes to {out} (process {os.getpid()})"
    assert_one_line(capsys.readouterr().err, named, "--out")


def assert_one_line(stderr, *words):
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr
