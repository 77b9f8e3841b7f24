"""data-prep/prepare-*.sh as a user runs them: own corpora, stages that run once, interruptions, and every bad input."""

import fcntl
import json
import os
import signal
import subprocess
import time

import pytest
from conftest import ROOT, run_checked, run_command
from corpus_archives import SIZES, write_split
from fairseq.data import Dictionary, data_utils

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "data-prep" / "prepare-corpus.sh"
STAGES = ["raw", "text", "subwords", "data-bin"]


@pytest.fixture
def raw(tmp_path):
    """A folder with {train,valid,test}.{en,de}, whose name a careless script would stumble over."""
    folder = tmp_path / "dữ liệu $HOME 'é"
    folder.mkdir()
    for seed, (name, size) in enumerate(SIZES.items()):
        write_split(folder / name, "en", "de", size, seed)
    return folder


def command(raw, *options):
    splits = [word for name in SIZES for word in (f"--{name}", raw / name)]
    return [SCRIPT, "--src", "en", "--tgt", "de", *splits, "--bpe-size", 50, "--workers", 2, *options]


def prepare(raw, *options):
    return run_checked(command(raw, *options))


def refused(*arguments, **options):
    done = run_command(arguments, **options)
    assert done.returncode == 1, done
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def made(said):
    """The stages that a run made, and those that it found up to date."""
    names = [line.partition(": ")[2] for line in said.splitlines()]
    return [name for name in STAGES if name in names], [name for name in STAGES if f"{name}: up to date" in names]


def sentences(data_bin, split, lang):
    words = Dictionary.load(str(data_bin / f"dict.{lang}.txt"))
    data = data_utils.load_indexed_dataset(str(data_bin / f"{split}.en-de.{lang}"), words)
    return [words.string(line, "subword_nmt") for line in data]


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def test_an_own_corpus_becomes_a_data_bin(raw, tmp_path):
    out = tmp_path / "aus ü"
    said = prepare(raw, out)
    assert made(said) == (STAGES, [])
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["corpus"], facts["bpe"], facts["tokenizer"]) == ("aus ü", "subword-nmt", "moses")
    assert (out / "data-bin" / "dict.en.txt").read_text() == (out / "data-bin" / "dict.de.txt").read_text()
    for name, size in SIZES.items():
        for lang in ("en", "de"):
            tokens = run_command(["sacremoses", "-q", "-l", lang, "-j", "1", "tokenize", "-a"],
                                 input=(raw / f"{name}.{lang}").read_text()).stdout  # fmt: skip
            ours = sentences(out / "data-bin", name, lang)
            if name == "train":  # filtered
                assert facts["splits"]["train"]["pairs"] == len(ours) < size
                assert set(ours) <= set(tokens.splitlines())
            else:
                assert ours == tokens.splitlines() and len(ours) == size
                assert lines(out / "data-bin" / "raw" / f"{name}.{lang}") == lines(raw / f"{name}.{lang}")
    pieces = sum(len(line.split()) + 1 for line in lines(out / "subwords" / "valid.de"))
    assert facts["splits"]["valid"]["tokens"]["de"] == pieces and f"{pieces:,}" in said
    assert facts["splits"]["train"]["unknown_percent"]["en"] == 0.0


def test_what_is_done_is_not_done_again_and_what_changes_is(raw, tmp_path):
    out = tmp_path / "out"
    prepare(raw, out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    assert made(prepare(raw, out)) == ([], STAGES)
    assert times == {path: path.stat().st_mtime_ns for path in times}
    assert made(prepare(raw, "--max-length", 12, out)) == (STAGES[2:], STAGES[:2])
    assert max(len(line.split()) for line in lines(out / "subwords" / "train.en")) <= 12
    with (raw / "test.en").open("a") as file:
        file.write("the dog\n")
    with (raw / "test.de").open("a") as file:
        file.write("der Hund\n")
    assert made(prepare(raw, "--max-length", 12, out)) == (STAGES, [])
    assert sentences(out / "data-bin", "test", "de")[-1] == "der Hund"


@pytest.mark.parametrize(
    "options", [["--separate"], ["--bpe", "sentencepiece"], ["--bpe", "none", "--tokenizer", "none"]]
)
def test_kinds_of_subwords(raw, tmp_path, options):
    prepare(raw, *options, "--bpe-size", 60, tmp_path / "out")
    data = tmp_path / "out" / "data-bin"
    facts = json.loads((data / "preparation.json").read_text())
    assert facts["joined_dictionary"] == (options != ["--separate"])
    same = (data / "dict.en.txt").read_text() == (data / "dict.de.txt").read_text()
    assert same == facts["joined_dictionary"]
    if options == ["--separate"]:
        codes = [(tmp_path / "out" / "subwords" / f"model.{lang}").read_text() for lang in ("en", "de")]
        assert codes[0] != codes[1]
        return
    assert facts["tokenizer"] == "none"
    words = Dictionary.load(str(data / "dict.de.txt"))
    line = data_utils.load_indexed_dataset(str(data / "test.en-de.de"), words)[0]
    text = words.string(line, "sentencepiece" if facts["bpe"] == "sentencepiece" else None)
    assert text.strip() == lines(raw / "test.de")[0]


def test_a_killed_preparation_goes_on_where_it_stopped(raw, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prepare(raw, "--name", "x", whole)
    process = subprocess.Popen(
        [str(word) for word in command(raw, "--name", "x", killed)], start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 180
    while not (killed / "subwords.part" / "model").exists():
        assert time.monotonic() < deadline and process.poll() is None, "no model within three minutes"
        time.sleep(0.02)
    run_checked(["pkill", "-KILL", "-s", process.pid])
    process.wait()
    while run_command(["pgrep", "-s", process.pid]).stdout:  # they hold the folder's lock until they are gone
        time.sleep(0.05)
    model = (killed / "subwords.part" / "model").stat().st_mtime_ns
    assert not (killed / "data-bin").exists()
    assert made(prepare(raw, "--name", "x", killed)) == (STAGES[2:], STAGES[:2])
    assert (killed / "subwords" / "model").stat().st_mtime_ns == model
    for path in (whole / "data-bin").iterdir():
        if path.suffix in (".bin", ".idx", ".txt") or path.name == "preparation.json":
            assert (killed / "data-bin" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("interruption", "status", "reached"),
    [(signal.SIGINT, 130, "text.part/.key"), (signal.SIGTERM, 143, "data-bin.part/dict.en.txt")],
)
def test_an_interruption_ends_everything_and_is_gone_on_from(raw, tmp_path, interruption, status, reached):
    """As a terminal's Ctrl-C and a batch system's TERM do it: to the script's process group."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [str(word) for word in command(raw, out)], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180
    while not (out / reached).exists():
        assert time.monotonic() < deadline and process.poll() is None, f"{reached} did not appear"
        time.sleep(0.01)
    os.killpg(process.pid, interruption)
    assert process.communicate(timeout=60)[1] == "error: interrupted; the same command goes on from here\n"
    assert process.returncode == status
    assert run_command(["pgrep", "-s", process.pid]).stdout == ""
    assert made(prepare(raw, out))[0] == STAGES[1:] if status == 130 else STAGES[3:]


def test_a_full_disk_leaves_no_half_split(raw, tmp_path):
    """The smaller side of train fits below the limit and the other does not."""
    side = (raw / "train.en").read_text()
    (raw / "train.en").write_text(side.replace("\n", " and so on and so on and so on\n"))
    limit = (raw / "train.de").stat().st_size // 1024 + 1
    error = refused("bash", "-c", f'ulimit -f {limit}; exec bash "$@"', "bash", *command(raw, tmp_path / "out"))
    assert "raw.part/train.en: File too large" in error
    assert made(prepare(raw, tmp_path / "out")) == (STAGES, [])


def test_bad_text_is_one_line_and_keeps_what_is_finished(raw, tmp_path):
    out = tmp_path / "out"
    prepare(raw, out)
    before = (out / "data-bin" / "preparation.json").read_text()
    for name, content, message in (
        ("train.de", b"nur eine Zeile\n", f"has {SIZES['train']} lines and"),
        ("valid.en", b"fine\n\xe9t\xe9\n", "valid.en: line 2 is not valid UTF-8"),
        ("test.en", b"", "test.en is empty"),
        ("train.en", b"\x1f\x8b\x08broken", "damaged gzip"),
    ):
        good = (raw / name).read_bytes()
        (raw / name).write_bytes(content)
        assert message in refused(*command(raw, out))
        (raw / name).write_bytes(good)
    assert (out / "data-bin" / "preparation.json").read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bpe", "wordpiece"], "subword-nmt, sentencepiece and none are known"),
        (["--bpe-size", "32k"], "--bpe-size 32k: a whole number"),
        (["--workers", "0"], "--workers 0: a whole number"),
        (["--max-ratio", "0.5"], "a number of at least 1"),
        (["--bep", "none"], "unknown option --bep"),
        (["--from", "/mirror"], "unknown option --from"),
        (["--tokenizer", "spacy"], "moses and none are known"),
        (["--tgt", "en"], "--src and --tgt are both en"),
        (["--tgt"], "--tgt needs a value"),
        (["--name", "", "OUT"], "--name needs a value"),
        ([""], "an empty argument"),
        (["--tgt", "zh-CN", "OUT"], "--tgt needs a language code"),
        (["--train", "/no/such", "OUT"], "no file /no/such.en"),
        (["two", "folders"], "one target folder is accepted, got 2: two folders"),
        ([], "the target FOLDER is missing"),
        (["--bpe", "sentencepiece", "--bpe-size", "99999", "OUT"], "sentencepiece with 99999 subwords"),
    ],
)
def test_a_wrong_option_is_one_line(raw, tmp_path, options, message):
    assert message in refused(*command(raw, *(tmp_path / "out" if word == "OUT" else word for word in options)))


def stand_ins(folder, **programs):
    """PATH with the programs' shell lines in front."""
    folder.mkdir()
    for name, line in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_machine_s_troubles_are_one_line_each(raw, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "file").write_text("")
    assert "cannot write to the folder" in refused(*command(raw, tmp_path / "file" / "out"))
    full = stand_ins(tmp_path / "full", df="printf 'h\\nx 1 1 5 1 /\\n'")
    error = refused("bash", *command(raw, out), env={"PATH": full})
    assert "may need" in error and "0 MB are free" in error
    error = refused("bash", "-c", 'ulimit -f 2; exec bash "$@"', "bash", *command(raw, out))
    assert "File too large" in error
    broken = stand_ins(tmp_path / "broken", fairseq_preprocess="echo some words; echo the reason >&2; exit 3")
    error = refused("bash", *command(raw, out), env={"PATH": broken})
    assert "fairseq-preprocess failed: the reason; all it said is in " in error
    assert made(prepare(raw, out)) == (STAGES[3:], STAGES[:3])


def test_a_missing_tool_and_a_second_preparation(raw, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "python3", "realpath"):
        (tools / name).symlink_to(run_checked(["sh", "-c", f"command -v {name}"]).strip())
    error = refused(tools / "bash", *command(raw, tmp_path / "out"), env={"PATH": str(tools), "VIRTUAL_ENV": "x"})
    assert "is not installed; scripts/setup_env.sh makes the environment" in error
    (tmp_path / "out").mkdir()
    lock = tmp_path / "out" / ".lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another preparation" in refused(*command(raw, tmp_path / "out"))
