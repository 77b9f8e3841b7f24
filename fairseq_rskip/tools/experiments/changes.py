"""How the experiments of a command line differ from those of their file: data, length, options."""

from dataclasses import dataclass, replace
from typing import Any

from fairseq_rskip.errors import UserError

from .plan import make_cell
from .records import Experiment, clean
from .tasks import TASKS

# the options that set a training's length, each with the one that follows it
LENGTHS = {
    "max-update": "warmup-updates",
    "max-epoch": "warmup-updates",
    "iterations": "warmup-iterations",
}


@dataclass(frozen=True)
class Changes:
    """What ``--corpus`` and ``--set`` change of a file's experiment."""

    data: str  # the name of other data, or ""
    length: float  # of a training, relative to the file's
    options: dict[str, Any]  # all others

    @property
    def are_none(self) -> bool:
        return not self.data and self.length == 1 and not self.options

    def name(self, experiment: Experiment) -> str:
        """A name of the experiment as changed, for files and folders."""
        words = [experiment.name]
        if self.data:
            words.append(self.data)
        if self.length != 1:
            words.append(f"scale{self.length:g}")
        for option, value in sorted(self.options.items()):
            words.append(f"{option}-{value}")
        return clean("-".join(words))


def changes_of(experiment: Experiment) -> Changes:
    """How ``experiment`` differs from its file; options that change no result do not count."""
    free = TASKS[experiment.task].free
    options = {name: value for name, value in experiment.changed.items() if name not in free}
    data = _other_data(experiment)
    if not LENGTHS.keys() & options.keys():
        return Changes(data, 1.0, options)
    length, in_file = _relative_length(experiment)
    if length is None:
        return Changes(data, 1.0, options)

    covered = set(LENGTHS)
    for warm_up in set(LENGTHS.values()) & options.keys() & in_file.keys():
        if options[warm_up] == round(length * in_file[warm_up]):  # in proportion
            covered.add(warm_up)
    others = {name: value for name, value in options.items() if name not in covered}
    return Changes(data, length, others)


def _other_data(experiment: Experiment) -> str:
    """The name of --corpus; "" without, and where the file has the same data."""
    if not experiment.corpus:
        return ""
    task = TASKS[experiment.task]
    in_file = {column.data or experiment.table.data for column in experiment.columns.values()}
    data = task.data_name(experiment.corpus)
    if data in in_file or data in {task.data_name(each) for each in in_file}:
        return ""
    return data


def _relative_length(experiment: Experiment) -> tuple[float | None, dict[str, Any]]:
    """The first run's length relative to that of the file, and the file's options.

    The length is None if they have different units, and where the file's own options are refused:
    fp16 without a GPU, for example.
    """
    cell = next((cell for cell in experiment.cells if cell.trials), None)
    if cell is None:
        return None, {}

    trial = cell.trials[0]
    run = trial.run
    in_file = make_cell(experiment, cell.row, cell.column, changed={})
    in_file = replace(in_file, options={**in_file.options, **trial.values_of_run})
    try:
        whole, _ = TASKS[experiment.task].make_run(run.data, in_file, experiment)
    except UserError:
        return None, in_file.options
    if whole.unit != run.unit or not whole.length:
        return None, in_file.options
    return run.length / whole.length, in_file.options
