"""Figure 4: the training loss (left) and the validation metric (right) of several runs.

A run is a folder that train_cifar.py wrote, or the --save-dir of train.sh with its train.log; a file is taken as such a
log itself. Seeds of a run (seed* in its folder, or RUNs with the same LABEL) are thin lines of one colour, their mean
is a thick one. docs/analysis.md says which lines are read, and what the columns of the CSV are.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..console import print_line
from ..errors import UserError
from . import figures

Record = tuple[int, dict[str, float]]  # step, values by the name of their curve
Curve = dict[int, float]  # iteration or update -> value, steps ascending
MARKERS = 12  # a line; more would hide it
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a seed's line, beside the mean
OTHERS = ("nll_loss", "ppl")  # read from fairseq's log lines besides the loss; not every criterion has them
RESUMED = "recipe: "  # what scripts/train.sh begins with


def _cifar_records(line: str) -> Iterator[Record]:
    record = json.loads(line) if line else {"train_loss_so_far": None}
    if "train_loss_so_far" not in record:  # else it is from within an epoch
        values = {"train_loss": float(record["train_loss"])}
        values.update({name: float(record[name]) for name in ("test_error", "valid_error") if name in record})
        yield int(record["iteration"]), values


# "<date> | INFO | train_inner | epoch 001:     20 / 251 loss=22.398, nll_loss=22.295, ..., num_updates=20, ..."
# "<date> | INFO | valid | epoch 001 | valid on 'valid' subset | loss 19.732 | nll_loss 19.543 | ... | num_updates 16"
# "<date> | INFO | train | {"epoch": 1, "train_loss": "4.1", ..., "train_num_updates": "502"}" with --log-format json
_LINE = re.compile(r"\| INFO \| (train_inner|train|valid) \| (?=epoch \d|\{)(.*)")
_VALUE = {"train_inner": r"(\w+)=([^\s,]+)", "train": r"\| (\w+) (\S+)", "valid": r"\| (\w+) (\S+)"}


def _fairseq_records(line: str) -> Iterator[Record]:
    if RESUMED in line:  # behind what a kill cut off
        return
    for source, text in _LINE.findall(line.replace("\r", "\n")):  # progress bars
        if text.startswith("{"):
            found = {re.sub(f"^{source}_", "", key): value for key, value in json.loads(text).items()}
        else:
            found = dict(re.findall(_VALUE[source], text))
        if "loss" in found and "num_updates" in found:  # else it was cut off, and a resumed run wrote on behind it
            names = ["loss", *(name for name in OTHERS if name in found)]
            yield int(found["num_updates"]), {f"{source}_{name}": float(found[name]) for name in names}


class Kind(NamedTuple):
    """A way of logging: who writes ``log``, how a line is read, what its steps are called, what the two panels show.

    ``panels`` are the training loss and the validation metric: the curves that may stand for it, the best one first,
    with their axes' labels.
    """

    writer: str
    log: str
    records: Callable[[str], Iterator[Record]]
    step: str
    panels: tuple[dict[str, str], dict[str, str]]


CIFAR = Kind(
    "train_cifar.py",
    "log.jsonl",
    _cifar_records,
    "iteration",
    ({"train_loss": "training loss (nats)"}, {"test_error": "test error (%)"}),
)
FAIRSEQ = Kind(
    "fairseq-train",
    "train.log",
    _fairseq_records,
    "update",
    (
        dict.fromkeys(("train_inner_loss", "train_loss"), "training loss (bits a token)"),
        {"valid_ppl": "validation perplexity", "valid_loss": "validation loss (bits a token)"},
    ),
)
KINDS = (CIFAR, FAIRSEQ)


class Log(NamedTuple):
    """A seed of the run called ``run``, and its curves by name."""

    run: str
    path: Path
    curves: dict[str, Curve]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="LABEL is the folder's name if not given")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out what is before iteration N")


def report(options: argparse.Namespace, stem: Path) -> None:
    kind, logs = read(options.runs, options.first)
    panels = shown(kind, logs)
    figure = draw(logs, panels, kind.step, spread=("train_loss", "valid_ppl"))
    rows = [
        {"run": log.run, "log": str(log.path), "kind": kind.writer, "curve": name, "step": step, "value": value}
        for log in logs
        for name, curve in log.curves.items()
        for step, value in curve.items()
    ]
    figures.write(stem, rows, figure, table(logs, panels, kind.step), count(logs))


def count(logs: Sequence[Log]) -> str:
    runs = len({log.run for log in logs})
    return f"{runs} run{'s' * (runs != 1)}"


def read(arguments: Sequence[str], first: int) -> tuple[Kind, list[Log]]:
    """The logs of every run from step ``first`` on; what has logged nothing is left out with a warning.

    Raises ``UserError``.
    """
    labels: dict[str, bool] = {}  # label -> whether the command line has it, as LABEL=
    found: list[tuple[Path, Kind]] = []
    logs = []
    for argument in arguments:
        label, path = split(argument)
        named = path != argument
        if label in labels and not (named and labels[label]):
            raise UserError(f"two runs are called {label}: say LABEL={path}; runs of one LABEL are its seeds")
        labels[label] = named
        for log, kind in find_logs(Path(path)):
            found.append((log, kind))
            other, another = found[0]
            if kind is not another:
                raise UserError(
                    f"{other} is of {another.writer}, {log} of {kind.writer}: draw them in two figures, their losses "
                    "are not comparable"
                )
            curves = read_log(log, kind)
            if not curves:
                print_line(f"warning: {log} holds no {kind.step} yet and is left out", "stderr")
            later = {name: {s: v for s, v in curve.items() if s >= first} for name, curve in curves.items()}
            logs.append(Log(label, log, {name: curve for name, curve in later.items() if curve}))
    logs = [log for log in logs if log.curves]
    if not logs:
        raise UserError("there is nothing to draw: no run has logged anything" + (f" from {first} on" if first else ""))
    return found[0][1], logs


def split(argument: str) -> tuple[str, str]:
    """``LABEL=PATH`` in two; a path by itself, also one with ``=`` in it that exists, is called by its last name."""
    label, equals, path = argument.partition("=")
    if not equals or not label or Path(argument).exists():
        return Path(argument).resolve().name, argument
    return label, path


def find_logs(run: Path) -> list[tuple[Path, Kind]]:
    """The logs of a run, its folder or one log: one a seed. Raises ``UserError`` for none."""
    if run.is_file():
        return [(run, CIFAR if run.suffix == ".jsonl" else FAIRSEQ)]
    for kind in KINDS:
        found = [run / kind.log] if (run / kind.log).is_file() else sorted(run.glob(f"seed*/{kind.log}"), key=_seed)
        if found:
            return [(path, kind) for path in found]
    expected = " or ".join(f"{kind.log} of {kind.writer}" for kind in KINDS)
    raise UserError(f"{run} holds no log: expected {expected}" if run.is_dir() else f"{run} does not exist")


def _seed(path: Path) -> tuple[int, str]:
    digits = re.sub(r"\D", "", path.parent.name)
    return int(digits or 0), path.parent.name


def read_log(path: Path, kind: Kind) -> dict[str, Curve]:
    """The curves of one log by name; a line that a kill cut off is left out. Raises ``UserError`` naming the line."""
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    curves: dict[str, Curve] = {}
    *lines, _cut = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            for step, values in kind.records(line):
                _add(curves, step, values)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise UserError(f"{path}, line {number}, is not a log line of {kind.writer}") from None
    return curves


def _add(curves: dict[str, Curve], step: int, values: dict[str, float]) -> None:
    """Put ``values`` at ``step``. A run that was resumed repeats steps: what it goes back over is taken out."""
    if any(step < next(reversed(curves[name])) for name in values if curves.get(name)):
        for name, curve in curves.items():
            curves[name] = {earlier: value for earlier, value in curve.items() if earlier < step}
    for name, value in values.items():
        curves.setdefault(name, {})[step] = value


def shown(kind: Kind, logs: Sequence[Log]) -> dict[str, str]:
    """The curves to draw with their axes' labels; a panel of which no log has a curve is left out.

    Of a panel's curves the first that every log has, else the first that one has: epochs' means do not stand beside
    means over a few updates.
    """
    found = {}
    for panel in kind.panels:
        for enough in (all, any):
            names = [name for name in panel if enough(name in log.curves for log in logs)]
            if names:
                found[names[0]] = panel[names[0]]
                break
    return found


def mean(seeds: Sequence[Curve]) -> Curve:
    """The mean of several curves, at the steps that all of them have."""
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    return {step: sum(curve[step] for curve in seeds) / len(seeds) for step in common}


def draw(logs: Sequence[Log], panels: dict[str, str], step: str, spread: Sequence[str]) -> Any:
    """A panel for each curve, one colour a run: its mean where it has several seeds, and they as thin lines.

    ``spread`` names the curves whose axis is logarithmic where they span a decade.
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


def table(logs: Sequence[Log], panels: dict[str, str], step: str) -> str:
    """The last value of every curve that is drawn, one line a seed."""
    lines = [["run", step, *panels.values()]]
    for log in logs:
        drawn = {name: log.curves[name] for name in panels if name in log.curves}
        values = [f"{list(drawn[name].values())[-1]:.4g}" if name in drawn else "-" for name in panels]
        lines.append([log.run, str(max(next(reversed(curve)) for curve in drawn.values())), *values])
    return figures.aligned(lines)
