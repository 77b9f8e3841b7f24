"""Plan a training, make its SAVE-DIR ready, and hand the command to train.sh."""

import contextlib
import shlex
import sys
from typing import List

from fairseq_rskip.errors import UserError
from training.folders import check_save, fill_save, finished
from training.options import PLUGIN, list_archs, parse
from training.plan import Plan, make_plan


def write(plan: Plan, dry_run: bool) -> None:
    """See ``main``."""
    line = shlex.join(plan.command)
    for warning in plan.warnings:
        print(f"train.sh: {warning}", file=sys.stderr)
    if dry_run:
        print("\n".join(plan.notes), file=sys.stderr)
        print(line)
    else:
        text = "\n".join([*plan.notes, line])
        sys.stdout.write("".join(f"{word}\0" for word in [str(plan.save), text, *plan.command]))


def main(argv: List[str]) -> int:
    """With --dry-run the command as one line; else, each ended by NUL, SAVE-DIR, a text to show, and the command's
    words, or nothing if there is nothing left to train."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where fairseq's logging goes
            if argv[:1] == ["--archs"]:
                plan, archs = None, list_archs(PLUGIN)
            else:
                corpus, arch, words, own = parse(argv)
                plan = make_plan(corpus, arch, words, own)
        if plan is None:
            print("\n".join(archs))
            return 0
        check_save(plan.save, plan.data, plan.settings)
        if not own.dry_run:
            if finished(plan.save, plan.end):
                print(f"{plan.save} has all {plan.end} updates: nothing to train", file=sys.stderr)
                return 0
            fill_save(plan.save, plan.data, plan.dictionaries, plan.settings)
        write(plan, own.dry_run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
