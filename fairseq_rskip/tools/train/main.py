"""``rskip train``: plan, make SAVE-DIR ready, run fairseq-train: output in train.log, progress on the screen.

fairseq-train is run by a process without torch and fairseq, so that the memory of planning is free again:
``python -m fairseq_rskip.tools.train.main SAVE-DIR ABOUT COMMAND ...``.
"""

import argparse
import contextlib
import os
import re
import shlex
import sys
import threading
import time
from pathlib import Path

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import lock_holder, locked, write_bytes
from fairseq_rskip.tools.corpus import NAMES, PREPARATION
from fairseq_rskip.tools.log import Record, record, summary
from fairseq_rskip.tools.process import Stopped, follow, stop_on_signals
from fairseq_rskip.tools.recipes import RECIPES

LOG, LOCK, LAST = "train.log", "train.lock", "checkpoint_last.pt"
LINES_EVERY = 30.0  # seconds between lines of progress
DESCRIPTION = f"""Train ARCH on CORPUS with the paper's settings for it (docs/training.md), on all GPUs that torch sees,
or on the CPU. The same command again resumes from SAVE-DIR/checkpoint_last.pt.

CORPUS is {", ".join(NAMES)},
prepared in data/CORPUS, or a folder: a data-bin of fairseq-preprocess, or the folder around it. ARCH is an architecture
of this plugin or of fairseq. Any option of fairseq-train may follow and overrides the recipe's; fairseq-train --help
lists them. --save-dir is checkpoints/CORPUS/ARCH by default."""
_SHOWN = re.compile(r"\| (Loaded checkpoint .* updates\))|WARNING \| (?:fairseq_rskip|fairseq\.tasks)[\w.]* \| (.*)")


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """CORPUS, ARCH and our own options; the other words are fairseq-train's. Raises ``UserError``."""
    usage = "%(prog)s CORPUS ARCH [option ...] [fairseq-train option ...]\n       %(prog)s --archs"
    parser = Parser(usage=usage, description=DESCRIPTION)
    parser.add_argument("corpus", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arch", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--archs", action="store_true", help="list the architectures")
    parser.add_argument("--dry-run", action="store_true", help="print the fairseq-train command and exit")
    parser.add_argument("--gpus", type=whole_number(0), metavar="N", help="print the command for N GPUs and exit")
    parser.add_argument("--no-fp16", action="store_true", help="train in fp32 even if fp16 is supported")
    recipe = "use the settings of small, medium, large or a corpus (default: the corpus's, else by its size)"
    parser.add_argument("--recipe", choices=list(RECIPES), metavar="NAME", help=recipe)
    own, words = parser.parse_known_args(argv)
    if not own.archs and [own.corpus, own.arch] != argv[:2]:
        raise UserError("expected CORPUS and ARCH first, in this order, then options; -h shows the usage")
    own.dry_run |= own.gpus is not None
    return own, words


def main(argv: list[str]) -> None:
    """Plan what ``argv`` says, and become the process that runs it. Raises ``UserError``."""
    own, words = read(argv)
    if own.archs:
        from fairseq_rskip.models._presets import overview

        return print(f"{overview()}\n\nfairseq-train --help lists fairseq's own.")
    if not own.dry_run:
        print_line("starting: reading the options and the data takes some seconds", "stderr")
    with contextlib.redirect_stdout(sys.stderr):  # fairseq logs there
        from fairseq_rskip.tools.train.plan import make_plan  # takes seconds to import

        plan = make_plan(own, words)
        plan.corpus.check_vocabulary(plan.save)
    about, command = "\n".join(plan.notes), shlex.join(plan.command)
    if not own.dry_run:
        if plan.finished:
            return print_line(f"{plan.save} has all {plan.end} updates: nothing to train", "stderr")
        plan.save.mkdir(parents=True, exist_ok=True)
        for path in filter(Path.is_file, [*plan.corpus.dictionaries(), plan.corpus.folder / PREPARATION]):
            write_bytes(plan.save / path.name, path.read_bytes())
    for line in [f"warning: {warning}" for warning in plan.warnings] + [about] * own.dry_run:
        print_line(line, "stderr")
    if own.dry_run:
        return print(command)
    run = [sys.executable, "-m", "fairseq_rskip.tools.train.main", str(plan.save), f"{about}\n{command}"]
    os.execv(sys.executable, [*run, *plan.command])


class Progress:
    """What the log says of a training: a line for each validation and every half minute, even if nothing is new."""

    def __init__(self) -> None:
        self.newest: dict[str, Record] = {}
        self.started = time.time()
        threading.Thread(target=self._print_regularly, daemon=True).start()

    def read(self, output: bytes) -> None:
        """Take in one line of the output, and print what is new in it."""
        line = output.decode("utf-8", "replace")
        if note := _SHOWN.search(line):
            print_line(note[1] or note[2])
        if new := record(line):
            self.newest = {**self.newest, new.kind: new}
            if new.source == "valid":
                print_line(summary(self.newest))

    def _print_regularly(self) -> None:
        while True:
            time.sleep(LINES_EVERY)
            print_line(f"{(time.time() - self.started) / 60:.1f} minutes: {summary(self.newest)}")


def run(save: Path, about: str, command: list[str]) -> int:
    """Train; return the exit status. ``about`` comes first in the log and on the screen. Raises ``UserError`` with the
    reason if fairseq-train fails."""
    with locked(save, LOCK) as lock, open(save / LOG, "ab", buffering=0) as log:
        if lock is None:
            raise UserError(f"another training writes to {save} ({lock_holder(save, LOCK)}); give another --save-dir")
        for path in [*save.glob("*.pt.tmp"), *save.glob("*.part")]:  # of a training that was killed
            path.unlink()
        print_line(f"{about}\nthe whole log: {save / LOG}")
        log.write(about.encode() + b"\n")
        progress = Progress()
        try:  # fairseq-train inherits the lock: it is held while anything writes there
            reason = follow(command, progress.read, log, [lock.fileno()])
        except Stopped as stopped:
            resume = f"resume from {save / LAST} with the same command"
            resume = resume if (save / LAST).exists() else "there is no checkpoint yet"
            print_line(f"stopped: {summary(progress.newest)}; {resume}", "stderr")
            return stopped.status
        if reason:
            raise UserError(f"fairseq-train failed: {reason}; its output is in {save / LOG}")
    print_line(f"trained in {(time.time() - progress.started) / 60:.1f} minutes: {summary(progress.newest)}")
    return 0


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(exit_status(lambda: run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
