"""A text with one language, for a language model: its documents.

They are made by the command that a user runs.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from conftest import run_checked
from corpus_archives import PREPROCESS, stand_ins, texts
from fairseq.data import Dictionary, data_utils

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.prepare import main, sources, stages, subwords
from fairseq_rskip.tools.prepare.stages import Stages, unknown_words
from fairseq_rskip.tools.prepare.text import content_hash, documents, draw_documents

COMMAND = ["python", "-m", "fairseq_rskip.tools", "prepare"]


@pytest.mark.slow
def test_a_text_becomes_a_data_bin_split_by_documents(tmp_path):
    """40 documents of 1 to 5 sentences."""
    lines, out = texts(200, 1)[0].decode().splitlines(), tmp_path / "out ü"
    actual = [lines[5 * i : 5 * i + 1 + i % 5] for i in range(40)]
    (tmp_path / "text").write_text("\n\n\n".join(map("\n".join, actual)) + "\n", encoding="utf-8")
    command = [
        *COMMAND,
        "--text",
        tmp_path / "text",
        "--lang",
        "cs",
        "--held-out",
        "0.1",
        "--bpe-size",
        60,
        "--workers",
        1,
        out,
    ]
    run_checked(command)
    raw = {
        name: (out / "raw" / f"{name}.cs").read_text(encoding="utf-8")
        for name in ("train", "valid", "test")
    }
    drawn = {
        name: [part.split("\n") for part in text.split("\n\n")[:-1]] for name, text in raw.items()
    }
    assert sorted(sum(drawn.values(), [])) == sorted(actual)
    assert [len(each) for each in drawn.values()] == [32, 4, 4]
    corpus = Corpus.find_for_evaluation(out)
    assert (corpus.is_monolingual, corpus.source, corpus.target, corpus.name) == (
        True,
        "cs",
        "",
        "out ü",
    )
    assert corpus.pairs == sum(len(document) + 1 for document in drawn["train"])
    words = Dictionary.load(str(out / "data-bin" / "dict.txt"))
    binarised = data_utils.load_indexed_dataset(str(out / "data-bin" / "test"), words)
    joined = "\n".join(words.string(line, "sentencepiece") for line in binarised) + "\n"
    assert joined == (out / "data-bin" / "raw" / "test.cs").read_text(encoding="utf-8")
    assert list(corpus.lengths("test", "cs")) == [len(line) for line in binarised]
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["bpe"], facts["tokenizer"], facts["dictionary_types"]["cs"]) == (
        "sentencepiece",
        "none",
        len(words),
    )

    assert (
        "data-bin: up to date" in (again := run_checked(command))
        and "up to date" in again.splitlines()[0]
    )
    with (tmp_path / "text").open("a") as file:
        file.write("\nOne more document.\n")
    quick = stand_ins(tmp_path / "bin", fairseq_preprocess=PREPROCESS)
    other = [*command, "--bpe", "subword-nmt", "--replace"]
    assert "up to date" not in run_checked(other, env=quick)
    facts = json.loads((out / "data-bin" / "preparation.json").read_text())
    assert (facts["bpe"], facts["tokenizer"]) == ("subword-nmt", "moses")


def test_pairs_in_a_folder_with_a_texts_name_are_pairs(tmp_path):
    for target, is_monolingual in (("de", False), ("", True), (None, True)):
        corpus = Corpus(tmp_path, "captions", "captions", "en", target, {})
        assert corpus.is_monolingual == is_monolingual


def test_documents_of_a_file_and_of_a_folder_and_too_few(tmp_path):
    text, targets = tmp_path / "b.txt", [tmp_path / name for name in ("train", "valid", "test")]
    text.write_text("\n\none\ntwo\n \nthree\n\n\n")
    assert list(documents(text)) == [["one", "two"], ["three"]]
    assert list(documents(text, 1)) == [["one"], ["two"], ["three"]]
    assert list(documents(text, 3)) == [["one", "two", "three"]]  # a blank line ends none of them
    with pytest.raises(
        UserError,
        match="expected at least 3 documents in .*, found 2: put a blank line after each",
    ):
        draw_documents(text, targets, 0.05)
    draw_documents(text, targets, 0.05, 1)
    assert sorted(path.read_text() for path in targets) == ["one\n\n", "three\n\n", "two\n\n"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("four")
    (tmp_path / "notes.md").write_text("not a text file")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a folder.txt").mkdir()
    assert list(documents(tmp_path)) == [["four"], ["one", "two", "three"]]


def test_the_same_documents_are_held_out_by_every_version(tmp_path):
    """Scores are compared between versions; the shares are rounded, here 1.7 to 2."""
    text, targets = tmp_path / "text", [tmp_path / name for name in ("train", "valid", "test")]
    text.write_text("\n\n".join(map(str, range(17))))
    draw_documents(text, targets, 0.1)
    assert [path.read_text().split() for path in targets[1:]] == [["2", "4"], ["1", "16"]]


def test_an_option_that_changes_the_data_is_noticed(tmp_path, monkeypatch, capsys):
    text, out = tmp_path / "text", str(tmp_path / "out")
    text.write_text("\n\n".join(f"{letter} b c\nd e" for letter in "abcdefghij"))
    quick = stand_ins(tmp_path / "bin", fairseq_preprocess=PREPROCESS)
    monkeypatch.setenv("PATH", quick["PATH"])
    words = ["--text", str(text), "--bpe", "none", "--workers", "1"]
    assert main.main([*words, out]) == 0
    for option, stage in {
        "--lang cs": "raw",
        "--lines 2": "raw",
        "--held-out 0.2": "raw",
        "--tokenizer none": "text",
        "--normalise-punctuation": "text",
        "--bpe subword-nmt": "subwords",
        "--name another": "data-bin",
    }.items():
        capsys.readouterr()
        assert main.main([*words, *option.split(), out]) == 1
        assert f"by another version ({stage} differs)" in capsys.readouterr().err


def test_tokens_that_training_lacks_are_warned_of_in_both_held_out_parts():
    shares = {"valid": {"en": 1.5, "de": 0.9}, "test": {"en": 0.0, "de": 40.0}}
    splits = {split: {"unknown_percent": each} for split, each in shares.items()}
    first, second = unknown_words({"splits": splits})
    assert first.startswith("1.5 % of the tokens in valid.en are unknown")
    assert second.startswith("40.0 % of the tokens in test.de are unknown")


def test_every_missing_file_of_a_pair_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = [f"{split}-{side}" for split in ("train", "valid", "test") for side in ("src", "tgt")]
    (tmp_path / "valid-src").touch()
    words = [word for name in names for word in (f"--{name}", name)]
    assert main.main(["--src", "de", "--tgt", "en", *words, "out"]) == 1
    lines = capsys.readouterr().err.splitlines()
    missing = [name for name in names if name != "valid-src"]
    assert lines == [f"error: --{name}: {tmp_path / name} does not exist" for name in missing]


def test_a_text_without_lang_has_an_undetermined_language(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(main.stages, "prepare", plans.append)
    text = tmp_path / "text"
    text.write_text("Dobrý den\n")
    for words in ([], ["--lang", "cs"], ["--lang", "pt_BR"], ["--lang", "ces"]):
        assert main.main(["--text", str(text), *words, str(tmp_path / "out")]) == 0
    assert [plan.src for plan in plans] == ["und", "cs", "pt_BR", "ces"]


def test_a_corpus_is_named_after_its_folder_however_that_is_written(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(main.stages, "prepare", plans.append)
    folder = tmp_path / "letters" / "in"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    (tmp_path / "text").write_text("Dobrý den\n")
    for written in (".", "..", "../out", str(tmp_path / "letters")):
        assert main.main(["--text", str(tmp_path / "text"), written]) == 0
    assert [plan.corpus for plan in plans] == ["in", "letters", "out", "letters"]


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ("--text nowhere out", 1, "nowhere does not exist"),
        ("--text . out", 1, "expected a text file, or a folder that holds *.txt files"),
        ("--text . --held-out 0.7 out", 2, "--held-out"),
        ("--text a.txt a,b", 1, "fairseq splits paths at commas and colons"),
        ("--text a.txt --normalise-punctuation out", 1, "--normalise-punctuation is done by Moses"),
        ("--text a.txt sotu", 1, "the folder's name, sotu is that of a published corpus"),
        ("--text a.txt --name captions out", 1, "--name captions is that of a published corpus"),
        ("--text . --lang xx out", 2, "'xx' is no language of ISO 639"),
        ("--text . --lang czech out", 2, "'czech' is not a language code"),
    ],
)
def test_a_bad_text_is_one_clear_line(options, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "a.txt" in options:
        (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n")
    assert main.main(options.split()) == status
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_folder_that_prepare_did_not_make_is_not_replaced(tmp_path, capsys):
    text, own = tmp_path / "letters.txt", tmp_path / "out" / "raw"
    text.write_text("\n\n".join("abcdefghij"))
    own.mkdir(parents=True)
    (own / "thesis.txt").write_text("mine")
    assert main.main(["--text", str(text), str(tmp_path / "out")]) == 1
    assert f"{own} is there already and was not made by rskip prepare" in capsys.readouterr().err
    assert (own / "thesis.txt").read_text() == "mine"

    unfinished = own.rename(tmp_path / "out" / "text.part")
    assert main.main(["--text", str(text), str(tmp_path / "out")]) == 1
    assert f"{unfinished} is there already" in capsys.readouterr().err
    moved = unfinished.rename(tmp_path / "out" / "raw.old")  # as the line asks
    assert main.main(["--text", str(text), "--bpe", "none", str(tmp_path / "out")]) == 0
    assert (moved / "thesis.txt").read_text() == "mine"


def test_a_text_is_another_where_its_documents_end_elsewhere(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "a.txt").write_text("a\nb\n")
    (tmp_path / "two" / "a.txt").write_text("a\n")
    (tmp_path / "two" / "b.txt").write_text("b\n")
    file = tmp_path / "one" / "a.txt"
    hashes = {content_hash(path) for path in (file, tmp_path / "one", tmp_path / "two")}
    assert len(hashes) == 3
    assert content_hash(file) == hashlib.sha256(b"a\nb\n").hexdigest()


@pytest.mark.parametrize("inputs", ["the same", "others"])
def test_a_part_is_resumed_if_its_inputs_are_the_same(tmp_path, inputs):
    def killed(part):
        (part / "finished").touch()
        (part / ".begun.1234.part").touch()
        raise KeyboardInterrupt

    actual = []
    with pytest.raises(KeyboardInterrupt):
        Stages("mine", tmp_path, "the same").make("raw", killed)
    Stages("mine", tmp_path, inputs).make("raw", lambda part: actual.extend(part.iterdir()))
    names = sorted(path.name for path in actual)
    assert names == ([".key", "finished"] if inputs == "the same" else [".key"])


def test_a_part_whose_key_a_full_disk_left_empty_is_begun_again(tmp_path):
    part = tmp_path / "raw.part"
    part.mkdir()
    (part / ".key").touch()
    (part / "text").write_text("unfinished")
    Stages("mine", tmp_path, "inputs").make("raw", lambda part: None)
    assert not (tmp_path / "raw" / "text").exists()

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "letter.txt").write_text("a user's")
    with pytest.raises(UserError, match="was not made by rskip prepare"):
        Stages("mine", tmp_path, "inputs").make("text", lambda part: None)


def test_a_kill_while_an_old_stage_is_removed_costs_nothing(tmp_path, monkeypatch):
    def make(source):
        def fill(part):
            (part / "text").write_text(source)

        Stages("mine", tmp_path, source).make("raw", fill)

    def killed(folder):
        raise KeyboardInterrupt

    make("one")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        make("two")
    assert (tmp_path / "raw" / "text").read_text() == "two"
    make("three")
    assert (tmp_path / "raw" / "text").read_text() == "three"
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


SPLITS = ("train", "valid", "test")


def plan_of(out, source, tgt="", **choices):
    """A preparation of English text, or of pairs with ``tgt``, with sentencepiece."""
    settings = {"tokenizer": "none", "bpe": "sentencepiece", "bpe_size": 50, "joined": True}
    settings |= {"normalise_punctuation": False, "max_length": 250, "max_ratio": 1.5, "workers": 1}
    return stages.Preparation("mine", out, source, "en", tgt, **{**settings, **choices})


OWN_TEXT = sources.Documents(Path("text"), document_lines=0, held_out=0.05)


PUBLISHED_TEXT = sources.Published([], {}, {}, document_lines=0, at_titles=False)


OWN_PAIRS = sources.Pairs({})


def test_blank_lines_do_not_count_for_the_number_of_subwords(tmp_path, capsys):
    """4,999 lines are below the table's 5,000, however many blank ones end documents."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.en").write_text("a b c\n" * 4999 + "\n" * 1000)
    assert stages.choose_bpe_size(plan_of(tmp_path, OWN_TEXT, bpe_size=None)) == 500
    assert "mine: 500 subwords for 4,999 training lines; " in capsys.readouterr().out


@pytest.fixture
def learned(monkeypatch):
    """The names of the files, and the options, from which subwords are learned; nothing is."""
    calls = []

    def learn(texts, model, size, **options):
        calls.append(([text.name for text in texts], options))
        model.touch()

    monkeypatch.setitem(subwords.LEARNERS, "sentencepiece", learn)
    monkeypatch.setattr(stages, "encode", lambda *arguments: None)
    monkeypatch.setattr(stages.text, "filter_pairs", lambda *arguments: None)
    return calls


@pytest.mark.parametrize(
    ("source", "options"), [(OWN_TEXT, {}), (PUBLISHED_TEXT, {"longest_line": 4192})]
)
def test_lines_of_any_length_count_for_own_text_alone(tmp_path, learned, source, options):
    stages.split_words(plan_of(tmp_path, source), tmp_path)
    assert learned == [(["train.en"], options)]


@pytest.mark.parametrize(
    ("joined", "files"),
    [(True, [["train.en", "train.de"]]), (False, [["train.en"], ["train.de"]])],
    ids=["joined", "separate"],
)
def test_joined_subwords_are_learned_from_both_languages(tmp_path, learned, joined, files):
    stages.split_words(plan_of(tmp_path, OWN_PAIRS, tgt="de", joined=joined), tmp_path)
    assert [names for names, _ in learned] == files


def test_a_share_of_unknown_words_is_warned_of_above_one_percent():
    splits = {"valid": {"unknown_percent": {"en": 1.0}}, "test": {"unknown_percent": {"en": 1.1}}}
    (warning,) = stages.unknown_words({"splits": splits})
    assert warning.startswith("1.1 % of the tokens in test.en are unknown")


def test_an_article_begins_at_its_title_and_not_at_a_section(tmp_path):
    text = tmp_path / "wiki"
    text.write_text(" \n = First = \n \n a b \n = = Section = = \n c \n = Second = \n d \n")
    first, second = documents(text, at_titles=True)
    assert first == [" = First = ", " a b ", " = = Section = = ", " c "]
    assert second == [" = Second = ", " d "]


def test_a_twentieth_of_a_text_is_held_out_by_default(tmp_path):
    (tmp_path / "text").write_text("a\n")
    kind, options = main.parse(["--text", str(tmp_path / "text"), str(tmp_path / "out")])
    assert main.plan(kind, options).source.held_out == 0.05


def test_training_pairs_have_250_subwords_at_most_and_a_ratio_of_one_and_a_half(tmp_path):
    words = ["--src", "en", "--tgt", "de"]
    for split in SPLITS:
        for side in ("src", "tgt"):
            file = tmp_path / f"{split}.{side}"
            file.write_text(f"{split} {side}\n")
            words += [f"--{split}-{side}", str(file)]
    plan = main.plan(*main.parse([*words, str(tmp_path / "out")]))
    assert (plan.max_length, plan.max_ratio, plan.joined) == (250, 1.5, True)
