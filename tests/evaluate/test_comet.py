"""--comet against comet-score run by hand: the real command with a checkpoint of random weights
where it is installed, else a small substitute that reads and writes the same files.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, run_checked, run_command
from evaluation_corpus import write
from experiment_runs import TRANSLATION, tables
from experiment_runs import write as write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import comet
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.experiments.tasks import TASKS

SUBSTITUTE = f"""#!{sys.executable}
import argparse, hashlib, json
parser = argparse.ArgumentParser()
for name in ("-s", "-r", "--model", "--gpus", "--to_json"):
    parser.add_argument(name)
parser.add_argument("-t", nargs="+")
parser.add_argument("--quiet", action="store_true")
parser.add_argument("--only_system", action="store_true")
options = parser.parse_args()
lines = lambda path: [line.strip() for line in open(path, encoding="utf-8")]
results = {{}}
for path in options.t:
    texts = [*zip(lines(options.s), lines(path), lines(options.r))]
    scores = [hashlib.sha256(repr(text).encode()).digest()[0] / 255 for text in texts]
    results[path] = [{{"COMET": score}} for score in scores]
    print(f"{{path}}\\tscore: {{sum(scores) / len(scores):.4f}}")
json.dump(results, open(options.to_json, "w"))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a checkpoint; without unbabel-comet, a substitute of its command is on PATH."""
    folder = tmp_path_factory.mktemp("comet")
    installed = shutil.which(comet.COMMAND, path=comet.environment()["PATH"])
    if installed:
        python = Path(installed).read_text("utf-8").split("\n")[0].removeprefix("#!")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")  # transformers asks the hub even for a local folder
            run_checked([python, ROOT / "tests" / "comet_model.py", folder])
            yield folder
        return
    command = write(folder / "bin" / comet.COMMAND, [SUBSTITUTE])
    command.chmod(0o755)
    write(folder / "hparams.yaml", ["class_identifier: regression_metric"])
    write(folder / "checkpoints" / "model.ckpt", ["weights"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
        yield folder


def by_hand(model, *files):
    """What comet-score itself prints for source, translation and reference."""
    source, translation, reference = files
    command = [comet.COMMAND, "-s", source, "-t", translation, "-r", reference]
    path = model / "checkpoints" / "model.ckpt"
    command += ["--model", path, "--gpus", "0", "--quiet", "--only_system"]
    command += ["--to_json", model / "by_hand.json"]
    match = re.search(r"score: (-?[\d.]+)", run_checked(command))
    return float(match[1])


def comet_row(path):
    """The row of COMET in a scores.json."""
    (row,) = (
        row for row in json.loads(path.read_text("utf-8"))["scores"] if row["name"] == "COMET"
    )
    return row


@pytest.mark.slow
def test_an_evaluation_scores_plain_source_translation_and_reference(
    translator, translated, model, tmp_path, capsys
):
    out = tmp_path / "evaluation"
    shutil.copytree(translated[1], out)
    data = translator[0] / "data-bin"
    assert (
        rskip(["evaluate", str(data), str(translator[1]), "--out", str(out), "--comet", str(model)])
        == 0
    )
    row = comet_row(out / "scores.json")
    raw = data / "raw"
    expected = by_hand(model, raw / "test.en", out / "hyp.txt", raw / "test.de")
    assert row["score"] == pytest.approx(expected, abs=6e-5)  # four digits
    assert row["signature"].startswith("model:model.ckpt|sha256:")
    printed = capsys.readouterr().out
    assert "up to date" in printed
    assert f"{expected:.4f}  {row['signature']}" in printed

    copied = tmp_path / "copied"
    shutil.copytree(out, copied)
    # the source is that of the recorded corpus
    systems = [str(out), str(copied)]
    assert rskip(["compare", *systems, "--comet", str(model), "--trials", "20"]) == 0
    assert f"{expected:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_text_published_as_tokens_is_detokenised_first(translator, tmp_path):
    """All three as sacremoses' own command gives them."""
    data = tmp_path / "data"
    shutil.copytree(translator[0] / "data-bin", data)
    about = json.loads((data / "preparation.json").read_text("utf-8"))
    about.update(tokenizer="none", corpus="iwslt15-en-vi")
    (data / "preparation.json").write_text(json.dumps(about), "utf-8")
    lines = {"en": ["a red car , &quot; he said &quot; ."], "de": ["ein rotes Auto , ja !"]}
    for language, tokens in lines.items():
        write(data / "raw" / f"test.{language}", tokens)
    output = ["das Auto &amp; ich ."]
    sources, (translations,), references, about = comet.plain_texts(
        Corpus.find_for_evaluation(data), "test", [output], lines["de"]
    )

    def plain(tokens, language):
        command = ["sacremoses", "-q", "-l", language, "-j", "1", "detokenize"]
        done = run_command(command, input="".join(line + "\n" for line in tokens))
        return done.stdout.splitlines()

    assert sources == plain(lines["en"], "en") == ['a red car, "he said".']
    assert translations == plain(output, "de") == ["das Auto & ich."]
    assert references == plain(lines["de"], "de") == ["ein rotes Auto, ja!"]
    assert "detokenised" in about


@pytest.fixture
def texts(tmp_path):
    """Twelve sentences: source, reference, and two systems; a carriage return in a sentence."""
    words = ["red", "car", "house"]
    source = [f"a {words[n % 3]}\rnumber {n}" for n in range(12)]
    files = {
        "source": source,
        "reference": [f"ein {words[n % 3]} Nummer {n}" for n in range(12)],
        "one": [f"ein {words[n % 3]} Nummer" for n in range(12)],
        "two": [f"das {words[(n + 1) % 3]} Nummer {n} ist hier" for n in range(12)],
    }
    return {name: str(write(tmp_path / name, lines)) for name, lines in files.items()}


def test_score_and_compare_show_it(texts, model, tmp_path, capsys):
    plain = write(tmp_path / "plain", [line.replace("\r", " ") for line in read(texts["source"])])
    expected = [by_hand(model, plain, texts[name], texts["reference"]) for name in ("one", "two")]
    shared = ["--ref", texts["reference"], "--src", texts["source"], "--comet", str(model)]
    out = tmp_path / "scores.json"
    assert rskip(["score", "--hyp", texts["one"], *shared, "--json", str(out)]) == 0
    assert comet_row(out)["score"] == pytest.approx(expected[0], abs=6e-5)  # four digits
    capsys.readouterr()

    assert rskip(["compare", texts["one"], texts["two"], *shared, "--trials", "20"]) == 0
    headings, *rows = (re.split("  +", line) for line in capsys.readouterr().out.splitlines()[:3])
    assert headings[-2:] == ["COMET", "COMET: p"]
    assert [row[-2] for row in rows] == [f"{score:.4f}" for score in expected]
    assert rows[0][-1] == "baseline" and 0 < float(rows[1][-1]) <= 1


def read(path):
    return Path(path).read_bytes().decode("utf-8").split("\n")[:-1]


MISTAKES = {
    "no such file": (["--comet", "none.ckpt", "--src", "source"], "none.ckpt does not exist"),
    "no such folder": (["--comet", "./none", "--src", "source"], "none does not exist"),
    "another file": (["--comet", "reference", "--src", "source"], "expected *.ckpt"),
    "a path as a name": (["--comet", "a b", "--src", "source"], "no name of a model"),
    "no source": (["--comet", "Unbabel/wmt22-comet-da"], "--src FILE belong together"),
    "no model": (["--src", "source"], "--src FILE belong together"),
    "two references": (
        ["--comet", "a/b", "--src", "source", "--ref", "reference", "one"],
        "takes one reference",
    ),
}


@pytest.mark.parametrize("words, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(texts, model, capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        status = rskip(["score", "--hyp", "one", "--ref", "reference", *words])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status in (1, 2) and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_a_missing_package_is_one_line(texts, model, capsys, monkeypatch):
    monkeypatch.setattr(comet.shutil, "which", lambda *words, **more: None)
    words = ["compare", texts["one"], texts["two"], "--ref", texts["reference"]]
    assert rskip([*words, "--comet", str(model), "--src", texts["source"]]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "unbabel-comet" in err and "[fairseq,comet]" in err


def test_an_experiment_needs_the_model_and_evaluates_with_it(tmp_path):
    with pytest.raises(UserError, match="evaluate: {comet: MODEL}"):
        tables(write_table(tmp_path, TRANSLATION, also=["COMET"]))
    evaluate = {"comet": "Unbabel/wmt22-comet-da"}
    (table,) = tables(write_table(tmp_path, TRANSLATION, also=["COMET"], evaluate=evaluate))
    for cell in table.cells:
        run = replace(cell.trials[0].run, folder=tmp_path)
        _, evaluation = TASKS["translation"].commands(run)
        assert evaluation[evaluation.index("--comet") + 1] == "Unbabel/wmt22-comet-da"
