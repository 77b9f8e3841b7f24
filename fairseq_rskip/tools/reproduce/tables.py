"""A table as data: what a file of experiments/ holds, and its cells."""

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from fairseq_rskip.tools.train.data import ROOT as ROOT

FIGURES = ("gradients", "ratio", "curves", "course")
TESTS = ("welch", "randomisation", "bootstrap")
# name -> whether lower is better
ERRORS = dict.fromkeys(("error", "best_error", "test_loss", "train_loss", "valid_error", "valid_loss"), True)
LOSSES = {"valid_loss": True, "last_valid_loss": True}
BLEUS = ("13a", "intl", "intl lower-cased")
SCORES = dict.fromkeys(
    [*(f"sacreBLEU {name}" for name in BLEUS), "chrF", "tokenised BLEU", "compound-split BLEU"], False
)
METRICS = {"images": ERRORS, "translation": {**SCORES, **LOSSES}}
HELD_OUT = {"images": "valid_error", "translation": "valid_loss"}  # what a sweep is decided by

Number = int | float
Value = bool | int | float | str | list[int]
Options = dict[str, Value]
Sweep = dict[str, list[int | float | str]]


def _key(accepts: str, *default: Any, **more: Any) -> Any:
    """A key of the YAML file; ``accepts`` says what its value may be."""
    if default:
        more["default"] = default[0]
    return field(metadata={"accepts": accepts}, **more)


def _options() -> Any:
    return _key(
        "a mapping, from options without dashes to true, false, a number, text or integers", default_factory=dict
    )


def _sweep(*default: Any) -> Any:
    more = {} if default else {"default_factory": dict}
    return _key("a mapping, from an option to two values or more, as {lr: [0.1, 0.2]}", *default, **more)


@dataclass(frozen=True)
class Corpus:
    """Your own text, of which prepare-corpus.sh makes ``folder``; the files of a split are [source's, target's].

    source, target: language codes; folder: data/<the table's name> unless given
    options: of prepare-corpus.sh, without the dashes
    """

    source: str = _key("a language code such as en")
    target: str = _key("a language code such as fr")
    train: list[str] = _key("two files, [SOURCE, TARGET]")
    valid: list[str] = _key("two files, [SOURCE, TARGET]")
    test: list[str] = _key("two files, [SOURCE, TARGET]")
    folder: str = _key("the path of a folder, which need not be there", "")
    options: Options = _options()


@dataclass(frozen=True)
class Column:
    """What sets the cells of a column apart: a data set of its own, or more options."""

    data: str = _key("text", "")
    options: Options = _options()


@dataclass(frozen=True)
class Row:
    """One line of a table.

    label: the paper's; equation: what y is
    arch: for translation, the fairseq architecture, for all columns or one each
    options: of train_cifar.py or fairseq-train, without the dashes
    sweep: in place of the table's; {} for none
    reported: the paper's value, for the one column or for each
    baseline: the row to compare with, in place of the table's
    run: false for a row that only quotes a figure
    """

    label: str = _key("text")
    equation: str = _key("text", "")
    arch: str | dict[str, str] = _key("an architecture, or a mapping from columns to architectures", "")
    options: Options = _options()
    sweep: Sweep | None = _sweep(None)
    reported: None | int | float | dict[str, Number] = _key("a number, or a mapping from columns to numbers", None)
    baseline: str = _key("the label of a row", "")
    run: bool = _key("true or false", True)


@dataclass(frozen=True)
class Table:
    """One table, or one figure; ``name`` is its file's, ``path`` where that is.

    source: the publication whose values are ``reported``; none for a table of one's own
    task: images (train_cifar.py) or translation (train.sh and evaluate.sh); by default as the rows have ``arch``
    metric: what a cell holds, one of ``METRICS``; also: more of them, shown beside it
    data: a data set of train_cifar.py, or a corpus of train.sh; corpora: by the folder, the text it is prepared from
    rows_from: the file that has the rows of which only the labels stand among ``rows``, or all of them
    evaluate: options of evaluate.sh, without the dashes
    sweep: option -> values of which each row trains with the one that does best on the held-out set
    sweep_seeds: how many of the first seeds each value is tried with
    test: what p-values are of; by default Welch's for images and losses, approximate randomisation for translations
    baseline: the row that the others are compared with; of a table of one's own, the first if no row is named
    figure: the subcommand of analyze.py that draws this figure, with figure_options
    """

    name: str = _key("")
    path: str = _key("")
    data: str = _key("the name of a corpus or data set, a folder, or a mapping with the files of your own")
    rows: list[Row] = _key("a list with at least one row")
    rows_from: str = _key("the path of a YAML file, from this one's folder", "")
    title: str = _key("text", "")
    source: str = _key("text", "")
    task: str = _key(" or ".join(METRICS), "")
    metric: str = _key("the name of a metric", "")
    also: list[str] = _key("a list of metrics", default_factory=list)
    seeds: list[int] = _key("different integers >= 0, as [1, 2, 3]", default_factory=lambda: [1])
    baseline: str = _key("the label of a row", "")
    columns: dict[str, Column] = _key("a mapping, from a column's name to its data and options", default_factory=dict)
    options: Options = _options()
    evaluate: Options = _options()
    sweep: Sweep = _sweep()
    sweep_seeds: int = _key("an integer >= 1", 1)
    test: str = _key(f"one of {', '.join(TESTS)}", "")
    figure: str = _key(f"one of {', '.join(FIGURES)}", "")
    figure_options: Options = _options()
    note: str = _key("text", "")
    corpora: dict[str, Corpus] = field(default_factory=dict)

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)

    def baseline_of(self, row: Row) -> str:
        return row.baseline or self.baseline

    @property
    def lower_is_better(self) -> bool:
        return METRICS[self.task][self.metric]

    @property
    def over_seeds(self) -> bool:
        """Whether the metric is of a whole run alone, not of each sentence."""
        return self.task == "images" or self.metric in LOSSES

    @property
    def scored(self) -> bool:
        """Whether a metric asks for the test set: what shows losses of the held-out set alone translates nothing."""
        return not set(LOSSES).issuperset([self.metric, *self.also])


@dataclass(frozen=True)
class Settings:
    """All of a run but its seed and place.

    data: as the tool takes it; options: as on its command line, without dashes, shortened if the run is
    identity: what tells it from other runs; name: that, readable and shorter
    length: of the training in ``unit``; average: how many checkpoints, 0 for evaluate.sh's own choice
    scored: whether the test set is evaluated, too, and with which options
    """

    data: str
    options: Options
    identity: dict[str, Any]
    name: str
    length: int
    unit: str
    arch: str = ""
    average: int = 0
    scored: bool = True
    evaluate: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """One way to train a cell: ``swept`` are the options that a sweep gives, {} without one."""

    swept: Options
    settings: Settings


@dataclass(frozen=True)
class Cell:
    """Where a row and a column meet: what is to be run there, and the value that the paper reports.

    variants: how, once a plan says with which data and at which scale; several for a sweep
    scored: whether the test set is evaluated, too, and with which options
    """

    row: str
    column: str
    arch: str
    options: Options
    data: str
    reported: Number | None
    run: bool
    sweep: Sweep = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    scored: bool = True
    evaluate: Options = field(default_factory=dict)

    def __str__(self) -> str:
        return " / ".join(filter(None, [self.row, self.column]))

    def is_twin(self, other: Optional["Cell"]) -> bool:
        """Whether two cells ask for the same runs."""
        asked = ("arch", "options", "data", "sweep", "scored", "evaluate")
        return self.run and other is not None and all(getattr(self, name) == getattr(other, name) for name in asked)


@dataclass(frozen=True)
class StandIn:
    """Data for those who lack the table's: for a ``task``, what stands for it and with which options.

    updates: the length of a whole run on it, where the corpus's recipe counts in epochs
    """

    task: str = _key("text")
    data: str = _key("text")
    options: Options = _options()
    updates: int = _key("an integer", 0)


def cells(table: Table) -> list[Cell]:
    """Every cell of ``table``, row by row; a row's options win over its column's, a column's over the table's."""
    result = []
    for row in table.rows:
        for name, column in table.columns.items():
            arch = row.arch.get(name, "") if isinstance(row.arch, dict) else row.arch
            reported = row.reported.get(name) if isinstance(row.reported, dict) else row.reported
            options = {k: v for part in (table, column, row) for k, v in dashed(part.options).items()}
            runs = row.run and (table.task == "images" or bool(arch))
            cell = Cell(row.label, name, arch, options, column.data or table.data, reported, runs)
            sweep = dashed(table.sweep if row.sweep is None else row.sweep)
            result.append(replace(cell, sweep=sweep, scored=table.scored, evaluate=dashed(table.evaluate)))
    return result


def dashed(options: dict[str, Any]) -> dict[str, Any]:
    """The names as command lines have them."""
    return {name.replace("_", "-"): value for name, value in options.items()}


def one_number(value: Any) -> Any:
    """One way for one number: 2.0 is 2."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**53 else value


def near(name: Any, known: Iterable[Any]) -> str:
    """Which of the ``known`` may have been meant, as a question; "" for none."""
    found = difflib.get_close_matches(str(name), list(map(str, known)), 1)
    return f"did you mean {found[0]!r}?" if found else ""


def tool(script: str, command: str) -> list[str]:
    """The first words of a tool's command line: the script of a checkout, without one the command of ``rskip``."""
    path = ROOT / "scripts" / script
    if not path.exists():
        return [sys.executable, "-m", "fairseq_rskip.tools", command]
    return [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
