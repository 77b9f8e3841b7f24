"""Run a planned fairseq-train: its whole output in SAVE-DIR/train.log, progress on the screen, one line if it fails.

A process of its own, which imports neither torch nor fairseq: the planner has let go of its memory, and of the GPU.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections import deque
from pathlib import Path

from tqdm import tqdm

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import locked
from fairseq_rskip.tools.process import Stopped, explain, follow, full_disk, stop_on_signals, tail
from fairseq_rskip.tools.train.save import NUMBERED, complete_last, numbered, tidy

LOG, LOCK = "train.log", "train.lock"
KEPT = 500  # lines of output, in which the reason of a failure is looked for
_RECORD = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})")  # fairseq with --log-format json
_RESUMED = re.compile(r"\| (Loaded checkpoint .* updates\))")
_WARNING = re.compile(r"\| WARNING \| (?:fairseq_rskip[\w.]*|fairseq\.tasks\.fairseq_task) \| (.*)")
_BAR = "{desc} |{bar:16}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"


class Log:
    """SAVE-DIR/train.log, and its last lines. A disk that has no room for it does not end the training."""

    def __init__(self, save: Path):
        self.path, self.lines, self.error = save / LOG, deque(maxlen=KEPT), ""
        self.file = open(self.path, "ab")  # noqa: SIM115 (as long as the training)

    def write(self, line: bytes) -> None:
        """Append ``line``."""
        self.lines.append(line)
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            self.error = str(error)


class Progress:
    """Reads fairseq-train's log line by line. ``end`` is the last update, or the last epoch, or 0 for none."""

    def __init__(self, end: int, unit: str):
        self.end, self.unit = end, unit
        self.updates, self.speed = 0, ""
        self.losses: dict[str, float] = {}  # train, valid, and best: the lowest valid
        self.told = 0  # the update that the last line was about
        self.bar: tqdm | None = None
        if sys.stdout.isatty():
            form = _BAR if end else None
            self.bar = tqdm(total=end or None, unit=unit, file=sys.stdout, bar_format=form, dynamic_ncols=True)

    def read(self, line: str) -> None:
        """Take in one line of the log, and say what is new in it."""
        for note in (_RESUMED.search(line), _WARNING.search(line)):
            if note:
                print_line(note.group(1), bar=self.bar)
        record = _RECORD.search(line)
        if not record:
            return
        source = record.group(1)
        found = {re.sub(f"^{source}_", "", name): value for name, value in json.loads(record.group(2)).items()}
        self.updates = int(found["num_updates"])
        self.losses["valid" if source == "valid" else "train"] = loss = float(found["loss"])
        if source == "valid":
            self.losses["best"] = min(loss, self.losses.get("best", loss))
        elif source == "train_inner":
            self.speed = f"{float(found['wps']):,.0f} words/s"
        if self.bar is not None:
            self._move(found)
        elif source == "valid" or (source == "train" and self.updates > self.told):
            self.told = self.updates
            print_line(f"epoch {found['epoch']}, {self}")
            self.losses.pop("train", None)  # the next line has a newer one, or none

    def _move(self, found: dict) -> None:
        done = self.updates if self.unit == "updates" else found.get("update", found["epoch"])
        if not self.bar.n:  # time left is reckoned from here: the start took long, and a resumed run did less
            self.bar.reset()
            self.bar.initial = done
        self.bar.n = done
        self.bar.set_description_str(f"epoch {found['epoch']}", refresh=False)
        self.bar.set_postfix_str(str(self))

    def __str__(self) -> str:
        told = [f"{name} loss {self.losses[name]:.3f}" for name in ("train", "valid") if name in self.losses]
        if self.losses.get("best") != self.losses.get("valid"):
            told[-1] += f" (best {self.losses['best']:.3f})"
        return ", ".join(filter(None, [f"{self.updates:,} updates", *told, self.speed]))

    def close(self) -> None:
        """Leave the live line as it is."""
        if self.bar is not None:
            self.bar.close()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """What the planner hands over."""
    parser = argparse.ArgumentParser(prog="python -m fairseq_rskip.tools.train.run", description=__doc__)
    parser.add_argument("--save", type=Path, required=True, help="SAVE-DIR")
    parser.add_argument("--about", required=True, help="lines that stand first in the log, and on the screen")
    parser.add_argument("--end", type=int, default=0, help="the last update, or epoch")
    parser.add_argument("--unit", choices=("updates", "epochs"), default="updates")
    parser.add_argument("command", nargs="+", help="fairseq-train and its options, behind --")
    return parser.parse_args(argv)


def train(options: argparse.Namespace) -> int:
    """Train; returns the exit status. Raises ``UserError`` with the reason if fairseq-train fails."""
    with locked(options.save, LOCK) as lock:  # fairseq-train inherits it: it is held as long as anything writes there
        if lock is None:
            raise UserError(f"another training writes to {options.save}")
        tidy(options.save)
        log, progress, started = Log(options.save), Progress(options.end, options.unit), time.time()
        log.write(options.about.encode() + b"\n")
        log.lines.clear()  # no reason of a failure is in there
        print_line(f"{options.about}\nthe whole log: {log.path}")

        def take(line: bytes) -> None:
            log.write(line)
            progress.read(line.decode("utf-8", "replace"))

        try:
            status = follow(options.command, take, inherit=[lock.fileno()])
        except Stopped as stopped:
            progress.close()
            return _say_stopped(options.save, stopped)
        progress.close()
        if status != 0:
            raise UserError(_reason(options.save, log, status, started))
        print_line(f"trained in {(time.time() - started) / 60:.1f} minutes: {progress}")
        _say_what_can_be_averaged(options.save)
        return 0


def _say_stopped(save: Path, stopped: Stopped) -> int:
    last = save / "checkpoint_last.pt"
    where = f"; the same command resumes from {last}" if last.exists() else " before the first checkpoint was written"
    print_line(f"stopped{where}", "stderr")
    return stopped.status


def _reason(save: Path, log: Log, status: int, started: float) -> str:
    """Why fairseq-train failed; what it has left half done is cleared away first."""
    output = tail(log.lines)
    if full_disk(output + log.error):
        free = shutil.disk_usage(save).free
        tidy(save)
        complete_last(save, started)
        saved = "; make room, then the same command resumes from checkpoint_last.pt"
        saved = saved if (save / "checkpoint_last.pt").exists() else ", and no checkpoint had been written"
        return f"no space left on the disk of {save} ({free / 1e6:,.0f} MB free){saved}; the log is {log.path}"
    tidy(save)
    return f"{explain('fairseq-train', output, status)}; its output is in {log.path}"


def _say_what_can_be_averaged(save: Path) -> None:
    """fairseq gives no number to the checkpoint where --max-update ends an epoch midway."""
    found = sum(len(numbered(save, unit)) for unit in NUMBERED)
    if found < 2:
        line = f"train.sh: {found} numbered checkpoint(s) in {save}: nothing to average, evaluate.sh will take a single"
        line += " one. fairseq writes them where an epoch ends, or every N updates with --save-interval-updates N"
        print_line(line, "stderr")


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    options = parse(argv)
    stop_on_signals()
    return exit_status(lambda: train(options))


if __name__ == "__main__":
    sys.exit(main())
