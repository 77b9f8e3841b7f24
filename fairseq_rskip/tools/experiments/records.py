"""The five records between a YAML file and a printed cell: Table and Row as written, Cell, Run and Result as computed."""

import hashlib
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

RUNS = "runs"  # the folder of the runs in the output folder
DONE, RUNNING, FAILED, STOPPED, NEW = "done", "running", "failed", "stopped", "not run"  # states of a run

Number = int | FiniteFloat
Value = bool | int | FiniteFloat | str | list[int]
Options = Annotated[
    dict[str, Value], Field(description="a mapping, from options without dashes to a number, text, true or false")
]
Sweep = Annotated[
    dict[str, list[int | FiniteFloat | str]],
    Field(description="a mapping, from an option to two or more values, as {lr: [0.1, 0.2]}"),
]
Text = Annotated[str, Field(description="text")]
Files = Annotated[list[str], Field(min_length=2, max_length=2, description="two files, [SOURCE, TARGET]")]


class Section(BaseModel):
    """A mapping of the YAML file. A key that is not listed is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Row(Section):
    """One line of a table; ``sweep`` replaces the table's ({} for none), ``run: false`` only quotes a figure."""

    label: Annotated[str, Field(pattern=r"\S", description="text")]
    equation: Text = ""
    arch: Annotated[
        str | dict[str, str], Field(description="an architecture, or a mapping from columns to architectures")
    ] = ""
    options: Options = {}
    sweep: Sweep | None = None
    reported: Annotated[
        Number | dict[str, Number] | None, Field(description="a number, or a mapping from columns to numbers")
    ] = None
    baseline: Annotated[str, Field(description="the label of a row")] = ""
    run: Annotated[bool, Field(description="true or false")] = True


class Table(Section):
    """A table, or one experiment. docs/reproduce.md explains the keys; the last ones are not the user's.

    texts: your own text by the folder in which it is prepared; tried: the seeds that a sweep tries each value with
    corpus, changed: what --corpus and --set ask for; cells: with their runs; warnings: of the training commands
    """

    class Column(Section):
        """What distinguishes the cells of a column: a data set, or more options."""

        data: Text = ""
        options: Options = {}

    class OwnText(Section):
        """Your own text, prepared in ``folder``; source and target are language codes."""

        source: Text
        target: Text
        train: Files
        valid: Files
        test: Files
        folder: Text = ""
        options: Options = {}

    data: Annotated[str, Field(description="the name of a corpus or data set, a folder, or a mapping with your files")]
    rows: Annotated[list[Row], Field(min_length=1, description="a list with at least one row")]
    title: Text = ""
    source: Text = ""
    note: Text = ""
    task: Annotated[str, Field(description="images or translation")] = ""
    metric: Annotated[str, Field(description="the name of a metric")] = ""
    also: Annotated[list[str], Field(description="a list of metrics")] = []
    seeds: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(min_length=1, description="different integers >= 0, as [1, 2, 3]")
    ] = [1]
    baseline: Annotated[str, Field(description="the label of a row")] = ""
    columns: Annotated[dict[str, Column], Field(min_length=1, description="a mapping from names to data and options")]
    options: Options = {}
    evaluate: Options = {}
    sweep: Sweep = {}
    sweep_seeds: Annotated[int, Field(ge=1, description="an integer >= 1")] = 1
    test: Annotated[
        Literal["", "welch", "randomisation", "bootstrap"], Field(description="welch, randomisation or bootstrap")
    ] = ""
    figure: Annotated[
        Literal["", "gradients", "ratio", "curves", "course"], Field(description="gradients, ratio, curves or course")
    ] = ""
    figure_options: Options = {}
    name: str = ""
    path: str = ""
    texts: dict[str, OwnText] = {}
    tried: list[int] = []
    corpus: str = ""
    changed: Options = {}
    cells: list[Any] = []
    warnings: list[str] = []

    def baseline_of(self, row: Row) -> str:
        return row.baseline or self.baseline


SET_BY_US = ("name", "path", "texts", "tried", "corpus", "changed", "cells", "warnings")


@dataclass(frozen=True)
class Run:
    """One training, and its evaluation if ``scored``, in ``folder``; its record there is run.json.

    identity: what distinguishes it from other runs; name: the same, readable and shorter
    length: of the training, in ``unit``; options: of the training command, without dashes; evaluate: of evaluate.sh
    """

    task: str
    data: str
    options: dict[str, Any]
    identity: dict[str, Any]
    name: str
    length: int
    unit: str
    arch: str = ""
    scored: bool = True
    evaluate: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    folder: Path = Path()

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def place(self, out: Path, seed: int) -> Path:
        """OUT/runs/<name>-<hash of task and identity>/seed<n>."""
        digest = hashlib.sha256(json.dumps([self.task, self.identity], sort_keys=True).encode()).hexdigest()[:8]
        return out / RUNS / f"{clean(self.name)}-{digest}" / f"seed{seed}"


@dataclass(frozen=True)
class Cell:
    """Where a row and a column meet.

    variants: for each combination of the sweep's values, these and the run that they make; one {} without a sweep
    """

    row: Row
    column: str
    arch: str
    data: str
    options: dict[str, Any]
    sweep: dict[str, list[Any]]
    reported: float | None
    run: bool
    variants: list[tuple[dict[str, Any], Run]] = field(default_factory=list)

    def __str__(self) -> str:
        return " / ".join(filter(None, [self.row.label, self.column]))


@dataclass(frozen=True)
class Result:
    """What the runs of a cell have given, and how that compares with the baseline.

    runs: by seed, [] until the sweep is decided; states: by seed, a state and its details; records: what each finished
    run measured; values: of the table's metric, by seed; trials: for each combination of the sweep's values, these,
    the held-out value or None, and the state; chosen: the best combination
    """

    cell: Cell
    runs: dict[int, Run] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    trials: list[tuple[dict[str, Any], float | None, str]] = field(default_factory=list)
    chosen: dict[str, Any] | None = None
    baseline: str = ""
    is_baseline: bool = False
    difference: float | None = None
    p: Mapping[str, float] = field(default_factory=dict)  # by seed, or by "" for a test over seeds
    adjusted: Mapping[str, float] = field(default_factory=dict)
    untested: str = ""  # why there is no p
    best: bool = False

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def folders(self) -> list[Path]:
        return [self.runs[seed].folder for seed in self.values]

    @property
    def begun(self) -> bool:
        return any(state != NEW for state in [*self.states.values(), *(state for *_, state in self.trials)])

    @property
    def waits(self) -> str:
        """How far the sweep is, "" when it is decided or there is none."""
        done = sum(value is not None for _, value, _ in self.trials)
        return "" if self.chosen is not None else f"sweep: {done} of {len(self.trials)} values done"

    def also(self, metric: str) -> list[float]:
        """Another metric of the seeds in ``values``; [] if one lacks it."""
        values = [self.records[seed]["values"].get(metric) for seed in self.values]
        return [] if None in values else values


def clean(name: str) -> str:
    """``name`` as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:150]


def dashed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Names as command lines have them, and one spelling for one number: 2.0 is 2."""
    return {name.replace("_", "-"): one_number(value) for name, value in options.items()}


def one_number(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value
