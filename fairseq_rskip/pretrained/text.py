"""From plain text to a corpus's tokens and subwords, and back: for data preparation and for
exported models.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import regex  # fairseq needs it

INVISIBLE = regex.compile(r"\p{C}")
CACHED_WORDS = 200_000  # of subword-nmt's cache of split words, which has no limit of its own
# subwords as preparation.json names them -> fairseq's --post-process
POST_PROCESS = {"subword-nmt": "subword_nmt", "sentencepiece": "sentencepiece", "none": None}


def clean(line: str) -> str:
    """``line`` with control and other invisible characters as blanks, runs of white space as one
    blank (fairseq's data preparation: remove-non-printing-char).
    """
    return " ".join(INVISIBLE.sub(" ", line).split())


# the codes of ISO 639-2 and -3 for the languages that sacremoses has rules for -> its own codes
_MOSES_CODES = dict(
    pair.split(":")
    for pair in """
    asm:as ben:bn cat:ca ces:cs cze:cs deu:de ger:de ell:el gre:el eng:en spa:es est:et fin:fi
    fra:fr fre:fr gle:ga guj:gu hin:hi hun:hu isl:is ice:is ita:it jpn:ja kan:kn kor:ko lit:lt
    lav:lv mal:ml mar:mr nld:nl dut:nl ori:or pan:pa pol:pl por:pt ron:ro rum:ro rus:ru slk:sk
    slo:sk slv:sl swe:sv tam:ta tel:te zho:zh chi:zh
    """.split()
)


def moses_code(language: str) -> str:
    """sacremoses' code for a language: ``fr`` for ``fr``, ``fra`` and ``fr_CA``.

    It treats a code that it does not know as a language without rules of its own.
    """
    base = language.partition("_")[0]
    return _MOSES_CODES.get(base, base)


def make_clean() -> Callable[[str], str]:
    """Only cleans (:func:`clean`)."""
    return clean


def make_moses(language: str, normalise: bool) -> Callable[[str], str]:
    """Cleans, and makes Moses tokens: hyphens split off as ``@-@``, special characters escaped, as
    fairseq's prepare-*.sh do it; with ``normalise``, quotes and dashes become ASCII first.
    """
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    tokenizer = MosesTokenizer(moses_code(language))
    normaliser = MosesPunctNormalizer(moses_code(language))

    def tokenise(line: str) -> str:
        line = clean(line)
        if normalise:
            line = normaliser.normalize(line)
        return tokenizer.tokenize(line, aggressive_dash_splits=True, return_str=True)

    return tokenise


def make_subword_nmt(codes: Path) -> Callable[[str], str]:
    """Splits tokens into subwords by the merge operations in the file ``codes``."""
    from subword_nmt.apply_bpe import BPE

    bpe = BPE(io.StringIO(codes.read_text(encoding="utf-8")))

    def split(line: str) -> str:
        if len(bpe.cache) > CACHED_WORDS:
            bpe.cache.clear()
        return bpe.process_line(line)

    return split


def make_sentencepiece(model: Path) -> Callable[[str], str]:
    """Splits text into subwords by the sentencepiece model in the file ``model``."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(model))
    return lambda line: " ".join(processor.encode(line, out_type=str))


# subwords as preparation.json and config.json name them -> what makes the function that splits
SUBWORDS = {"subword-nmt": make_subword_nmt, "sentencepiece": make_sentencepiece}


def make_detokenise(language: str) -> Callable[[str], str]:
    """Turns Moses tokens into plain text, entities undone (``sacremoses -l LANGUAGE
    detokenize``).
    """
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=moses_code(language))
    return lambda line: detokenizer.detokenize(line.split(), return_str=True)


def detokenise(lines: Sequence[str], language: str) -> list[str]:
    """Each line of Moses tokens as plain text."""
    join = make_detokenise(language)
    return [join(line) for line in lines]
