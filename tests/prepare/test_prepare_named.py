"""The named corpora, through the commands that a user types.

Their archives are stand-ins, laid out as the published ones.
"""

import json
import shutil

import corpus_archives
import pytest
from conftest import ROOT, run_checked, run_command
from loopback import Answer, Loopback

from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.prepare import main

pytestmark = pytest.mark.slow

QUICK = ("--bpe-size", 60, "--workers", 1)
RSKIP = ["python", "-m", "fairseq_rskip.tools", "prepare"]
NAMED = {  # archives, command, pairs of valid and test, tokenizer
    "multi30k-en-de": (corpus_archives.multi30k, "prepare-multi30k.sh --tgt de", [30, 20], "moses"),
    "multi30k-en-fr": (corpus_archives.multi30k, "multi30k-en-fr", [30, 20], "moses"),
    "wmt14-en-de": (corpus_archives.wmt14, "prepare-wmt14-en-de.sh", [30, 20], "moses"),
    "wmt14-en-fr": (corpus_archives.wmt14, "prepare-wmt14-en-fr.sh", [40, 20], "moses"),
}


def script(name):
    return ["bash", ROOT / "data-prep" / name] if name.endswith(".sh") else [*RSKIP, name]


def facts(out):
    return json.loads((out / "data-bin" / "preparation.json").read_text())


def documents(out):
    """The documents of each split of a prepared text."""
    texts = [
        (out / "raw" / f"{name}.en").read_text(encoding="utf-8")
        for name in ("train", "valid", "test")
    ]
    return [[part.split("\n") for part in text.split("\n\n")[:-1]] for text in texts]


@pytest.fixture
def archives(tmp_path):
    (tmp_path / "the archives").mkdir()
    return tmp_path / "the archives"


@pytest.fixture
def quick(tmp_path):
    return corpus_archives.stand_ins(
        tmp_path / "bin", fairseq_preprocess=corpus_archives.PREPROCESS
    )


@pytest.mark.parametrize("corpus", NAMED)
def test_a_published_corpus(archives, quick, tmp_path, corpus):
    write, command, sizes, tokenizer = NAMED[corpus]
    (name, *options), out, tgt = command.split(), tmp_path / "out", corpus[-2:]
    write(archives, tgt)
    listed = corpus_archives.write_list(archives)
    said = run_checked(
        [*script(name), *options, "--from", archives, "--archives", listed, *QUICK, out], env=quick
    )
    assert "sha256 checked" in said
    about = facts(out)
    assert (about["corpus"], about["tokenizer"]) == (corpus, tokenizer)
    assert [about["splits"][name]["pairs"] for name in ("valid", "test")] == sizes
    if corpus.startswith("wmt14"):
        parts, first = {"de": (3, (30, 4)), "fr": (5, (10, 5))}[tgt]
        assert len((out / "raw" / "train.en").read_text().splitlines()) == 40 * parts
        assert not list((out / "unpacked").rglob("*cs-en*"))
        for file, text in (
            ("test.en", corpus_archives.texts(20, 6)[0]),
            (f"valid.{tgt}", corpus_archives.texts(*first)[1]),
        ):
            assert (out / "data-bin" / "raw" / file).read_bytes().startswith(text)


def test_another_part_in_the_list_of_corpora_makes_the_raw_text_again(
    archives, quick, tmp_path, monkeypatch, capfd
):
    """The archives and their list stay as they are."""
    corpus_archives.multi30k(archives, "de")
    listed = corpus_archives.write_list(archives)
    corpora = tmp_path / "data-prep"
    shutil.copytree(main.FOLDER, corpora)
    monkeypatch.setattr(main, "FOLDER", corpora)
    monkeypatch.setenv("PATH", quick["PATH"])
    words = [*map(str, ["multi30k-en-de", "--from", archives, "--archives", listed, *QUICK])]
    assert main.main([*words, str(tmp_path / "out")]) == 0
    assert main.main([*words, str(tmp_path / "out")]) == 0
    assert "raw: up to date" in capfd.readouterr().out

    file = corpora / "corpora.yaml"
    text = file.read_text("utf-8")
    assert text.count("[archives/test_2016_flickr]") == 1
    file.write_text(text.replace("[archives/test_2016_flickr]", "[archives/val]"), "utf-8")
    assert main.main([*words, str(tmp_path / "out")]) == 1
    assert "--replace" in capfd.readouterr().err
    assert main.main([*words, "--replace", str(tmp_path / "out")]) == 0
    assert "raw: up to date" not in capfd.readouterr().out
    raw = tmp_path / "out" / "raw"
    assert (raw / "test.en").read_text("utf-8") == (raw / "valid.en").read_text("utf-8")


@pytest.mark.parametrize("corpus", ["wikitext103", "captions", "sotu"])
def test_a_published_text(archives, quick, tmp_path, corpus):
    """WikiText-103 is taken from a server's address, here file://.

    Articles and speeches are documents, and the text stays as published.
    """
    if corpus == "captions":
        corpus_archives.multi30k(archives, "en", sizes=(60, 25, 20))
    elif corpus == "sotu":
        corpus_archives.sotu(archives)
    else:
        corpus_archives.wikitext103(archives)
    options = [
        "--from",
        archives.as_uri(),
        "--archives",
        corpus_archives.write_list(archives),
        *QUICK,
    ]
    run_checked([*RSKIP, corpus, *options, tmp_path / "out"], env=quick)
    actual, made = documents(tmp_path / "out"), Corpus.find_for_evaluation(tmp_path / "out")
    assert (made.name, made.is_monolingual, made.tokenizer) == (corpus, True, "none")
    if corpus == "captions":
        assert [list(map(len, split)) for split in actual] == [[20, 20, 20], [20, 5], [20]]
    elif corpus == "sotu":
        assert [list(map(len, split)) for split in actual] == [[6] * 36, [6] * 2, [6] * 2]
    else:
        first = actual[2][0]
        assert [*map(len, actual)] == [12, 2, 3] and made.bpe == "none"
        assert (first[0], first[4], len(first)) == (" = test 0 = ", " = = Section = = ", 8)


def test_iwslt15_over_a_server_that_errs_at_first(archives, quick, tmp_path):
    """The text is published as tokens: it stays as it is.

    An archive that is not the pinned one is refused.
    """
    corpus_archives.iwslt15(archives)
    out = tmp_path / "out"
    with Loopback() as server:
        server.answers = {
            f"/{path.name}": Answer(path.read_bytes(), times=1) for path in archives.iterdir()
        }
        server.answers["/train-en-vi.tgz"].drop_at = 1000
        server.answers["/dev-2012-en-vi.tgz"].status = 500
        command = [*script("prepare-iwslt15-en-vi.sh"), "--from", server.base, *QUICK, out]
        done = run_command(command)
        assert (
            done.returncode == 1
            and "train-en-vi.tgz: wrong checksum" in done.stderr.splitlines()[-1]
        )
        command += ["--archives", corpus_archives.write_list(archives)]
        run_checked(command, env=quick)
        assert facts(out)["splits"]["valid"]["pairs"] == 30 and facts(out)["tokenizer"] == "none"
        text = (out / "text" / "train.vi").read_bytes()
        assert text == corpus_archives.texts(300, 300)[1] and b"@-@" not in text
        asked = len(server.requests)
        assert (
            "data-bin: up to date" in run_checked(command, env=quick)
            and len(server.requests) == asked
        )


def test_a_wrong_name_is_one_line(capsys):
    assert main.main(["multi30k-de"]) == 1
    error = capsys.readouterr().err
    assert "did you mean multi30k-en-de?" in error and "your own text: rskip prepare --src" in error
    assert main.main(["data/mine", "--text", "my.txt"]) == 1
    expected = "data/mine is no corpus, and a folder comes last: rskip prepare --text ... data/mine"
    assert capsys.readouterr().err == f"error: {expected}\n"


def test_own_text_in_a_wrong_order_is_told_so_without_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(main, "FOLDER", tmp_path / "missing")
    assert main.main(["data/mine", "--text", "my.txt"]) == 1
    assert "a folder comes last" in capsys.readouterr().err
    assert main.main(["captions"]) == 1
    assert "published corpora need a checkout" in capsys.readouterr().err


def test_a_name_with_a_target_takes_no_other_target(capsys):
    assert main.main(["multi30k-en-de", "--tgt", "fr"]) != 0
    assert "unrecognized argument --tgt" in capsys.readouterr().err
    kind, options = main.parse(["multi30k", "--tgt", "fr"])
    assert main.plan(kind, options).corpus == "multi30k-en-fr"


def test_the_help_lists_the_options_of_every_form(capsys):
    assert main.main(["-h"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: rskip prepare CORPUS")
    for option in (
        "--from",
        "--bpe-size",
        "--train-src",
        "--text",
        "--lang",
        "--held-out",
        "--name",
    ):
        assert f"  {option} " in text
