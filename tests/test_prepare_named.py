"""The named corpora: stand-in archives, laid out as the published ones, through each prepare script."""

import json

import corpus_archives
import pytest
from conftest import ROOT, run_checked, run_command
from loopback import Answer, Loopback

pytestmark = pytest.mark.slow


def script(name):
    return ROOT / "data-prep" / f"prepare-{name}.sh"


def facts(out):
    return json.loads((out / "data-bin" / "preparation.json").read_text())


def pairs(out):
    return {name: split["pairs"] for name, split in facts(out)["splits"].items()}


def head(path):
    return path.read_text(encoding="utf-8").split("\n", 1)[0]


@pytest.fixture
def archives(tmp_path):
    folder = tmp_path / "the archives"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("tgt", ["de", "fr"])
def test_multi30k(archives, tmp_path, tgt):
    corpus_archives.multi30k(archives, tgt)
    listed = corpus_archives.write_list(archives)
    options = ["--tgt", tgt, "--from", archives, "--archives", listed, "--bpe-size", 60, tmp_path / "out"]
    options = options[2:] + options[:2] if tgt == "fr" else options  # the list holds whatever comes first
    said = run_checked([script("multi30k"), *options])
    assert "train.en.gz: " in said and "sha256 checked" in said
    assert (facts(tmp_path / "out")["corpus"], facts(tmp_path / "out")["tokenizer"]) == (f"multi30k-en-{tgt}", "moses")
    counts = pairs(tmp_path / "out")
    assert (counts["valid"], counts["test"]) == (30, 20) and 100 < counts["train"] < 300


@pytest.mark.parametrize(("corpus", "train", "valid"), [("wmt14-en-de", 3 * 40, 30), ("wmt14-en-fr", 5 * 40, 10 + 30)])
def test_wmt14(archives, tmp_path, corpus, train, valid):
    corpus_archives.wmt14(archives, corpus[-2:])
    listed = corpus_archives.write_list(archives)
    out = tmp_path / "out"
    run_checked([script(corpus), "--from", archives, "--archives", listed, "--bpe-size", 60, out])
    assert (pairs(out)["valid"], pairs(out)["test"]) == (valid, 20)
    assert len((out / "raw" / "train.en").read_text().splitlines()) == train
    assert not list((out / "unpacked").rglob("*cs-en*"))
    assert head(out / "data-bin" / "raw" / "test.en") == corpus_archives.texts(20, 6)[0].decode().split("\n")[0]
    first = corpus_archives.texts(10 if corpus == "wmt14-en-fr" else 30, 5 if corpus == "wmt14-en-fr" else 4)[1]
    assert head(out / "data-bin" / "raw" / f"valid.{corpus[-2:]}") == first.decode().split("\n")[0]


def test_iwslt15_over_a_server_that_errs_at_first(archives, tmp_path):
    """The text is published as tokens: it stays as it is. The server drops one download and fails another once."""
    corpus_archives.iwslt15(archives)
    listed = corpus_archives.write_list(archives)
    out = tmp_path / "out"
    with Loopback() as server:
        server.serve_folder(archives)
        server.answers["/train-en-vi.tgz"].drop_at, server.answers["/train-en-vi.tgz"].times = 1000, 1
        server.answers["/dev-2012-en-vi.tgz"] = Answer(
            (archives / "dev-2012-en-vi.tgz").read_bytes(), status=500, times=1
        )
        command = [script("iwslt15-en-vi"), "--from", server.base, "--archives", listed, "--bpe-size", 60, out]
        said = run_checked(command)
        assert pairs(out)["valid"] == 30 and "(paper: 1,553)" in said
        assert facts(out)["tokenizer"] == "none"
        text = (out / "text" / "train.vi").read_text()
        assert text == corpus_archives.texts(300, 300)[1].decode() and "@-@" not in text
        asked = len(server.requests)
        assert "data-bin: up to date" in run_checked(command) and len(server.requests) == asked


def test_an_archive_that_is_not_the_pinned_one_is_refused(archives, tmp_path):
    corpus_archives.iwslt15(archives)
    done = run_command([script("iwslt15-en-vi"), "--from", archives, tmp_path / "out"])
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and "train-en-vi.tgz" in done.stderr


def test_the_help_names_every_option():
    for name in ("multi30k", "iwslt15-en-vi", "wmt14-en-de", "wmt14-en-fr", "corpus"):
        said = run_checked([script(name), "-h"])
        assert said.startswith(f"usage: data-prep/prepare-{name}.sh") and "--bpe-size" in said
        assert ("--from" in said) == (name != "corpus")
