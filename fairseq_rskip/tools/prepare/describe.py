"""Write DATA-BIN/preparation.json, which training and evaluation read."""

import argparse
import re
from pathlib import Path
from typing import Any

from fairseq_rskip import files
from fairseq_rskip.errors import UserError

# "| [en] some/train.en: 29000 sents, 412893 tokens, 0.0% replaced (by <unk>)", as fairseq-preprocess logs it
COUNTS = re.compile(r"\[(\S+)\] (.+): (\d+) sents, (\d+) tokens, ([\d.e+-]+)% replaced")
TYPES = re.compile(r"\[(\S+)\] Dictionary: (\d+) types")


def counts(log: str, src: str, tgt: str) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """``{split: {"pairs": n, "tokens": {lang: n}, "unknown_percent": {lang: x}}}`` and ``{lang: types}`` of a log."""
    splits = {}
    for lang, path, sentences, tokens, unknown in COUNTS.findall(log):
        split = splits.setdefault(Path(path).name.rpartition(".")[0], {"tokens": {}, "unknown_percent": {}})
        split["pairs"] = int(sentences)
        split["tokens"][lang] = int(tokens)
        split["unknown_percent"][lang] = float(unknown)
    missing = {"train", "valid", "test"} - splits.keys()
    if missing:
        raise UserError(f"fairseq-preprocess logged no counts for {', '.join(sorted(missing))}")
    types = {lang: int(count) for lang, count in TYPES.findall(log)}
    return splits, {lang: types[lang] for lang in (src, tgt) if lang}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What ``describe`` needs to know."""
    parser.add_argument("data_bin", type=Path)
    parser.add_argument("--log", type=Path, required=True, help="preprocess.log of fairseq-preprocess")
    for name in ("corpus", "src", "tgt", "bpe", "tokenizer"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--bpe-size", type=int, required=True)
    parser.add_argument("--normalise-punctuation", action="store_true", help="quotes and dashes were made ASCII")
    parser.add_argument("--vocabulary", choices=("joint", "separate"), required=True)


def describe(options: argparse.Namespace) -> None:
    """Write preparation.json. Raises ``UserError``."""
    log = options.log.read_text(encoding="utf-8")
    if not options.tgt:  # of a text, fairseq-preprocess calls its language None
        log = log.replace("[None]", f"[{options.src}]")
    splits, types = counts(log, options.src, options.tgt)
    keys = ("corpus", "src", "tgt", "bpe", "bpe_size", "tokenizer", "normalise_punctuation")
    facts = {key: getattr(options, key) for key in keys}
    facts.update(joined_dictionary=options.vocabulary == "joint", dictionary_types=types, splits=splits)
    files.write_json(options.data_bin / "preparation.json", facts)
