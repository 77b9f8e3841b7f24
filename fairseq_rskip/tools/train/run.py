"""Run fairseq-train: its output in SAVE-DIR/train.log, progress on the screen, one line if it fails.

It runs as a process without torch and fairseq, so that the memory of planning is free again.
"""

import json
import re
import shutil
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import lock_holder, locked
from fairseq_rskip.tools.log import Record, record
from fairseq_rskip.tools.process import Stopped, explain, follow, stop_on_signals
from fairseq_rskip.tools.train.save import NUMBERED, complete_last, numbered, remove_unfinished

LOG, LOCK = "train.log", "train.lock"
LINES_EVERY = 30.0  # seconds between lines of progress, where there is no terminal
LAST_LINES = 500  # of output, in which the reason of a failure is searched
_SHOWN = re.compile(
    r"\| (Loaded checkpoint .* updates\))|\| WARNING \| (?:fairseq_rskip[\w.]*|fairseq\.tasks\.fairseq_task) \| (.*)"
)
_BAR = "{desc} |{bar:16}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """What the log says of a training: a live line on a terminal, else a line for each validation and every half
    minute. ``end`` is the last of ``unit`` (updates or epochs), 0 for none."""

    def __init__(self, end: int, unit: str):
        self.unit, self.epoch, self.updates, self.speed = unit, 0, 0, ""
        self.losses: dict[str, float] = {}  # train, valid, and best: the lowest valid
        form = _BAR if end else None
        quiet = not sys.stdout.isatty()
        self.bar = tqdm(
            total=end or None, unit=unit, file=sys.stdout, bar_format=form, dynamic_ncols=True, disable=quiet
        )
        self.closed, self.started = threading.Event(), time.time()
        if quiet:
            threading.Thread(target=self._print_regularly, daemon=True).start()

    def read(self, line: str) -> None:
        """Take in one line of the log, and print what is new in it."""
        note, figures = _SHOWN.search(line), record(line)
        if note:
            self.print(note[1] or note[2])
        if figures:
            self._take(figures)

    def _take(self, new: Record) -> None:
        loss, valid = new.values["loss"], new.source == "valid"
        ended = valid or (new.source == "train" and new.updates > self.updates)
        self.epoch, self.updates = new.epoch, new.updates
        self.losses["valid" if valid else "train"] = loss
        if valid:
            self.losses["best"] = min(loss, self.losses.get("best", loss))
        elif new.source == "train_inner":
            self.speed = f"{new.values['wps']:,.0f} words/s"
        if self.bar.disable:
            if ended:
                self.print(str(self))
            return
        done = self.updates if self.unit == "updates" else new.values.get("update", self.epoch)
        if not self.bar.n:  # time left is computed from here: starting took long, and a resumed training did less
            self.bar.reset()
            self.bar.initial = done
        self.bar.n = done
        self.bar.set_description_str(f"epoch {self.epoch}", refresh=False)
        self.bar.set_postfix_str(str(self).partition(", ")[2])

    def print(self, line: str) -> None:
        print_line(line, bar=None if self.bar.disable else self.bar)

    def _print_regularly(self) -> None:
        while not self.closed.wait(LINES_EVERY):
            minutes, seconds = divmod(int(time.time() - self.started), 60)
            print_line(f"{minutes}:{seconds:02} {self if self.epoch else 'starting, no update yet'}")

    def __str__(self) -> str:
        parts = [f"{name} loss {self.losses[name]:.3f}" for name in ("train", "valid") if name in self.losses]
        if self.losses.get("best") != self.losses.get("valid"):
            parts[-1] += f" (best {self.losses['best']:.3f})"
        return ", ".join(filter(None, [f"epoch {self.epoch}", f"{self.updates:,} updates", *parts, self.speed]))

    def close(self) -> None:
        self.closed.set()
        self.bar.close()


def train(save: Path, about: str, end: int, unit: str, command: list[str]) -> int:
    """Train; return the exit status. ``about`` comes first in the log and on the screen.

    Raises ``UserError`` with the reason if fairseq-train fails.
    """
    with locked(save, LOCK) as lock:  # fairseq-train inherits it: it is held while anything writes there
        if lock is None:
            raise UserError(f"another training writes to {save} ({lock_holder(save, LOCK)}); give another --save-dir")
        remove_unfinished(save)
        path, started, lines = save / LOG, time.time(), deque[bytes](maxlen=LAST_LINES)
        print_line(f"{about}\nthe whole log: {path}")
        progress, errors = Progress(end, unit), []
        with open(path, "ab", buffering=0) as log:

            def take(line: bytes) -> None:
                lines.append(line)
                try:
                    log.write(line)
                except OSError as error:  # a disk without room for the log does not end the training
                    errors.append(str(error))
                progress.read(line.decode("utf-8", "replace"))

            take(about.encode() + b"\n")
            lines.clear()  # it is no reason of a failure
            try:
                status = follow(command, take, inherit=[lock.fileno()])
            except Stopped as stopped:
                last = save / "checkpoint_last.pt"
                resume = (
                    f"; resume from {last} with the same command" if last.exists() else "; there is no checkpoint yet"
                )
                print_line(f"stopped after {progress.updates:,} updates{resume}", "stderr")
                return stopped.status
            finally:
                progress.close()
        if status:
            output = b"".join(lines).decode("utf-8", "replace")
            raise UserError(_reason(save, output + "".join(errors[:1]), status, started))
        print_line(f"trained in {(time.time() - started) / 60:.1f} minutes: {progress}")
        if sum(len(numbered(save, unit)) for unit in NUMBERED) < 2:
            print_line(
                f"warning: {save} has fewer than two numbered checkpoints, so evaluation cannot average. fairseq-train "
                "writes one at the end of an epoch, and every N updates with --save-interval-updates N",
                "stderr",
            )
        return 0


def _reason(save: Path, output: str, status: int, started: float) -> str:
    """Why fairseq-train failed. Removes what it has left unfinished."""
    full = re.search(r"No space left on device|Disk quota exceeded", output)
    free = shutil.disk_usage(save).free
    remove_unfinished(save)
    if not full:
        return f"{explain('fairseq-train', output, status)}; its output is in {save / LOG}"
    complete_last(save, started)
    resume = "the same command resumes" if (save / "checkpoint_last.pt").exists() else "there is no checkpoint yet"
    return f"no space left on the disk of {save} ({free / 1e6:,.0f} MB free); {resume}; the log is {save / LOG}"


def main(argv: list[str] | None = None) -> int:
    """``argv`` holds the arguments of ``train`` as JSON; returns the exit status."""
    job: dict[str, Any] = json.loads((sys.argv[1:] if argv is None else argv)[0])
    stop_on_signals()
    return exit_status(lambda: train(Path(job.pop("save")), **job))


if __name__ == "__main__":
    sys.exit(main())
