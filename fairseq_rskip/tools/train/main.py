"""``rskip train``: plan, make SAVE-DIR ready, and become ``run``. fairseq is imported after the options are read."""

import contextlib
import os
import shlex
import sys

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.train.plan import make_plan, read
from fairseq_rskip.tools.train.save import check_vocabulary, fill_save, finished


def train(argv: list[str]) -> None:
    """Do what ``argv`` says. Raises ``UserError``."""
    own, words = read(argv)
    if own.archs:
        from fairseq.models import ARCH_MODEL_REGISTRY

        from fairseq_rskip.models import skip_architectures
        from fairseq_rskip.models._presets import overview

        print(f"{overview()}\n\nfairseq's own:\n{', '.join(sorted(ARCH_MODEL_REGISTRY.keys() - skip_architectures()))}")
        return
    if not own.dry_run:
        print_line("starting: reading the options and the data takes some seconds", "stderr")
    with contextlib.redirect_stdout(sys.stderr):  # fairseq logs there
        plan = make_plan(own, words)
        check_vocabulary(plan.save, plan.corpus)
        if not own.dry_run and finished(plan.save, plan.end if plan.unit == "updates" else 0):
            print_line(f"{plan.save} has all {plan.end} updates: nothing to train", "stderr")
            return
    if not own.dry_run:
        fill_save(plan.save, plan.corpus)
    for warning in plan.warnings:
        print_line(f"warning: {warning}", "stderr")
    notes, command = "\n".join(plan.notes), shlex.join(plan.command)
    if own.dry_run:
        print(notes, file=sys.stderr)
        print(command)
        return
    sys.stdout.flush()
    run = [sys.executable, "-m", "fairseq_rskip.tools.train.run", str(plan.save), f"{notes}\n{command}", *plan.command]
    os.execv(sys.executable, run)


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: train(argv))
