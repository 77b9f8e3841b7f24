"""rskip compare: scores and p-values of sacreBLEU's own command, gaps that are length, examples, a page, refusals."""

import json
import random
import re
import sys
from html.parser import HTMLParser

import pytest
import sacrebleu
from conftest import run_command
from evaluation_corpus import write

from fairseq_rskip.tools import compare
from fairseq_rskip.tools.__main__ import main as rskip

WORDS = "the a cat dog house tree big red sees eats under over <b> & runs".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A reference of 60 sentences; "good" and "bad" have one word in ten and in three wrong, "short" lacks two words of
    those that good has, "nearly" differs from good in two sentences."""
    folder, rng = tmp_path_factory.mktemp("so gut"), random.Random(4)
    reference = [[rng.choice(WORDS) for _ in range(12)] for _ in range(60)]

    def spoil(share):
        return [[rng.choice(WORDS) if rng.random() < share else word for word in words] for words in reference]

    good = spoil(0.1)
    found = {"ref": reference, "good": good, "bad": spoil(0.33), "short": [words[:-2] for words in good]}
    found["nearly"] = [words[::-1] if index < 2 else words for index, words in enumerate(good)]
    return {name: write(folder / f"{name}.txt", map(" ".join, lines)) for name, lines in found.items()}


def run(texts, capsys, *names, options=()):
    command = ["compare", *(str(texts[name]) for name in names), "--ref", str(texts["ref"]), "--trials", "300"]
    assert rskip([*command, *map(str, options)]) == 0
    return capsys.readouterr().out


def test_scores_and_p_values_are_those_of_sacrebleus_own_command(texts, capsys):
    head, *rows = [line.split("  ") for line in run(texts, capsys, "good", "bad").split("\n\n")[0].splitlines()]
    good, bad = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    for kind, column in (("ar", 5), ("bs", 7)):
        options = ["-m", "bleu", "chrf", f"--paired-{kind}", f"--paired-{kind}-n", "300", "--format", "text", "-w", "2"]
        told = run_command(["sacrebleu", texts["ref"], "-i", texts["good"], texts["bad"], *options]).stdout
        values = [float(value) for value in re.findall(r"p = ([\d.]+)", told)]
        assert [float(cell) for cell in bad[column : column + 2]] == values
        for row, name in ((good, "good.txt"), (bad, "bad.txt")):
            (line,) = (line for line in told.splitlines() if f" {name} " in line or f"/{name} " in line)
            assert all(re.search(rf"\b{re.escape(score)}\b", line) for score in row[1:3]), line
    assert good[5:] == ["baseline"] * 4 and (good[0], bad[0]) == ("good.txt", "bad.txt")
    assert [cell.strip() for cell in head if cell][3:5] == ["length ratio", "brevity penalty"]


def test_a_gap_that_is_mostly_length_is_said_to_be(texts, capsys):
    out = run(texts, capsys, "good", "short", "bad")
    (line,) = (line for line in out.splitlines() if "is length" in line)
    assert line.startswith("all of the BLEU gap between good.txt and short.txt is length: short.txt is 17% shorter")
    reference = texts["ref"].read_text("utf-8").splitlines()
    good, short = (
        sacrebleu.corpus_bleu(texts[name].read_text("utf-8").splitlines(), [reference]) for name in ("good", "short")
    )
    assert f"they have {good.score / good.bp:.2f} and {short.score / short.bp:.2f}" in line and short.bp < 0.9


def test_a_bleu_of_zero_has_its_length_explained_too(texts, capsys, tmp_path):
    """Of one word a sentence there are no 4-grams; of wrong words at full length the precision is 0, not the length."""
    empty = {"one": ["the"] * 60, "none": ["the", *[""] * 59], "wrong": ["x y z x y z x y z x y z"] * 60}
    paths = {**texts, **{name: write(tmp_path / f"{name}.txt", lines) for name, lines in empty.items()}}
    lines = [line for line in run(paths, capsys, "good", *empty).splitlines() if "mostly length" in line]
    assert [re.search(r"(\w+)\.txt has a BLEU of 0 and is (\d+)% shorter", line).groups() for line in lines] == [
        ("one", "93"),
        ("none", "100"),
    ]
    assert all(line.endswith("good.txt would have 0.00, too") for line in lines)


def test_the_sentences_that_differ_most_come_first_beside_their_source(texts, capsys):
    out = run(texts, capsys, "good", "nearly", options=["--examples", 9, "--src", texts["bad"]])
    shown = [int(line.split()[1]) for line in out.splitlines() if line.startswith("sentence ")]
    assert sorted(shown) == [1, 2]  # the others are the same
    lines = {name: path.read_text("utf-8").splitlines() for name, path in texts.items()}
    for number in shown:
        for label, name in (("source", "bad"), ("reference", "ref"), ("good.txt", "good"), ("nearly.txt", "nearly")):
            assert f"\n  {label:<10}  {lines[name][number - 1]}" in out
    assert out.count("hardly differs") == 4  # no test of two differences
    assert "nrefs:1|case:mixed|eff:no|tok:13a" in out and "chrF over 60 sentences: nrefs:1|" in out


def test_portuguese_is_no_checkpoint(texts, capsys, tmp_path):
    paths = {**texts, "bom": write(tmp_path / "bom.pt", texts["good"].read_text("utf-8").splitlines())}
    row = run(paths, capsys, "bom", "bad").splitlines()[1]
    assert row.split()[1:] == run(texts, capsys, "good", "bad").splitlines()[1].split()[1:]


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open = [], False

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "img") and tag != "b"  # self-contained, and text is no markup
        self.open = tag in ("td", "th")
        self.found += [""] * self.open

    def handle_data(self, data):
        if self.open:
            self.found[-1] += data

    def handle_endtag(self, tag):
        self.open = False


def test_the_page_says_the_same_as_the_text(texts, capsys, tmp_path):
    out = run(texts, capsys, "good", "bad", options=["--html", tmp_path / "page.html", "--examples", 4])
    cells = Cells()
    cells.feed((tmp_path / "page.html").read_text("utf-8"))
    assert len(cells.found) == 3 * 9 + 4 * 3 * 2 and any("<b>" in cell for cell in cells.found)
    assert all(cell in out for cell in cells.found)


def test_folders_of_evaluations_bring_their_reference(texts, capsys, tmp_path):
    for name in ("good", "bad"):
        folder = tmp_path / name / "evaluation-test"
        write(folder / "hyp.txt", texts[name].read_text("utf-8").splitlines())
        (folder / "scores.json").write_text(json.dumps({"ref": [str(texts["ref"])]}))
    folders = [str(tmp_path / name / "evaluation-test") for name in ("good", "bad")]
    assert rskip(["compare", *folders, "--trials", "300"]) == 0
    plain = run(texts, capsys, "good", "bad")
    folders_said, files_said = plain.split("system", 2)[1:]
    assert folders_said.split() == files_said.replace(".txt", "").split()


COMET = """
__version__ = "2.2.7"
def download_model(name):
    if name != "Unbabel/wmt22-comet-da":
        raise KeyError(f"Model '{name}' not supported by COMET.")
    return "here/checkpoints/model.ckpt"
def load_from_checkpoint(path):
    assert path == "here/checkpoints/model.ckpt"
    return Model()
class Prediction(dict):
    __getattr__ = dict.__getitem__
class Model:
    def predict(self, samples, batch_size=16, gpus=1):
        scores = [(each["mt"] == each["ref"]) + 2.0 * each["src"].startswith("the") for each in samples]
        return Prediction(scores=scores, system_score=sum(scores) / len(scores))
"""


@pytest.fixture
def comet(tmp_path, monkeypatch):
    """A stand-in for unbabel-comet, with the interface of its version 2.2.7."""
    (tmp_path / "comet.py").write_text(COMET, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("comet", None)


def test_comet_scores_source_output_and_reference(comet, texts, capsys):
    out = run(texts, capsys, "good", "bad", options=["--comet", "--src", texts["short"], "--examples", 0])
    lines = {name: path.read_text("utf-8").splitlines() for name, path in texts.items()}
    source = 2 * sum(line.startswith("the") for line in lines["short"])
    head, good, bad = (re.split("  +", line) for line in out.splitlines()[:3])
    assert head[3] == "COMET"
    for row in (good, bad):
        same = sum(map(str.__eq__, lines[row[0][:-4]], lines["ref"]))
        assert row[3] == f"{(same + source) / 60:.4f}"
    assert "COMET over 60 sentences: Unbabel/wmt22-comet-da of unbabel-comet 2.2.7, against the reference" in out


COMET_REFUSED = {
    "not installed": ([], False, "error: --comet needs unbabel-comet: pip install unbabel-comet ("),
    "no source": ([], True, "error: --comet needs the source: --src FILE"),
    "no such model": (["own", "--src", "ref"], True, "error: --comet own: \"Model 'own' not supported by COMET.\""),
}


@pytest.mark.parametrize("options, installed, said", COMET_REFUSED.values(), ids=COMET_REFUSED)
def test_comet_that_cannot_score_is_one_line(comet, texts, capsys, monkeypatch, tmp_path, options, installed, said):
    """Without the package before anything is read: that there are no such files is not said."""
    if not installed:
        monkeypatch.setitem(sys.modules, "comet", None)
    systems = [texts["good"], texts["bad"]] if installed else [tmp_path / "no", tmp_path / "such"]
    words = [*systems, "--ref", texts["ref"], "--trials", 50, "--comet", *(texts.get(word, word) for word in options)]
    assert compare.main([str(word) for word in words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(said)


REFUSED = {
    "one system": (["good"], [], "error: two systems are needed"),
    "no reference": (["good", "bad"], [], "error: plain files need their reference: --ref FILE"),
    "another length": (["good", "four"], ["--ref", "ref"], "four.txt has 4 lines and "),
    "twice the same": (["good", "good"], ["--ref", "ref"], "error: a system is given twice"),
    "no such checkpoint": (["good", "none.pt"], ["--ref", "ref"], "error: no file or folder none.pt"),
    "a folder of something else": (["good", "folder"], ["--ref", "ref"], "; of rskip run it is RUN/seedN/evaluation\n"),
}


@pytest.mark.parametrize("systems, options, said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_one_line(texts, capsys, tmp_path, systems, options, said):
    paths = {**texts, "four": write(tmp_path / "four.txt", "abcd"), "folder": tmp_path}
    words = [str(paths.get(word, word)) for word in [*systems, *options]]
    try:
        status = compare.main(words)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status in (1, 2) and out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err
