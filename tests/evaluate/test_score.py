"""rskip score against sacreBLEU's and sacremoses' own commands.

It is also compared with perl, and with values worked out by hand.
"""

import json
import math

import pytest
from conftest import run_command
from evaluation_corpus import write

from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.score import degenerate

REFERENCE = """\
Ein Boston-Terrier läuft über saftig-grünes Gras vor einem weißen Zaun.
„Wir haben 3.000,50 € bezahlt“, sagte die 45-jährige Frau am 12. März.
Der US-Präsident traf den EU-Kommissar – zum Nord-Süd-Gespräch – in Köln.
Das ist's: R&D kostet <10 % & bringt's "gar nichts".
Zwei Männer stehen am Herd und bereiten Essen zu.
""".splitlines()
HYPOTHESIS = """\
Ein boston-Terrier läuft über saftig-grünes Gras vor einem weissen Zaun.
"Wir haben 3.000,50 Euro bezahlt", sagte die 45-Jährige Frau am 12. März.
Der US-Präsident traf einen EU-Kommissar - zum Nord-Süd-Gespräch - in Köln.
Das ist es: R&D kostet <10 % & bringt's "gar nichts".
Zwei Männer stehen am Herd und bereiten das Essen zu.
""".splitlines()


@pytest.fixture
def pair(tmp_path):
    """HYPOTHESIS and REFERENCE as files, in a folder whose name has a space and an umlaut."""
    folder = tmp_path / "zwei Wörter"
    return write(folder / "hyp.de", HYPOTHESIS), write(folder / "ref.de", REFERENCE)


def scores(hyp, *refs, options=("--src-lang", "en", "--tgt-lang", "de")):
    """Name -> row of the JSON that is written."""
    out = hyp.with_suffix(".json")
    assert (
        rskip(
            [str(word) for word in ["score", "--hyp", hyp, "--ref", *refs, *options, "--json", out]]
        )
        == 0
    )
    return {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["scores"]}


def sacrebleu(hyp, refs, *options):
    """Score and signature as the command line tool gives them."""
    actual = json.loads(
        run_command(
            ["sacrebleu", *refs, "-i", hyp, "-w", "10", "--format", "json", *options]
        ).stdout
    )
    return actual["score"], actual["signature"]


SAME_AS = {
    "sacreBLEU 13a": ["-m", "bleu"],
    "sacreBLEU intl": ["-m", "bleu", "--tokenize", "intl"],
    "sacreBLEU intl lower-cased": ["-m", "bleu", "--tokenize", "intl", "--lowercase"],
    "chrF": ["-m", "chrf"],
    "chrF++": ["-m", "chrf", "--chrf-word-order", "2"],
}


def test_plain_scores_are_those_of_the_sacrebleu_command(pair):
    second = write(pair[0].with_name("ref2.de"), HYPOTHESIS[:2] + REFERENCE[2:])
    actual = scores(*pair)
    for name, options in SAME_AS.items():
        value, signature = sacrebleu(pair[0], pair[1:], *options)
        assert (actual[name]["score"], actual[name]["signature"]) == (
            pytest.approx(value, abs=1e-9),
            signature,
        )
    value, signature = sacrebleu(pair[0], [pair[1], second], "-m", "bleu")
    several = scores(*pair, second)["sacreBLEU 13a"]
    assert (several["score"], several["signature"]) == (pytest.approx(value, abs=1e-9), signature)
    assert (
        len({round(actual[name]["score"], 3) for name in SAME_AS}) == 5
    )  # the cases differ, so mixing them up shows


def test_tokenised_and_compound_split_bleu_are_those_of_the_commands(pair):
    """The commands are, in this order, sacremoses' tokeniser, perl's substitution and sacreBLEU.

    The substitution is as in get_ende_bleu.sh; sacreBLEU has no tokeniser.
    """
    tokens, split = [], []
    for path in pair:
        text = path.read_text(encoding="utf-8")
        done = run_command(["sacremoses", "-q", "-l", "de", "-j", "1", "tokenize"], input=text)
        tokens.append(write(path.with_suffix(".tok"), done.stdout.splitlines()))
        done = run_command(["perl", "-ple", "s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g", tokens[-1]])
        split.append(write(path.with_suffix(".atat"), done.stdout.splitlines()))
    actual = scores(*pair)
    for name, (hyp, ref) in {"tokenised BLEU": tokens, "compound-split BLEU": split}.items():
        value, signature = sacrebleu(hyp, [ref], "-m", "bleu", "--tokenize", "none", "--force")
        assert (actual[name]["score"], actual[name]["signature"]) == (
            pytest.approx(value, abs=1e-9),
            signature,
        )
    lower = ["-m", "bleu", "--tokenize", "none", "--force", "--lowercase"]
    value, signature = sacrebleu(tokens[0], [tokens[1]], *lower)
    row = actual["tokenised BLEU lower-cased"]
    assert (row["score"], row["signature"]) == (pytest.approx(value, abs=1e-9), signature)
    assert abs(actual["tokenised BLEU"]["score"] - actual["compound-split BLEU"]["score"]) > 0.5


def test_values_worked_out_by_hand(tmp_path):
    """Of seven words the last is wrong.

    The precisions are 6/7, 5/6, 4/5 and 3/4, their product is 3/7. An entity that is published as a
    token stays one.
    """
    texts = {"h": "the cat sat on the mat today", "r": "the cat sat on the mat"}
    hyp, ref = (write(tmp_path / name, [text]) for name, text in texts.items())
    expected = 100 * (3 / 7) ** 0.25
    for name, row in scores(hyp, ref, options=["--tgt-lang", "en"]).items():
        if "BLEU" in name:
            assert row["score"] == pytest.approx(expected, abs=1e-9)
            assert (row["length_ratio"], row["brevity_penalty"]) == (pytest.approx(7 / 6), 1)
    short = scores(ref, hyp, options=["--tgt-lang", "en"])["sacreBLEU 13a"]
    values = [
        short[name] for name in ("length_ratio", "brevity_penalty", "score")
    ]  # right words, one too few
    assert values == pytest.approx([6 / 7, math.exp(1 - 7 / 6), 100 * math.exp(1 - 7 / 6)])
    hyp, ref = (write(path, [texts[path.name].replace("sat", "&quot;")]) for path in (hyp, ref))
    row = scores(hyp, ref, options=["--tgt-lang", "vi", "--tokenised"])["tokenised BLEU"]
    assert row["score"] == pytest.approx(expected, abs=1e-9) and row["note"] == "tokens as given"


def test_table_and_json_say_the_same_and_lines_end_at_newlines_only(pair, capsys):
    """Python would split at a line separator, a next-line and a form feed, too.

    A missing last newline is no matter.
    """
    for path in pair:
        path.write_text(
            "ein Haus\u2028und\x85ein\x0cSchiff auf See\nnoch ein Satz hier", encoding="utf-8"
        )
    rows = scores(*pair)
    table = capsys.readouterr().out
    actual = json.loads(pair[0].with_suffix(".json").read_text(encoding="utf-8"))
    assert (
        actual["hyp"] == str(pair[0])
        and actual["ref"] == [str(pair[1])]
        and actual["sentences"] == 2
    )
    assert set(actual["versions"]) == {"sacrebleu", "sacremoses", "python"}
    for name, row in rows.items():
        (line,) = (line for line in table.split("\n") if line.startswith(name + "  "))
        assert " 100.00 " in line and row["signature"] in line and row["note"] in table


REFUSED = {
    "other length": (
        lambda hyp, ref: write(hyp, HYPOTHESIS[:3]),
        ["hyp.de has 3 lines", "ref.de has 5"],
    ),
    "empty": (lambda hyp, ref: hyp.write_bytes(b""), ["hyp.de is empty"]),
    "not UTF-8": (
        lambda hyp, ref: ref.write_bytes(b"gut\ngut\nsch\xf6n\n"),
        ["ref.de", "line 3", "0xf6"],
    ),
}


def test_what_is_no_language_code_is_refused(pair, capsys):
    files = ["--hyp", str(pair[0]), "--ref", str(pair[1])]
    assert rskip(["score", *files, "--tgt-lang", "german"]) == 2
    assert "'german' is not a language code such as en, ces or pt_BR" in capsys.readouterr().err


@pytest.mark.parametrize("spoil, words", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line(pair, spoil, words, capsys):
    spoil(*pair)
    assert rskip(["score", "--hyp", str(pair[0]), "--ref", str(pair[1]), "--tgt-lang", "de"]) == 1
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.startswith("error: ")
        and err.count("\n") == 1
        and all(word in err for word in words)
    )


def test_rows_that_need_a_language_are_left_out_without_it(pair):
    tokens = ["tokenised BLEU", "tokenised BLEU lower-cased"]
    split = [*tokens, "compound-split BLEU"]
    for options, more in (
        ("", []),
        ("--tokenised", tokens),
        ("--src-lang fr --tgt-lang de", tokens),
        ("--tgt-lang de", split),
        ("--src-lang eng --tgt-lang deu", split),
    ):
        assert list(scores(*pair, options=options.split())) == [*SAME_AS, *more]


@pytest.mark.parametrize(
    ("hypotheses", "says"),
    [
        (["a b c d"] * 20, ""),
        (["a"] * 20, "0.25 times the reference's words"),
        ([f"{n} b c d e f g h i" for n in range(20)], "2.25 times the reference's words"),
        (["."] * 12 + [f"{n} b c d" for n in range(8)], "12 of 20 sentences are '.'"),
        ([f"{n} b c d" for n in range(7)] + ["x b c d"] * 2, ""),
        (["x b c d"] * 9, ""),
    ],
    ids=["good", "short", "long", "one output", "two alike", "too few to say"],
)
def test_output_that_is_hardly_a_translation_is_named(hypotheses, says):
    references = ["a b c d"] * len(hypotheses)
    actual = degenerate(hypotheses, [references])
    assert says in actual and bool(actual) == bool(says)


@pytest.mark.parametrize(
    ("words", "is_named"), [(49, True), (50, False), (200, False), (201, True)]
)
def test_output_of_half_to_twice_the_references_words_is_accepted(words, is_named):
    assert bool(degenerate(["w " * words], [["r " * 100]])) is is_named


@pytest.mark.parametrize(("count", "is_named"), [(10, False), (11, True)])
def test_most_of_twenty_sentences_are_eleven(count, is_named):
    hypotheses = ["x b c d"] * count + [f"{n} b c d" for n in range(20 - count)]
    assert bool(degenerate(hypotheses, [["a b c d"] * 20])) is is_named
