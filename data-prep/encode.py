#!/usr/bin/env python3
"""Clean, tokenise or split into subwords every line of a file, on all cores."""

import argparse
import io
from pathlib import Path

import parallel
import regex
from errors import UserError, run

CACHED_WORDS = 200_000  # of subword-nmt's cache of split words, which has no limit of its own
INVISIBLE = regex.compile(r"\p{C}")


def clean(line):
    """Control and other invisible characters become blanks, runs of white space one blank (fairseq's data
    preparation: remove-non-printing-char)."""
    return " ".join(INVISIBLE.sub(" ", line).split())


def make_clean():
    return clean


def make_moses(lang, normalise):
    """Moses tokens: hyphens split off as ``@-@``, special characters escaped, as fairseq's prepare-*.sh do it."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    tokenizer, normaliser = MosesTokenizer(lang), MosesPunctNormalizer(lang)

    def tokenise(line):
        line = clean(line)
        if normalise:
            line = normaliser.normalize(line)
        return tokenizer.tokenize(line, aggressive_dash_splits=True, return_str=True)

    return tokenise


def make_subword_nmt(codes):
    from subword_nmt.apply_bpe import BPE

    bpe = BPE(io.StringIO(Path(codes).read_text(encoding="utf-8")))

    def split(line):
        if len(bpe.cache) > CACHED_WORDS:
            bpe.cache.clear()
        return bpe.process_line(line)

    return split


def make_sentencepiece(model):
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=model)
    return lambda line: " ".join(processor.encode(line, out_type=str))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True, metavar="clean|moses|subword-nmt|sentencepiece")
    steps.add_parser("clean", help="white space and invisible characters only")
    moses = steps.add_parser("moses", help="clean, and tokenise with sacremoses")
    moses.add_argument("--lang", required=True, help="language code, such as en")
    moses.add_argument("--normalise-punctuation", action="store_true", help="before it: quotes and dashes to ASCII")
    for name, model in (("subword-nmt", "codes of subword-nmt"), ("sentencepiece", "model of sentencepiece")):
        steps.add_parser(name, help=f"split with the {model}").add_argument("--model", required=True, help=model)
    for step in steps.choices.values():
        step.add_argument("source")
        step.add_argument("target")
        step.add_argument("--workers", type=int, default=parallel.all_cores(), help="processes (default: all cores)")
    options = parser.parse_args()
    if options.workers < 1:
        raise UserError(f"--workers must be at least 1, not {options.workers}")
    make, arguments = {
        "clean": lambda: (make_clean, ()),
        "moses": lambda: (make_moses, (options.lang, options.normalise_punctuation)),
        "subword-nmt": lambda: (make_subword_nmt, (options.model,)),
        "sentencepiece": lambda: (make_sentencepiece, (options.model,)),
    }[options.step]()
    parallel.transform(options.source, options.target, make, arguments, options.workers)


if __name__ == "__main__":
    run(main)
