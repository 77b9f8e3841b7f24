"""rskip compare: scores and p-values of sacreBLEU's own command.

Names, lengths, examples and refusals are tested, too.
"""

import json
import random
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import sacrebleu
import torch
from conftest import run_command
from evaluation_corpus import write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import systems
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.compare import about_trainings, comet_cells, compare_texts, most_different
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import main as evaluate_main
from fairseq_rskip.tools.evaluate import weights
from fairseq_rskip.tools.systems import find_system, load

WORDS = "the a cat dog house tree big red sees eats under over <b> & runs".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Write a reference of 60 sentences, and systems.

    "good" and "bad" have one word in ten and in three wrong, "short" lacks two words of those that
    good has, "nearly" differs from good in two sentences.
    """
    folder, rng = tmp_path_factory.mktemp("so gut"), random.Random(4)
    reference = [[rng.choice(WORDS) for _ in range(12)] for _ in range(60)]

    def spoil(share):
        return [
            [rng.choice(WORDS) if rng.random() < share else word for word in words]
            for words in reference
        ]

    good = spoil(0.1)
    actual = {
        "ref": reference,
        "good": good,
        "bad": spoil(0.33),
        "short": [words[:-2] for words in good],
    }
    actual["nearly"] = [words[::-1] if index < 2 else words for index, words in enumerate(good)]
    return {
        name: write(folder / f"{name}.txt", map(" ".join, lines)) for name, lines in actual.items()
    }


def run(texts, capsys, *names, options=()):
    command = [
        "compare",
        *(str(texts[name]) for name in names),
        "--ref",
        str(texts["ref"]),
        "--trials",
        "300",
    ]
    assert rskip([*command, *options]) == 0
    return capsys.readouterr().out


def table(printed):
    """The cells of each line of the table, the headings first."""
    lines = printed.split("\n\n")[0].splitlines()
    return [re.split("  +", line.strip()) for line in lines]


def test_scores_and_p_values_are_those_of_sacrebleus_own_command(texts, capsys, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "7")  # comparisons do not depend on it
    _, good, bad = table(run(texts, capsys, "good", "bad"))

    command = ["sacrebleu", texts["ref"], "-i", texts["good"], texts["bad"], "-m", "bleu", "chrf"]
    command += ["--paired-ar", "--paired-ar-n", "300", "--format", "text", "-w", "2"]
    printed = run_command(command, env={"SACREBLEU_SEED": "12345"}).stdout

    p_values = [float(value) for value in re.findall(r"p = ([\d.]+)", printed)]
    assert good[7:] == ["baseline", "baseline"]
    assert [float(cell) for cell in bad[7:]] == p_values
    for name, row in (("good.txt", good), ("bad.txt", bad)):
        (line,) = [line for line in printed.splitlines() if re.search(rf"[ /]{name} ", line)]
        bleu, chrf = row[1:3]
        assert row[0] == name
        assert bleu in line and chrf in line


def test_how_much_of_a_gap_is_length_can_be_read_from_the_table(texts, capsys):
    """Half of "short" is missing, its words are right.

    Without the brevity penalty it is as good as "good".
    """
    head, *rows = (
        re.split("  +", line) for line in run(texts, capsys, "good", "short").splitlines()[:3]
    )
    columns = [
        head.index(name)
        for name in ("BLEU without brevity penalty", "brevity penalty", "length ratio")
    ]
    reference = texts["ref"].read_text("utf-8").splitlines()
    for name, row in zip(("good", "short"), rows):
        bleu = sacrebleu.corpus_bleu(texts[name].read_text("utf-8").splitlines(), [reference])
        expected = [
            f"{bleu.score / bleu.bp:.2f}",
            f"{bleu.bp:.3f}",
            f"{bleu.sys_len / bleu.ref_len:.3f}",
        ]
        assert [row[column] for column in columns] == expected
    assert float(rows[1][columns[1]]) < 0.9


def test_only_sentences_that_differ_are_shown_with_their_reference(texts, capsys):
    out = run(texts, capsys, "good", "nearly", options=["--examples", "9"])
    shown = [int(line.split()[1]) for line in out.splitlines() if line.startswith("sentence ")]
    assert set(shown) == {1, 2}
    for label, name in (("reference", "ref"), ("good.txt", "good"), ("nearly.txt", "nearly")):
        sentences = texts[name].read_text("utf-8").splitlines()
        for number in shown:
            assert f"\n  {label:<10}  {sentences[number - 1]}" in out


def test_a_system_with_two_other_translations_is_not_tested(texts, capsys):
    out = run(texts, capsys, "good", "nearly")
    assert table(out)[2][7:] == ["not tested", "not tested"]
    assert "fewer than 10 differing translations is not tested" in out


def test_several_tests_against_one_system_are_said_to_be_uncorrected(texts, capsys):
    note = "not corrected for 2 comparisons"
    assert note in run(texts, capsys, "good", "bad", "short")
    assert "not corrected" not in run(texts, capsys, "good", "bad")


def test_systems_are_called_by_their_name_or_label(texts, capsys, tmp_path):
    """The name is NAME=PATH, else the label of the row in a run's record, else the end of the path.

    A seed's folder is a system.
    """
    for name, label in (("good", "post-norm"), ("bad", "2rSkip")):
        seed = tmp_path / f"data-{name}-29decdd9" / "seed1"
        write(seed / "evaluation" / "hyp.txt", texts[name].read_text("utf-8").splitlines())
        (seed / "evaluation" / "scores.json").write_text(json.dumps({"ref": [str(texts["ref"])]}))
        (seed / "run.json").write_text(json.dumps({"settings": {"label": label}}))
        (seed / "checkpoints").mkdir()
    seeds = [str(tmp_path / f"data-{name}-29decdd9" / "seed1") for name in ("good", "bad")]
    assert (
        rskip(
            [
                "compare",
                seeds[0],
                f"mine={seeds[1]}",
                f"{seeds[1]}/evaluation/hyp.txt",
                "--trials",
                "20",
            ]
        )
        == 0
    )
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert names == ["post-norm", "mine", "2rSkip"]


def test_systems_without_a_difference_are_said_to_have_none(texts, capsys, tmp_path):
    paths = {**texts, "same": shutil.copy(texts["good"], tmp_path / "same.txt")}
    nothing = "\nno sentences to show: all systems have the same"
    assert nothing in run(paths, capsys, "good", "same")
    assert nothing not in run(paths, capsys, "good", "same", options=["--examples", "0"])


def test_a_run_is_evaluated_again_on_other_data(tmp_path, monkeypatch):
    seed = tmp_path / "seed1"
    write(seed / "evaluation" / "scores.json", ["{}"])
    (seed / "checkpoints").mkdir()
    (seed / "checkpoints" / "checkpoint_best.pt").touch()
    monkeypatch.setattr(systems, "_to_evaluate", lambda path, data: (path, data))
    assert systems.find_system(seed, None).path == seed / "evaluation"
    assert systems.find_system(seed, Path("mine")) == (seed / "checkpoints", Path("mine"))


def test_an_export_is_no_system(texts, capsys, tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert rskip(["compare", str(texts["good"]), str(tmp_path)]) == 1
    assert f"{tmp_path} is an export; expected the checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "seed1", "seed1/checkpoint.pt"])
def test_a_training_of_images_is_no_system(texts, capsys, tmp_path, name):
    seed = tmp_path / "run" / "seed1"
    seed.mkdir(parents=True)
    for file in ("checkpoint.pt", "log.jsonl", "result.json"):
        (seed / file).touch()
    status = rskip(["compare", str(tmp_path / "run" / name), str(texts["good"])])
    line = capsys.readouterr().err
    assert status == 1 and "is of rskip train-cifar" in line and line.count("\n") == 1


def test_a_truncated_checkpoint_is_no_text(texts, capsys, tmp_path):
    torch.save({"model": {"w": torch.zeros(99)}}, tmp_path / "whole.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:300])
    assert rskip(["compare", str(texts["good"]), str(tmp_path / "short.pt")]) == 1
    assert "short.pt: truncated, or not a checkpoint" in capsys.readouterr().err


def test_a_useless_output_is_warned_of(texts, capsys, tmp_path):
    empty = write(tmp_path / "empty.txt", ["."] * 60)
    out = run({**texts, "empty": empty}, capsys, "good", "empty")
    assert re.search(r"^WARNING: the output of .*empty.txt is degenerate: ", out, re.M), out
    assert "output of good" not in out


def test_every_system_is_found_before_the_first_is_evaluated(texts, tmp_path, monkeypatch, capsys):
    """A translation takes minutes; the second system is no checkpoint."""
    training = tmp_path / "training"
    training.mkdir()
    torch.save({"model": {}}, training / "checkpoint_best.pt")
    known = systems.System(tmp_path / "out", options=Namespace())
    monkeypatch.setattr(systems, "_to_evaluate", lambda path, data: known)
    monkeypatch.setattr(evaluate_main, "evaluate", lambda options: pytest.fail("it is evaluated"))
    assert rskip(["compare", str(training), str(tmp_path / "nothing")]) == 1
    assert "does not exist; expected a file of translations" in capsys.readouterr().err

    (tmp_path / "run" / "seed2" / "checkpoints").mkdir(parents=True)
    assert rskip(["compare", str(training), str(tmp_path / "run")]) == 1
    assert "run is a folder of seeds: expected one of" in capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert rskip(["compare", str(training), str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err.endswith("or RUN/seed1 of rskip run\n")

    text = tmp_path / "text"
    text.mkdir()
    monkeypatch.setattr(systems, "read_scores", lambda folder: {"text_sha256": "0"})
    assert rskip(["compare", str(training), f"lm={text}"]) == 1
    assert "lm is a language model and training is not" in capsys.readouterr().err


def test_different_texts_are_refused_before_the_first_is_evaluated(tmp_path, monkeypatch, capsys):
    training, text = tmp_path / "training", tmp_path / "text"
    for folder in (training, text):
        folder.mkdir()
    torch.save({"model": {}}, training / "checkpoint_best.pt")
    to_evaluate = systems.System(tmp_path / "out", text_sha256="1", options=Namespace())
    monkeypatch.setattr(systems, "_to_evaluate", lambda path, data: to_evaluate)
    monkeypatch.setattr(evaluate_main, "evaluate", lambda options: pytest.fail("it is evaluated"))
    monkeypatch.setattr(systems, "read_scores", lambda folder: {"text_sha256": "0"})
    assert rskip(["compare", f"ours={training}", f"lm={text}"]) == 1
    assert capsys.readouterr().err == "error: ours and lm do not score the same text\n"


@pytest.mark.parametrize("has_one_language, kind", [(True, "translation"), (False, "language")])
def test_data_of_the_other_kind_are_refused_before_the_first_is_evaluated(
    tmp_path, monkeypatch, capsys, has_one_language, kind
):
    task = "translation" if has_one_language else "language_modeling"
    corpus = Namespace(is_monolingual=has_one_language, folder="data/mine")
    monkeypatch.setattr(weights, "task_of", lambda path: {"_name": task, "data": "elsewhere"})
    monkeypatch.setattr(systems, "corpus_of", lambda *_: corpus)
    monkeypatch.setattr(evaluate_main, "evaluate", lambda options: pytest.fail("it is evaluated"))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        torch.save({"model": {}}, tmp_path / name / "checkpoint_best.pt")
    paths = [str(tmp_path / name) for name in ("one", "other")]
    assert rskip(["compare", *paths, "--data", "data/mine"]) == 1
    languages = "one language" if has_one_language else "two languages"
    expected = f"one is a {kind} model, and data/mine has {languages}\n"
    assert capsys.readouterr().err.endswith(expected)


REFUSED = {
    "one system": (["good"], [], "error: two systems are needed"),
    "no reference": (["good", "bad"], [], "error: plain files need their reference: --ref FILE"),
    "another length": (["good", "four"], ["--ref", "ref"], "four.txt has 4 lines and "),
    "twice the same": (["good", "good"], ["--ref", "ref"], "error: a system is given twice"),
    "a folder of something else": (
        ["good", "folder"],
        ["--ref", "ref"],
        "or RUN/seed1 of rskip run\n",
    ),
}


@pytest.mark.parametrize("systems, options, said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_one_line(texts, capsys, tmp_path, systems, options, said):
    paths = {**texts, "four": write(tmp_path / "four.txt", "abcd"), "folder": tmp_path}
    try:
        status = rskip(["compare", *(str(paths.get(word, word)) for word in [*systems, *options])])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (
        status in (1, 2)
        and out == ""
        and err.count("\n") == 1
        and err.startswith("error: ")
        and said in err
    )


def test_comets_p_compares_the_sentences_with_those_of_the_first_system():
    """Each of twelve sentences is 0.5 better: p is 2 of all 4,096 signs."""
    outputs = [["a"] * 12, ["b"] * 12]
    segments = [[0.01 * n for n in range(12)], [0.01 * n + 0.5 for n in range(12)]]
    cells = comet_cells(outputs, segments, trials=5000)
    assert cells == [["0.0550", "baseline"], ["0.5550", "0.0005"]]


def test_comet_does_not_test_a_system_with_nine_other_translations():
    outputs = [["a"] * 12, ["b"] * 9 + ["a"] * 3]
    segments = [[0.0] * 12, [1.0] * 9 + [0.0] * 3]
    assert comet_cells(outputs, segments, trials=20)[1] == ["0.7500", "not tested"]


def sentences_shown(lines):
    return [int(line.split()[1]) for line in lines if line.startswith("\nsentence ")]


def test_the_sentence_with_the_largest_difference_is_shown_first():
    reference = ["a red house", "a small dog", "two cars", "the sea"]
    other = ["a red house", "a small dot", "two cars", "xyz"]
    shown = most_different(["one", "other"], [reference, other], [reference], count=10)
    assert sentences_shown(shown) == [4, 2]
    shown = most_different(["one", "other"], [reference, other], [reference], count=1)
    assert sentences_shown(shown) == [4]


def test_a_sentence_in_which_the_third_system_differs_is_shown():
    reference = ["a red house", "a small dog"]
    third = ["a red house", "xyz"]
    shown = most_different(["a", "b", "c"], [reference, reference, third], [reference], count=10)
    assert sentences_shown(shown) == [2]


def test_an_option_in_which_only_the_middle_one_of_three_differs_is_named():
    evaluations = {
        name: {"trained_with": {"max-update": 300, "lr": [rate]}}
        for name, rate in (("a", 0.1), ("b", 0.2), ("c", 0.1))
    }
    assert about_trainings(evaluations) == ["trained with another --lr: a 0.1, b 0.2, c 0.1"]


def test_data_are_refused_for_what_is_evaluated_already(tmp_path):
    file = tmp_path / "hyp.de"
    file.write_text("ein Haus\n")
    with pytest.raises(UserError, match="--data is for checkpoints, and .*hyp.de is evaluated al"):
        find_system(file, tmp_path)


def test_a_run_with_two_evaluations_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("evaluation", "evaluation-beam1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="expected one of evaluation, evaluation-beam1 in it"):
        find_system(tmp_path, None)


def test_weights_of_another_vocabulary_are_refused_before_anything_is_evaluated(
    tmp_path, monkeypatch
):
    training, data = tmp_path / "training", tmp_path / "data"
    for folder, words in ((training, "a 2\nb 1\n"), (data, "b 2\na 1\n")):
        folder.mkdir()
        for language in ("en", "de"):
            (folder / f"dict.{language}.txt").write_text(words)
    (training / "checkpoint_best.pt").touch()
    corpus = Corpus(data, "mine", source="en", target="de")
    monkeypatch.setattr(weights, "task_of", lambda path: {"_name": "translation"})
    monkeypatch.setattr(systems, "corpus_of", lambda *_: corpus)
    with pytest.raises(UserError, match="training holds checkpoints of another vocabulary"):
        find_system(training, data)


def test_translations_of_two_test_sets_are_refused(tmp_path):
    """Of as many sentences: only the references tell."""
    paths = {}
    for name in ("one", "other"):
        reference = tmp_path / f"{name}.de"
        reference.write_text(f"ein {name}\nzwei {name}\n")
        (tmp_path / name).mkdir()
        (tmp_path / name / "hyp.txt").write_text("ein\nzwei\n")
        (tmp_path / name / "scores.json").write_text(json.dumps({"ref": [str(reference)]}))
        paths[name] = tmp_path / name
    with pytest.raises(UserError, match="other and .*one were scored against different reference"):
        load(paths, None)
    outputs, _ = load(paths, [tmp_path / "one.de"])  # of one test set after all
    assert outputs == [["ein", "zwei"]] * 2


def test_the_table_of_language_models_has_each_perplexity_in_its_column(tmp_path):
    """Three documents of 30 and of 36 bits, in a text of 20 bytes: 6 bits more over 20 bytes."""
    paths = {}
    for name, bits in (("one", [10.0, 10.0, 10.0]), ("other", [12.0, 13.0, 11.0])):
        scores = {"perplexity": {"subword": 8.0, "word": 64.0}, "bits": {"byte": sum(bits) / 20}}
        scores |= {"bytes": 20, "documents": [{"bits": each} for each in bits]}
        scores["context"] = {"tokens_per_sample": 32, "stride": 32}
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps(scores))
        paths[name] = tmp_path / name
    (head, first, second), _ = compare_texts(paths, trials=100)
    assert head[1:5] == ["perplexity per subword", "per word", "bits per byte", "difference"]
    assert first[1:] == ["8.00", "64.00", "1.5000", "", "baseline"]
    assert second[1:] == ["8.00", "64.00", "1.8000", "+0.3000", "0.2500"]  # 2 of all 8 signs
