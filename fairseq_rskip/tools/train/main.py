"""The command line of scripts/train.sh: check what is cheap to check, plan, make SAVE-DIR ready, and train."""

import argparse
import contextlib
import os
import shlex
import sys

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.train.data import find_data
from fairseq_rskip.tools.train.options import check_ranges
from fairseq_rskip.tools.train.recipes import NAMES, RECIPES
from fairseq_rskip.tools.train.save import check_save, fill_save, finished

USAGE = """scripts/train.sh CORPUS ARCH [--dry-run [--gpus N]] [--recipe NAME] [--no-fp16] [fairseq-train option ...]
       scripts/train.sh --archs"""
DESCRIPTION = f"""Trains ARCH on CORPUS with the paper's settings for it (docs/training.md), on all GPUs that
torch sees, or on the CPU.
The same command again resumes from SAVE-DIR/checkpoint_last.pt.

  CORPUS               {", ".join(NAMES[:3])},
                       {", ".join(NAMES[3:])}, prepared in data/CORPUS/data-bin;
                       or a folder: a data-bin of fairseq-preprocess, or the folder around it
  ARCH                 an architecture of this plugin or of fairseq; --archs lists them all
  fairseq-train option any; what is given here wins over the settings; fairseq-train --help lists them.
                       --save-dir is checkpoints/CORPUS/ARCH unless given
"""
EPILOG = """environment:
  MAX_TOKENS_PER_GPU=n the largest batch a GPU takes at once (4096); the tokens per step do not depend on it
  CUDA_VISIBLE_DEVICES chooses among the GPUs
"""


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """CORPUS, ARCH and train.sh's own options; fairseq-train's options, not read yet. Raises ``UserError``."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("corpus", nargs="?", metavar="CORPUS", help=argparse.SUPPRESS)
    parser.add_argument("arch", nargs="?", metavar="ARCH", help=argparse.SUPPRESS)
    parser.add_argument("--archs", action="store_true", help="list the architectures, this plugin's first")
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command alone, and do nothing")
    parser.add_argument("--gpus", type=int, metavar="N", help="with --dry-run: as on a machine with N GPUs")
    parser.add_argument("--no-fp16", action="store_true", help="single precision on a GPU that could do otherwise")
    parser.add_argument(
        "--recipe",
        choices=list(RECIPES),
        metavar="NAME",
        help="these settings in place of the corpus's own, or of those for its size: small, medium, large or a corpus",
    )
    own, words = parser.parse_known_args(argv)
    if not own.archs and [own.corpus, own.arch] != argv[:2]:
        raise UserError("CORPUS and ARCH are needed, in this order, before any option; -h shows the usage")
    if own.gpus is not None and (not own.dry_run or own.gpus < 0):
        raise UserError(
            "--gpus N plans for another machine, with --dry-run; CUDA_VISIBLE_DEVICES chooses among the GPUs here"
        )
    return own, words


def prepare(argv: list[str] | None = None) -> list[str] | None:
    """Do what ``argv`` asks for, up to the training; returns run.py's arguments, or None if nothing is to be trained.

    Raises ``UserError``.
    """
    own, words = parse(argv)
    if own.archs:
        from fairseq_rskip.tools.train.options import PLUGIN, list_archs

        print("\n".join(list_archs(PLUGIN)))
        return None
    check_ranges(words)
    data = find_data(own.corpus, own.dry_run, own.recipe)
    if not own.dry_run:
        print_line("train.sh: starting, which takes some seconds", "stderr")
    with contextlib.redirect_stdout(sys.stderr):  # where fairseq's logging goes
        from fairseq_rskip.tools.train.plan import make_plan

        plan = make_plan(data, own.arch, words, own)
    check_save(plan.save, plan.data, plan.settings)
    line = shlex.join(plan.command)
    if own.dry_run:
        _warn(plan.warnings)
        print("\n".join(plan.notes), file=sys.stderr)
        print(line)
        return None
    if finished(plan.save, plan.end if plan.unit == "updates" else 0):
        print_line(f"{plan.save} has all {plan.end} updates: nothing to train", "stderr")
        return None
    fill_save(plan.save, plan.data, plan.dictionaries, plan.settings)
    _warn(plan.warnings)
    about = "\n".join([*plan.notes, line])
    ours = ["--save", str(plan.save), "--about", about, "--end", str(plan.end), "--unit", plan.unit]
    return [*ours, "--", *plan.command]


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print_line(f"train.sh: {warning}", "stderr")


def train(argv: list[str] | None = None) -> None:
    """Plan, then become run.py."""
    arguments = prepare(argv)
    if arguments:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "fairseq_rskip.tools.train.run", *arguments])


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    return exit_status(lambda: train(argv))
