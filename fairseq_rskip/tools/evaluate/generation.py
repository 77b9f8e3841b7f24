"""Run fairseq-generate or fairseq-eval-lm in a process of its own.

The former's output is read in the order of sentences.
"""

import re
from pathlib import Path
from typing import NamedTuple

from fairseq_rskip.console import Progress
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained.text import POST_PROCESS
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.process import PLUGIN, follow

# torch's list below "Error(s) in loading ..."
MISFIT = r"^\s*((?:size mismatch for|Missing key|Unexpected key).*)$"
# turns off fairseq-generate's own limits; the model's limits still apply
LOG = "generate.log"
NO_LIMIT = ["--max-source-positions", "1000000", "--max-target-positions", "1000000"]


class Shown(NamedTuple):
    """What the progress counts: the lines of output that match ``line``, ``total`` in the end."""

    line: bytes
    total: int
    label: str
    unit: str


class Program(NamedTuple):
    """A command of fairseq, with the ``options`` that decide its results; ``log`` gets these."""

    name: str
    log: Path
    options: list[str]
    shown: Shown


def search_options(
    corpus: Corpus, subset: str, beam: int, lenpen: float, max_tokens: int
) -> list[str]:
    """fairseq's options that decide which hypotheses come out.

    The longest output is the input's length + 50, as in Vaswani et al. 2017, section 6.1.
    """
    words = ["--source-lang", corpus.source, "--target-lang", corpus.target]
    words += ["--gen-subset", subset, "--beam", str(beam), "--lenpen", str(lenpen)]
    words += ["--max-len-a", "1", "--max-len-b", "50", "--max-tokens", str(max_tokens)]
    post_process = POST_PROCESS[corpus.bpe]
    if post_process:
        words += ["--post-process", post_process]
    return words


def command(
    corpus: Corpus, checkpoint: Path, options: list[str], program: str = "fairseq-generate"
) -> list[str]:
    """The whole command line. Raises ``UserError`` for a path that fairseq would take apart."""
    for path in (corpus.folder, checkpoint):
        if ":" in str(path):
            raise UserError(f"fairseq cannot take a colon in a path: rename {path}, or link to it")
    words = [program, str(corpus.folder), "--user-dir", str(PLUGIN), "--path", str(checkpoint)]
    words += options
    if not corpus.is_monolingual:
        words += NO_LIMIT
    return [*words, "--num-workers", "0"]


def run(arguments: list[str], log: Path, shown: Shown) -> None:
    """Run ``arguments``, output and errors in ``log``, and show the progress.

    Raises ``UserError`` with the last meaningful line if the command fails; for a checkpoint that
    does not fit it names the tensor.
    """

    def count(line: bytes) -> None:
        if re.search(shown.line, line):
            bar.advance()

    with open(log, "wb") as out, Progress(shown.total, shown.label, shown.unit) as bar:
        reason = follow(arguments, count, out)
    if reason:
        misfit = re.search(MISFIT, log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        detail = f" {misfit[1][:300]}" if misfit else ""
        raise UserError(f"{arguments[0]} failed: {reason}{detail} (the log is {log})")


def hypotheses(log: Path, sentences: int) -> list[str]:
    """The best hypotheses in ``log``, subwords joined, in the corpus's order.

    Raises ``UserError`` unless there is exactly one for each of ``sentences``.
    """
    text = log.read_text(encoding="utf-8")
    best = sorted(
        (int(n), line) for n, line in re.findall(r"^H-(\d+)\t[^\t\n]*\t(.*)$", text, re.MULTILINE)
    )
    if [n for n, _ in best] != list(range(sentences)):
        raise UserError(
            f"generation gave {len(best)} hypotheses for {sentences} references (the log is {log})"
        )
    return [line for _, line in best]
