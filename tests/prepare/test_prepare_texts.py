"""A text with one language, for a language model: its documents, through the scripts that a user runs."""

import json

import corpus_archives
import pytest
from conftest import ROOT, run_checked, run_command
from fairseq.data import Dictionary, data_utils

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.prepare.text import documents, draw_documents

COMMAND = ["python", "-m", "fairseq_rskip.tools", "prepare"]


def parts(path):
    """The documents of a prepared text."""
    return [part.split("\n") for part in path.read_text(encoding="utf-8").split("\n\n")[:-1]]


def written(folder, count=40):
    """A text of ``count`` documents, of 1 to 5 sentences."""
    sentences = corpus_archives.texts(5 * count, 1)[0].decode().splitlines()
    found = [sentences[5 * i : 5 * i + 1 + i % 5] for i in range(count)]
    (folder / "text").write_text("\n\n\n".join("\n".join(document) for document in found) + "\n", encoding="utf-8")
    return found


@pytest.mark.slow
def test_a_text_becomes_a_data_bin_split_by_documents(tmp_path):
    found, out = written(tmp_path), tmp_path / "out ü"
    command = [*COMMAND, "--text", tmp_path / "text", "--held-out", "0.1", "--bpe-size", 60, "--workers", 1, out]
    run_checked(command)
    drawn = {name: parts(out / "raw" / f"{name}.en") for name in ("train", "valid", "test")}
    assert sorted(sum(drawn.values(), [])) == sorted(found)
    assert [len(each) for each in drawn.values()] == [32, 4, 4]
    corpus = Corpus.find(out, prepared=True)
    assert (corpus.is_text, corpus.source, corpus.target, corpus.name) == (True, "en", "", "out ü")
    assert corpus.pairs == sum(len(document) + 1 for document in drawn["train"])
    words = Dictionary.load(str(out / "data-bin" / "dict.txt"))
    binarised = data_utils.load_indexed_dataset(str(out / "data-bin" / "test"), words)
    joined = "\n".join(words.string(line, "sentencepiece") for line in binarised) + "\n"
    assert joined == (out / "data-bin" / "raw" / "test.en").read_text(encoding="utf-8")
    assert list(corpus.lengths("test", "en")) == [len(line) for line in binarised]
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["bpe"], facts["tokenizer"], facts["dictionary_types"]["en"]) == ("sentencepiece", "none", len(words))

    assert "data-bin: up to date" in (again := run_checked(command)) and "up to date" in again.splitlines()[0]
    with (tmp_path / "text").open("a") as file:
        file.write("\nOne more document.\n")
    assert "up to date" not in run_checked([*command, "--bpe", "subword-nmt"])
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["bpe"], facts["tokenizer"]) == ("subword-nmt", "moses")


@pytest.mark.slow
def test_wikitext103_from_its_archive(tmp_path):
    """From a server's address, here file://; articles are documents, and the text stays as it was published."""
    folder = tmp_path / "archives"
    folder.mkdir()
    corpus_archives.wikitext103(folder)
    options = ["--from", folder.as_uri(), "--archives", corpus_archives.write_list(folder), "--workers", 1]
    said = run_checked([*COMMAND, "wikitext103", *options, tmp_path / "out"])
    assert "sha256 checked" in said
    assert [len(parts(tmp_path / "out" / "raw" / f"{name}.en")) for name in ("train", "valid", "test")] == [12, 2, 3]
    first = parts(tmp_path / "out" / "data-bin" / "raw" / "test.en")[0]
    assert (first[0], first[4], len(first)) == (" = test 0 = ", " = = Section = = ", 8)
    corpus = Corpus.find(tmp_path / "out", prepared=True)
    assert (corpus.name, corpus.bpe, corpus.tokenizer) == ("wikitext103", "none", "none")


@pytest.mark.slow
def test_captions_from_their_archives(tmp_path):
    folder = tmp_path / "archives"
    folder.mkdir()
    corpus_archives.captions(folder)
    options = ["--from", folder, "--archives", corpus_archives.write_list(folder), "--bpe-size", 60, "--workers", 1]
    run_checked([*COMMAND, "captions", *options, tmp_path / "out"])
    found = {
        name: list(map(len, parts(tmp_path / "out" / "raw" / f"{name}.en"))) for name in ("train", "valid", "test")
    }
    assert found == {"train": [20, 20, 20], "valid": [20, 5], "test": [20]}
    assert Corpus.find(tmp_path / "out", prepared=True).is_text


def test_documents_of_a_file_and_of_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("\n\none\ntwo\n \nthree\n\n\n")
    assert list(documents(tmp_path / "b.txt")) == [["one", "two"], ["three"]]
    assert list(documents(tmp_path / "b.txt", length=1)) == [["one"], ["two"], ["three"]]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("four")
    (tmp_path / "notes.md").write_text("not a text file")
    assert list(documents(tmp_path)) == [["four"], ["one", "two", "three"]]


def test_too_few_documents_are_refused(tmp_path):
    (tmp_path / "text").write_text("one\ntwo\nthree\n")
    targets = [tmp_path / name for name in ("train", "valid", "test")]
    with pytest.raises(UserError, match="holds 1 documents: expected a blank line between two, or --lines N"):
        draw_documents(tmp_path / "text", targets, 0.05, 0, False)
    draw_documents(tmp_path / "text", targets, 0.05, 1, False)
    assert sorted(path.read_text() for path in targets) == ["one\n\n", "three\n\n", "two\n\n"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--text", "nowhere", "out"], "no file or folder nowhere"),
        (["--text", ".", "out"], "holds no *.txt file"),
        (["--text", ".", "--src", "en", "out"], "--src"),
        (["--text", ".", "--held-out", "0.7", "out"], "--held-out"),
    ],
)
def test_a_bad_text_is_one_clear_line(options, says, tmp_path):
    done = run_command([*COMMAND, *options], cwd=tmp_path)
    assert done.returncode and says in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_help_names_what_a_text_needs():
    shown = run_checked(["bash", ROOT / "data-prep" / "prepare-text.sh", "-h"])
    assert "--lines" in shown and "--held-out" in shown and "--max-ratio" not in shown and "--tgt" not in shown
