"""The demo's corpus of spelled-out numbers, and how scripts/demo.sh goes on after an interruption."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("num2words")
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "scripts" / "make_number_corpus.py")
SPLITS = ("train", "valid", "test")

# Written by hand from the languages' rules: mốt, lăm and lẻ stand where plain digit names would be wrong.
KNOWN = {
    "five": "năm",
    "fifteen": "mười lăm",
    "twenty one": "hai mươi mốt",
    "twenty five": "hai mươi lăm",
    "eighty": "tám mươi",
    "ninety nine": "chín mươi chín",
    "one hundred and five": "một trăm lẻ năm",
    "three hundred and fourteen": "ba trăm mười bốn",
}


def make(folder, *options):
    command = [sys.executable, SCRIPT, str(folder), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def read(folder, split, language):
    return (folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    result = make(folder, "--train", 400, "--valid", 50, "--test", 50, "--digits", 3)
    assert result.returncode == 0, result.stderr
    return folder


def test_sizes_and_pairs(corpus):
    assert sorted(p.name for p in corpus.iterdir()) == sorted(f"{s}.{lang}" for s in SPLITS for lang in ("en", "vi"))
    for split, size in zip(SPLITS, (400, 50, 50)):
        english, vietnamese = read(corpus, split, "en"), read(corpus, split, "vi")
        assert len(english) == len(vietnamese) == size
        for line in english + vietnamese:
            assert line == " ".join(line.split()) and line.islower()
            assert "-" not in line and "," not in line


def test_splits_share_no_number(corpus):
    for language in ("en", "vi"):
        lines = [line for split in SPLITS for line in read(corpus, split, language)]
        assert len(set(lines)) == len(lines) == 500


def test_pairs_mean_the_same(corpus):
    pairs = {}
    for split in SPLITS:
        pairs.update(zip(read(corpus, split, "en"), read(corpus, split, "vi")))
    met = [english for english in KNOWN if english in pairs]
    assert len(met) >= 4
    assert {english: pairs[english] for english in met} == {english: KNOWN[english] for english in met}


def test_seed_decides_everything(tmp_path, corpus):
    sizes = ("--train", 400, "--valid", 50, "--test", 50, "--digits", 3)
    assert make(tmp_path / "same", *sizes).returncode == 0
    assert make(tmp_path / "other", *sizes, "--seed", 2).returncode == 0
    assert read(tmp_path / "same", "test", "vi") == read(corpus, "test", "vi")
    assert read(tmp_path / "other", "test", "vi") != read(corpus, "test", "vi")


def test_first_numbers_of_the_default_seed():
    """Pinned: another Python must not give another corpus."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import make_number_corpus as m; print(m.draw_numbers(8, 6, 1))"
    command = [sys.executable, "-c", code, str(ROOT / "scripts")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == "[1464, 8090, 498055, 4, 7, 8737, 22, 82]\n"


@pytest.mark.parametrize(
    "options, words",
    [
        (("--train", 0), ("--train", "above 0", "'0'")),
        (("--test", "many"), ("--test", "above 0", "'many'")),
        (("--digits", 10), ("--digits", "1 to 9", "10")),
        (("--train", 400, "--valid", 50, "--test", 51, "--digits", 3), ("501 pairs", "at most 500")),
    ],
)
def test_bad_options(tmp_path, options, words):
    result = make(tmp_path / "corpus", *options)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert all(word in result.stderr.splitlines()[-1] for word in words), result.stderr
    assert not (tmp_path / "corpus").exists()


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    result = make(tmp_path / "file" / "corpus", "--train", 5, "--valid", 1, "--test", 1)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr


STAND_INS = {
    "fairseq-preprocess": "",
    "fairseq-train": "[ ! -e CUT ] || exit 130",
    "fairseq-generate": 'i=0; while read -r line; do printf "H-%s\\t0\\t%s\\n" $i "$line"; i=$((i+1)); done <REFERENCE',
}


class Demo:
    """scripts/demo.sh with stand-ins for fairseq's commands; the corpus and the score are real."""

    def __init__(self, folder):
        self.out, self.log, self.cut = folder / "demo out", folder / "log", folder / "cut"
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.reference = self.out / "corpus" / "test.vi"
        (self.tools / "python").symlink_to(sys.executable)
        (self.tools / "sacrebleu").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sacrebleu "$@"\n')
        for name, body in STAND_INS.items():
            body = body.replace("CUT", f"'{self.cut}'").replace("REFERENCE", f"'{self.out}/reference'")
            (self.tools / name).write_text(f'#!/bin/bash\necho {name} >> "{self.log}"\n{body}\n')
        for tool in self.tools.iterdir():
            if not tool.is_symlink():
                tool.chmod(0o755)

    def run(self, **variables):
        environment = {
            **os.environ,
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "DEMO_DIR": str(self.out),
            "DEMO_PAIRS": "50",
            **variables,
        }
        script = str(ROOT / "scripts" / "demo.sh")
        self.log.write_text("")
        return subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60)

    def called(self):
        return [line.split("-")[1] for line in self.log.read_text().splitlines()]

    def answer(self, spoil=lambda lines: lines):
        """What the stand-in for fairseq-generate will say: the references, spoilt or not."""
        make(self.out / "reference-corpus", "--train", 50)
        lines = spoil(read(self.out / "reference-corpus", "test", "vi"))
        (self.out / "reference").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def demo(tmp_path):
    demo = Demo(tmp_path)
    demo.answer()
    return demo


def test_second_run_repeats_nothing(demo):
    first = demo.run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert demo.called() == ["preprocess", "train", "generate"]
    assert "= 100.0 " in first.stdout and first.stdout.count("\nref ") == 10
    second = demo.run()
    assert second.returncode == 0 and demo.called() == []
    assert second.stdout.count("up to date") == 4


def test_interrupted_training_goes_on(demo):
    demo.cut.touch()
    assert demo.run().returncode == 130
    (demo.out / "model" / "half-way").touch()
    demo.cut.unlink()
    assert demo.run().returncode == 0
    assert demo.called() == ["train", "generate"]
    assert (demo.out / "model" / "half-way").exists()


def test_changed_setting_starts_the_stage_anew(demo):
    demo.run()
    (demo.out / "model" / "old").touch()
    assert demo.run(DEMO_EPOCHS="7").returncode == 0
    assert demo.called() == ["train", "generate"]
    assert not (demo.out / "model" / "old").exists()


def test_poor_score_fails_loudly(demo):
    demo.answer(spoil=lambda lines: lines[1:] + lines[:1])
    result = demo.run()
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: held-out BLEU is ")
    assert demo.run(DEMO_LEAST_BLEU="1").returncode == 0
