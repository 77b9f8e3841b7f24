"""From tables and the command line to experiments with their cells and runs."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.option_error import InYaml, RefusedOption

from .contradictions import contradictions
from .records import Cell, Experiment, Row, Run, Table, Trial, dashed, plain_number
from .tasks import TASKS
from .yaml_file import NumbersLoader, Texts, find, load


class Selection(NamedTuple):
    """What a command line chooses of tables, and changes in them.

    Rows by label, columns by name; none of them is all of them. ``corpus`` is other data, a name
    or a folder; ``changes`` are options as ``NAME=VALUE``, for every row.
    """

    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    seeds: Sequence[int] = ()
    corpus: str = ""
    changes: Sequence[str] = ()


EVERYTHING = Selection()


def make_tables(names: Sequence[str], selection: Selection = EVERYTHING) -> list[Experiment]:
    """The tables of these names or paths, with cells and runs.

    Raises ``UserError`` with a line for each mistake.
    """
    mistakes: list[str] = []
    experiments: list[Experiment] = []
    for name in dict.fromkeys(names):
        try:
            experiment = _make_table(find(name), selection, mistakes)
        except UserError as error:
            mistakes.append(str(error))
        else:
            if experiment is not None:
                experiments.append(experiment)
    if mistakes:
        raise UserError("\nerror: ".join(dict.fromkeys(mistakes)))
    _check_folders(experiments)
    return experiments


def _make_table(path: Path, selection: Selection, mistakes: list[str]) -> Experiment | None:
    """The experiment in ``path``; None where ``mistakes`` says why there is none."""
    loaded = load(path, mistakes)
    if loaded is None:
        return None
    table, texts = loaded
    return _resolve(path, table, texts, selection, mistakes)


def _resolve(
    path: Path, table: Table, texts: Texts, selection: Selection, mistakes: list[str]
) -> Experiment | None:
    """``table`` with its defaults, what was chosen, and its cells.

    Appends to ``mistakes``; None without a known task. Raises ``UserError``.
    """
    task = table.task or _default_task(table, texts)
    metric = table.metric
    if not metric and task in TASKS:
        metric = TASKS[task].metric
    baseline = table.baseline or _default_baseline(table)

    for text in contradictions(table, task, metric, baseline):
        mistakes.append(f"{path}{text}")
    if task not in TASKS:
        return None
    if metric not in TASKS[task].metrics:  # named already; what else is wrong?
        metric = TASKS[task].metric

    if metric.startswith("sacreBLEU") and not table.also:
        table = table.model_copy(update={"also": ["chrF++"]})
    experiment = Experiment(
        table=table,
        path=path,
        task=task,
        metric=metric,
        title=table.title or path.stem,
        baseline=baseline,
        rows=_chosen_rows(table, selection),
        columns=_chosen_columns(table, selection),
        chosen_seeds=list(dict.fromkeys(selection.seeds)),
        texts=texts,
        corpus=TASKS[task].find_data(selection.corpus) if selection.corpus else "",
        changed=parse_changes(selection.changes),
    )
    cells, warnings = _cells(experiment, mistakes)
    return replace(experiment, cells=cells, warnings=list(dict.fromkeys(warnings)))


def _default_task(table: Table, texts: Texts) -> str:
    """The task by the data and the rows."""
    if any(isinstance(text, Table.Documents) for text in texts.values()):
        return "language-model"
    if any(isinstance(text, Table.Pairs) for text in texts.values()):
        return "translation"
    if table.data in TASKS["images"].names:
        return "images"

    architectures = [str(row.arch) for row in table.rows if row.arch]  # mappings, perhaps
    of_text = ["transformer_lm" in arch for arch in architectures]
    if of_text and all(of_text):
        return "language-model"
    if any(of_text):  # a row is wrong: which, the data says
        is_monolingual = TASKS["translation"].has_one_language(table.data)
        return "language-model" if is_monolingual else "translation"

    is_corpus = table.data in TASKS["translation"].names or (Path(table.data) / "data-bin").is_dir()
    if texts or is_corpus or any(row.arch for row in table.rows):
        return "translation"
    return "images"


def _default_baseline(table: Table) -> str:
    """The first row that is run; "" for published values, and where rows name their baselines."""
    ran = [row.label for row in table.rows if row.run]
    if table.source or len(ran) < 2 or any(row.baseline for row in table.rows):
        return ""
    return ran[0]


def _check_names(names: Sequence[str], known: list[str]) -> None:
    """Raise ``UserError`` for a row or a column of the command line that the table lacks."""
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"expected {', '.join(known)}")
            raise UserError(f"no row or column {name!r}; {hint}")


def _chosen_rows(table: Table, selection: Selection) -> list[Row]:
    """The rows that --rows names, or all. Raises ``UserError``."""
    _check_names(selection.rows, [row.label for row in table.rows])
    if not selection.rows:
        return table.rows
    return [row for row in table.rows if row.label in selection.rows]


def _chosen_columns(table: Table, selection: Selection) -> dict[str, Table.Column]:
    """The columns that --columns names, or all. Raises ``UserError``."""
    _check_names(selection.columns, [*table.columns])
    columns = {}
    for name, column in table.columns.items():
        if not selection.columns or name in selection.columns:
            columns[name] = column

    data = sorted({column.data or table.data for column in columns.values()})
    if selection.corpus and len(data) > 1:
        raise UserError(
            f"the table has columns of {', '.join(data)}: --corpus needs --columns, for one"
        )
    return columns


def parse_changes(words: Sequence[str]) -> dict[str, Any]:
    """The options of ``--set`` NAME=VALUE, the values as YAML has them. Raises ``UserError``."""
    changed: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        try:
            value = plain_number(yaml.load(text, NumbersLoader))
        except (yaml.YAMLError, ValueError):
            value = text
        is_option = name and equals and name not in changed
        if not is_option or not isinstance(value, bool | int | float | str | list):
            raise UserError(
                f"--set {word}: expected NAME=VALUE, once for each option, such as depth=20"
            )
        changed[name] = value
    return changed


class Refusal(NamedTuple):
    """What a cell's training command refuses first: others may follow from it."""

    cell: Cell
    message: str


def _cells(experiment: Experiment, mistakes: list[str]) -> tuple[list[Cell], list[str]]:
    """The cells with their runs, and warnings; appends to ``mistakes`` what a training refuses."""
    cells: list[Cell] = []
    warnings: list[str] = []
    refusals: list[Refusal] = []
    places = list(itertools.product(experiment.rows, experiment.columns))
    # a bar on a terminal alone
    checked = tqdm(places, f"{experiment.name}: checking", leave=False, unit=" cells", disable=None)
    for row, name in checked:
        cell = make_cell(experiment, row, name, experiment.changed)
        if not cell.run:
            if row.run:
                warnings.append(f"row {row.label!r} has no arch for column {name!r}: not run there")
            cells.append(cell)
            continue
        try:
            cells.append(_with_runs(cell, experiment, warnings))
        except UserError as error:
            refusals.append(Refusal(cell, _in_yaml(error, cell)))
    mistakes += _one_line_each(refusals, experiment)
    return cells, warnings


def _one_line_each(refusals: list[Refusal], experiment: Experiment) -> list[str]:
    """A line for each refusal; the same one in several cells is one line."""
    groups: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        same = refusal.message
        if refusal.cell.arch:
            same = same.replace(refusal.cell.arch, "")
        groups.setdefault(same, []).append(refusal)

    lines = []
    for (cell, message), *others in groups.values():
        where = f"row {cell.row.label!r}"
        if cell.column:
            where += f", column {cell.column!r}"
        if others:
            where += f" and {len(others)} more"
        if experiment.changed:
            where += ", with --set"
        lines.append(f"{experiment.path}, {where}: {message}")
    return lines


def _in_yaml(error: UserError, cell: Cell) -> str:
    """The message of ``error``; an option of a training command is written as in the file."""
    if not isinstance(error, RefusedOption):
        return str(error)
    message = error.error.message(InYaml())
    is_in_file = error.error.name in {*cell.options, *cell.sweep}
    return message if is_in_file or not cell.arch else f"{cell.arch} has {message}"


def make_cell(experiment: Experiment, row: Row, column_name: str, changed: dict[str, Any]) -> Cell:
    """The cell without its runs: row over column over table, and ``changed`` over all."""
    table = experiment.table
    column = table.columns[column_name]

    options: dict[str, Any] = {}
    for part in (table, column, row):
        options |= dashed(part.options)
    options |= changed

    if row.sweep is None:  # the table's, but for an option that the column or the row sets
        sweep = dashed(table.sweep)
        for name in (*dashed(column.options), *dashed(row.options)):
            sweep.pop(name, None)
    else:
        sweep = dashed(row.sweep)
    for name in changed:
        sweep.pop(name, None)

    arch = row.arch
    if isinstance(arch, dict):
        arch = arch.get(column_name, "")
    reported = row.reported
    if isinstance(reported, dict):
        reported = reported.get(column_name)

    return Cell(
        row=row,
        column=column_name,
        arch=arch,
        data=column.data or table.data,
        options=options,
        sweep=sweep,
        evaluate=dashed({**table.evaluate, **row.evaluate}),
        reported=reported,
        run=row.run and bool(arch) == TASKS[experiment.task].has_architectures,
    )


def _with_runs(cell: Cell, experiment: Experiment, warnings: list[str]) -> Cell:
    """``cell`` with a run for each combination of its sweep's values. Raises ``UserError``."""
    task = TASKS[experiment.task]
    _check_options(cell, experiment.task)
    data = experiment.corpus or cell.data
    if not experiment.corpus and data not in experiment.texts:
        data = task.find_data(data)
    column = experiment.table.columns[cell.column]
    deciding = _deciding_trials(cell, column, experiment, warnings)

    trials = []
    for combination in itertools.product(*cell.sweep.values()):
        values = dict(zip(cell.sweep, combination))
        used = dashed(_scaled(values, dashed(column.scale)))
        complete = replace(cell, options={**cell.options, **used})
        run, its_warnings = task.make_run(data, complete, experiment)
        run = replace(run, label=cell.row.label)
        decided_by = next((trial.run for trial in deciding if trial.values == values), None)
        trials.append(Trial(values, run, decided_by))
        warnings += its_warnings
    return replace(cell, trials=trials)


def _check_options(cell: Cell, task_name: str) -> None:
    """Raise ``UserError`` for an option that every run sets, or a sweep without held-out images."""
    task = TASKS[task_name]
    reserved = set(task.reserved) & {*cell.options, *cell.sweep}
    if reserved:
        raise UserError(f"option {reserved.pop()!r} cannot be given here: every run gets its own")
    if cell.sweep and not task.has_architectures and not cell.options.get("valid-images"):
        raise UserError(
            "a sweep is decided on held-out images, never on the test set; set valid-images"
        )


def _deciding_trials(
    cell: Cell, column: Table.Column, experiment: Experiment, warnings: list[str]
) -> list[Trial]:
    """The trials of the column that decides this one's sweep; [] where its own trials do."""
    if not (cell.sweep and column.sweep_of):
        return []
    swept = experiment.table.columns.get(column.sweep_of)
    if swept is None or swept.sweep_of:  # a contradiction
        return []
    swept_cell = make_cell(experiment, cell.row, column.sweep_of, experiment.changed)
    return _with_runs(swept_cell, experiment, warnings).trials


def _scaled(values: dict[str, Any], scale: dict[str, Any]) -> dict[str, Any]:
    """``values``, those in ``scale`` times their factor."""
    scaled = {}
    for name, value in values.items():
        is_scaled = name in scale and not isinstance(value, str)  # else a contradiction
        scaled[name] = _rounded(value * scale[name]) if is_scaled else value
    return scaled


def _rounded(value: float) -> float:
    """``value`` as a person writes it: 0.003 · 0.1 is 0.0003."""
    return float(f"{value:.12g}")


def _check_folders(experiments: list[Experiment]) -> None:
    """Raise ``UserError`` where two data folders of one name would share a folder of runs."""
    known: dict[Path, Run] = {}
    for experiment in experiments:
        data_folder = TASKS[experiment.task].data_folder
        for run in experiment.runs:
            other = known.setdefault(run.folder_in(Path(), 1), run)
            if data_folder(other.data) != data_folder(run.data):
                raise UserError(
                    f"{other.data} and {run.data} would share their runs; rename one of the folders"
                )
