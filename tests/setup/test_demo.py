"""The demo's corpus of spelled-out numbers, and how scripts/demo.sh goes on after an interruption."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_command

pytest.importorskip("num2words")
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
    result = make(folder, "--train", 400)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_corpus_has_different_numbers_in_two_languages(corpus):
    assert sorted(p.name for p in corpus.iterdir()) == sorted(f"{s}.{lang}" for s in SPLITS for lang in ("en", "vi"))
    pairs = {}
    for split, size in zip(SPLITS, (400, 500, 500)):
        english, vietnamese = read(corpus, split, "en"), read(corpus, split, "vi")
        assert len(english) == len(vietnamese) == size
        pairs.update(zip(english, vietnamese))
    assert len(pairs) == len(set(pairs.values())) == 1400
    for line in (*pairs, *pairs.values()):
        assert line == " ".join(line.split()) and line.islower() and "-" not in line and "," not in line
    met = [english for english in KNOWN if english in pairs]
    assert len(met) >= 4
    assert {english: pairs[english] for english in met} == {english: KNOWN[english] for english in met}


def test_first_numbers_of_the_default_seed():
    """Pinned: another Python must not give another corpus."""
    draw_numbers = runpy.run_path(SCRIPT)["draw_numbers"]
    assert draw_numbers(8) == [1464, 8090, 498055, 4, 7, 8737, 22, 82]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--train", 0), ("--train", "'0' is not a whole number of at least 1")),
        (("--train", "many"), ("--train", "'many' is not")),
        (("--train", 500_000), ("501000 pairs", "at most 500000")),
    ],
)
def test_bad_options(tmp_path, options, words):
    result = make(tmp_path / "corpus", *options)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert all(word in result.stderr.splitlines()[-1] for word in words), result.stderr
    assert not (tmp_path / "corpus").exists()


@pytest.mark.slow
def test_the_demo_resumes_after_ctrl_c_and_fails_where_nothing_was_learned(tmp_path):
    """The real scripts on 300 pairs, which teach nothing. Ctrl-C is for every process of the terminal's foreground."""
    out, printed = tmp_path / "demo out", tmp_path / "printed"
    variables = {"DEMO_DIR": str(out), "DEMO_PAIRS": "300", "DEMO_EPOCHS": "5", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    model, demo = out / "model-300-5", ROOT / "scripts" / "demo.sh"
    with open(printed, "wb") as file, subprocess.Popen(
        [demo],
        env={**os.environ, **variables, "PATH": path},
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as running:
        deadline = time.time() + 180
        while not (model / "checkpoint2.pt").exists() and running.poll() is None and time.time() < deadline:
            time.sleep(0.02)
        shown = printed.read_text(encoding="utf-8")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=60) == 130, printed.read_text(encoding="utf-8")[-2000:]
    assert "\nepoch 1, " in shown  # as it comes, not when it ends
    assert printed.read_text(encoding="utf-8").splitlines()[-1].startswith("stopped after ")
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)

    resumed = run_command([demo], env=variables)
    assert resumed.returncode == 1
    assert resumed.stderr.splitlines()[-1].startswith("error: held-out BLEU is ")
    assert resumed.stderr.splitlines()[-1].endswith("the demo needs 95")
    epochs = [int(number) for number in re.findall(r"^epoch (\d+), ", resumed.stdout, re.MULTILINE)]
    assert "Loaded checkpoint" in resumed.stdout and 2 <= epochs[0] <= epochs[-1] == 5
    assert "\n$ scripts/evaluate.sh " in resumed.stdout and "demo\\ out/data-300 " in resumed.stdout
    translations = [line[4:] for line in resumed.stdout.splitlines() if line.startswith("en  ")]
    assert translations == read(out / "corpus-300", "test", "en")[:10] and resumed.stdout.count("\nref ") == 10
    assert "sacreBLEU 13a" in resumed.stdout and f"the whole log: {model}/train.log" in resumed.stdout
    assert "| INFO |" not in resumed.stdout and len(resumed.stdout.splitlines()) < 100  # two screens

    trained = (model / "checkpoint_last.pt").stat().st_mtime_ns
    again = run_command([demo], env={**variables, "DEMO_LEAST_BLEU": "0"})
    assert again.returncode == 0, again.stderr
    assert "data-bin: up to date" in again.stdout and "translation: up to date" in again.stdout
    assert (model / "checkpoint_last.pt").stat().st_mtime_ns == trained


def test_the_demo_refuses_what_it_does_not_know():
    done = run_command([ROOT / "scripts" / "demo.sh", "--fast"])
    assert (done.returncode, done.stderr) == (1, "error: unknown argument --fast; -h shows the usage\n")
