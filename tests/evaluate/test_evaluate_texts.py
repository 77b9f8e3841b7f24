"""rskip evaluate and rskip compare on a text.

Perplexities are compared with fairseq-eval-lm's and a direct computation.
"""

import itertools
import json
import math
import re
from argparse import Namespace

import numpy
import pytest
import torch
from evaluation_corpus import follow_in_server
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from text_corpus import train

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools.__main__ import main
from fairseq_rskip.tools.evaluate import generation
from fairseq_rskip.tools.evaluate.language_model import documents, eval_options, windows
from fairseq_rskip.tools.significance import paired_values
from fairseq_rskip.tools.systems import find_system


@pytest.fixture(scope="module")
def rskip():
    """A command in this process, but for fairseq's part: its status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "follow", follow_in_server)
        yield lambda *words: main([str(word) for word in words])


@pytest.fixture(scope="module")
def evaluated(rskip, language_model):
    """The folder of an evaluation."""
    data, folder = language_model
    assert rskip("evaluate", data, folder, "--cpu") == 0
    return folder / "evaluation-test"


def direct(data, checkpoint, length, window):
    """Bits of every token of the test text, computed window by window from fairseq's model."""
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], {"data": str(data)}
    )
    model = models[0].eval()
    lines = data_utils.load_indexed_dataset(str(data / "test"), task.dictionary)
    text = torch.cat([*lines]).long()
    inputs = torch.cat([torch.tensor([task.dictionary.eos()]), text])

    bits = []
    step = length - window
    for start in range(0, len(text), step):
        begin = max(0, start - window)
        end = min(start + step, len(text))
        with torch.no_grad():
            log_probabilities = model(inputs[begin:end][None])[0].log_softmax(-1)[0]
        of_text = log_probabilities.gather(1, text[begin:end, None])[:, 0]
        scored = of_text[start - begin :]  # what is before is context
        bits += (-scored / math.log(2)).tolist()
    return bits


@pytest.mark.slow
def test_the_perplexity_is_fairseqs_and_a_direct_computations(language_model, evaluated):
    out = evaluated
    scores = json.loads((out / "scores.json").read_text())
    fairseqs = re.search(
        r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", (out / "eval_lm.log").read_text()
    )
    assert (
        f"{scores['bits']['subword']:.4f}",
        f"{scores['perplexity']['subword']:.2f}",
    ) == fairseqs.groups()
    bits = direct(language_model[0], language_model[1] / "checkpoint_best.pt", 32, 0)
    assert scores["bits"]["subword"] == pytest.approx(numpy.mean(bits), abs=1e-6)
    assert sum(part["bits"] for part in scores["documents"]) == pytest.approx(sum(bits), abs=1e-3)
    assert (
        scores["perplexity"]["word"] == scores["perplexity"]["subword"]
    )  # its words are its subwords
    raw = (language_model[0] / "raw" / "test.en").read_bytes()
    assert scores["bits"]["byte"] == pytest.approx(sum(bits) / len(raw), abs=1e-6)
    assert [part["tokens"] for part in scores["documents"]] == 10 * [3 * 13 + 1]
    assert scores["context"] == {"tokens_per_sample": 32, "context_window": 0, "stride": 32}


@pytest.mark.slow
def test_a_context_window_is_as_stated(rskip, language_model, evaluated, tmp_path, capsys):
    data, folder = language_model
    words = ["evaluate", data, folder, "--cpu", "--context-window", 16, "--out", tmp_path / "out"]
    assert (
        rskip(*words) == 0
        and "a stride of 16: at least 16 tokens of context" in capsys.readouterr().out
    )
    assert rskip(*words) == 0 and "fairseq-eval-lm: up to date" in capsys.readouterr().out
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())
    bits = direct(data, folder / "checkpoint_best.pt", 32, 16)
    assert scores["bits"]["subword"] == pytest.approx(numpy.mean(bits), abs=1e-6)
    assert rskip("evaluate", data, folder, "--context-window", 32) == 1
    assert (
        "--context-window 32: expected less than the model's 32 tokens" in capsys.readouterr().err
    )


def test_options_of_a_beam_search_are_refused_for_a_text(rskip, language_model, capsys):
    data, folder = language_model
    for option, value in (("--beam", "5"), ("--lenpen", "1.0"), ("--comet", "model")):
        assert rskip("evaluate", data, folder, option, value) == 1
        expected = f"{option} {value} is for translations, and the data are a text"
        assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_language_models_are_compared_by_documents(
    rskip, language_model, evaluated, tmp_path, capsys
):
    data, folder = language_model
    train(data, tmp_path / "other", "postln_tiny", "--seed", 5, "--max-update", 20)
    assert rskip("compare", f"ours={folder}", f"other={tmp_path / 'other'}") == 0
    paths = [path / "evaluation-test" / "scores.json" for path in (folder, tmp_path / "other")]
    ours, other = (json.loads(path.read_text())["bits"]["byte"] for path in paths)
    scored = json.loads(paths[0].read_text())["text_sha256"]
    assert find_system(folder, None).text_sha256 == scored  # known before an evaluation
    compared = capsys.readouterr().out
    assert re.search(rf"other .* \{other - ours:+.4f} +0\.00\d+", compared)
    assert "10 documents, 730 bytes; windows of 32 tokens, a stride of 32" in compared
    assert "p cannot be below" not in compared
    assert "trained with another --seed: ours 3, other 5" in compared
    assert "trained with another --lr" not in compared

    for path in paths:  # two documents: with both signs equal, p is 2 of 4
        scores = json.loads(path.read_text())
        path.write_text(json.dumps({**scores, "documents": scores["documents"][:2]}))
    folders = [str(path.parent) for path in paths]
    assert rskip("compare", *folders) == 0
    compared = capsys.readouterr().out
    assert "with 2 documents p cannot be below 0.50" in compared and "unlike" not in compared

    scores["context"]["tokens_per_sample"] = 64
    path.write_text(json.dumps(scores))
    assert rskip("compare", f"ours={folder}", f"other={path.parent}") == 0
    unlike = "unlike contexts, which is part of their difference: ours, windows of 32 tokens, "
    unlike += "a stride of 32; other, windows of 64 tokens, a stride of 32"
    assert unlike in capsys.readouterr().out


@pytest.mark.slow
def test_a_translation_model_cannot_score_a_text(rskip, language_model, tmp_path, capsys):
    data, folder = language_model
    state = load_checkpoint(folder / "checkpoint_best.pt")
    state["cfg"]["task"]["_name"] = "translation"
    torch.save(state, tmp_path / "checkpoint_best.pt")
    assert rskip("evaluate", data, tmp_path) == 1
    assert (
        "was trained for --task translation: expected language_modeling" in capsys.readouterr().err
    )


def test_windows_are_those_of_the_training():
    options = Namespace(subset="valid", context_window=0, max_tokens=16)
    task = {"tokens_per_sample": 32, "add_bos_token": True}
    words = eval_options(options, windows(options, task))
    assert words[words.index("--gen-subset") + 1] == "valid"
    assert words[words.index("--max-tokens") + 1] == "32"  # a batch holds one window at least
    assert "--add-bos-token" in words
    without = windows(options, {**task, "add_bos_token": False})
    assert "--add-bos-token" not in eval_options(options, without)


def test_the_documents_are_tested_with_as_many_trials_as_asked_for(rskip, tmp_path, capsys):
    for name, bits in (("one", 10.0), ("other", 11.0)):
        documents = [{"bits": bits * (12 + number)} for number in range(12)]
        scores = {"perplexity": {"subword": 2, "word": 3}, "bits": {"byte": 1}, "bytes": 100}
        scores |= {"context": {"tokens_per_sample": 32, "stride": 32}, "documents": documents}
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text(json.dumps({**scores, "text_sha256": "0"}))
    for trials, p in ((1, "1.0000"), (5000, "0.0005")):  # 2 of all 4,096 signs
        assert rskip("compare", tmp_path / "one", tmp_path / "other", "--trials", trials) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[2].endswith(f" {p}") and f"{trials:,} trials" in printed
    assert rskip("compare", tmp_path / "one", tmp_path / "other", "--examples", 3) == 1
    assert "--examples is for translations, and these are" in capsys.readouterr().err


def test_documents_end_at_blank_lines(tmp_path):
    (tmp_path / "raw").write_text("é b\nc\n\nd\n", encoding="utf-8")
    assert documents(tmp_path / "raw", [4, 2, 1, 2]) == [
        {"tokens": 7, "words": 6, "bytes": 8},
        {"tokens": 2, "words": 2, "bytes": 2},
    ]


def test_the_paired_test_is_that_of_all_signs():
    a, b = [1.0, 2.0, 3.0, 4.0, 5.0], [1.5, 2.1, 2.9, 5.0, 6.0]
    differences = numpy.subtract(b, a)
    sums = [abs((differences * signs).sum()) for signs in itertools.product((1, -1), repeat=5)]
    p = numpy.mean(numpy.array(sums) >= abs(differences.sum()) - 1e-9)
    assert paired_values(a, b, 1000) == pytest.approx(p) and paired_values(a[:1], b[:1], 1000) == 1
