"""Run fairseq-train: its output in SAVE-DIR/train.log, progress on the screen, one line if it fails.

It runs as a process without torch and fairseq, so that the memory of planning is free again.
"""

import contextlib
import re
import sys
import threading
import time
from collections import deque
from pathlib import Path

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import lock_holder, locked
from fairseq_rskip.tools.log import record
from fairseq_rskip.tools.process import Stopped, explain, follow, stop_on_signals, tail
from fairseq_rskip.tools.train.save import NUMBERED, numbered, remove_unfinished

LOG, LOCK = "train.log", "train.lock"
LINES_EVERY = 30.0  # seconds between lines of progress
LAST_LINES = 500  # of output, in which the reason of a failure is searched
_SHOWN = re.compile(
    r"\| (Loaded checkpoint .* updates\))|\| WARNING \| (?:fairseq_rskip[\w.]*|fairseq\.tasks\.fairseq_task) \| (.*)"
)


class Progress:
    """What the log says of a training: a line for each validation and every half minute."""

    def __init__(self) -> None:
        self.epoch, self.updates, self.speed = 0, 0, ""
        self.losses: dict[str, float] = {}  # train, valid, and best: the lowest valid
        self.closed, self.started = threading.Event(), time.time()
        threading.Thread(target=self._print_regularly, daemon=True).start()

    def read(self, line: str) -> None:
        """Take in one line of the log, and print what is new in it."""
        if note := _SHOWN.search(line):
            print_line(note[1] or note[2])
        new = record(line)
        if not new:
            return
        loss, valid = new.values["loss"], new.source == "valid"
        ended = valid or (new.source == "train" and new.updates > self.updates)
        self.epoch, self.updates = new.epoch, new.updates
        self.losses["valid" if valid else "train"] = loss
        if valid:
            self.losses["best"] = min(loss, self.losses.get("best", loss))
        elif new.source == "train_inner":
            self.speed = f"{new.values['wps']:,.0f} words/s"
        if ended:
            print_line(str(self))

    def _print_regularly(self) -> None:
        while not self.closed.wait(LINES_EVERY):
            minutes, seconds = divmod(int(time.time() - self.started), 60)
            print_line(f"{minutes}:{seconds:02} {self if self.epoch else 'starting, no update yet'}")

    def __str__(self) -> str:
        parts = [f"{name} loss {self.losses[name]:.3f}" for name in ("train", "valid") if name in self.losses]
        if self.losses.get("best") != self.losses.get("valid"):
            parts[-1] += f" (best {self.losses['best']:.3f})"
        return ", ".join(filter(None, [f"epoch {self.epoch}", f"{self.updates:,} updates", *parts, self.speed]))


def train(save: Path, about: str, command: list[str]) -> int:
    """Train; return the exit status. ``about`` comes first in the log and on the screen.

    Raises ``UserError`` with the reason if fairseq-train fails.
    """
    with locked(save, LOCK) as lock, open(save / LOG, "ab", buffering=0) as log:
        if lock is None:
            raise UserError(f"another training writes to {save} ({lock_holder(save, LOCK)}); give another --save-dir")
        remove_unfinished(save)
        print_line(f"{about}\nthe whole log: {save / LOG}")
        log.write(about.encode() + b"\n")
        progress, lines = Progress(), deque[bytes](maxlen=LAST_LINES)

        def take(line: bytes) -> None:
            lines.append(line)
            with contextlib.suppress(OSError):  # a disk without room for the log does not end the training
                log.write(line)
            progress.read(line.decode("utf-8", "replace"))

        try:  # fairseq-train inherits the lock: it is held while anything writes there
            status = follow(command, take, inherit=[lock.fileno()])
        except Stopped as stopped:
            last = save / "checkpoint_last.pt"
            resume = f"resume from {last} with the same command" if last.exists() else "there is no checkpoint yet"
            print_line(f"stopped after {progress.updates:,} updates; {resume}", "stderr")
            return stopped.status
        finally:
            progress.closed.set()
        if status:
            remove_unfinished(save)
            raise UserError(f"{explain('fairseq-train', tail([*lines]), status)}; its output is in {save / LOG}")
    print_line(f"trained in {(time.time() - progress.started) / 60:.1f} minutes: {progress}")
    if sum(len(numbered(save, unit)) for unit in NUMBERED) < 2:
        print_line(
            f"warning: {save} has fewer than two numbered checkpoints, so evaluation cannot average. fairseq-train "
            "writes one at the end of an epoch, and every N updates with --save-interval-updates N",
            "stderr",
        )
    return 0


def main() -> None:
    """Train as the command line says: SAVE-DIR, what comes first in the log, the command."""
    stop_on_signals()
    save, about, *command = sys.argv[1:]
    sys.exit(exit_status(lambda: train(Path(save), about, command)))


if __name__ == "__main__":
    main()
