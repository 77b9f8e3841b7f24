"""The named corpora: stand-in archives, laid out as the published ones, through each prepare script."""

import json

import corpus_archives
import pytest
from conftest import ROOT, run_checked, run_command
from loopback import Answer, Loopback

from fairseq_rskip.tools.prepare import main

pytestmark = pytest.mark.slow

QUICK = ("--bpe-size", 60, "--workers", 1)


def script(name):
    return ROOT / "data-prep" / f"prepare-{name}.sh"


def facts(out):
    return json.loads((out / "data-bin" / "preparation.json").read_text())


def pairs(out):
    return [facts(out)["splits"][name]["pairs"] for name in ("train", "valid", "test")]


@pytest.fixture
def archives(tmp_path):
    (tmp_path / "the archives").mkdir()
    return tmp_path / "the archives"


@pytest.fixture
def quick(tmp_path):
    return corpus_archives.stand_ins(tmp_path / "bin", fairseq_preprocess=corpus_archives.PREPROCESS)


@pytest.mark.parametrize("tgt", ["de", "fr"])
def test_multi30k(archives, quick, tmp_path, tgt):
    corpus_archives.multi30k(archives, tgt)
    listed = corpus_archives.write_list(archives)
    options = ["--tgt", tgt, "--from", archives, "--archives", listed, *QUICK, tmp_path / "out"]
    options = options[2:] + options[:2] if tgt == "fr" else options  # the list holds whatever comes first
    said = run_checked(["bash", script("multi30k"), *options], env=quick)
    assert "train.en.gz: " in said and "sha256 checked" in said
    assert (facts(tmp_path / "out")["corpus"], facts(tmp_path / "out")["tokenizer"]) == (f"multi30k-en-{tgt}", "moses")
    train, valid, test = pairs(tmp_path / "out")
    assert (valid, test) == (30, 20) and 100 < train < 300


@pytest.mark.parametrize(
    ("corpus", "train", "valid", "first"), [("wmt14-en-de", 3, 30, (30, 4)), ("wmt14-en-fr", 5, 40, (10, 5))]
)
def test_wmt14(archives, quick, tmp_path, corpus, train, valid, first):
    tgt, out = corpus[-2:], tmp_path / "out"
    corpus_archives.wmt14(archives, tgt)
    listed = corpus_archives.write_list(archives)
    command = ["bash", script(corpus), "--from", archives, "--archives", listed, *QUICK, out]
    run_checked(command, env=quick)
    assert pairs(out)[1:] == [valid, 20]
    assert len((out / "raw" / "train.en").read_text().splitlines()) == 40 * train
    assert not list((out / "unpacked").rglob("*cs-en*"))
    for name, text in (
        ("test.en", corpus_archives.texts(20, 6)[0]),
        (f"valid.{tgt}", corpus_archives.texts(*first)[1]),
    ):
        assert (out / "data-bin" / "raw" / name).read_bytes().startswith(text)


def test_iwslt15_over_a_server_that_errs_at_first(archives, quick, tmp_path):
    """The text is published as tokens: it stays as it is. An archive that is not the pinned one is refused."""
    corpus_archives.iwslt15(archives)
    out = tmp_path / "out"
    with Loopback() as server:
        server.answers = {f"/{path.name}": Answer(path.read_bytes(), times=1) for path in archives.iterdir()}
        server.answers["/train-en-vi.tgz"].drop_at = 1000
        server.answers["/dev-2012-en-vi.tgz"].status = 500
        command = ["bash", script("iwslt15-en-vi"), "--from", server.base, *QUICK, out]
        done = run_command(command)
        assert done.returncode == 1 and "train-en-vi.tgz: wrong checksum" in done.stderr.splitlines()[-1]
        command += ["--archives", corpus_archives.write_list(archives)]
        run_checked(command, env=quick)
        assert pairs(out)[1] == 30 and facts(out)["tokenizer"] == "none"
        text = (out / "text" / "train.vi").read_bytes()
        assert text == corpus_archives.texts(300, 300)[1] and b"@-@" not in text
        asked = len(server.requests)
        assert "data-bin: up to date" in run_checked(command, env=quick) and len(server.requests) == asked


@pytest.mark.parametrize("name", ["multi30k", "iwslt15-en-vi", "wmt14-en-de", "wmt14-en-fr", "corpus"])
def test_the_help_names_every_option(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"prepare-{name}.sh"])
    with pytest.raises(SystemExit):
        main.main([name, "-h"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: prepare-{name}.sh") and "--bpe-size" in text
    assert ("--from" in text) == (name != "corpus") == ("--train-src" not in text)


def test_rskip_prepare_is_the_same_by_name(archives, quick, tmp_path):
    corpus_archives.multi30k(archives, "fr")
    listed = corpus_archives.write_list(archives)
    command = ["python", "-m", "fairseq_rskip.tools", "prepare"]
    done = run_command([*command, "multi30k-en-fr", "-h"])
    assert done.stdout.startswith("usage: rskip prepare multi30k-en-fr") and done.returncode == 0
    run_checked([*command, "multi30k-en-fr", "--from", archives, "--archives", listed, *QUICK, tmp_path], env=quick)
    assert facts(tmp_path)["corpus"] == "multi30k-en-fr"
    for words, part in ((["multi30k-de"], "did you mean multi30k-en-de?"), (["--src", "en"], "--tgt")):
        done = run_command([*command, *words])
        assert done.returncode and part in done.stderr and len(done.stderr.splitlines()) == 1
    assert run_command([*command, "-h"]).stdout.startswith("usage: rskip prepare CORPUS")
