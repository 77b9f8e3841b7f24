"""A task of ``rskip run``: what it has to say of its data, options, runs and results."""

import abc
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.files import why_no_file
from fairseq_rskip.tools.corpus import NAMES

from .records import Cell, Experiment, Run

RSKIP = [sys.executable, "-m", "fairseq_rskip.tools"]


class Task(abc.ABC):
    """What a table's runs train, and how they are measured. :mod:`.tasks` has all by name."""

    # data: the known names; any other is a folder, which a command line has after the prefix
    names: Iterable[str] = NAMES
    prefix = ""

    # metrics
    metric: str  # where a table names none
    metrics: Mapping[str, bool]  # name -> whether lower is better
    over_seeds: Iterable[str]  # those of a whole run; the others are of sentences
    meanings: Mapping[str, str] = {}  # what a report says of some
    held_out: str  # the metric that decides a sweep

    # options of the training command
    has_architectures: bool  # whether a row names one
    reserved: Iterable[str]  # those that the plan sets, not a row
    parent: str  # the option that names the checkpoint which a training starts from
    free: Iterable[str]  # those that do not change results

    weights: Iterable[str]  # files in a run's folder of which one is there once it has trained

    def find_data(self, data: str) -> str:
        """``data`` as the training command takes it. Raises ``UserError``."""
        if data in self.names:
            return data
        path = Path(data.removeprefix(self.prefix)).expanduser()
        if not path.is_dir():
            hint = did_you_mean(data, self.names, f"expected one of {', '.join(self.names)}")
            raise UserError(f"no corpus or folder named {data!r}; {hint}, or a folder")
        return f"{self.prefix}{path.resolve()}"

    def data_folder(self, data: str) -> Path:
        """The folder of ``data``; a relative path if it is no folder.

        A run's identity has only its name.
        """
        return Path(data.removeprefix(self.prefix))

    @abc.abstractmethod
    def data_name(self, data: str) -> str:
        """The name of ``data`` in a report and in a run's identity: a folder's own name."""

    def data_checksum(self, data: str) -> str:
        """What distinguishes the present content of ``data``; "" where the training compares it."""
        return ""

    def check_data(self, data: str) -> None:
        """Raise ``UserError`` for data that a run would refuse only after hours."""
        return  # by default there is none

    def parent_of(self, run: Run) -> Path | None:
        """The checkpoint that the training of ``run`` starts from; None without one."""
        name = run.options.get(self.parent)
        return Path(str(name)).expanduser() if name else None

    def has_begun(self, run: Run) -> bool:
        """Whether the training of ``run`` has a checkpoint."""
        return any((run.folder / name).is_file() for name in self.weights)

    def missing_parent(self, run: Run) -> str:
        """What is wrong with that checkpoint; "" of a training that has one of its own already."""
        parent = self.parent_of(run)
        if parent is None or self.has_begun(run):
            return ""
        problem = why_no_file(parent)
        if not problem:
            return ""
        return f"{self.parent}: {parent} {problem}; expected a checkpoint, a file"

    @abc.abstractmethod
    def make_run(self, data: str, cell: Cell, experiment: Experiment) -> tuple[Run, list[str]]:
        """The run, without seed and folder, and warnings.

        Raises ``UserError`` for what its commands would refuse.
        """

    @abc.abstractmethod
    def commands(self, run: Run) -> list[list[str]]:
        """The command lines that fill the run's folder, in their order."""

    @abc.abstractmethod
    def progress(self, run: Run) -> tuple[float, str]:
        """The part of the training that is done, from 0 to 1, and its losses."""

    @abc.abstractmethod
    def measure(self, run: Run) -> dict[str, Any] | None:
        """The results of a training: ``values`` by metric, and further entries of a report.

        None if it has not finished.
        """

    def scores(self, run: Run) -> dict[str, Any] | None:
        """The evaluation of a trained run: ``values`` by metric, and further entries of a report.

        None if it has not finished, or the task has none.
        """
        return None


def own_rule(arch: str, options: dict[str, Any]) -> dict[str, str]:
    """The checksum of the file of the rule that is trained, if it is of your own, for an identity.

    With another text the rule is another one, and is trained again.
    """
    from fairseq_rskip.residual import own_rules

    kind = options.get("skip-kind")
    if kind is None and arch:
        from fairseq_rskip.models import default_kind

        kind = default_kind(arch)
    checksum = own_rules.checksum(str(kind))
    return {"rule": checksum} if checksum else {}
