"""Score translations against references, each score with its signature.

    rskip score --hyp out.de --ref newstest2014.de --src-lang en --tgt-lang de --json scores.json

Give plain text, one sentence a line: sacreBLEU tokenises by itself. docs/evaluation.md explains the
kinds of BLEU.
"""

import platform
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from fairseq_rskip.console import Parser, in_columns
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.pretrained.text import moses_code
from fairseq_rskip.tools import comet
from fairseq_rskip.tools.lines import check_lengths, read_lines
from fairseq_rskip.tools.prepare.languages import language

BLEUS = {
    "sacreBLEU 13a": {"tokenize": "13a"},
    "sacreBLEU intl": {"tokenize": "intl"},
    "sacreBLEU intl lower-cased": {"tokenize": "intl", "lowercase": True},
    "tokenised BLEU": {"tokenize": "none"},
    "tokenised BLEU lower-cased": {"tokenize": "none", "lowercase": True},
    "compound-split BLEU": {"tokenize": "none"},
}
FEWEST = 10  # sentences of which most can be one output
# scores of text as it is, with what the note adds
SCORES_AS_GIVEN = {
    "sacreBLEU 13a": "",
    "sacreBLEU intl": "; t2t-bleu cased",
    "sacreBLEU intl lower-cased": "; t2t-bleu uncased",
    "chrF": "",
    "chrF++": "",
}


@dataclass
class Score:
    """One row of the table.

    ``signature`` is sacreBLEU's; ``note`` says how the text was changed first. BLEU also has the
    length ratio, output over reference in this row's tokens, and the brevity penalty that follows
    from it (1 for output that is not too short).
    """

    name: str
    score: float
    signature: str
    note: str
    length_ratio: float | None = None
    brevity_penalty: float | None = None


def digits(metric: str) -> int:
    """How many digits a score or loss is shown with; scores of COMET are of about 0 to 1."""
    if metric == comet.NAME:
        return 4
    return 3 if "loss" in metric else 2


def make_metric(name: str, force: bool = True) -> Any:
    """sacreBLEU's metric of the row ``name``.

    ``force`` accepts text that looks tokenised without a warning.
    """
    if name in BLEUS:
        return BLEU(**BLEUS[name], force=force)
    return CHRF(word_order=2 if name == "chrF++" else 0)


class Texts(NamedTuple):
    """One system's output, and one list of lines per reference."""

    hypotheses: list[str]
    references: list[list[str]]

    def rewritten(self, change: Callable[[str], str]) -> "Texts":
        """Both sides with every line changed."""
        references = [[change(line) for line in lines] for lines in self.references]
        return Texts([change(line) for line in self.hypotheses], references)

    def score(self, name: str, note: str, force: bool = True) -> Score:
        """The row ``name``; ``force`` as in :func:`make_metric`."""
        metric = make_metric(name, force)
        result = metric.corpus_score(self.hypotheses, self.references)
        row = Score(name, result.score, str(metric.get_signature()), note)
        if name in BLEUS:
            if result.ref_len:
                row.length_ratio = result.sys_len / result.ref_len
            row.brevity_penalty = result.bp
        return row


def compute(
    hypotheses: list[str],
    references: list[list[str]],
    tgt_lang: str | None = None,
    src_lang: str | None = None,
    tokenised: bool = False,
) -> list[Score]:
    """Every score of one system's output; ``references`` holds one list of lines per reference.

    ``tokenised`` text consists of tokens already, which tokenised BLEU takes without the Moses
    tokeniser. Without ``tgt_lang`` the rows that need a language are left out.
    """
    texts = Texts(hypotheses, references)
    rows = []
    for name, more in SCORES_AS_GIVEN.items():
        force = tokenised or "13a" not in name
        rows.append(texts.score(name, "text as given" + more, force))
    if tgt_lang is None and not tokenised:
        return rows

    note = "tokens as given"
    if not tokenised:
        from sacremoses import MosesTokenizer

        code = moses_code(str(tgt_lang))
        moses = MosesTokenizer(code)
        texts = texts.rewritten(lambda line: moses.tokenize(line, return_str=True))
        note = f"both sides through sacremoses {version('sacremoses')}'s MosesTokenizer({code})"
    rows.append(texts.score("tokenised BLEU", note))
    rows.append(texts.score("tokenised BLEU lower-cased", note))

    languages = moses_code(src_lang or "en"), moses_code(tgt_lang or "")
    if languages == ("en", "de"):  # as tensor2tensor's get_ende_bleu.sh
        texts = texts.rewritten(lambda line: re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line))
        note += ", a-b split into a ##AT##-##AT## b"
        rows.append(texts.score("compound-split BLEU", note))
    return rows


def comet_score(model: str, segments: Sequence[float], text: str) -> Score:
    """The row of COMET: the mean over sentences; ``text`` says what was scored."""
    note = f"mean over sentences, by {comet.COMMAND}; {text}"
    return Score(comet.NAME, fmean(segments), comet.signature(model), note)


def degenerate(hypotheses: list[str], references: list[list[str]]) -> str:
    """Why output is hardly a translation: its length, or one output for most sentences; else ""."""
    words = sum(len(line.split()) for line in hypotheses)
    expected = sum(len(line.split()) for line in references[0])
    reasons = []
    if expected and not 0.5 <= words / expected <= 2:
        reasons.append(f"it has {words / expected:.2f} times the reference's words between blanks")

    most_common, count = Counter(hypotheses).most_common(1)[0]
    in_reference = Counter(references[0])[most_common]
    if len(hypotheses) >= FEWEST and count - in_reference > len(hypotheses) / 2:
        shown = most_common if len(most_common) <= 40 else most_common[:40] + "…"
        reasons.append(f"{count:,} of {len(hypotheses):,} sentences are {shown!r}")
    return "; ".join(reasons)


def table(rows: Sequence[Score]) -> str:
    """The rows as aligned text: name, score, signature, and below each its note and its length."""
    cells: list[tuple[str, str, str]] = []
    for row in rows:
        length = ""
        if row.length_ratio is not None:
            length = (
                f"; length ratio {row.length_ratio:.3f}, brevity penalty {row.brevity_penalty:.3f}"
            )
        score = f"{row.score:6.{digits(row.name)}f}"
        cells += [(row.name, score, row.signature), ("", "", row.note + length)]
    return "\n".join(in_columns(cells))


def report(
    rows: Sequence[Score], hyp: Path, refs: Sequence[Path], sentences: int
) -> dict[str, Any]:
    """The content of scores.json: the scores, the compared files, and the versions."""
    return {
        "hyp": str(hyp),
        "ref": [str(ref) for ref in refs],
        "sentences": sentences,
        "scores": [asdict(row) for row in rows],
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("sacrebleu", "sacremoses")},
    }


def main(argv: list[str] | None = None) -> None:
    """Write the JSON file, print the table. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument("--hyp", type=Path, required=True, metavar="FILE", help="the translations")
    parser.add_argument(
        "--ref", type=Path, required=True, nargs="+", metavar="FILE", help="one or more references"
    )
    parser.add_argument(
        "--src-lang", type=language, metavar="LANG", help="language of the source, such as en"
    )
    parser.add_argument(
        "--tgt-lang",
        type=language,
        metavar="LANG",
        help="language of both files, for the rows with its tokeniser",
    )
    parser.add_argument(
        "--tokenised",
        action="store_true",
        help="the files are tokenised: do not tokenise them again",
    )
    comet.add_option(parser)
    parser.add_argument("--src", type=Path, metavar="FILE", help="the source text, for --comet")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the scores to this file"
    )
    options = parser.parse_args(argv)
    check_comet(options)
    hypotheses = read_lines(options.hyp)
    references = {path: read_lines(path) for path in options.ref}
    check_lengths(hypotheses, references, options.hyp)
    rows = compute(
        hypotheses, list(references.values()), options.tgt_lang, options.src_lang, options.tokenised
    )
    if options.comet:
        rows.append(comet_row(options, hypotheses))
    if options.json:
        write_json(options.json, report(rows, options.hyp, options.ref, len(hypotheses)))
    print(table(rows))


def check_comet(options: Namespace) -> None:
    """Raise ``UserError`` unless ``--comet`` and what it needs are given, or none of them."""
    if bool(options.comet) != bool(options.src):
        raise UserError("--comet MODEL and --src FILE belong together")
    if not options.comet:
        return
    comet.program()
    if len(options.ref) > 1:
        raise UserError(f"COMET takes one reference, and --ref has {len(options.ref)}")
    if options.tokenised:
        raise UserError("COMET is for plain text: detokenise the files, and omit --tokenised")


def comet_row(options: Namespace, hypotheses: list[str]) -> Score:
    """The row of COMET, of text as it is. Raises ``UserError``."""
    import torch  # takes seconds

    sources = read_lines(options.src)
    references = read_lines(options.ref[0])
    check_lengths(hypotheses, {options.src: sources}, options.hyp)
    texts = comet.PlainTexts(sources, [hypotheses], references, "text as given")
    (segments,) = comet.segment_scores(options.comet, texts, gpu=torch.cuda.is_available())
    return comet_score(options.comet, segments, texts.about)
