"""Curves of trainings, a line for each run: Figure 4, and what the skip connections do in the course of a training.

A run is a folder that train_cifar.py wrote, or the --save-dir of train.sh with its train.log, or such a log. Seeds of a
run (seed* in its folder, or RUNs with the same LABEL) are thin lines of one colour, their mean is a thick one.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..console import print_line
from ..errors import UserError
from ..files import read_json_lines
from . import figures

Record = tuple[int, dict[str, float]]  # step, values by the name of their curve
Curve = dict[int, float]  # iteration or update -> value, steps ascending
MARKERS = 12  # on a line
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a seed's line, beside the mean


def _cifar_records(path: Path) -> Iterator[Record]:
    try:
        for record in read_json_lines(path):
            names = [name for name in ("train_loss", "test_error", "valid_error") if name in record]
            if names:
                yield int(record["iteration"]), {name: float(record[name]) for name in names}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a log of train_cifar.py") from None


def _fairseq_records(path: Path) -> Iterator[Record]:
    from ..tools.log import records

    for record in records(path):
        if "loss" in record.values:  # not every criterion has the others
            names = [name for name in ("loss", "nll_loss", "ppl") if name in record.values]
            yield record.updates, {f"{record.source}_{name}": record.values[name] for name in names}


class Kind(NamedTuple):
    """A kind of log: the program that writes it, its file name, its reader, the name of its steps.

    ``panels`` are the training loss and the validation metric: the curves that can show it, the best first, with the
    labels of their axes.
    """

    writer: str
    log: str
    records: Callable[[Path], Iterator[Record]]
    step: str
    panels: tuple[dict[str, str], dict[str, str]]


_CIFAR = {"train_loss": "training loss (nats)"}, {"test_error": "test error (%)"}
_FAIRSEQ = (
    dict.fromkeys(("train_inner_loss", "train_loss"), "training loss (bits a token)"),
    {"valid_ppl": "validation perplexity", "valid_loss": "validation loss (bits a token)"},
)
KINDS = (
    Kind("train_cifar.py", "log.jsonl", _cifar_records, "iteration", _CIFAR),
    Kind("fairseq-train", "train.log", _fairseq_records, "update", _FAIRSEQ),
)


class Log(NamedTuple):
    """The log of one seed of the run called ``run``, with its curves by name."""

    run: str
    path: Path
    curves: dict[str, Curve]


def report(options: argparse.Namespace, stem: Path) -> None:
    kind, logs = read(options.runs, options.first)
    panels = shown(kind, logs)
    rows = [
        {"run": log.run, "log": str(log.path), "kind": kind.writer, "curve": name, "step": step, "value": value}
        for log in logs
        for name, curve in log.curves.items()
        for step, value in curve.items()
    ]
    write(stem, rows, logs, panels, kind.step, spread=("train_loss", "valid_ppl"))


def read(arguments: Sequence[str], first: int) -> tuple[Kind, list[Log]]:
    """The logs of every run from step ``first`` on; an empty log is left out with a warning. Raises ``UserError``."""
    named: dict[str, bool] = {}  # label -> whether the command line says LABEL=
    logs, kinds = [], []
    for argument in arguments:
        label, path = split(argument)
        if label in named and not (path != argument and named[label]):
            raise UserError(f"two runs are called {label}: say LABEL={path}; runs of one LABEL are its seeds")
        named[label] = path != argument
        for log, kind in find_logs(Path(path)):
            kinds.append(kind)
            curves = read_log(log, kind)
            if not curves:
                print_line(f"warning: {log} holds no {kind.step} yet and is left out", "stderr")
            later = {name: {s: v for s, v in curve.items() if s >= first} for name, curve in curves.items()}
            logs.append(Log(label, log, {name: curve for name, curve in later.items() if curve}))
    if any(kind is not kinds[0] for kind in kinds):
        raise UserError("these are runs of train_cifar.py and of fairseq-train: draw them in two figures")
    logs = [log for log in logs if log.curves]
    if not logs:
        raise UserError("there is nothing to draw: no run has logged anything" + (f" from {first} on" if first else ""))
    return kinds[0], logs


def split(argument: str) -> tuple[str, str]:
    """Label and path of ``LABEL=PATH``; the label of a path alone is its last name."""
    label, equals, path = argument.partition("=")
    if not equals or not label or Path(argument).exists():
        return Path(argument).resolve().name, argument
    return label, path


def find_logs(run: Path) -> list[tuple[Path, Kind]]:
    """The logs of a run, its folder or one log: one for each seed. Raises ``UserError`` for none."""
    if run.is_file():
        return [(run, KINDS[0] if run.suffix == ".jsonl" else KINDS[1])]
    for kind in KINDS:
        logs = [run / kind.log] if (run / kind.log).is_file() else sorted(run.glob(f"seed*/{kind.log}"), key=_seed)
        if logs:
            return [(path, kind) for path in logs]
    expected = " or ".join(f"{kind.log} of {kind.writer}" for kind in KINDS)
    raise UserError(f"{run} holds no log: expected {expected}" if run.is_dir() else f"{run} does not exist")


def _seed(path: Path) -> tuple[int, str]:
    return int(re.sub(r"\D", "", path.parent.name) or 0), path.parent.name


def read_log(path: Path, kind: Kind) -> dict[str, Curve]:
    """Read the curves of one log, by name. Where a resumed run repeats updates, the last values count."""
    curves: dict[str, Curve] = {}
    for step, values in kind.records(path):
        if any(step < next(reversed(curves[name])) for name in values if curves.get(name)):
            curves = {name: {s: v for s, v in curve.items() if s < step} for name, curve in curves.items()}
        for name, value in values.items():
            curves.setdefault(name, {})[step] = value
    return curves


def shown(kind: Kind, logs: Sequence[Log]) -> dict[str, str]:
    """The curves to draw with the labels of their axes: of each panel the first that every log has, else that any has.

    A panel of which no log has a curve is left out.
    """
    chosen = {}
    for panel in kind.panels:
        names = [name for enough in (all, any) for name in panel if enough(name in log.curves for log in logs)]
        chosen.update({names[0]: panel[names[0]]} if names else {})
    return chosen


def write(
    stem: Path, rows: list[figures.Row], logs: Sequence[Log], panels: dict[str, str], step: str, spread: Sequence[str]
) -> None:
    """Write the ``rows`` of ``stem``'s CSV and the figure of ``logs``; print its table: first and last values."""
    lines = [["run", step, *panels.values()]]
    for log in logs:
        curves = [log.curves.get(name, {}) for name in panels]
        ends = [[f"{value:.4g}" for value in curve.values()] for curve in curves]
        cells = [f"{values[0]} .. {values[-1]}" if values else "-" for values in ends]
        lines.append([log.run, str(max(max(curve) for curve in curves if curve)), *cells])
    runs = len({log.run for log in logs})
    figure = draw(logs, panels, step, spread)
    figures.write(stem, rows, figure, figures.aligned(lines), f"{runs} run{'s' * (runs != 1)}")


def mean(seeds: Sequence[Curve]) -> Curve:
    """The mean of several curves, at the steps that all of them have."""
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    return {step: sum(curve[step] for curve in seeds) / len(seeds) for step in common}


def draw(logs: Sequence[Log], panels: dict[str, str], step: str, spread: Sequence[str]) -> Any:
    """A panel for each curve, one colour a run: its mean if it has several seeds, and they as thin lines.

    ``spread`` names the curves whose axis is logarithmic if they span a decade.
    """
    figure, axes = figures.new_figure(len(panels))
    for axis, (name, title) in zip(axes, panels.items()):
        for number, run in enumerate(dict.fromkeys(log.run for log in logs)):
            seeds = [log.curves[name] for log in logs if log.run == run and name in log.curves]
            look, line = figures.style(number), mean(seeds)
            every = max(1, len(line) // MARKERS)
            axis.plot(list(line), list(line.values()), **look, markevery=every, label=figures.label_text(run))
            for seed in seeds if len(seeds) > 1 else ():
                axis.plot(list(seed), list(seed.values()), **{**look, **THIN})
        axis.set_xlabel(step)
        axis.set_ylabel(title)
        if name in spread:
            figures.scale_values(axis, [value for log in logs for value in log.curves.get(name, {}).values()])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize="small")
    return figure
