"""The tools of data-prep/ against the command-line tools whose work they spread over cores, and against the rules."""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import encode
import learn_subwords
import lines
import parallel
import pytest
import sacremoses
from conftest import ROOT, run_checked, run_command
from errors import UserError

TOOLS = ROOT / "data-prep"
WORDS = (
    "the cat's house, well-known \"big\" dogs & co. Straße größer Übung 3.14 1,000 don't U.S. (see) e-mail a|b".split()
)


def sentences(count, seed=1):
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 20))) + "." for _ in range(count)]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else "".join(line + "\n" for line in content).encode())
    return str(path)


def tool(name, *arguments):
    return run_checked([sys.executable, TOOLS / f"{name}.py", *arguments])


def fails(name, *arguments):
    done = run_command([sys.executable, TOOLS / f"{name}.py", *arguments])
    assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, done
    return done.stderr


def test_a_line_ends_at_a_newline_only(tmp_path):
    text = "one\rstill\x0bone\x85\u2028\ntwo\r\n\nfour"
    assert list(lines.read(write(tmp_path / "a", text.encode()))) == [
        "one\rstill\x0bone\x85\u2028",
        "two\r",
        "",
        "four",
    ]
    assert list(lines.read(write(tmp_path / "bom", "\ufeffone\n\ufefftwo".encode()))) == ["one", "\ufefftwo"]
    assert list(lines.read(write(tmp_path / "a.gz", gzip.compress(text.encode()))))[3] == "four"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe\nfine\n", "line 2 is not valid UTF-8"),
        (b"", "is empty"),
        (gzip.compress(b"some text\n" * 50)[:-12], "damaged gzip"),
        (gzip.compress(b"some text\n" * 50)[:-8] + b"checksum", "damaged gzip"),
    ],
    ids=["not UTF-8", "empty", "cut off", "wrong checksum"],
)
def test_unreadable_text_is_named(tmp_path, content, message):
    with pytest.raises(UserError, match=f"bad.*{message}"):
        list(lines.read(write(tmp_path / "bad", content)))


@pytest.mark.parametrize(("left", "right"), [(3, 5), (5, 3), (0, 2), (2, 0)])
def test_files_of_different_length_are_named_with_both_counts(left, right):
    with pytest.raises(UserError, match=f"a.en has {left} lines and a.de {right};"):
        list(lines.paired(iter("x" * left), iter("y" * right), ("a.en", "a.de")))


def test_nothing_is_left_of_a_file_whose_writing_failed(tmp_path):
    (tmp_path / "out").write_text("old")
    with pytest.raises(ZeroDivisionError), lines.writing(tmp_path / "out") as file:
        file.write(str(1 / 0))
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "old"


def test_clean():
    assert encode.clean(" a\u00a0b\u200b \tc\x07\rd\ufeff\u2028e ") == "a b c d e"


@pytest.mark.parametrize("lang", ["en", "de"])
def test_moses_tokens_are_those_of_sacremoses_on_any_number_of_workers(tmp_path, lang):
    text = write(tmp_path / "text", sentences(1200))  # two chunks
    for workers in (1, 2):
        tool("encode", "moses", "--lang", lang, "--workers", workers, text, tmp_path / f"out{workers}")
    done = run_command(
        ["sacremoses", "-q", "-l", lang, "-j", "1", "tokenize", "-a"], input=Path(text).read_text("utf-8")
    )
    assert done.returncode == 0 and "@-@" in done.stdout and "&apos;" in done.stdout
    assert (tmp_path / "out1").read_text() == (tmp_path / "out2").read_text() == done.stdout


def test_punctuation_is_normalised_on_request_only(tmp_path):
    text = write(tmp_path / "text", ["„Hallo“ – sagte er…"])
    tool("encode", "moses", "--lang", "de", "--workers", 1, text, tmp_path / "plain")
    tool("encode", "moses", "--lang", "de", "--workers", 1, "--normalise-punctuation", text, tmp_path / "ascii")
    assert "„" in (tmp_path / "plain").read_text()
    expected = sacremoses.MosesPunctNormalizer("de").normalize("„Hallo“ – sagte er…")
    assert (tmp_path / "ascii").read_text() == sacremoses.MosesTokenizer("de").tokenize(
        expected, return_str=True
    ) + "\n"


def test_subwords_are_those_of_subword_nmt(tmp_path):
    sides = [write(tmp_path / name, sentences(1500, seed)) for seed, name in enumerate(("a", "b"))]
    tool("learn_subwords", "subword-nmt", "--size", 60, "--model", tmp_path / "codes", *sides)
    joined = write(tmp_path / "joined", [line for side in sides for line in lines.read(side)])
    run_checked(["subword-nmt", "learn-bpe", "-s", "60", "-i", joined, "-o", tmp_path / "their-codes"])
    assert (tmp_path / "codes").read_text() == (tmp_path / "their-codes").read_text()
    tool("encode", "subword-nmt", "--model", tmp_path / "codes", "--workers", 2, sides[0], tmp_path / "out")
    run_checked(["subword-nmt", "apply-bpe", "-c", tmp_path / "codes", "-i", sides[0], "-o", tmp_path / "theirs"])
    assert (tmp_path / "out").read_text() == (tmp_path / "theirs").read_text()
    assert "@@ " in (tmp_path / "out").read_text()


def test_split_words_are_forgotten_before_they_fill_the_memory(tmp_path, monkeypatch):
    codes = write(tmp_path / "codes", ["#version: 0.2", "a b</w>"])
    monkeypatch.setattr(encode, "CACHED_WORDS", 10)
    split = encode.make_subword_nmt(codes)
    bpe = split.__closure__[0].cell_contents
    for number in range(100):
        assert split(f"ab {number}").startswith("ab ")
        assert len(bpe.cache) <= 12


def test_rare_words_are_forgotten_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(learn_subwords, "MOST_COUNTED", 50)
    text = write(tmp_path / "text", [f"often rare{number}" for number in range(1000)])
    counts = learn_subwords.count_words([text])
    assert counts["often"] == 1000 and len(counts) <= 51


def test_a_corpus_with_fewer_merges_than_asked_for_says_so(tmp_path):
    said = tool(
        "learn_subwords", "subword-nmt", "--size", 500, "--model", tmp_path / "codes", write(tmp_path / "a", ["ab ab"])
    )
    assert said == "subword-nmt: 1 merges learned, not 500: no further pair of symbols occurs twice\n"


def test_sentencepiece_is_undone_without_loss(tmp_path):
    text = write(tmp_path / "text", [*sentences(800), "NFKC would change … 5 m² ½ ™ ﬁ №"] * 2)
    tool("learn_subwords", "sentencepiece", "--size", 120, "--model", tmp_path / "model", text)
    tool("encode", "sentencepiece", "--model", tmp_path / "model", "--workers", 2, text, tmp_path / "out")
    pieces = list(lines.read(tmp_path / "out"))
    assert [line.replace(" ", "").replace("▁", " ").strip() for line in pieces] == list(lines.read(text))
    assert max(len(line.split()) for line in pieces) > 20
    error = fails("learn_subwords", "sentencepiece", "--size", 5000, "--model", tmp_path / "m", text)
    assert "5000 subwords" in error and "<= " in error


def test_the_filter_is_the_rule_of_clean_corpus_n(tmp_path):
    rng = random.Random(3)
    pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(400)]
    pairs += [(250, 250), (251, 251), (250, 167), (250, 166), (2, 3), (3, 2), (1, 2), (0, 0), (251, 200)]
    files = [write(tmp_path / side, ["w " * pair[index] for pair in pairs]) for index, side in enumerate("ab")]
    said = tool("filter_pairs", *files, tmp_path / "a.out", tmp_path / "b.out")
    kept = [(a, b) for a, b in pairs if not (a == 0 or b == 0 or a > 250 or b > 250 or a / b > 1.5 or b / a > 1.5)]
    result = [
        (len(a.split()), len(b.split())) for a, b in zip(lines.read(tmp_path / "a.out"), lines.read(tmp_path / "b.out"))
    ]
    assert result == kept and 0 < len(kept) < len(pairs)
    assert said == f"filter: kept {len(kept)} of {len(pairs)} training pairs\n"
    error = fails("filter_pairs", *files, tmp_path / "a.none", tmp_path / "b.none", "--max-length", "0")
    assert "none of the 409 training pairs is left" in error and not list(tmp_path.glob("*.none*"))


def test_parts_are_joined_whatever_their_form(tmp_path):
    write(tmp_path / "one.en", b"A\r\nB")
    write(tmp_path / "one.de", ["a", "b"])
    write(tmp_path / "two.en.gz", gzip.compress(b"C\n"))
    write(tmp_path / "two.de", ["c"])
    sgm = '<refset>\n<doc docid="d">\n<hl>\n<seg id="1">{}</seg>\n</hl><p>\n<seg id="2"> {} </seg></p>\n</doc>'
    write(tmp_path / "three-src.en.sgm", sgm.format("R&amp;D &lt;x&gt;", "E").encode())
    write(tmp_path / "three-ref.de.sgm", sgm.format("d", "e").encode())
    tool(
        "collect",
        tmp_path / "all",
        "--src",
        "en",
        "--tgt",
        "de",
        *(tmp_path / part for part in ("one", "two", "three")),
    )
    assert (tmp_path / "all.en").read_text() == "A\nB\nC\nR&D <x>\nE\n"
    assert (tmp_path / "all.de").read_text() == "a\nb\nc\nd\ne\n"
    write(tmp_path / "two.de", ["c", "d"])
    error = fails("collect", tmp_path / "new", "--src", "en", "--tgt", "de", tmp_path / "one", tmp_path / "two")
    assert "two.en.gz has 1 lines" in error and "two.de 2" in error and not list(tmp_path.glob("new*"))
    assert "none of these files exists" in fails(
        "collect", tmp_path / "new", "--src", "en", "--tgt", "de", tmp_path / "x"
    )


def test_no_more_is_read_ahead_than_the_workers_may_wait_for():
    """What bounds the memory on a corpus of any size: the standard library's map() reads all of it first."""
    read = 0

    def chunks():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield ["line"] * 3

    for done, result in enumerate(parallel._mapped(chunks(), encode.make_clean, (), 2), start=1):
        assert result == ["line"] * 3
        assert read <= done + 2 * parallel.WAITING
        if done == 50:
            break


def test_workers_end_with_their_killed_parent(tmp_path):
    text = write(tmp_path / "text", sentences(60_000))
    command = [sys.executable, TOOLS / "encode.py", "moses", "--lang", "en", "--workers", "2", text, tmp_path / "out"]
    process = subprocess.Popen(command)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        wait_for(lambda: len(children.read_text().split()) == 2 and (tmp_path / "out.part").stat().st_size)
        workers = [int(child) for child in children.read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers))
    assert not (tmp_path / "out").exists()


def wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
