"""The finished runs below folders, as their records have them, whatever table they are of."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rskip.analysis.skip_log import logs_below

from .run_folder import RECORD, read_record, trained


@dataclass(frozen=True)
class FinishedRun:
    """A training that has ended, and what it was evaluated to."""

    folder: Path
    label: str  # of its row; "" where the record has none
    arch: str
    options: dict[str, Any]  # of the training command, without dashes
    seed: int
    values: dict[str, float]  # the training's results, such as valid_loss
    scores: dict[str, dict[str, float]]  # name of an evaluation -> metric -> value

    @property
    def skip_log(self) -> Path | None:
        """The log of its skip connections; None if it has none."""
        logs = logs_below(self.folder)
        return logs[0] if logs else None


def finished_runs(*folders: Path) -> Iterator[FinishedRun]:
    """The finished runs in each of ``folders`` and below it, by their paths."""
    paths: list[Path] = []
    for folder in folders:
        paths += sorted(folder.rglob(RECORD))
    for path in paths:
        record = read_record(path.parent)
        metrics = trained(record)
        if not metrics:
            continue
        settings = record["settings"]
        evaluations = record.get("scores", {})
        yield FinishedRun(
            folder=path.parent,
            label=settings.get("label", ""),
            arch=settings.get("arch", ""),
            options=settings["options"],
            seed=record["seed"],
            values=metrics["values"],
            scores={name: scores["values"] for name, scores in evaluations.items()},
        )
