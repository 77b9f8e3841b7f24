"""Make a table of scores from a prepared corpus and a folder of checkpoints.

Torch is imported after the options.
"""

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import fairseq_rskip
from fairseq_rskip.console import Parser, finite, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import lock_holder, locked, write_json, write_text
from fairseq_rskip.machine import fairseq_version
from fairseq_rskip.pretrained.text import detokenise
from fairseq_rskip.tools import cached, comet
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate import generation, language_model
from fairseq_rskip.tools.evaluate.scores_file import SCORES, TRANSLATION
from fairseq_rskip.tools.process import stop_on_signals

DESCRIPTION = """Average the last checkpoints, translate with beam search, score against the raw
references; or, on a text, print the perplexity of a language model.

DATA is a prepared corpus: the folder with preparation.json, its parent, or the name of a corpus in
data/. CHECKPOINT-DIR is where training saved to. OUT gets generate.log, hyp.tok (subwords joined),
hyp.txt (detokenised) and scores.json; of a language model eval_lm.log and scores.json, with the
bits of each document. A finished generation is not repeated while checkpoints, data and options are
the same.
See docs/evaluation.md."""
# tensor2tensor divides a log-probability by ((5 + L) / 6)^0.6 (Wu et al. 2016, equation 14),
# fairseq by L^lenpen. What chooses between hypotheses of about L tokens is the elasticity: lenpen,
# and 0.6 L / (L + 5), or 0.5 at 25 subwords.
DEFAULT_LENPEN = 0.5


def add_search(parser: Parser) -> None:
    """Add the options of the beam search and its device."""
    parser.add_argument(
        "--beam", type=whole_number(1), default=4, metavar="N", help="beam size (4)"
    )
    penalty = "divide a hypothesis's score by length^A (0.5: near tensor2tensor's alpha 0.6)"
    parser.add_argument("--lenpen", type=finite, default=DEFAULT_LENPEN, metavar="A", help=penalty)
    parser.add_argument("--cpu", action="store_true", help="decode on the CPU")


def make_parser() -> Parser:
    """The options of the command."""
    parser = Parser(description=DESCRIPTION)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT-DIR")
    weights = parser.add_mutually_exclusive_group()
    count: dict[str, Any] = {"type": whole_number(0), "metavar": "N"}
    last = (
        "average the last N checkpoints of epochs or updates (5; of a language model 0); "
        "0: checkpoint_best.pt, else checkpoint_last.pt"
    )
    weights.add_argument("--average", **count, help=last)
    one = "evaluate this checkpoint: a path, or a name in the folder"
    weights.add_argument("--checkpoint", type=Path, metavar="FILE", help=one)
    parser.add_argument(
        "--subset", choices=("test", "valid"), default="test", help="sentences to take (test)"
    )
    add_search(parser)
    parser.add_argument(
        "--max-tokens",
        type=whole_number(1),
        default=8000,
        metavar="N",
        help="tokens per batch (8000)",
    )
    comet.add_option(parser)
    parser.add_argument(
        "--fp32", action="store_true", help="compute in fp32 on a GPU (default: fp16)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results (CHECKPOINT-DIR/evaluation-SUBSET)"
    )
    window = (
        "language models: least number of tokens before each predicted one, "
        "where the text has them (0)"
    )
    parser.add_argument("--context-window", default=0, **count, help=window)
    return parser


def parse(argv: list[str] | None = None) -> Namespace:
    """The options, defaults filled in. Raises ``UsageError``."""
    options = make_parser().parse_args(argv)
    options.out = options.out or options.folder / f"evaluation-{options.subset}"
    return options


def default_options(data: Path, weights: Path) -> Namespace:
    """The default options for ``weights``, a checkpoint or a folder of checkpoints, on ``data``.

    A checkpoint's results are in a folder with its name, beside it.
    """
    if weights.is_dir():
        return parse([str(data), str(weights)])
    options = parse([str(data), str(weights.parent), "--checkpoint", str(weights)])
    options.out = options.out.with_name(f"{options.out.name}-{weights.stem}")
    return options


def check_kind_of_data(options: Namespace, is_monolingual: bool) -> None:
    """Raise ``UserError`` for an option of translations on a text, or of texts on a translation."""
    if is_monolingual:
        unused, reason = ("comet", "beam", "lenpen"), "is for translations, and the data are a text"
    else:
        unused, reason = ("context_window",), "is for a text, and the data are a translation"
    parser = make_parser()
    for name in unused:
        value = getattr(options, name)
        if value != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')} {value} {reason}")


def choose_checkpoints(options: Namespace, corpus: Corpus) -> tuple[list[Path], str]:
    """The checkpoints to average, and a line that says which. Raises ``UserError``."""
    from fairseq_rskip.tools.evaluate import weights

    average = options.average
    if average is None:
        average = 0 if corpus.is_monolingual else weights.AVERAGED
    return weights.choose(options.folder, average, options.checkpoint)


def translating(options: Namespace, corpus: Corpus, sentences: int) -> generation.Program:
    """The command that translates this number of ``sentences``."""
    search = generation.search_options(
        corpus, options.subset, options.beam, options.lenpen, options.max_tokens
    )
    shown = generation.Shown(rb"^H-", sentences, "translated", "sent")
    return generation.Program("fairseq-generate", options.out / generation.LOG, search, shown)


def run_fairseq(
    options: Namespace, corpus: Corpus, taken: list[Path], program: generation.Program
) -> dict[str, Any]:
    """Run ``program`` with the weights ``taken``, unless its log is up to date.

    Returns what the log was made from. Raises ``UserError``.
    """
    import torch

    from fairseq_rskip.tools.evaluate import weights

    device = []
    if options.cpu or not torch.cuda.is_available():
        device = ["--cpu"]
    elif not options.fp32:
        device = ["--fp16"]
    key: dict[str, Any] = {
        "checkpoints": cached.identity(taken),
        "data": corpus.checksums(options.subset),
        "options": [*program.options, *device],
        "versions": {"fairseq": fairseq_version(), "fairseq_rskip": fairseq_rskip.__version__},
    }
    rules = weights.own_rules_of(taken[0])
    if rules:
        key["rules"] = rules
    if cached.is_made(program.log, key):
        print_line(f"== {program.name}: up to date ({program.log})")
        return key

    corpus.check_vocabulary(taken[0].parent, "name the corpus that it was trained on")
    checkpoint = weights.one_file(taken, options.out / "averaged.pt")
    weights.load_state(checkpoint)  # an unusable one ends in one line here
    command = generation.command(corpus, checkpoint, key["options"], program.name)
    lines = len(corpus.references(options.subset))
    print_line(f"== {program.name} on {lines:,} lines\n{shlex.join(command)}")
    cached.make(program.log, key, lambda path: generation.run(command, path, program.shown))
    return key


def score(
    options: Namespace, corpus: Corpus, hypotheses: list[str], references: list[str], about: dict
) -> None:
    """Print the table and write OUT/scores.json."""
    from fairseq_rskip.tools import score as metrics

    if corpus.tokenizer == "moses":
        title = "detokenised translations against the raw references"
    elif corpus.tokenised:
        title = "text as published, which is tokenised already"
    else:
        title = "text as it is"
    rows = metrics.compute(hypotheses, [references], corpus.target, corpus.source, corpus.tokenised)
    if options.comet:
        rows.append(comet_row(options, corpus, hypotheses, references))
    result = metrics.report(
        rows, options.out / TRANSLATION, [corpus.reference(options.subset)], len(references)
    )
    wrong = metrics.degenerate(hypotheses, [references])
    result |= {"text": title, "degenerate": wrong, "evaluation": about}
    print_line(
        f"\n{corpus.source}-{corpus.target} {options.subset}, "
        f"{len(references):,} sentences: {title}"
    )
    print_line(metrics.table(rows))
    write_json(options.out / SCORES, result)
    if wrong:
        print_line(f"WARNING: the output is degenerate: {wrong}", "stderr")
    print_line(f"\nwritten to {options.out}: {generation.LOG}, hyp.tok, hyp.txt, {SCORES}")


def comet_row(
    options: Namespace, corpus: Corpus, hypotheses: list[str], references: list[str]
) -> Any:
    """The row of COMET. Raises ``UserError``."""
    import torch

    from fairseq_rskip.tools import score as metrics

    print_line(f"== {comet.COMMAND} on {len(references):,} lines")
    texts = comet.plain_texts(corpus, options.subset, [hypotheses], references)
    gpu = torch.cuda.is_available() and not options.cpu
    (segments,) = comet.segment_scores(options.comet, texts, gpu)
    return metrics.comet_score(options.comet, segments, texts.about)


def evaluate(options: Namespace) -> None:
    """Do what ``parse`` read. Raises ``UserError``."""
    from fairseq_rskip.tools.evaluate import weights  # takes seconds

    corpus = Corpus.find_for_evaluation(options.data)
    check_kind_of_data(options, corpus.is_monolingual)
    if options.comet:
        comet.program()
    references = corpus.references(options.subset)
    taken, which = choose_checkpoints(options, corpus)
    print_line(f"== {which}")
    with locked(options.out) as lock:
        if lock is None:
            raise UserError(
                f"another evaluation writes to {options.out} ({lock_holder(options.out)}); "
                "give another --out, or wait for it"
            )
        if corpus.is_monolingual:
            task = weights.task_of(taken[0], "language_modeling")
            windows = language_model.windows(options, task)
            program = language_model.scoring(options, corpus, windows)
        else:
            program = translating(options, corpus, len(references))
        made_from = run_fairseq(options, corpus, taken, program)
        about = {
            "data": str(corpus.folder),
            "corpus": corpus.name,
            "subset": options.subset,
            "weights": which,
            "trained_with": weights.training_options(taken[0]),
            "checkpoints": made_from["checkpoints"],
            "checksums": made_from["data"],
            "options": made_from["options"],
            "versions": made_from["versions"],
            "rules": made_from.get("rules", []),
        }
        if corpus.is_monolingual:
            language_model.report(options, corpus, windows, about)
        else:
            write_translations(options, corpus, references, about)


def write_translations(
    options: Namespace, corpus: Corpus, references: list[str], about: dict[str, Any]
) -> None:
    """Write OUT/hyp.tok and hyp.txt, and score them."""
    tokens = generation.hypotheses(options.out / generation.LOG, len(references))
    hypotheses = tokens
    if corpus.tokenizer == "moses":
        hypotheses = detokenise(tokens, corpus.target)
    for name, lines in (("hyp.tok", tokens), (TRANSLATION, hypotheses)):
        write_text(options.out / name, "".join(line + "\n" for line in lines))
    score(options, corpus, hypotheses, references, about)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status. An error is one line on standard error."""

    def run() -> None:
        options = parse(argv)
        stop_on_signals()
        evaluate(options)

    return exit_status(run, "interrupted; the same command resumes from what is complete")
