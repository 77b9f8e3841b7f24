"""data-prep/prepare-corpus.sh as a user runs it.

The tests cover stages that run once, interruptions, and every bad input. fairseq-preprocess itself
runs where a data-bin is looked at; elsewhere a stand-in writes the log that is read of it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_checked, run_command
from corpus_archives import PREPROCESS, SIZES, stand_ins, texts, write_splits
from fairseq.data import Dictionary, data_utils

from fairseq_rskip.pretrained.hub import splitter
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.prepare import main

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "data-prep" / "prepare-corpus.sh"
STAGES = ["raw", "text", "subwords", "data-bin"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with {train,valid,test}.{en,de}, prepared in ``out ü``.

    A careless script would stumble over its name. It is to be copied, not changed.
    """
    folder = tmp_path_factory.mktemp("own") / "dữ liệu $HOME 'é"
    folder.mkdir()
    write_splits(folder)
    prepare(folder, "--workers", 2, folder / "out ü")
    return folder


@pytest.fixture
def raw(prepared, tmp_path):
    """A copy of it, times included, so that ``out`` is as up to date as it was."""
    return shutil.copytree(prepared, tmp_path / prepared.name, symlinks=True)


@pytest.fixture
def quick(tmp_path):
    return stand_ins(tmp_path / "bin", fairseq_preprocess=PREPROCESS)


def command(raw, *options):
    sides = [(name, side, lang) for name in SIZES for side, lang in (("src", "en"), ("tgt", "de"))]
    splits = [
        word for name, side, lang in sides for word in (f"--{name}-{side}", raw / f"{name}.{lang}")
    ]
    options = [
        "--src",
        "en",
        "--tgt",
        "de",
        *splits,
        "--bpe-size",
        50,
        "--workers",
        1,
        "--name",
        "mine",
        *options,
    ]
    return ["bash", SCRIPT, *options]


def prepare(raw, *options, env=None):
    return run_checked(command(raw, *options), env=env)


def refused(*arguments, **options):
    done = run_command(arguments, **options)
    errors = done.stderr.splitlines()
    assert done.returncode in (1, 2) and len(errors) == 1 and errors[0].startswith("error: "), done
    return errors[0]


def made(said):
    """The stages that a run made, and those that it found up to date."""
    names = [line.partition(": ")[2] for line in said.splitlines()]
    return [name for name in STAGES if name in names], [
        name for name in STAGES if f"{name}: up to date" in names
    ]


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_an_own_corpus_becomes_a_data_bin(prepared):
    out = prepared / "out ü"
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["corpus"], facts["bpe"], facts["tokenizer"]) == ("mine", "subword-nmt", "moses")
    assert (out / "data-bin" / "dict.en.txt").read_text() == (
        out / "data-bin" / "dict.de.txt"
    ).read_text()
    words = Dictionary.load(str(out / "data-bin" / "dict.en.txt"))
    for lang in ("en", "de"):
        text = "".join((prepared / f"{name}.{lang}").read_text() for name in SIZES)
        tokens = run_checked(
            ["sacremoses", "-q", "-l", lang, "-j", "1", "tokenize", "-a"], input=text
        ).splitlines()
        for name, size in SIZES.items():
            data = data_utils.load_indexed_dataset(
                str(out / "data-bin" / f"{name}.en-de.{lang}"), words
            )
            ours = [words.string(line, "subword_nmt") for line in data]
            expected, tokens = tokens[:size], tokens[size:]
            if name == "train":  # filtered
                assert facts["splits"]["train"]["pairs"] == len(ours) < size and set(ours) <= set(
                    expected
                )
            else:
                assert ours == expected
                assert lines(out / "data-bin" / "raw" / f"{name}.{lang}") == lines(
                    prepared / f"{name}.{lang}"
                )
    pieces = sum(len(line.split()) + 1 for line in lines(out / "subwords" / "valid.de"))
    assert facts["splits"]["valid"]["tokens"]["de"] == pieces
    assert facts["splits"]["train"]["unknown_percent"]["en"] == 0.0


def test_held_out_text_of_another_script_is_warned_about(raw, tmp_path):
    """The real fairseq-preprocess counts; the merges are learned from Latin letters."""
    (raw / "test.de").write_text("Привет мир\n" * SIZES["test"], encoding="utf-8")
    said = prepare(raw, tmp_path / "out")
    (line,) = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert "% of the tokens in test.de are unknown" in line


def test_blank_lines_of_a_held_out_text_are_warned_about(raw, tmp_path, quick):
    for name, blank in (("train.en", (4,)), ("valid.de", (0, 2)), ("test.en", range(6))):
        text = lines(raw / name)
        for number in blank:
            text[number] = "  "
        (raw / name).write_text("\n".join(text) + "\n", encoding="utf-8")
    said = prepare(raw, tmp_path / "out", env=quick)
    assert "of 300 training pairs; dropped 1 (0.3 %) by an empty side" in said
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert "valid.de has blank lines, 2 in all (1, 3), " in warnings[0]
    assert "test.en has blank lines, 6 in all (1, 2, 3, 4, 5, ...), " in warnings[1]


def test_what_is_done_is_not_done_again_and_what_changes_is(raw, quick):
    out = raw / "out ü"
    times = {
        path: path.stat().st_mtime_ns
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert made(prepare(raw, out, env=quick)) == ([], STAGES)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    line = refused(*command(raw, "--max-length", 12, out), env=quick)
    assert "by another version (subwords differs), and what was trained on it needs it" in line
    assert times == {path: path.stat().st_mtime_ns for path in times}
    said = prepare(raw, "--max-length", 12, "--replace", out, env=quick)
    assert made(said) == (STAGES[2:], STAGES[:2])
    assert "training pairs; dropped 0 (0.0 %) by an empty side, " in said
    assert " %) by --max-length 12, " in said
    assert max(len(line.split()) for line in lines(out / "subwords" / "train.en")) <= 12
    for name, line in (("test.en", "the dog\n"), ("test.de", "der Hund\n")):
        with (raw / name).open("a") as file:
            file.write(line)
    assert made(prepare(raw, "--max-length", 12, "--replace", out, env=quick)) == (STAGES, [])
    assert lines(out / "text" / "test.de")[-1] == "der Hund"


@pytest.mark.parametrize("option", ["--bpe-size 60", "--separate", "--max-ratio 2"])
def test_an_option_of_the_subwords_is_noticed(prepared, capsys, option):
    words = command(prepared, *option.split(), prepared / "out ü")
    assert main.main(["corpus", *map(str, words[2:])]) == 1
    assert "by another version (subwords differs)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    ["--separate --normalise-punctuation", "--bpe sentencepiece", "--bpe none --tokenizer none"],
)
def test_kinds_of_subwords(raw, quick, tmp_path, options):
    out, separate = tmp_path / "out", "--separate" in options
    prepare(raw, *options.split(), "--bpe-size", 60, out, env=quick)
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert facts["joined_dictionary"] == (out / "data-bin" / "joined").exists() == (not separate)
    assert (facts["tokenizer"], facts["normalise_punctuation"]) == (
        ("moses", True) if separate else ("none", False)
    )
    line = lines(out / "subwords" / "test.de")[0]
    if separate:
        assert lines(out / "subwords" / "model.en") != lines(out / "subwords" / "model.de")
        assert line.replace("@@ ", "") == lines(out / "text" / "test.de")[0]
    else:
        line = line.replace(" ", "").replace("▁", " ").strip() if "▁" in line else line
        assert line == lines(raw / "test.de")[0]
    for language in ("en", "de"):  # which the replacement of fairseq-preprocess does not write
        (out / "data-bin" / f"dict.{language}.txt").touch()
    # what rskip export takes along, to do the same to a sentence
    path = Corpus.find_for_evaluation(out).subwords("en")
    assert (path is None) == (facts["bpe"] == "none")
    config = {**facts, "source": "en", "subwords": {"en": path.name if path else None}}
    split = splitter(config, out / "subwords")
    assert [split(sentence) for sentence in lines(raw / "test.en")] == lines(
        out / "subwords" / "test.en"
    )


def started(arguments, until, **options):
    """A process in a session of its own, when ``until()`` is true."""
    process = subprocess.Popen(
        [str(word) for word in arguments], start_new_session=True, text=True, **options
    )
    deadline = time.monotonic() + 180
    while not until():
        assert time.monotonic() < deadline and process.poll() is None, (
            "not reached within three minutes"
        )
        time.sleep(0.01)
    return process


def kill_session(leader):
    """Kill every process of a session; return whether there was one."""
    actual = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)
                actual.append(folder)
    return actual


def test_a_killed_preparation_resumes_where_it_stopped(prepared, quick, tmp_path):
    """Killed at every stage, one after the other: the result is that of a run without a kill."""
    out = tmp_path / "out"
    begun = 'while [ "$1" != --destdir ]; do shift; done; touch "$2/dict.en.txt"; sleep 300'
    slow = {**os.environ, **stand_ins(tmp_path / "slow", fairseq_preprocess=begun)}
    for reached in (
        "raw.part/.key",
        "text.part/train.en",
        "subwords.part/model",
        "data-bin.part/dict.en.txt",
    ):
        stage = out / reached.partition(".part")[0]

        def begun_or_over(stage=stage, begun=out / reached):
            return begun.exists() or stage.exists()

        process = started(
            command(prepared, out), begun_or_over, stdout=subprocess.DEVNULL, env=slow
        )
        while kill_session(process.pid):  # the last one holds the lock
            process.poll()
    model = (out / "subwords" / "model").stat().st_mtime_ns
    assert not (out / "data-bin").exists()
    assert made(prepare(prepared, out, env=quick)) == (STAGES[3:], STAGES[:3])
    assert (out / "subwords" / "model").stat().st_mtime_ns == model
    for stage in STAGES[:3]:
        assert tree(out / stage) == tree(prepared / "out ü" / stage)
    assert not (out / "data-bin" / "dict.en.txt").exists()  # which the killed step had begun


def test_ctrl_c_ends_every_worker_without_a_traceback(raw, tmp_path):
    """As a terminal does it: to the process group."""
    with (raw / "train.en").open("wb") as source, (raw / "train.de").open("wb") as target:
        for file, text in zip((source, target), texts(30_000, 1)):
            file.write(text)
    out = tmp_path / "out"
    process = started(
        command(raw, "--workers", 2, out),
        lambda: any(part.stat().st_size for part in (out / "text.part").glob(".train.en.*.part")),
        stderr=subprocess.PIPE,
    )
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    # Python 3.14 may warn of its own semaphores, too
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and lines[0].startswith("error: interrupted; the same command ")
    assert "Traceback" not in error
    assert process.returncode == 130 and not kill_session(process.pid)
    assert not (out / "text.part" / "train.en").exists()


def test_bad_text_is_one_line_and_keeps_what_is_finished(raw):
    before = (raw / "out ü" / "data-bin" / "preparation.json").read_text()
    (raw / "valid.en").write_bytes(b"fine\n\xe9t\xe9\n")
    words = command(raw, "--replace", raw / "out ü")
    assert "valid.en: line 2 is not valid UTF-8" in refused(*words)
    assert (raw / "out ü" / "data-bin" / "preparation.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--bpe wordpiece", 2, "--bpe: invalid choice: 'wordpiece'"),
        ("--max-ratio 0.5", 2, "--max-ratio: '0.5'"),
        ("--tgt en OUT", 1, "--src and --tgt are both en"),
        ("--tokenizer moses --bpe sentencepiece OUT", 1, "splits text that is not tokenised"),
        ("--tgt zh-CN OUT", 2, "'zh-CN'"),
        ("", 2, "required: FOLDER"),
    ],
)
def test_a_wrong_option_is_one_line(prepared, tmp_path, capsys, options, status, message):
    words = [tmp_path / "out" if word == "OUT" else word for word in options.split()]
    assert main.main(["corpus", *map(str, command(prepared, *words)[2:])]) == status
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_the_same_text_on_both_sides_is_refused(raw, tmp_path):
    words = command(raw, tmp_path / "new")
    shutil.copy(raw / "train.en", raw / "train.de")
    assert "have the same text: expected en and de" in refused(*words)


def test_the_machine_s_troubles_are_one_line_each(raw, quick, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "file").write_text("")
    assert "file/out: Not a directory" in refused(*command(raw, tmp_path / "file" / "out"))
    broken = stand_ins(
        tmp_path / "broken", fairseq_preprocess="echo some words; echo the reason >&2; exit 3"
    )
    error = refused(*command(raw, out), env=broken)
    assert "fairseq-preprocess failed: the reason; its output is in " in error
    assert made(prepare(raw, out, env=quick)) == (STAGES[3:], STAGES[:3])
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another preparation" in refused(*command(raw, out))
    bare = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "x"}
    error = refused("/bin/bash", *command(raw, out)[1:], env=bare)
    assert "is not installed; scripts/setup_env.sh makes the environment" in error
