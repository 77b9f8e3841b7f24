"""Measure the perplexity of a language model on a prepared text.

It is computed from fairseq-eval-lm's probabilities, summed by document.
"""

import math
import re
from argparse import Namespace
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from fairseq_rskip.console import in_columns, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import generation
from fairseq_rskip.tools.evaluate.scores_file import SCORES

LOG = "eval_lm.log"
# "2026-01-01 12:00:00 | INFO | fairseq_cli.eval_lm | 3 two [-4.100000]\tdogs [-2.000000]"
WINDOW = rb" \| \d+ .*\]$"


def eval_options(options: Namespace, task: dict[str, Any]) -> list[str]:
    """Return fairseq-eval-lm's options that decide the probabilities.

    Raises ``UserError`` for a context window that leaves no token to score.
    """
    length = window_length(task)
    if options.context_window >= length:
        raise UserError(
            f"--context-window {options.context_window}: "
            f"expected less than the model's {length} tokens"
        )
    words = ["--task", "language_modeling", "--gen-subset", options.subset]
    words += ["--sample-break-mode", "none", "--tokens-per-sample", str(length)]
    words += ["--context-window", str(options.context_window)]
    words += ["--max-tokens", str(max(options.max_tokens, length)), "--output-word-probs"]
    if task.get("add_bos_token"):
        words.append("--add-bos-token")
    return words


def windows(options: Namespace, corpus: Corpus, task: dict[str, Any]) -> generation.Shown:
    """The progress of fairseq-eval-lm, which prints a line for each window of tokens."""
    tokens = int(corpus.lengths(options.subset, str(corpus.source)).sum())
    new_tokens = window_length(task) - options.context_window
    return generation.Shown(WINDOW, math.ceil(tokens / new_tokens), "scored", "window")


def window_length(task: dict[str, Any]) -> int:
    """The number of tokens of a window, as in training."""
    return int(task.get("tokens_per_sample") or 1024)


def log_probabilities(log: Path) -> list[float]:
    """The natural log-probability of every token in ``log``, in the order of the text."""
    lines = re.findall(r" \| (\d+) (.*\])$", log.read_bytes().decode("utf-8"), re.MULTILINE)
    samples = {int(number): re.findall(r" \[(\S+)\](?:\t|$)", words) for number, words in lines}
    return [float(value) for _, values in sorted(samples.items()) for value in values]


def documents(raw: Path, lengths: Any) -> list[dict[str, int]]:
    """Return tokens, words and bytes of each document of the text ``raw``.

    Its lines have ``lengths`` tokens. A line's end counts as a word, as fairseq-eval-lm counts it,
    and as a byte; a blank line ends a document.
    """
    counts: list[dict[str, int]] = [Counter()]
    for line, tokens in zip(raw.read_bytes().split(b"\n"), lengths):
        counts[-1].update(tokens=int(tokens), words=len(line.split()) + 1, bytes=len(line) + 1)
        if not line.strip():
            counts.append(Counter())
    return [dict(document) for document in counts if document]


def measure(corpus: Corpus, subset: str, values: list[float]) -> dict[str, Any]:
    """Return the perplexities, bits per byte, and the sums of each document.

    Raises ``UserError`` unless there is a value for each token.
    """
    raw, lengths = corpus.reference(subset), corpus.lengths(subset, str(corpus.source))
    if len(values) != int(lengths.sum()):
        raise UserError(
            f"fairseq-eval-lm scored {len(values):,} of {int(lengths.sum()):,} tokens of {subset}"
        )
    parts = documents(raw, lengths)
    ends = [0, *accumulate(part["tokens"] for part in parts)]
    for part, start, end in zip(parts, ends, ends[1:]):
        part["bits"] = -math.fsum(values[start:end]) / math.log(2)
    total = {
        name: sum(part[name] for part in parts) for name in ("tokens", "words", "bytes", "bits")
    }
    per = {name: total["bits"] / total[name] for name in ("tokens", "words", "bytes")}
    return {
        "perplexity": {"subword": 2 ** per["tokens"], "word": 2 ** per["words"]},
        "bits": {"subword": per["tokens"], "word": per["words"], "byte": per["bytes"]},
        **{name: total[name] for name in ("tokens", "words", "bytes")},
        "text_sha256": corpus.text_sha256(subset),
        "documents": parts,
    }


def report(options: Namespace, corpus: Corpus, about: dict) -> None:
    """Print the table and write OUT/scores.json."""
    result = measure(corpus, options.subset, log_probabilities(options.out / LOG))
    length = int(_value_of("--tokens-per-sample", about["options"]))
    window = int(_value_of("--context-window", about["options"]))
    result["context"] = {
        "tokens_per_sample": length,
        "context_window": window,
        "stride": length - window,
    }
    bits, perplexity = result["bits"], result["perplexity"]
    subwords, words = f"{perplexity['subword']:.2f}", f"{perplexity['word']:.2f}"
    rows = [
        ("perplexity per subword", subwords, f"{result['tokens']:,} subwords and line ends"),
        ("perplexity per word", words, f"{result['words']:,} words and line ends"),
        ("bits per byte", f"{bits['byte']:.4f}", f"{result['bytes']:,} bytes"),
    ]
    print_line(f"\n{corpus.name} {options.subset}, {len(result['documents']):,} documents")
    context = (
        f"windows of {length} tokens, a stride of {length - window}: "
        f"at least {window} tokens of context"
    )
    print_line("\n".join([*in_columns(rows), context]))
    write_json(options.out / SCORES, {**result, "evaluation": about})
    print_line(f"\nwritten to {options.out}: {LOG}, {SCORES}")


def _value_of(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]
