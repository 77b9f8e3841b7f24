"""Run fairseq-train: its output in SAVE-DIR/train.log, progress on the screen.

``python -m fairseq_rskip.tools.train.run SAVE-DIR ABOUT COMMAND ...`` is a process without torch
and fairseq, so that the memory of planning is free again.
"""

import os
import re
import sys
import threading
import time
from pathlib import Path

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.fairseq_log import Record, record
from fairseq_rskip.files import lock_holder, locked, write_bytes
from fairseq_rskip.tools.corpus import PREPARATION
from fairseq_rskip.tools.process import Stopped, follow, is_divergence, stop_on_signals
from fairseq_rskip.tools.training_files import LAST, LOG, summary

LOCK = "train.lock"
LINES_EVERY = 30.0  # seconds between lines of progress
# lines of fairseq's log that are shown: a resumed checkpoint, our warnings, those about the data
_LOADED = re.compile(r"\| (Loaded checkpoint .* updates\))")
_SAVED = re.compile(r"\| (?:Loaded|Saved) checkpoint .* @ (\d+) updates")
_WARNING = re.compile(r"WARNING \| (?:fairseq_rskip|fairseq\.tasks)[\w.]* \| (.*)")
# fairseq does not say of which option this is, nor that it is a warning
_TOO_LONG = re.compile(r"\| ([\d,]+) samples have invalid sizes and will be skipped")


class Progress:
    """Lines about a training from its log: one for each validation.

    Within a ``with`` block there is also one every half minute.
    """

    def __init__(self) -> None:
        self.newest: dict[str, Record] = {}
        self.saved = ""  # updates in the last checkpoint, where the log has named one
        self.started = time.time()
        self.ended = threading.Event()

    def __enter__(self) -> "Progress":
        threading.Thread(target=self._print_regularly, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.ended.set()

    @property
    def summary(self) -> str:
        """The newest figures of the log."""
        if self.saved and not self.newest:
            return f"no update logged yet after the {self.saved} of the checkpoint"
        return summary(self.newest)

    @property
    def minutes(self) -> str:
        """How long the training has run."""
        return f"{(time.time() - self.started) / 60:.1f} minutes"

    def read(self, output: bytes) -> None:
        """Read one line of the output, and print what is new in it."""
        line = output.decode("utf-8", "replace")
        too_long = _TOO_LONG.search(line)
        loaded, warning = _LOADED.search(line), _WARNING.search(line)
        if too_long:
            subject = "1 sentence is" if too_long[1] == "1" else f"{too_long[1]} sentences are"
            print_line(
                f"warning: {subject} longer than --max-tokens or the model's positions and left out"
            )
        elif warning:
            print_line(f"warning: {warning[1]}")
        elif loaded:
            print_line(loaded[1])
        saved = _SAVED.search(line)
        if saved:
            self.saved = saved[1]

        new = record(line)
        if new is None:
            return
        self.newest = {**self.newest, new.source: new}
        if new.source == "valid":
            print_line(summary(self.newest))

    def _print_regularly(self) -> None:
        while not self.ended.wait(LINES_EVERY):
            print_line(f"{self.minutes}: {self.summary}")


def start(save: Path, about: str, command: list[str]) -> None:
    """Become the process that runs ``command``; it first prints and logs ``about``."""
    module = "fairseq_rskip.tools.train.run"
    os.execv(sys.executable, [sys.executable, "-m", module, str(save), about, *command])


def run(save: Path, about: str, command: list[str]) -> int:
    """Train, and return the exit status. Raises ``UserError`` with the reason of a failure."""
    with locked(save, LOCK) as lock:
        if lock is None:
            raise UserError(
                f"another training writes to {save} ({lock_holder(save, LOCK)}); "
                "give another --save-dir"
            )
        _copy_vocabulary(Path(command[1]), save)  # the first word of fairseq-train is the data
        left_by_a_killed_training = [*save.glob("*.pt.tmp"), *save.glob("*.part")]
        for path in left_by_a_killed_training:
            path.unlink()

        print_line(f"{about}\nthe whole log: {save / LOG}")
        with open(save / LOG, "ab", buffering=0) as log, Progress() as progress:
            log.write(about.encode() + b"\n")
            try:  # fairseq-train inherits the lock: it is held while anything writes there
                reason = follow(command, progress.read, log, [lock.fileno()])
            except Stopped as stopped:
                resume = "there is no checkpoint yet"
                if (save / LAST).exists():
                    updates = f" at {progress.saved} updates" if progress.saved else ""
                    resume = f"the same command resumes from {save / LAST}{updates}"
                print_line(f"stopped: {progress.summary}; {resume}", "stderr")
                return stopped.status
    if reason:
        advice = ""
        if is_divergence(reason):
            advice = "; try a lower --lr"
        elif "parameter group that doesn't match" in reason:
            advice = (
                "; the optimizer's state is of another model, such as stock fairseq's: expected "
                "--finetune-from-model, or --restore-file with --reset-optimizer "
                "--reset-lr-scheduler --reset-meters --reset-dataloader"
            )
        raise UserError(f"fairseq-train failed: {reason}{advice}; its output is in {save / LOG}")
    print_line(f"trained in {progress.minutes}: {summary(progress.newest)}")
    return 0


def _copy_vocabulary(data_bin: Path, save: Path) -> None:
    """Copy the dictionaries and preparation.json of the data to the checkpoints' folder.

    The caller holds its lock: another training there keeps its own.
    """
    for path in [*data_bin.glob("dict*.txt"), data_bin / PREPARATION]:
        if path.is_file():
            write_bytes(save / path.name, path.read_bytes())


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(exit_status(lambda: run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])))
