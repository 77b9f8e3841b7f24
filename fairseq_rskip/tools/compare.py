"""Compare translations of one test set: scores with signatures, how much of a gap is length, significance, examples.

    rskip compare checkpoints/a checkpoints/b/checkpoint_best.pt --html compare.html
    rskip compare checkpoints/a/evaluation-test checkpoints/b/evaluation-test
    rskip compare a.de b.de c.de --ref test.de --src test.en

The first is the baseline. A SYSTEM is a checkpoint, a folder of checkpoints that a training wrote, a folder that
evaluate.sh wrote, or a file of one translation per line. Checkpoints are evaluated on the test set as by evaluate.sh
with no option, a training's folder by the average of its last five; an evaluation that is there is taken.
"""

import argparse
import html
import importlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_rskip.console import Parser, in_columns, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.tools.process import stop_on_signals
from fairseq_rskip.tools.systems import evaluation_of, load, names_of

TESTS = {"ar": "approximate randomisation, two-sided", "bs": "paired bootstrap, whose p is about one-sided"}
SEED = "12345"  # sacreBLEU's own; a fixed one makes a comparison repeatable
LEAST_DIFFERENT = 10  # translations, below which the tests say nothing
MOSTLY = 0.5  # part of a gap
ZERO = 0.005  # what is below is printed as a BLEU of 0.00
COMET = "Unbabel/wmt22-comet-da"
COMET_BATCH = 16  # sentences


@dataclass
class System:
    """One system's translations and their scores; ``p``: test -> metric -> p-value against the baseline."""

    name: str
    lines: list[str]
    bleu: Any  # sacreBLEU's score objects
    chrf: Any
    p: dict[str, dict[str, float]]
    comet: float | None = None

    @property
    def length_ratio(self) -> float:
        """Tokens of the output per token of the reference."""
        return self.bleu.sys_len / self.bleu.ref_len

    @property
    def precision(self) -> float:
        """BLEU without its brevity penalty."""
        return self.bleu.score / self.bleu.bp if self.bleu.bp else 0.0


def import_comet() -> Any:
    """The module of unbabel-comet. Raises ``UserError`` where it is not installed."""
    try:
        return importlib.import_module("comet")
    except ImportError as error:
        raise UserError(f"--comet needs unbabel-comet: pip install unbabel-comet ({error})") from None


def add_comet(systems: list[System], source: list[str], reference: list[str], comet: Any, name: str) -> None:
    """Have the model ``name`` of COMET score every system. Raises ``UserError`` if there is no such model."""
    import torch

    try:
        model = comet.load_from_checkpoint(comet.download_model(name))
    except Exception as error:  # it raises KeyError and bare Exception for a model that it cannot get
        raise UserError(f"--comet {name}: {' '.join(str(error).split())}") from None
    gpus = 1 if torch.cuda.is_available() else 0
    for system in systems:
        triples = [{"src": s, "mt": m, "ref": r} for s, m, r in zip(source, system.lines, reference)]
        system.comet = model.predict(triples, batch_size=COMET_BATCH, gpus=gpus).system_score


def compare(
    names: list[str], outputs: list[list[str]], references: list[list[str]], trials: int
) -> tuple[list[System], dict[str, str]]:
    """Score every system, and test each against the first with ``trials`` resamples or shuffles; and the signatures."""
    metrics = {"BLEU": BLEU(), "chrF": CHRF()}
    systems = []
    for name, lines in zip(names, outputs):
        bleu, chrf = (metric.corpus_score(lines, references) for metric in metrics.values())
        systems.append(System(name, lines, bleu, chrf, {kind: {} for kind in TESTS}))
    testable = [s for s in systems[1:] if sum(map(str.__ne__, s.lines, outputs[0])) >= LEAST_DIFFERENT]
    os.environ.setdefault("SACREBLEU_SEED", SEED)
    for kind in TESTS if testable else ():
        named = [(str(index), system.lines) for index, system in enumerate([systems[0], *testable])]
        _, results = PairedTest(named, {"BLEU": BLEU(), "chrF": CHRF()}, references, kind, trials)()
        for metric, found in zip(metrics, (values for name, values in results.items() if name != "System")):
            for system, result in zip(testable, found[1:]):
                system.p[kind][metric] = float(result.p_value)
    return systems, {name: str(metric.get_signature()) for name, metric in metrics.items()}


def explain_length(baseline: System, system: System) -> str:
    """How much of a BLEU gap is length, as log BLEU is log brevity penalty plus log precision; "" below half."""
    if not (baseline.bleu.score and system.bleu.score):
        return explain_zero(*sorted((baseline, system), key=lambda each: each.bleu.score))
    gap = math.log(system.bleu.score / baseline.bleu.score)
    length = math.log(system.bleu.bp / baseline.bleu.bp)
    if not gap or length / gap < MOSTLY:
        return ""
    shorter = min(baseline, system, key=lambda each: each.length_ratio)
    share = "all" if length / gap >= 1 else f"{length / gap:.0%}"
    return (
        f"{share} of the BLEU gap between {baseline.name} and {system.name} is length: {shorter.name} is "
        f"{1 - shorter.length_ratio:.0%} shorter than the reference; without the brevity penalty they have "
        f"{baseline.precision:.2f} and {system.precision:.2f}"
    )


def explain_zero(zero: System, other: System) -> str:
    """The same of a BLEU of 0, which has no log: "" unless its length alone would bring ``other`` down to 0.00."""
    if other.bleu.score < ZERO or other.precision * zero.bleu.bp >= ZERO:
        return ""
    return (
        f"the gap is mostly length: {zero.name} has a BLEU of 0 and is {1 - zero.length_ratio:.0%} shorter than the "
        f"reference; at that length {other.name} would have {other.precision * zero.bleu.bp:.2f}, too"
    )


def most_different(systems: list[System], references: list[list[str]], count: int) -> list[int]:
    """The sentences, by index, on which the systems' sentence chrF is furthest apart."""
    metric = CHRF()
    spread = []
    for index, translations in enumerate(zip(*(system.lines for system in systems))):
        found = [reference[index] for reference in references]
        scores = [metric.sentence_score(line, found).score for line in translations]
        spread.append((max(scores) - min(scores), -index))
    return [-index for gap, index in sorted(spread, reverse=True)[:count] if gap > 0]


def rows_of(systems: list[System]) -> list[list[str]]:
    """The table: a row for each system; p-values of both tests and metrics beside all but the first."""
    tests = [f"{metric}: p ({kind})" for kind in TESTS for metric in ("BLEU", "chrF")]
    comet = ["COMET"] if systems[0].comet is not None else []
    rows = [["system", "BLEU", "chrF", *comet, "length ratio", "brevity penalty", *tests]]
    for number, system in enumerate(systems):
        scores = [f"{system.bleu.score:.2f}", f"{system.chrf.score:.2f}"]
        scores += [f"{system.comet:.4f}"] if comet else []
        scores += [f"{system.length_ratio:.3f}", f"{system.bleu.bp:.3f}"]
        found = [system.p[kind].get(metric) for kind in TESTS for metric in ("BLEU", "chrF")]
        none = "baseline" if number == 0 else "hardly differs"
        rows.append([system.name, *scores, *(none if p is None else f"{p:.4f}" for p in found)])
    return rows


def notes_of(systems: list[System], signatures: dict[str, str], trials: int) -> list[str]:
    """Which metrics and tests these are, and what is to be said of the lengths."""
    tests = "; ".join(f"{kind}: {what}" for kind, what in TESTS.items())
    lengths = filter(None, (explain_length(systems[0], system) for system in systems[1:]))
    scored = [f"{name} over {len(systems[0].lines):,} sentences: {signature}" for name, signature in signatures.items()]
    return [*lengths, *scored, f"p against {systems[0].name}, {trials:,} trials; {tests}"]


def example(index: int, systems: list[System], references: list[list[str]], source: list[str]) -> list[tuple[str, str]]:
    """Label and text of each line that is shown of sentence ``index``."""
    lines = [("source", source[index])] if source else []
    lines += [("reference", reference[index]) for reference in references]
    return [*lines, *((system.name, system.lines[index]) for system in systems)]


def as_text(rows: list[list[str]], notes: list[str], examples: list[tuple[int, list[tuple[str, str]]]]) -> str:
    """All of it as aligned text."""
    lines = [*in_columns(rows), "", *notes]
    for index, shown in examples:
        lines += ["", f"sentence {index + 1}", *(f"  {line}" for line in in_columns(shown))]
    return "\n".join(lines)


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:left;
vertical-align:top}tr:first-child th{border-bottom:2px solid #222}li{margin:.2rem 0}"""


def as_page(rows: list[list[str]], notes: list[str], examples: list[tuple[int, list[tuple[str, str]]]]) -> str:
    """The same as one HTML page that needs nothing else."""
    table = _table([_row("th", rows[0]), *(_row("td", row) for row in rows[1:])])
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    tables = ((index + 1, _table([_row("td", pair) for pair in lines])) for index, lines in examples)
    shown = "".join(f"<h3>Sentence {number}</h3>{lines}" for number, lines in tables)
    return (
        f"<!DOCTYPE html><html lang='en'><meta charset='utf-8'><title>Comparison</title><style>{STYLE}</style>"
        f"<h1>Comparison</h1>{table}<ul>{listed}</ul><h2>Sentences that differ most</h2>{shown}</html>\n"
    )


def _row(tag: str, cells: Any) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options. A mistake ends the program with one line."""
    parser = Parser(description=__doc__)
    parser.add_argument("systems", type=Path, nargs="+", metavar="SYSTEM", help="two or more; baseline first")
    parser.add_argument("--ref", type=Path, nargs="+", metavar="FILE", help="references (those of the evaluations)")
    parser.add_argument("--src", type=Path, metavar="FILE", help="the source, to be shown (that of the evaluations)")
    parser.add_argument("--data", type=Path, help="to evaluate checkpoints on (what they were trained on)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="for evaluations of checkpoints (beside the checkpoints)"
    )
    parser.add_argument(
        "--comet",
        nargs="?",
        const=COMET,
        metavar="MODEL",
        help=f"behind the systems: with COMET, if unbabel-comet is installed ({COMET})",
    )
    parser.add_argument("--examples", type=whole_number(0), default=10, metavar="N", help="sentences to show (10)")
    parser.add_argument("--trials", type=whole_number(1), default=1000, metavar="N", help="of each test (1000)")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write it as a page, too")
    options = parser.parse_args(argv)
    if len(options.systems) < 2:
        parser.error("two systems are needed, or more")
    return options


def run(options: argparse.Namespace) -> None:
    """Compare, write the page, print the text. Raises ``UserError``."""
    comet = import_comet() if options.comet else None  # what is missing is said before anything is computed
    names = names_of(options.systems)
    places = (options.data, options.output)
    paths = [evaluation_of(path, name, *places) for path, name in zip(options.systems, names)]
    outputs, references, source = load(paths, options.ref, options.src)
    if comet and not source:
        raise UserError("--comet needs the source: --src FILE")
    systems, signatures = compare(names, outputs, references, options.trials)
    if comet:
        add_comet(systems, source, references[0], comet, options.comet)
        against = "the first reference" if len(references) > 1 else "the reference"
        signatures["COMET"] = f"{options.comet} of unbabel-comet {comet.__version__}, against {against}"
    chosen = most_different(systems, references, options.examples)
    examples = [(index, example(index, systems, references, source)) for index in chosen]
    parts = (rows_of(systems), notes_of(systems, signatures, options.trials), examples)
    if options.html:
        write_text(options.html, as_page(*parts))
    print(as_text(*parts))


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    options = parse(argv)
    stop_on_signals()
    return exit_status(lambda: run(options))
