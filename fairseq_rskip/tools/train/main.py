"""``rskip train``: plan, make SAVE-DIR ready, and train."""

import contextlib
import json
import os
import shlex
import sys

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.train.arguments import load_architectures, read_own
from fairseq_rskip.tools.train.save import check_vocabulary, fill_save, finished


def prepare(argv: list[str]) -> dict | None:
    """Do what ``argv`` says, up to the training; return the arguments of ``run.train``, or None if nothing is to be
    trained. Raises ``UserError``."""
    own, _ = read_own(argv)
    if own.archs:
        known = load_architectures(own.user_dir)
        from fairseq_rskip.models import skip_architectures
        from fairseq_rskip.models._presets import overview

        print(f"{overview()}\n\nfairseq's own:\n{', '.join(sorted(known.keys() - skip_architectures()))}")
        return None
    if not own.dry_run:
        print_line("starting: reading the options and the data takes some seconds", "stderr")
    with contextlib.redirect_stdout(sys.stderr):  # fairseq logs there
        from fairseq_rskip.tools.train.plan import make_plan

        plan = make_plan(argv)
        check_vocabulary(plan.save, plan.corpus)
        done = not own.dry_run and finished(plan.save, plan.end if plan.unit == "updates" else 0)
    if done:
        print_line(f"{plan.save} has all {plan.end} updates: nothing to train", "stderr")
        return None
    if not own.dry_run:
        fill_save(plan.save, plan.corpus)
    for warning in plan.warnings:
        print_line(f"warning: {warning}", "stderr")
    command = shlex.join(plan.command)
    if own.dry_run:
        print("\n".join(plan.notes), file=sys.stderr)
        print(command)
        return None
    about = "\n".join([*plan.notes, command])
    return {"save": str(plan.save), "about": about, "command": plan.command}


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` says; return the exit status. Where there is something to train, this becomes ``run``."""

    def train() -> None:
        if job := prepare(sys.argv[1:] if argv is None else argv):
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-m", "fairseq_rskip.tools.train.run", json.dumps(job)])

    return exit_status(train)
