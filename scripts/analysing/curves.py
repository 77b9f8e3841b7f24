"""Figure 4: the training loss (left) and the validation metric (right) of several runs.

A run is a folder that train_cifar.py wrote, or the --save-dir of train.sh with its train.log; a file is taken as such a
log itself. Seeds of a run (seed* in its folder, or RUNs with the same LABEL) are thin lines of one colour, their mean
is a thick one. docs/analysis.md says which lines are read, and what the columns of the CSV are.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

from analysing.columns import aligned
from fairseq_rskip.analysis import curves
from fairseq_rskip.analysis.figures import check_stem, label_text, new_figure, save, scale_values, style, write_csv
from fairseq_rskip.errors import UserError

MARKERS = 12  # a line; more would hide it
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a seed's line, beside the mean
LEGEND_COLUMNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="LABEL is the folder's name if not said")
    parser.add_argument("--output", required=True, type=Path, help="the figure's path without its ending")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out what is before iteration N")


def run(options: argparse.Namespace) -> None:
    stem = check_stem(options.output)
    runs = read(options.runs, options.first)
    write_csv(stem.with_name(f"{stem.name}.csv"), curves.rows(runs))
    save(draw(runs), stem)
    print(table(runs))
    print(f"{stem}.png, .pdf and .csv: {len(runs)} run{'s' if len(runs) > 1 else ''}")


def read(arguments: List[str], first: int) -> Dict[str, List[curves.Log]]:
    """The logs of every run from step ``first`` on, by label; what has logged nothing is left out with a warning.

    Raises ``UserError``.
    """
    runs: Dict[str, List[curves.Log]] = {}
    given: Dict[str, bool] = {}  # label -> whether it was said
    for argument in arguments:
        label, path = split(argument)
        said = path != argument
        if label in given and not (said and given[label]):
            raise UserError(f"two runs are called {label}: say LABEL={path}; runs of one LABEL are its seeds")
        given[label] = said
        for log in curves.read_run(Path(path)):
            same = [other for logs in runs.values() for other in logs if other.kind is not log.kind]
            if same:
                raise UserError(
                    f"{same[0].path} is of {same[0].kind.writer}, {log.path} of {log.kind.writer}: "
                    "draw them in two figures, their losses are not comparable"
                )
            if log.curves:
                runs.setdefault(label, []).append(log)
            else:
                print(f"warning: {log.path} holds no {log.kind.step} yet and is left out", file=sys.stderr)
    runs = {label: [log.since(first) for log in logs] for label, logs in runs.items()}
    runs = {label: [log for log in logs if log.curves] for label, logs in runs.items()}
    runs = {label: logs for label, logs in runs.items() if logs}
    if not runs:
        raise UserError("there is nothing to draw: no run has logged anything" + (f" from {first} on" if first else ""))
    return runs


def split(argument: str) -> Tuple[str, str]:
    """``LABEL=PATH`` in two; a path by itself, also one with ``=`` in it that exists, is called by its last name."""
    label, equals, path = argument.partition("=")
    if not equals or not label or Path(argument).exists():
        return Path(argument).resolve().name, argument
    return label, path


def draw(runs: Dict[str, List[curves.Log]]) -> Any:
    """One panel a quantity, one colour a run: its mean where it has several seeds, and they as thin lines."""
    logs = [log for seeds in runs.values() for log in seeds]
    panels = curves.shown(logs)
    figure, axes = new_figure(len(panels))
    for axis, (name, title) in zip(axes, panels.items()):
        for number, (label, seeds) in enumerate(runs.items()):
            each = [log.curves[name] for log in seeds if log.curves.get(name)]
            _draw_run(axis, each, style(number), label_text(label))
        axis.set_xlabel(logs[0].kind.step)
        axis.set_ylabel(title)
        if name in ("train_loss", "valid_ppl"):
            scale_values(axis, [value for log in logs for _, value in log.curves.get(name, [])])
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(LEGEND_COLUMNS, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    return figure


def _draw_run(axis: Any, seeds: List[curves.Points], look: Dict[str, Any], label: str) -> None:
    line = curves.mean(seeds) if seeds else []
    steps, values = zip(*line) if line else ((), ())
    axis.plot(steps, values, **look, markevery=max(1, len(steps) // MARKERS), label=label)
    for points in seeds if len(seeds) > 1 else ():
        axis.plot(*zip(*points), **{**look, **THIN})


def table(runs: Dict[str, List[curves.Log]]) -> str:
    """The last value of every curve that is drawn, one line a seed."""
    logs = [log for seeds in runs.values() for log in seeds]
    panels = curves.shown(logs)
    lines = [["run", logs[0].kind.step, *panels.values()]]
    for label, seeds in runs.items():
        for log in seeds:
            last = [log.curves[name][-1] if log.curves.get(name) else None for name in panels]
            step = max(point[0] for point in last if point is not None)
            values = ["-" if point is None else f"{point[1]:.4g}" for point in last]
            lines.append([label, str(step), *values])
    return aligned(lines)
