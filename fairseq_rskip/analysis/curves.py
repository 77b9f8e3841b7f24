"""Curves of trainings, a line for each run: Figure 4, and the skip connections over a training.

A run is a folder that train_cifar.py wrote, or the --save-dir of train.sh with its train.log, or
such a log. Seeds of a run (seed* in its folder, or RUNs with the same LABEL) are thin lines of one
colour, their mean is a thick one.
"""

import collections
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from ..console import label_and_path, print_line
from ..errors import UserError
from ..fairseq_log import records
from ..files import read_json_lines
from . import figures, skip_log
from .figures import Row

if TYPE_CHECKING:
    import pandas

Curve = dict[int, float]  # iteration or update -> value, steps ascending
MARKERS = 12  # on a line
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a seed's line, beside the mean
# the quantities of a skip log that are drawn, with their titles
QUANTITIES = {
    skip_log.X_TO_F: "x:F in y",
    skip_log.F_OVER_X: "‖F(x)‖ / ‖x‖",
    skip_log.GRAD_NORM: "gradient norm at y",
    skip_log.LAMBDA: "adaptive λ",
}


class LogFormat(NamedTuple):
    """A format of logs.

    ``writer`` is the program that writes it, ``log`` its file name, ``step`` the name of its steps,
    ``curves`` the values that are read. ``panels``, of training loss and validation metric, have
    the curves that can show each, the best first, with their labels.
    """

    writer: str
    log: str
    step: str
    curves: tuple[str, ...]
    panels: tuple[dict[str, str], dict[str, str]]


CIFAR = LogFormat(
    writer="train_cifar.py",
    log="log.jsonl",
    step="iteration",
    curves=("train_loss", "test_error", "valid_error"),
    panels=({"train_loss": "training loss (nats)"}, {"test_error": "test error (%)"}),
)
FAIRSEQ = LogFormat(
    writer="fairseq-train",
    log="train.log",
    step="update",
    curves=("loss", "nll_loss", "ppl"),
    panels=(
        dict.fromkeys(("train_inner_loss", "train_loss"), "training loss (bits a token)"),
        {"valid_ppl": "validation perplexity", "valid_loss": "validation loss (bits a token)"},
    ),
)
FORMATS = (CIFAR, FAIRSEQ)


def report(runs: Sequence[str], first: int, stem: Path) -> None:
    """Draw the losses of ``runs``, each ``LABEL=FOLDER`` or a folder, from step ``first`` on."""
    log_format, points = read(runs, first)
    panels = shown(log_format, points)
    rows = points.to_dict("records")
    write(stem, rows, points, panels, log_format.step, spread=("train_loss", "valid_ppl"))


def read(arguments: Sequence[str], first: int) -> tuple[LogFormat, "pandas.DataFrame"]:
    """The points of every run's logs from step ``first`` on; an empty log gets a warning.

    Their columns are ``run``, ``log``, ``kind``, ``curve``, ``step`` and ``value``. Raises
    ``UserError``.
    """
    import pandas

    points: list[Row] = []
    labels, formats = [], []
    for argument in arguments:
        label, path = label_and_path(argument)
        if label in labels and path == argument:
            raise UserError(
                f"two runs are called {label}: say LABEL={path}; runs of one LABEL are its seeds"
            )
        labels.append(label)
        for log, log_format in find_logs(Path(path)):
            formats.append(log_format)
            curves = read_log(log, log_format)
            if not curves:
                print_line(
                    f"warning: {log} holds no {log_format.step} yet and is left out", "stderr"
                )
            about = {"run": label, "log": str(log), "kind": log_format.writer}
            points += points_of(curves, about, first)
    if any(log_format is not formats[0] for log_format in formats):
        raise UserError(
            "these are runs of train_cifar.py and of fairseq-train: draw them in two figures"
        )
    if not points:
        since = f" from {first} on" if first else ""
        raise UserError(f"there is nothing to draw: no run has logged anything{since}")
    return formats[0], pandas.DataFrame(points)


def points_of(curves: dict[str, Curve], about: Row, first: int) -> list[Row]:
    """A row, ``about`` and the point, for each point of ``curves`` from step ``first`` on."""
    points = []
    for name, curve in curves.items():
        for step, value in curve.items():
            if step >= first:
                points.append({**about, "curve": name, "step": step, "value": value})
    return points


def find_logs(run: Path) -> list[tuple[Path, LogFormat]]:
    """The logs of a run, its folder or one log: one for each seed.

    Raises ``UserError`` for none.
    """
    if run.is_file():
        return [(run, CIFAR if run.suffix == ".jsonl" else FAIRSEQ)]
    for log_format in FORMATS:
        seeds = sorted(run.glob(f"seed*/{log_format.log}"), key=_seed_number)
        logs = [run / log_format.log] if (run / log_format.log).is_file() else seeds
        if logs:
            return [(path, log_format) for path in logs]
    expected = " or ".join(f"{log_format.log} of {log_format.writer}" for log_format in FORMATS)
    raise UserError(
        f"{run} holds no log: expected {expected}" if run.is_dir() else f"{run} does not exist"
    )


def _seed_number(log: Path) -> int:
    """2 of seed2/log.jsonl."""
    return int(re.sub(r"\D", "", log.parent.name) or 0)


def read_log(path: Path, log_format: LogFormat) -> dict[str, Curve]:
    """Read the curves of one log, by name.

    Where a resumed run repeats updates, the last values count.
    """
    curves: dict[str, Curve] = {}
    for step, values in _records(path, log_format):
        last_steps = [next(reversed(curves[name])) for name in values if curves.get(name)]
        if any(step < last for last in last_steps):
            curves = {name: _until(curve, step) for name, curve in curves.items()}
        for name, value in values.items():
            curves.setdefault(name, {})[step] = value
    return curves


def _until(curve: Curve, step: int) -> Curve:
    """The points of ``curve`` before ``step``."""
    return {each: value for each, value in curve.items() if each < step}


def _records(path: Path, log_format: LogFormat) -> Iterator[tuple[int, dict[str, float]]]:
    """Step, and values by the name of their curve, of each record of a log."""
    if log_format is CIFAR:
        try:
            for record in read_json_lines(path):
                values = {name: float(record[name]) for name in log_format.curves if name in record}
                if values:
                    yield int(record["iteration"]), values
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a log of {log_format.writer}") from None
        return
    for logged in records(path):
        if "loss" in logged.values:  # not every criterion has the others
            names = [name for name in log_format.curves if name in logged.values]
            yield logged.updates, {f"{logged.source}_{name}": logged.values[name] for name in names}


def shown(log_format: LogFormat, points: "pandas.DataFrame") -> dict[str, str]:
    """The curves to draw, with their axis labels.

    For each panel it is the first one in every log, else the first in any log. A panel is left out
    if no log has any of its curves.
    """
    logs = [set(curves) for _, curves in points.groupby("log")["curve"]]
    chosen = {}
    for panel in log_format.panels:
        in_all = [name for name in panel if all(name in log for log in logs)]
        in_any = [name for name in panel if any(name in log for log in logs)]
        for name in (in_all + in_any)[:1]:
            chosen[name] = panel[name]
    return chosen


def write(
    stem: Path,
    rows: list[Row],
    points: "pandas.DataFrame",
    panels: dict[str, str],
    step: str,
    spread: Sequence[str],
) -> None:
    """Write ``stem``'s CSV of ``rows`` and figure of ``points``; print the ends of each curve."""
    lines = [["run", step, *panels.values()]]
    for (run, log), of_log in points.groupby(["run", "log"], sort=False):
        logs = points.loc[points["run"] == run, "log"].unique()
        ends = []
        last = 0
        for name in panels:
            curve = of_log[of_log["curve"] == name]
            if curve.empty:
                ends.append("-")
                continue
            values = curve["value"]
            first, final = f"{values.iloc[0]:.4g}", f"{values.iloc[-1]:.4g}"
            ends.append(final if len(values) == 1 else f"{first} → {final}")
            last = max(last, curve["step"].max())
        label = f"{run}, {_seed_name(log, logs)}" if len(logs) > 1 else run
        lines.append([label, str(last), *ends])

    runs = points["run"].nunique()
    about = "1 run" if runs == 1 else f"{runs} runs"
    figures.write(stem, rows, draw(points, panels, step, spread), lines, about)


def _seed_name(log: str, logs: Iterable[str]) -> str:
    """The first part of the path of ``log`` in which the ``logs`` of a run differ: ``seed2``."""
    parts_of_logs = [Path(each).parts for each in logs]
    for own, *parts in zip(Path(log).parts, *parts_of_logs):
        if len(set(parts)) > 1:
            return own
    return log


def draw(
    points: "pandas.DataFrame", panels: dict[str, str], step: str, spread: Sequence[str]
) -> Any:
    """A panel for each curve, one colour a run.

    ``spread`` names the curves whose axis is logarithmic if they span a decade.
    """
    figure, axes = figures.new_figure(len(panels))
    for axis, (name, title) in zip(axes, panels.items()):
        curves = points[points["curve"] == name]
        for number, run in enumerate(points["run"].unique()):
            _draw_run(axis, curves[curves["run"] == run], run, number)
        axis.set(xlabel=step, ylabel=title)
        if name in spread:
            figures.scale_values(axis, curves["value"])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize="small"
    )
    return figure


def _draw_run(axis: Any, curves: "pandas.DataFrame", run: str, number: int) -> None:
    """Draw the mean of a run's seeds at the steps that all have, and the seeds as thin lines.

    ``number`` is that of the run's colour.
    """
    seeds = curves.groupby("log", sort=False)
    by_step = curves.groupby("step")
    means = by_step["value"].agg(fmean)[by_step["log"].nunique() == seeds.ngroups]
    look = figures.style(number)
    every = max(1, len(means) // MARKERS)
    axis.plot(means.index, means, **look, markevery=every, label=figures.label_text(run))
    if seeds.ngroups > 1:
        for _, seed in seeds:
            axis.plot(seed["step"], seed["value"], **{**look, **THIN})


def course(runs: Sequence[str], by_block: bool, stem: Path) -> None:
    """Draw what ``--skip-log-interval`` logged of ``runs``, each ``LABEL=FOLDER`` or a folder.

    It is each quantity's geometric mean over the residual blocks, against the updates, or with
    ``by_block`` each block at the last update; the mean is also over the seeds of a label. A label
    without such a mean gets a warning. Raises ``UserError`` if none has one.
    """
    rows: list[Row] = []
    seeds: collections.Counter[str] = collections.Counter()
    for argument in runs:
        label, path = label_and_path(argument)
        for seed in read_skips(Path(path), by_block):
            seeds[label] += 1
            rows += [{"run": label, "seed": seeds[label], **row} for row in seed]
    if by_block:
        by, axis, what = "number", "residual block", ""
    else:
        by, axis, what = "step", "update", ", geometric mean over blocks"
    points = means_over_blocks(rows, by)
    drawn = set(points["run"])
    empty = []
    for label, count in seeds.items():
        if label not in drawn:
            reason = _why_no_point(figures.select(rows, run=label), count, axis)
            empty.append(f"{label}: {reason}")
    if points.empty:
        raise UserError("; ".join(empty))
    for line in empty:
        print_line(f"warning: {line}; it is left out", "stderr")
    logged = set(points["curve"])
    panels = {name: f"{title}{what}" for name, title in QUANTITIES.items() if name in logged}
    write(stem, rows, points, panels, axis, spread=tuple(panels))


def _why_no_point(rows: list[Row], seeds: int, axis: str) -> str:
    """Why nothing can be drawn of the values of a label's ``seeds``, and what is accepted."""
    if not any(row["value"] > 0 for row in rows):
        names = ", ".join(QUANTITIES)
        return f"no logged value is positive: expected a value above 0 of one of {names}"
    return (
        f"its {seeds} seeds share no logged {axis} with a positive value: expected seeds of one "
        "network and one --skip-log-interval N"
    )


def read_skips(folder: Path, at_the_end: bool = False) -> list[list[Row]]:
    """The values that --skip-log-interval logged in or below ``folder``.

    A list of rows for each seed, block by block. With ``at_the_end`` only the last update's, with
    the ``number`` of each block: from 1, encoder before decoder. Raises ``UserError`` if there is
    nothing.
    """
    if not folder.exists():
        raise UserError(f"{folder} does not exist; expected the folder of a training")
    seeds = [_read_seed(log, at_the_end) for log in skip_log.logs_below(folder)]
    seeds = [rows for rows in seeds if rows]
    if not seeds:
        raise UserError(
            f"{folder} has no values in a {skip_log.SKIP_LOG}: expected a training with "
            "--skip-log-interval N, of at least N updates"
        )
    return seeds


def _read_seed(log: Path, at_the_end: bool) -> list[Row]:
    """The rows of one log, by quantity and block; ``at_the_end``: see :func:`read_skips`."""
    rows: list[Row] = []
    for step, values in skip_log.read(log).items():
        for tag, value in values.items():
            quantity, _, block = tag.partition("/")
            if quantity in QUANTITIES:
                rows.append({"quantity": quantity, "block": block, "step": step, "value": value})

    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    blocks = _in_order(dict.fromkeys(row["block"] for row in rows))
    rows.sort(key=lambda row: (quantities.index(row["quantity"]), blocks.index(row["block"])))
    if not at_the_end:
        return rows
    last = max((row["step"] for row in rows), default=0)
    rows = [row for row in rows if row["step"] == last]
    return [{**row, "number": blocks.index(row["block"]) + 1} for row in rows]


def _in_order(blocks: Iterable[str]) -> list[str]:
    """Blocks in the order of a log, sorted by stack and layer.

    A log's first line lacks the layers that LayerDrop left out there.
    """
    logged = list(blocks)
    stacks = list(dict.fromkeys(block.partition(".")[0] for block in logged))

    def stack_and_layer(block: str) -> tuple[int, list[int]]:
        stack = block.partition(".")[0]
        return stacks.index(stack), [int(digits) for digits in re.findall(r"\d+", block)]

    return sorted(logged, key=stack_and_layer)


def means_over_blocks(rows: list[Row], by: str) -> "pandas.DataFrame":
    """The points of each run's curves: a quantity's geometric mean over all seeds at each ``by``.

    The mean is that of positive values; a point is left out where not all seeds have one.
    """
    import pandas

    points = []
    for (run, quantity), curve in pandas.DataFrame(rows).groupby(["run", "quantity"], sort=False):
        for step, at_step in curve.groupby(by):
            positive = at_step[at_step["value"] > 0]
            if len(positive) and positive["seed"].nunique() == curve["seed"].nunique():
                mean = geometric_mean(positive["value"])
                points.append((run, run, quantity, step, mean))
    return pandas.DataFrame(points, columns=["run", "log", "curve", "step", "value"])
