"""A preparation's steps against the command-line tools whose work they spread over cores.

They are also compared with the rules.
"""

import gzip
import itertools
import random
import re
import sys
from pathlib import Path

import pytest
import sacremoses
from conftest import run_checked, run_command

from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained import text as encoders
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.prepare import subwords
from fairseq_rskip.tools.prepare import text as steps
from fairseq_rskip.tools.prepare.text import published

WORDS = (
    'the cat\'s house, well-known "big" dogs & co. Straße größer Übung '
    "3.14 1,000 don't U.S. (see) e-mail a|b"
).split()


def sentences(count, seed=1):
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 20))) + "." for _ in range(count)
    ]


def write(path, content):
    path.write_bytes(
        content if isinstance(content, bytes) else "".join(line + "\n" for line in content).encode()
    )
    return path


def encoded(folder, make, *arguments, workers=2):
    """What becomes of the file "text" of ``folder``, encoded by ``make(*arguments)``."""
    target = folder / "encoded"
    target.mkdir(exist_ok=True)
    steps.encode(folder, target, ["text"], workers, make, arguments)
    return (target / "text").read_text("utf-8")


def test_a_line_ends_at_a_newline_only(tmp_path):
    text = "one\rstill\x0bone\x85\u2028\ntwo\r\n\nfour"
    expected = ["one\rstill\x0bone\x85\u2028", "two\r", "", "four"]
    assert list(lines.read(write(tmp_path / "a", text.encode()))) == expected
    assert list(lines.read(write(tmp_path / "a.gz", gzip.compress(text.encode())))) == expected
    assert list(lines.read(write(tmp_path / "bom", "\ufeffone\n\ufefftwo".encode()))) == [
        "one",
        "\ufefftwo",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n\xff\xfe\nfine\n", "line 2 is not valid UTF-8"),
        (b"", "is empty"),
        (gzip.compress(b"some text\n" * 50)[:-12], "damaged gzip"),
    ],
    ids=["not UTF-8", "empty", "cut off"],
)
def test_unreadable_text_is_named(tmp_path, content, message):
    with pytest.raises(UserError, match=f"bad.*{message}"):
        list(lines.read(write(tmp_path / "bad", content)))


def test_clean():
    assert encoders.clean(" a\u00a0b\u200b \tc\x07\rd\ufeff\u2028e ") == "a b c d e"


@pytest.mark.parametrize("lang", ["en", "de"])
def test_moses_tokens_are_those_of_sacremoses_on_any_number_of_workers(tmp_path, monkeypatch, lang):
    monkeypatch.setattr(steps, "CHUNK", 30)
    text = write(tmp_path / "text", sentences(100))
    done = run_command(
        ["sacremoses", "-q", "-l", lang, "-j", "1", "tokenize", "-a"], input=text.read_text("utf-8")
    )
    assert done.returncode == 0 and "@-@" in done.stdout and "&apos;" in done.stdout
    for workers in (1, 2):
        assert encoded(tmp_path, encoders.make_moses, lang, False, workers=workers) == done.stdout
        (tmp_path / "encoded" / "text").unlink()


def test_a_file_that_is_encoded_is_not_encoded_again(tmp_path):
    """A preparation that was killed resumes; the text of WMT'14 takes hours."""
    write(tmp_path / "text", sentences(3))
    (tmp_path / "encoded").mkdir()
    write(tmp_path / "encoded" / "text", ["as an earlier command left it"])
    assert encoded(tmp_path, encoders.make_moses, "en", False) == "as an earlier command left it\n"


@pytest.mark.parametrize("code", ["fr", "fra", "fr_CA"])
def test_a_language_has_its_rules_under_all_its_codes(code):
    """sacremoses knows two letters only, and splits l'homme in another way without its rules."""
    sentence = "L'homme dit qu'il aime l'été."
    tokens = encoders.make_moses(code, False)(sentence)
    assert tokens == "L&apos; homme dit qu&apos; il aime l&apos; été ."
    assert encoders.detokenise([tokens], code) == [sentence]


def test_codes_of_three_letters_are_those_of_sacremoses_rules():
    """Each base code that sacremoses has a file of prefixes for can be written with three."""
    files = Path(sacremoses.__file__).parent.glob("data/nonbreaking_prefixes/*")
    own = {file.suffix[1:] for file in files} - {"mni", "tdt", "yue"}  # of three letters there
    assert own <= set(encoders._MOSES_CODES.values())


def test_punctuation_is_normalised_on_request_only():
    line = "„Hallo“ – sagte er…"
    normalised = sacremoses.MosesPunctNormalizer("de").normalize(line)
    expected = sacremoses.MosesTokenizer("de").tokenize(normalised, return_str=True)
    assert encoders.make_moses("de", True)(line) == expected and "„" in encoders.make_moses(
        "de", False
    )(line)


def test_subwords_are_those_of_subword_nmt(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "CHUNK", 100)
    monkeypatch.setattr(encoders, "CACHED_WORDS", 10)
    sides = [
        write(tmp_path / name, sentences(300, seed)) for seed, name in enumerate(("text", "b"))
    ]
    codes = tmp_path / "codes"
    subwords.learn_subword_nmt(sides, codes, 60)
    joined = write(tmp_path / "joined", [line for side in sides for line in lines.read(side)])
    run_checked(
        ["subword-nmt", "learn-bpe", "-s", "60", "-i", joined, "-o", tmp_path / "their-codes"]
    )
    assert codes.read_text("utf-8") == (tmp_path / "their-codes").read_text("utf-8")
    run_checked(
        ["subword-nmt", "apply-bpe", "-c", codes, "-i", sides[0], "-o", tmp_path / "theirs"]
    )
    ours = encoded(tmp_path, encoders.make_subword_nmt, codes)
    assert ours == (tmp_path / "theirs").read_text("utf-8") and "@@ " in ours


def test_fewer_merges_than_asked_for_are_counted(tmp_path, capsys):
    text = write(tmp_path / "text", ["low low lower", "low lower"])
    subwords.learn_subword_nmt([text], tmp_path / "codes", 99)
    merges = list(lines.read(tmp_path / "codes"))[1:]  # the first line is the version
    assert capsys.readouterr().out.startswith(f"subword-nmt: {len(merges)} merges learned, not 99")


def test_words_seen_once_are_forgotten_where_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(subwords, "MOST_COUNTED", 3)
    text = write(tmp_path / "text", ["a a b b", "c d", "c"])
    assert subwords.count_words([text]) == {"a": 2, "b": 2, "c": 1}


def test_a_corpus_without_anything_to_merge_is_refused(tmp_path):
    text = write(tmp_path / "a", ["a b c", "b a"])
    with pytest.raises(UserError, match="--bpe none"):
        subwords.learn_subword_nmt([text], tmp_path / "codes", 99)


def test_sentencepiece_is_undone_without_loss(tmp_path, capsys):
    text = write(tmp_path / "text", [*sentences(800), "NFKC would change … 5 m² ½ ™ ﬁ №"] * 2)
    subwords.learn_sentencepiece([text], tmp_path / "model", 120)
    make = encoders.make_sentencepiece
    pieces = encoded(tmp_path, make, tmp_path / "model", workers=1).splitlines()
    assert [line.replace(" ", "").replace("▁", " ").strip() for line in pieces] == list(
        lines.read(text)
    )
    assert max(len(line.split()) for line in pieces) > 20
    for size in (5000, 999_999_999):
        subwords.learn_sentencepiece([text], tmp_path / "m", size)
        said = capsys.readouterr().out
        assert re.search(rf"^sentencepiece: \d+ subwords learned, not {size}: ", said), said
    with pytest.raises(UserError, match="5 subwords: .* smaller than required_chars"):
        subwords.learn_sentencepiece([text], tmp_path / "n", 5)


def test_long_lines_count_for_sentencepiece_as_well(tmp_path):
    from sentencepiece import SentencePieceProcessor

    text = write(tmp_path / "text", [" ".join(sentences(400))] * 2)
    assert len(text.read_text("utf-8")) > 2 * subwords.LONGEST_PUBLISHED_LINE
    subwords.learn_sentencepiece([text], tmp_path / "model", 120)
    learned = SentencePieceProcessor(model_file=str(tmp_path / "model"))
    assert learned.get_piece_size() == 120
    for line in lines.read(text):
        assert learned.unk_id() not in learned.encode(line)


@pytest.mark.parametrize(
    ("pairs", "merges", "pieces"),
    [
        (500, 1_000, 500),
        (5_000, 3_000, 2_000),
        (29_000, 6_000, 4_000),
        (133_317, 32_000, 8_000),
        (4_500_000, 32_000, 8_000),
    ],
)
def test_the_number_of_subwords_follows_the_corpus(pairs, merges, pieces):
    assert subwords.size_for("subword-nmt", pairs, 100) == merges
    assert subwords.size_for("sentencepiece", pairs, 100) == pieces


def test_a_text_of_many_characters_has_more_subwords_than_characters(tmp_path):
    """Chinese, where sentencepiece refuses fewer; a merge has no such limit."""
    characters = [chr(0x4E00 + number) for number in range(1200)]
    path = tmp_path / "zh"
    path.write_text("\n".join(a + b for a, b in zip(characters, characters[1:])) + "\n", "utf-8")
    size = subwords.size_for("sentencepiece", 1199, subwords.count_characters([path]))
    assert size == 2400 and subwords.size_for("subword-nmt", 1199, 1200) == 1000
    subwords.learn_sentencepiece([path], tmp_path / "model", size)


KEPT = [(1, 1), (2, 3), (3, 2), (4, 6), (250, 250), (250, 167)]
DROPPED = {
    "an empty side": [(0, 0), (0, 3), (3, 0)],
    "--max-length 250": [(251, 251), (200, 251), (251, 1)],
    "--max-ratio 1.5": [(1, 2), (2, 1), (4, 7), (250, 166)],
}


def lengths(paths):
    return [(len(a.split()), len(b.split())) for a, b in zip(*map(lines.read, paths))]


def test_the_filter_is_the_rule_of_clean_corpus_n(tmp_path, capsys):
    """Pairs by their numbers of subwords, source and target."""
    pairs = KEPT + sum(DROPPED.values(), [])
    files = []
    for side, name in enumerate("ab"):
        files.append(write(tmp_path / name, ["w " * pair[side] for pair in pairs]))
    out = [tmp_path / "a.out", tmp_path / "b.out"]
    steps.filter_pairs(files, out, 250, 1.5)
    assert lengths(out) == KEPT
    said = capsys.readouterr().out
    assert "kept 6 of 16 training pairs" in said
    for rule, dropped in DROPPED.items():
        assert f"{len(dropped)} ({100 * len(dropped) / 16:.1f} %) by {rule}" in said


def test_a_filter_that_leaves_no_pair_is_refused_and_writes_nothing(tmp_path):
    files = [write(tmp_path / "a", ["w"]), write(tmp_path / "b", ["w w"])]
    with pytest.raises(UserError, match="none of the 1 training pairs"):
        steps.filter_pairs(files, [tmp_path / "a.none", tmp_path / "b.none"], 250, 1)
    assert not list(tmp_path.glob("*.none*"))


def test_parts_are_joined_whatever_their_form(tmp_path):
    write(tmp_path / "one.en", b"A\r\nB")
    write(tmp_path / "one.de", ["a", "b"])
    write(tmp_path / "two.en.gz", gzip.compress(b"C\n"))
    write(tmp_path / "two.de", ["c"])
    sgm = (
        '<refset>\n<doc docid="d">\n<hl>\n<seg id="1">{}</seg>\n</hl><p>\n'
        '<seg id="2"> {} </seg></p>\n</doc>'
    )
    write(tmp_path / "three-src.en.sgm", sgm.format("R&amp;D &lt;x&gt;", "E").encode())
    write(tmp_path / "three-ref.de.sgm", sgm.format("d", "e").encode())
    parts = [tmp_path / part for part in ("one", "two", "three")]
    steps.join_parts(tmp_path / "all", "en", "de", parts)
    assert (tmp_path / "all.en").read_text() == "A\nB\nC\nR&D <x>\nE\n"
    assert (tmp_path / "all.de").read_text() == "a\nb\nc\nd\ne\n"
    pairs = [(tmp_path / "two.en.gz", tmp_path / "two.de")]
    steps.join(tmp_path / "files", "en", "de", pairs)
    assert (tmp_path / "files.en").read_text() == "C\n"
    write(tmp_path / "two.de", ["c", "d"])
    for parts, message in (
        (["one", "two"], "two.en.gz has 1 lines and .*two.de 2"),
        (["x"], "none of these files"),
    ):
        with pytest.raises(UserError, match=message):
            paths = [tmp_path / part for part in parts]
            steps.join_parts(tmp_path / "new", "en", "de", paths)
    assert not list(tmp_path.glob("new*"))


def test_no_more_is_read_ahead_than_the_workers_may_wait_for(monkeypatch):
    """This bounds the memory on a corpus of any size.

    The standard library's map() reads all of it first.
    """
    monkeypatch.setattr(steps, "CHUNK", 3)
    read = itertools.count(1)
    with steps.mapper(encoders.make_clean, (), 2) as mapped:
        results = mapped(f"line {next(read)}" for _ in itertools.count())
        for done, _ in zip(range(1, 150), results):
            assert int(str(read)[6:-1]) <= 2 + done + 3 * 2 * steps.WAITING


def test_neither_torch_nor_fairseq_is_imported():
    code = "import sys; from fairseq_rskip.tools.prepare import main; "
    run_checked([sys.executable, "-c", code + "assert not {'torch', 'fairseq'} & set(sys.modules)"])


def test_sentencepiece_knows_a_character_that_occurs_once(tmp_path):
    """Its own default leaves out one in two thousand of the text's characters."""
    from sentencepiece import SentencePieceProcessor

    text = tmp_path / "text"
    text.write_text("the red house and the small dog\n" * 3000 + "№\n", encoding="utf-8")
    subwords.learn_sentencepiece([text], tmp_path / "model", 40)
    learned = SentencePieceProcessor(model_file=str(tmp_path / "model"))
    assert learned.unk_id() not in learned.encode("№")
    assert learned.unk_id() in learned.encode("™")  # which the text does not have


def test_every_segment_of_a_line_of_sgml_is_a_sentence(tmp_path):
    """A sentence that was left out would shift all that follow."""
    path = tmp_path / "newstest-src.en.sgm"
    path.write_text('<p><seg id="1">one</seg> <seg id="2">two</seg></p>\n<seg id="3">three</seg>\n')
    assert list(published(path)) == ["one", "two", "three"]
