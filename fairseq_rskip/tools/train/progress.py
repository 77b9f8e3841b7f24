"""What a training says while it runs: one live line on a terminal, elsewhere a line for each validation or epoch."""

import json
import re
import sys
from typing import Dict, Optional

from tqdm import tqdm

from fairseq_rskip.tools.console import print_line

_RECORD = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})")  # fairseq with --log-format json
_RESUMED = re.compile(r"\| (Loaded checkpoint .* updates\))")
_WARNING = re.compile(r"\| WARNING \| (?:fairseq_rskip[\w.]*|fairseq\.tasks\.fairseq_task) \| (.*)")
_BAR = "{desc} |{bar:16}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Reads fairseq-train's log line by line. ``end`` is the last update, or the last epoch, or 0 for none."""

    def __init__(self, end: int, unit: str):
        self.end, self.unit = end, unit
        self.updates, self.speed = 0, ""
        self.losses: Dict[str, float] = {}  # train, valid, and best: the lowest valid
        self.told = 0  # the update that the last line was about
        self.bar: Optional[tqdm] = None
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

    def _move(self, found: Dict) -> None:
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
