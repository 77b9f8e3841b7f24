"""Measure the perplexity of a language model on a prepared text.

It is computed from fairseq-eval-lm's probabilities, summed by document.
"""

import math
import re
from argparse import Namespace
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.console import in_columns, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import generation
from fairseq_rskip.tools.evaluate.scores_file import SCORES

LOG = "eval_lm.log"
# "2026-01-01 12:00:00 | INFO | fairseq_cli.eval_lm | 3 two [-4.100000]\tdogs [-2.000000]"
LINE = rb" \| \d+ .*\]$"


class Windows(NamedTuple):
    """How a text is cut: windows of ``length`` tokens, of which the first ``context`` are context
    alone, and whether each begins with the symbol for a beginning.
    """

    length: int
    context: int
    has_start: bool

    @property
    def stride(self) -> int:
        """The tokens that a window scores, and by which the next one is further on."""
        return self.length - self.context


def windows(options: Namespace, task: dict[str, Any]) -> Windows:
    """Those of the training ``task``, with the context that is asked for.

    Raises ``UserError`` for one that leaves no token to score.
    """
    length = int(task.get("tokens_per_sample") or 1024)
    if options.context_window >= length:
        raise UserError(
            f"--context-window {options.context_window}: "
            f"expected less than the model's {length} tokens"
        )
    return Windows(length, options.context_window, bool(task.get("add_bos_token")))


def eval_options(options: Namespace, windows: Windows) -> list[str]:
    """Return fairseq-eval-lm's options that decide the probabilities."""
    words = ["--task", "language_modeling", "--gen-subset", options.subset]
    words += ["--sample-break-mode", "none", "--tokens-per-sample", str(windows.length)]
    words += ["--context-window", str(windows.context)]
    words += ["--max-tokens", str(max(options.max_tokens, windows.length)), "--output-word-probs"]
    if windows.has_start:
        words.append("--add-bos-token")
    return words


def scoring(options: Namespace, corpus: Corpus, windows: Windows) -> generation.Program:
    """The command that scores the text; it prints a line for each window of tokens."""
    tokens = int(corpus.lengths(options.subset, str(corpus.source)).sum())
    shown = generation.Shown(LINE, math.ceil(tokens / windows.stride), "scored", "window")
    words = eval_options(options, windows)
    return generation.Program("fairseq-eval-lm", options.out / LOG, words, shown)


def log_probabilities(log: Path) -> list[float]:
    """The natural log-probability of every token in ``log``, in the order of the text."""
    text = log.read_bytes().decode("utf-8")
    by_window = {}
    for number, words in re.findall(r" \| (\d+) (.*\])$", text, re.MULTILINE):
        by_window[int(number)] = re.findall(r" \[(\S+)\](?:\t|$)", words)
    values = []
    for number in sorted(by_window):
        values += [float(value) for value in by_window[number]]
    return values


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


def report(options: Namespace, corpus: Corpus, windows: Windows, about: dict) -> None:
    """Print the table and write OUT/scores.json."""
    result = measure(corpus, options.subset, log_probabilities(options.out / LOG))
    result["context"] = {
        "tokens_per_sample": windows.length,
        "context_window": windows.context,
        "stride": windows.stride,
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
        f"windows of {windows.length} tokens, a stride of {windows.stride}: "
        f"at least {windows.context} tokens of context"
    )
    print_line("\n".join([*in_columns(rows), context]))
    write_json(options.out / SCORES, {**result, "evaluation": about})
    print_line(f"\nwritten to {options.out}: {LOG}, {SCORES}")
