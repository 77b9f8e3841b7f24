"""The records between a YAML file and a printed cell.

Table and Row are what the file says; Experiment, Cell, Run and Result are computed.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

# kinds of state of a run
DONE, RUNNING, FAILED, STOPPED, NEW = "done", "running", "failed", "stopped", "not run"
DIVERGED = "diverged"  # failed because its numbers left the finite range: it would again
UNSCORED = "trained, not evaluated"
LONGEST_NAME = 150  # of a folder, in characters
NO_VALUE = "no value"  # done, and the metric is missing or not finite

Number = int | FiniteFloat
Options = dict[str, bool | Number | str | list[int]]
Sweep = dict[str, Annotated[list[Number | str], Field(min_length=2)]]
SWEEP = Field(description="a list of two values or more for each option, such as {lr: [0.1, 0.2]}")
Files = Annotated[
    list[str],
    Field(min_length=2, max_length=2, description="a list of two files, source and target"),
]


class Section(BaseModel):
    """A mapping of the YAML file. An unknown key is an error; errors quote the descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Row(Section):
    """One line of a table.

    ``sweep`` replaces the table's ({} for none); ``run: false`` only quotes a published value.
    """

    label: Annotated[str, Field(pattern=r"\S", description="a string that is not blank")]
    equation: str = ""
    arch: str | dict[str, str] = ""
    options: Options = {}
    sweep: Annotated[Sweep | None, SWEEP] = None
    reported: Number | dict[str, Number] | None = None
    parameters: str = ""  # as published
    baseline: str = ""
    seeds: Annotated[
        list[NonNegativeInt] | None,
        Field(min_length=1, description="integers from 0, a list; the table's if it is missing"),
    ] = None
    evaluate: Options = {}
    run: bool = True


class Table(Section):
    """A table, or one experiment, as its file has it; docs/reproduce.md explains the keys."""

    class Column(Section):
        """What distinguishes a column's cells: a data set, or more options.

        With ``sweep_of`` a row takes the value that its sweep chose in that column, times the
        option's factor in ``scale``, and is not swept here.
        """

        data: str = ""
        options: Options = {}
        sweep_of: str = ""
        scale: dict[str, Number] = {}

    class Pairs(Section):
        """Your own text, prepared in ``folder``; ``source`` and ``target`` are language codes."""

        source: str
        target: str
        train: Files
        valid: Files
        test: Files
        folder: str = ""
        options: Options = {}

    class Documents(Section):
        """A text file, or a folder of them, for a language model."""

        text: str
        folder: str = ""
        options: Options = {}

    class Published(Section):
        """A published corpus, prepared with other options than by default."""

        corpus: str
        folder: str = ""
        options: Options = {}

    data: Annotated[str, Field(description="a corpus, a folder, or a mapping with your own text")]
    rows: Annotated[list[Row], Field(min_length=1, description="a list with at least one row")]
    title: str = ""
    source: str = ""
    note: str = ""
    arch: str | dict[str, str] = ""  # of the rows without one
    task: str = ""
    metric: str = ""
    also: Annotated[list[str], Field(description="a list of metrics, such as [valid_loss]")] = []
    seeds: Annotated[
        list[NonNegativeInt], Field(min_length=1, description="integers from 0: one or a list")
    ] = [1]
    baseline: str = ""
    columns: Annotated[
        dict[str, Column], Field(min_length=1, description="a mapping, name: {data, options, …}")
    ]
    options: Options = {}
    evaluate: Options = {}
    sweep: Annotated[Sweep, SWEEP] = {}
    test: Literal["", "seeds", "randomisation"] = ""
    figure: Literal["", "gradients", "ratio", "curves", "course"] = ""
    figure_options: Options = {}


@dataclass(frozen=True)
class Run:
    """One training, and its evaluation if ``scored``, with its record in ``folder``/run.json."""

    task: str
    data: str
    options: dict[str, Any]  # of the training command, without dashes
    identity: dict[str, Any]  # what distinguishes the training from others
    name: str  # the same, readable and shorter
    length: int  # of the training, in ``unit``
    unit: str
    arch: str = ""
    scored: bool = False
    evaluate: dict[str, Any] = field(default_factory=dict)  # options of evaluate.sh
    averaged: int = 0  # the most checkpoints that a row of its table averages
    seed: int = 1
    folder: Path = Path()
    label: str = ""  # of its row

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def titled(self) -> str:
        """Its row's label and its folder, for a line on the screen."""
        return f"{self.label} ({self})" if self.label else str(self)

    @property
    def evaluation(self) -> str:
        """The name of the folder of its evaluation."""
        return evaluation_name(self.evaluate)

    def folder_in(self, out: Path, seed: int) -> Path:
        """OUT/runs/<name>-<hash of task and identity>/seed<n>."""
        content = json.dumps([self.task, self.identity], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        return out / "runs" / f"{clean(self.name)}-{digest}" / f"seed{seed}"


class State(NamedTuple):
    """What has become of a run, such as ``running 20%: train loss 7.8`` of the kind ``RUNNING``."""

    kind: str
    brief: str = ""  # the kind with its progress; "" for the kind alone
    detail: str = ""

    @property
    def short(self) -> str:
        return self.brief or self.kind

    def __str__(self) -> str:
        return f"{self.short}: {self.detail}" if self.detail else self.short


@dataclass(frozen=True)
class Trial:
    """A combination of a sweep's values, {} without a sweep, and its run.

    ``decided_by`` is the run of another column that tries these values, None where ``run`` does.
    Once the folders are read, ``held_out`` and ``state`` are those of the ``deciding_run``.
    """

    values: dict[str, Any]
    run: Run
    decided_by: Run | None = None
    held_out: float | None = None
    state: State = State(NEW)

    @property
    def deciding_run(self) -> Run:
        """The run whose held-out metric is compared."""
        return self.decided_by or self.run

    @property
    def values_of_run(self) -> dict[str, Any]:
        """The values as ``run`` has them: a column may scale those of its sweep."""
        return {name: self.run.options[name] for name in self.values}


@dataclass(frozen=True)
class Cell:
    """Where a row and a column meet; it has a trial for each combination of the sweep's values."""

    row: Row
    column: str
    arch: str
    data: str
    options: dict[str, Any]
    sweep: dict[str, list[Any]]
    evaluate: dict[str, Any]
    reported: float | None
    run: bool
    trials: list[Trial] = field(default_factory=list)

    def __str__(self) -> str:
        return " / ".join(filter(None, [self.row.label, self.column]))

    @property
    def decides(self) -> bool:
        """Whether its own runs choose between the values of its sweep."""
        return len(self.trials) > 1 and self.trials[0].decided_by is None

    @property
    def runs(self) -> list[Run]:
        """The runs that may be started for this cell, those that decide its sweep among them."""
        own = [trial.run for trial in self.trials]
        return own + [trial.decided_by for trial in self.trials if trial.decided_by]


@dataclass(frozen=True)
class Experiment:
    """A ``table`` with its defaults, the choices of the command line, and its cells."""

    table: Table
    path: Path
    task: str
    metric: str
    title: str
    baseline: str
    rows: list[Row]  # those that were chosen, as the columns and the seeds
    columns: dict[str, Table.Column]
    chosen_seeds: list[int]  # those of --seeds; [] for the file's
    # your own text, by the folder it is prepared in
    texts: dict[str, Table.Pairs | Table.Documents | Table.Published]
    corpus: str  # --corpus, or ""
    changed: dict[str, Any]  # the options of --set
    cells: list[Cell] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # from the training commands

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def runs(self) -> list[Run]:
        """The runs that may be started for the cells."""
        return [run for cell in self.cells for run in cell.runs]

    def seeds_of(self, row: Row) -> list[int]:
        """The seeds with which a row is trained."""
        return self.chosen_seeds or row.seeds or self.table.seeds

    @property
    def seeds(self) -> list[int]:
        """The seeds of all rows."""
        return sorted({seed for row in self.rows for seed in self.seeds_of(row)})

    @property
    def sweep_seed(self) -> int:
        """The seed with which a sweep tries each value."""
        return self.table.seeds[0]


@dataclass(frozen=True)
class Comparison:
    """How a row compares with its ``baseline``."""

    baseline: str
    difference: float | None = None
    interval: tuple[float, float] | None = None  # 95 %, over seeds
    p: Mapping[str, float] = field(default_factory=dict)  # by seed, or by "" for a test over seeds
    adjusted: Mapping[str, float] = field(default_factory=dict)
    p_over_seeds: float | None = None
    untested: str = ""  # why there is no p
    seeds: int = 0  # number of seeds that both have
    tests: int = 0  # number of tests that Holm's correction covers


RunsAndValues = tuple[tuple[Path, float], ...]  # the folder and the value of each run of a row


@dataclass(frozen=True)
class Result:
    """The states and the values of a cell's runs, and how they compare with the baseline."""

    cell: Cell
    runs: dict[int, Run] = field(default_factory=dict)  # by seed, {} until the sweep is decided
    states: dict[int, State] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the finished runs
    values: dict[int, float] = field(default_factory=dict)  # of the table's metric
    # of its sweep; in a column with sweep_of those of the other column, until that has decided
    trials: list[Trial] = field(default_factory=list)
    chosen: dict[str, Any] = field(default_factory=dict)  # the best trial's values
    is_baseline: bool = False
    comparison: Comparison | None = None
    best: bool = False

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def runs_and_values(self) -> RunsAndValues:
        """The folder and the value of each run with one: what makes two rows the same.

        Rows that differ in ``evaluate`` alone share the folders of their trainings.
        """
        return tuple((self.runs[seed].folder, value) for seed, value in self.values.items())

    def also(self, metric: str) -> list[float]:
        """Another metric of the seeds in ``values``; [] if one lacks it."""
        values = [self.records[seed]["values"].get(metric) for seed in self.values]
        return [] if None in values else values


def clean(name: str) -> str:
    """``name`` as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:LONGEST_NAME]


def evaluation_name(options: Mapping[str, Any]) -> str:
    """The folder of an evaluation: "evaluation", then evaluate.sh's options with their values."""
    words = [f"{name}{value}" for name, value in sorted(options.items())]
    name = "-".join(["evaluation", *words])
    if len(name) <= LONGEST_NAME:
        return clean(name)
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]  # of what is cut, such as a path
    return f"{clean(name)}-{digest}"


def dashed(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with dashes in their names, and with one spelling for one number: 2.0 is 2."""
    result = {}
    for name, value in options.items():
        if isinstance(value, list):
            value = [plain_number(each) for each in value]
        result[name.replace("_", "-")] = plain_number(value)
    return result


def plain_number(value: Any) -> Any:
    """2 for 2.0; any other value as it is."""
    return int(value) if type(value) is float and value.is_integer() else value
