"""Compare translations of one test set: scores with signatures, lengths, significance, examples.

Or compare language models on one text: perplexity, and a test paired by documents.

    rskip compare checkpoints/a checkpoints/b/checkpoint_best.pt
    rskip compare post-norm=runs/x/seed1 2rSkip=runs/y/seed1
    rskip compare a.de b.de c.de --ref test.de

The first is the baseline. A SYSTEM is a checkpoint, a folder of checkpoints, a seed's folder of
rskip run, a folder of rskip evaluate, or a file with one translation per line; NAME=SYSTEM names
it. Checkpoints that are not evaluated yet are evaluated on the test set with rskip evaluate's
defaults, a folder by the average of its last five.
"""

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from sacrebleu.metrics import BLEU, CHRF

from fairseq_rskip.console import Parser, in_columns, whole_number
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import comet
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate.scores_file import read_scores
from fairseq_rskip.tools.lines import check_lengths, read_lines
from fairseq_rskip.tools.process import stop_on_signals
from fairseq_rskip.tools.score import degenerate
from fairseq_rskip.tools.systems import are_texts, find_system, load, name_paths

UNTESTED = "not tested"
EXAMPLES = 10  # sentences that are shown


def compare(
    names: list[str],
    outputs: list[list[str]],
    references: list[list[str]],
    trials: int,
    examples: int,
    segments: list[list[float]] | None = None,
) -> tuple[list[list[str]], list[str]]:
    """The table, headings first, with each system's tests against the first one; and notes.

    The notes name the metrics and the tests, and show this number of ``examples``. ``segments``
    are COMET's scores of each system's sentences.
    """
    from fairseq_rskip.tools.significance import LEAST_DIFFERENT, PAIRED  # takes seconds

    metrics: dict[str, Any] = {"BLEU": BLEU(), "chrF": CHRF(), "chrF++": CHRF(word_order=2)}
    tested = {name: metrics[name] for name in ("BLEU", "chrF")}
    headings = ["system", *metrics, "BLEU without brevity penalty", "brevity penalty"]
    headings += ["length ratio", *(f"{name}: p" for name in tested)]
    rows = []
    for name, lines in zip(names, outputs):
        p_cells = ["baseline"] * len(tested)
        if rows:
            p_cells = p_values(outputs[0], lines, references, tested, trials)
        rows.append([name, *score_cells(lines, references, metrics), *p_cells])
    if segments:
        headings += [comet.NAME, f"{comet.NAME}: p"]
        for row, cells in zip(rows, comet_cells(outputs, segments, trials)):
            row += cells

    notes = []
    for name, metric in metrics.items():
        notes.append(f"{name} over {len(outputs[0]):,} sentences: {metric.get_signature()}")
    notes.append(f"p against {names[0]}: {PAIRED}, {trials:,} trials{_uncorrected(names)}")
    if any(UNTESTED in row for row in rows):
        notes.append(
            f"a system with fewer than {LEAST_DIFFERENT} differing translations is not tested"
        )
    for name, lines in zip(names, outputs):
        wrong = degenerate(lines, references)
        if wrong:
            notes.append(f"WARNING: the output of {name} is degenerate: {wrong}")
    if examples:
        notes += most_different(names, outputs, references, examples)
    return [headings, *rows], notes


def score_cells(
    lines: list[str], references: list[list[str]], metrics: dict[str, Any]
) -> list[str]:
    """The cells with each of the ``metrics``, and the parts of BLEU."""
    scores = {name: metric.corpus_score(lines, references) for name, metric in metrics.items()}
    bleu = scores["BLEU"]
    unpenalised = bleu.score / bleu.bp if bleu.bp else 0.0
    cells = [f"{score.score:.2f}" for score in scores.values()]
    cells += [f"{unpenalised:.2f}", f"{bleu.bp:.3f}", f"{bleu.sys_len / bleu.ref_len:.3f}"]
    return cells


def p_values(
    baseline: list[str],
    lines: list[str],
    references: list[list[str]],
    tested: dict[str, Any],
    trials: int,
) -> list[str]:
    """The cells with the p of each metric in ``tested``."""
    from fairseq_rskip.tools.significance import paired  # takes seconds

    p_by_metric = paired(baseline, lines, references, tested, trials)
    return [f"{p:.4f}" for p in p_by_metric.values()] or [UNTESTED] * len(tested)


def comet_cells(
    outputs: list[list[str]], segments: list[list[float]], trials: int
) -> list[list[str]]:
    """The mean of each system's ``segments``, and its p against the first system."""
    from fairseq_rskip.tools.significance import are_tested, paired_values  # takes seconds

    cells = []
    for number, (lines, scores) in enumerate(zip(outputs, segments)):
        p = UNTESTED
        if number == 0:
            p = "baseline"
        elif are_tested(outputs[0], lines):
            p = f"{paired_values(segments[0], scores, trials):.4f}"
        cells.append([f"{fmean(scores):.4f}", p])
    return cells


def most_different(
    names: list[str], outputs: list[list[str]], references: list[list[str]], count: int
) -> list[str]:
    """The ``count`` sentences with the largest differences in sentence chrF between the systems.

    Each has a line for each reference and system.
    """
    metric = CHRF()
    scores = []
    for lines in outputs:
        with_references = zip(lines, *references)
        scores.append([metric.sentence_score(line, refs).score for line, *refs in with_references])
    gaps = numpy.ptp(scores, axis=0)
    largest_first = (-gaps).argsort(kind="stable")

    labels = ["reference"] * len(references) + names
    shown = []
    for index in largest_first[:count]:
        if gaps[index] > 0:
            sentences = [lines[index] for lines in [*references, *outputs]]
            shown.append(f"\nsentence {index + 1}")
            shown += [f"  {line}" for line in in_columns([*zip(labels, sentences)])]
    return shown or ["no sentences to show: all systems have the same chrF on every sentence"]


def _uncorrected(names: Iterable[str]) -> str:
    """What a note on p says of several comparisons with one system; "" where there is one."""
    count = len(list(names)) - 1
    return f", not corrected for {count} comparisons" if count > 1 else ""


def compare_texts(paths: dict[str, Path], trials: int) -> tuple[list[list[str]], list[str]]:
    """The table, headings first, with each language model's test against the first one; and notes.

    All have scored the same text. Raises ``UserError``.
    """
    from fairseq_rskip.tools.significance import LEVEL, PAIRED, paired_values  # takes seconds

    scores = {name: read_scores(path) for name, path in paths.items()}
    base, first = next(iter(scores.items()))

    table = [["system", "perplexity per subword", "per word", "bits per byte", "difference", "p"]]
    bits = {}
    for name, each in scores.items():
        bits[name] = [document["bits"] for document in each["documents"]]
        cells = [f"{each['perplexity'][unit]:.2f}" for unit in ("subword", "word")]
        cells.append(f"{each['bits']['byte']:.4f}")
        if name == base:
            cells += ["", "baseline"]
        else:
            difference = (sum(bits[name]) - sum(bits[base])) / each["bytes"]
            p = paired_values(bits[base], bits[name], trials)
            cells += [f"{difference:+.4f}", f"{p:.4f}"]
        table.append([name, *cells])

    window = "windows of {tokens_per_sample} tokens, a stride of {stride}"
    windows = {name: window.format(**each["context"]) for name, each in scores.items()}
    seen = windows[base]
    if len(set(windows.values())) > 1:
        seen = "they saw unlike contexts, which is part of their difference: "
        seen += "; ".join(f"{name}, {each}" for name, each in windows.items())
    notes = [f"{len(bits[base]):,} documents, {first['bytes']:,} bytes; {seen}"]
    test = f"p of the documents: {PAIRED}, {trials:,} trials{_uncorrected(scores)}"
    notes.append(f"difference: of bits per byte, against {base}; {test}")
    smallest_p = 2 / 2 ** len(bits[base])  # all signs of the differences, or all of them flipped
    if smallest_p > LEVEL:
        notes.append(f"with {len(bits[base])} documents p cannot be below {smallest_p:.2f}")
    return table, notes


def compare_translations(
    paths: dict[str, Path], options: Namespace
) -> tuple[list[list[str]], list[str]]:
    """As :func:`compare`, of files and evaluations. Raises ``UserError``."""
    outputs, references = load(paths, options.ref)
    segments, note = None, ""
    if options.comet:
        segments, note = comet_segments(paths, options, outputs, references)
    examples = EXAMPLES if options.examples is None else options.examples
    table, notes = compare([*paths], outputs, references, options.trials, examples, segments)
    return table, ([note] if note else []) + notes


def comet_segments(
    paths: dict[str, Path],
    options: Namespace,
    outputs: list[list[str]],
    references: list[list[str]],
) -> tuple[list[list[float]], str]:
    """COMET's score of each sentence of each system, and a note. Raises ``UserError``."""
    import torch  # takes seconds

    if len(references) > 1:
        raise UserError(f"COMET takes one reference, and there are {len(references)}")
    evaluations = [read_scores(path)["evaluation"] for path in paths.values() if path.is_dir()]
    if options.src:
        sources = read_lines(options.src)
        check_lengths(outputs[0], {options.src: sources}, next(iter(paths.values())))
        texts = comet.PlainTexts(sources, outputs, references[0], "text as given")
    elif evaluations:
        corpus = Corpus.find_for_evaluation(evaluations[0]["data"])
        subset = evaluations[0]["subset"]
        texts = comet.plain_texts(corpus, subset, outputs, references[0])
    else:
        raise UserError("--comet needs the source of plain files: --src FILE")
    segments = comet.segment_scores(options.comet, texts, gpu=torch.cuda.is_available())
    signature = comet.signature(options.comet)
    return segments, f"{comet.NAME}, mean over sentences: {signature}; {texts.about}"


def main(argv: list[str] | None = None) -> None:
    """Compare, and print the table. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument("systems", nargs="+", metavar="SYSTEM", help="two or more; baseline first")
    parser.add_argument(
        "--ref", type=Path, nargs="+", metavar="FILE", help="references (those of the evaluations)"
    )
    parser.add_argument(
        "--data", type=Path, help="corpus to evaluate checkpoints on (the one they were trained on)"
    )
    parser.add_argument(
        "--examples", type=whole_number(0), metavar="N", help=f"sentences to show ({EXAMPLES})"
    )
    parser.add_argument(
        "--trials", type=whole_number(1), default=1000, metavar="N", help="trials per test (1000)"
    )
    comet.add_option(parser)
    parser.add_argument(
        "--src", type=Path, metavar="FILE", help="source of plain files, for --comet"
    )
    options = parser.parse_args(argv)
    if len(options.systems) < 2:
        parser.error("two systems are needed, or more")
    stop_on_signals()
    systems = {}
    for name, path in name_paths(options.systems).items():
        systems[name] = find_system(path, options.data)
    score_texts = are_texts(systems)
    if score_texts:
        check_options_of_texts(options)
    if options.comet:
        comet.program()
    paths = {name: system.evaluated() for name, system in systems.items()}

    if score_texts:
        table, notes = compare_texts(paths, options.trials)
    else:
        table, notes = compare_translations(paths, options)
    evaluations = {}
    for name, path in paths.items():
        if path.is_dir():
            evaluations[name] = read_scores(path)["evaluation"]
    print("\n".join([*in_columns(table), "", *about_trainings(evaluations), *notes]))


def check_options_of_texts(options: Namespace) -> None:
    """Raise ``UserError`` for an option that language models do not have."""
    for name in ("comet", "ref", "src", "examples"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for translations, and these are language models")


def about_trainings(evaluations: dict[str, dict[str, Any]]) -> list[str]:
    """The weights of each system that rskip evaluate scored, and how their trainings differ."""
    lines = []
    for name, evaluation in evaluations.items():
        if evaluation.get("weights"):
            lines.append(f"{name}: {evaluation['weights']}")

    trained_with = {}
    for name, evaluation in evaluations.items():
        if "trained_with" in evaluation:
            trained_with[name] = evaluation["trained_with"]
    options = dict.fromkeys(option for each in trained_with.values() for option in each)
    for option in options:
        values = {name: each.get(option) for name, each in trained_with.items()}
        first, *others = values.values()
        if any(value != first for value in others):
            listed = ", ".join(f"{name} {short(value)}" for name, value in values.items())
            lines.append(f"trained with another --{option}: {listed}")
    return lines


def short(value: Any) -> str:
    """An option's value; fairseq has some as lists of one for each epoch."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
