"""``rskip train``: read the command line, plan, prepare SAVE-DIR, hand over to ``train.run``."""

import argparse
import contextlib
import shlex
import sys

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import make_folder
from fairseq_rskip.tools.corpus import NAMES, Corpus
from fairseq_rskip.tools.recipes import RECIPES
from fairseq_rskip.tools.train import run

DESCRIPTION = f"""Train ARCH on CORPUS with the paper's settings for it (docs/training.md),
on all GPUs that torch sees, or on the CPU. The same command again resumes from
SAVE-DIR/checkpoint_last.pt.

CORPUS is {", ".join(NAMES)},
prepared in data/CORPUS below the current folder, or a folder: a data-bin of fairseq-preprocess,
or the folder around it. ARCH is an architecture of this plugin or of fairseq. Any option of
fairseq-train may follow and overrides the recipe's; fairseq-train --help lists them. --save-dir is
checkpoints/CORPUS/ARCH below the current folder by default."""
USAGE = "%(prog)s CORPUS ARCH [option ...] [fairseq-train option ...]\n       %(prog)s --archs"


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """CORPUS, as a :class:`.Corpus`, ARCH and our own options, and the other words, which are
    fairseq-train's.

    Only a dry run may lack the corpus. Raises ``UserError``.
    """
    parser = Parser(usage=USAGE, description=DESCRIPTION)
    parser.add_argument("corpus", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arch", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--archs", action="store_true", help="list the architectures")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the fairseq-train command and exit"
    )
    parser.add_argument(
        "--gpus", type=whole_number(0), metavar="N", help="print the command for N GPUs and exit"
    )
    parser.add_argument(
        "--no-fp16", action="store_true", help="train in fp32 even if fp16 is supported"
    )
    parser.add_argument(
        "--recipe",
        choices=list(RECIPES),
        metavar="NAME",
        help=f"settings to train with: {', '.join(RECIPES)} "
        "(default: the corpus's, else by its size)",
    )
    # for rskip run, which has planned the same training and so has built the small model before
    parser.add_argument("--model-checked", action="store_true", help=argparse.SUPPRESS)
    own, words = parser.parse_known_args(argv)
    if not own.archs and [own.corpus, own.arch] != argv[:2]:
        raise UserError(
            "expected CORPUS and ARCH first, in this order, then options; -h shows the usage"
        )
    if own.gpus is not None:
        own.dry_run = True
    if not own.archs:  # a wrong name is found before fairseq is imported, which takes seconds
        find = Corpus.find_or_plan if own.dry_run else Corpus.find
        own.corpus = find(own.corpus)
    return own, words


def main(argv: list[str]) -> None:
    """Plan the training of ``argv``, and become the process that runs it. Raises ``UserError``."""
    own, words = read(argv)
    if own.archs:
        from fairseq_rskip.models.overview import overview

        print(f"{overview()}\n\nfairseq-train --help lists fairseq's own.")
        return
    if not own.dry_run:
        print_line("starting: reading the options and the data takes some seconds", "stderr")
    with contextlib.redirect_stdout(sys.stderr):  # fairseq logs there
        from fairseq_rskip.tools.train.plan import make_plan  # takes seconds to import

        plan = make_plan(own, words)
        plan.corpus.check_vocabulary(plan.save)
        plan.check_parent()

    notes = "\n".join(plan.notes)
    command = shlex.join(plan.command)
    if own.dry_run:
        _warn(plan.warnings)
        print_line(notes, "stderr")
        print(command)
        return

    reason = plan.why_finished()
    if reason:
        print_line(reason, "stderr")
        return
    make_folder(plan.save)
    _warn([*plan.warnings, *plan.changes()])
    run.start(plan.save, f"{notes}\n{command}", plan.command)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print_line(f"warning: {warning}", "stderr")
