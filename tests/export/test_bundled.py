"""The models that come with the package: found by name, small, and able to translate."""

import csv
import io
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import fairseq_rskip
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained import BUNDLED, bundled_names, locate
from fairseq_rskip.tools import translate
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate.weights import choose

NAMES = ["multi30k-en-de-2rskip", "multi30k-en-de-postnorm"]
STUDIES = {  # each row at its own learning rate, seed 1
    "multi30k-en-de-2rskip": ("2rSkip+LN", "multi30k.csv"),
    "multi30k-en-de-postnorm": ("post-norm", "multi30k_rate_0.0025.csv"),
}


def test_the_names_are_those_of_the_page_and_the_files_are_small():
    assert bundled_names() == NAMES
    page = (ROOT / "docs/share.md").read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in NAMES)
    sizes = [path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()]
    assert sum(sizes) < 12_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_score_of_the_study(name):
    row, file_name = STUDIES[name]
    with (ROOT / "results" / file_name).open(encoding="utf-8") as file:
        scores = {line["row"]: float(line["mean"]) for line in csv.DictReader(file)}
    card = (BUNDLED / name / "README.md").read_text("utf-8")
    line = next(line for line in card.splitlines() if line.startswith("* sacreBLEU 13a"))
    assert line.endswith(f": {scores[row]:.2f}")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_translates_a_caption_of_its_kind(name, tmp_path, monkeypatch, capsys):
    """Of a sentence whose best translation is far ahead of the second."""
    monkeypatch.chdir(tmp_path)
    text = "Two dogs are playing in the snow.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert rskip(["translate", name, "--cpu"]) == 0
    assert capsys.readouterr().out == "Zwei Hunde spielen im Schnee.\n"
    assert fairseq_rskip.from_pretrained(name).translate(text) == "Zwei Hunde spielen im Schnee."


def test_a_closed_standard_input_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert rskip(["translate", NAMES[0], "--cpu"]) == 1
    assert "the standard input is closed" in capsys.readouterr().err


def test_sentences_are_texts_and_empty_ones_stay_empty():
    model = fairseq_rskip.from_pretrained(NAMES[0])
    translated = model.translate(["", "Two dogs are playing in the snow.", " "])
    assert translated == ["", "Zwei Hunde spielen im Schnee.", ""]
    assert model.translate("") == "" and model.translate([]) == []
    for options in ({"beam": 0}, {"beam": "x"}, {"sentences": 3}):
        with pytest.raises(UserError, match=f"^{list(options)[0]}=.*: expected"):
            model.translate(**{"sentences": "A dog.", **options})


def test_a_bundled_model_is_no_training(capsys):
    line = "is a model that comes with the package, an export"
    assert rskip(["compare", *NAMES]) == 1
    assert line in capsys.readouterr().err
    with pytest.raises(UserError, match=line):  # of rskip evaluate
        choose(Path(NAMES[0]), 1)


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NAMES[0]
    assert locate(folder.relative_to(tmp_path)) == BUNDLED / NAMES[0]
    folder.mkdir()
    assert locate(folder.relative_to(tmp_path)) == folder.relative_to(tmp_path)


def test_a_mistyped_name_is_refused_with_the_names_that_there_are(capsys):
    assert rskip(["translate", "multi30k-en-de-2rskp"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: multi30k-en-de-2rskp does not exist; did you mean ")
    assert f"did you mean {NAMES[0]}? expected a checkpoint, a folder" in line
    assert ", ".join(NAMES) in line


def test_every_command_knows_the_name_or_says_what_it_takes(tmp_path, capsys):
    assert rskip(["describe", NAMES[0]]) == 0
    assert f"{NAMES[0]}: 20 skip connections" in capsys.readouterr().out
    for command in (["export", NAMES[0], tmp_path / "out"], ["analyze", "ratio", NAMES[0]]):
        words = [str(word) for word in command]
        if words[0] == "analyze":
            words += ["--output", str(tmp_path / "stem")]
        assert rskip(words) == 1
        assert "is an export: expected a checkpoint, or a folder" in capsys.readouterr().err


class Translator:
    """Returns its options for each line."""

    def to(self, device):
        return self

    def translate(self, lines, **options):
        return [str(options)] * len(lines)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {"beam": 4, "lenpen": 0.5}),
        (["--beam", "5", "--lenpen", "1"], {"beam": 5, "lenpen": 1.0}),
    ],
    ids=["those of rskip evaluate", "others"],
)
def test_the_search_of_translate_has_the_options_of_its_command(
    monkeypatch, capsys, words, options
):
    monkeypatch.setattr(translate, "load", lambda path, data: Translator())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A dog.\n")))
    translate.main(["model", "--cpu", *words])
    assert capsys.readouterr().out == f"{options}\n"
