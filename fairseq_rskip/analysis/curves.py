"""Figure 4: the training loss (left) and the validation metric (right) of several runs.

A run is a folder that train_cifar.py wrote, or the --save-dir of train.sh with its train.log; a file is taken as such a
log itself. Seeds of a run (seed* in its folder, or RUNs with the same LABEL) are thin lines of one colour, their mean
is a thick one. docs/analysis.md says which lines are read, and what the columns of the CSV are.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from ..errors import UserError
from ..tools.console import print_line
from .figures import aligned, check_stem, label_text, new_figure, save, scale_values, style, write_csv

Points = List[Tuple[int, float]]  # (iteration or update, value), steps ascending


class Kind(NamedTuple):
    """A way of logging: who writes ``log``, what its steps are called, and what the two panels show.

    ``panels`` are the training loss and the validation metric: the curves that may stand for it, the best one first,
    with their axes' labels.
    """

    writer: str
    log: str
    step: str
    panels: Tuple[Dict[str, str], Dict[str, str]]


CIFAR = Kind(
    "train_cifar.py",
    "log.jsonl",
    "iteration",
    ({"train_loss": "training loss (nats)"}, {"test_error": "test error (%)"}),
)
FAIRSEQ = Kind(
    "fairseq-train",
    "train.log",
    "update",
    (
        dict.fromkeys(("train_inner_loss", "train_loss"), "training loss (bits a token)"),
        {"valid_ppl": "validation perplexity", "valid_loss": "validation loss (bits a token)"},
    ),
)
KINDS = (CIFAR, FAIRSEQ)
RESUMED = "recipe: "  # what scripts/train.sh begins with
MARKERS = 12  # a line; more would hide it
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a seed's line, beside the mean
LEGEND_COLUMNS = 5
OTHERS = ("nll_loss", "ppl")  # read from fairseq's log lines besides the loss; not every criterion has them


class Log(NamedTuple):
    """One log: of which kind, and its curves by name, for example ``train_loss``; none where nothing is logged yet."""

    path: Path
    kind: Kind
    curves: Dict[str, Points]

    def since(self, first: int) -> "Log":
        """The same without what is before step ``first``."""
        later = {name: [point for point in points if point[0] >= first] for name, points in self.curves.items()}
        return self._replace(curves={name: points for name, points in later.items() if points})


def read_run(run: Path) -> List[Log]:
    """The logs of a run, its folder or one log: one a seed. Raises ``UserError`` for none, or one that is not a log."""
    if run.is_file():
        return [read_log(run, CIFAR if run.suffix == ".jsonl" else FAIRSEQ)]
    for kind in KINDS:
        found = [run / kind.log] if (run / kind.log).is_file() else sorted(run.glob(f"seed*/{kind.log}"), key=_seed)
        if found:
            return [read_log(path, kind) for path in found]
    expected = " or ".join(f"{kind.log} of {kind.writer}" for kind in KINDS)
    raise UserError(f"{run} holds no log: expected {expected}" if run.is_dir() else f"{run} does not exist")


def read_log(path: Path, kind: Kind) -> Log:
    """The curves of one log; a line that a kill cut off is left out. Raises ``UserError`` naming file and line."""
    try:
        text = path.read_bytes().decode("utf-8", "strict" if kind is CIFAR else "replace")  # train.log holds any output
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a log of {kind.writer}: it is not text") from None
    curves: Dict[str, Points] = {}
    *lines, _cut = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            for record in _cifar_records(line) if kind is CIFAR else _fairseq_records(line):
                _add(curves, *record)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if kind is FAIRSEQ and (isinstance(error, KeyError) or RESUMED in line):
                continue  # killed within the line; a resumed run wrote on behind it
            raise UserError(f"{path}, line {number}, is not a log line of {kind.writer}") from None
    return Log(path, kind, curves)


Record = Tuple[str, int, Dict[str, float]]  # source, step, values by name


def _cifar_records(line: str) -> Iterator[Record]:
    if line:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise TypeError
        if "train_loss_so_far" in record:  # within an epoch
            return
        values = {"train_loss": float(record["train_loss"])}
        values.update({name: float(record[name]) for name in ("test_error", "valid_error") if name in record})
        yield "epoch", int(record["iteration"]), values


# "<date> | INFO | train_inner | epoch 001:     20 / 251 loss=22.398, nll_loss=22.295, ..., num_updates=20, ..."
# "<date> | INFO | valid | epoch 001 | valid on 'valid' subset | loss 19.732 | nll_loss 19.543 | ... | num_updates 16"
# "<date> | INFO | train | {"epoch": 1, "train_loss": "4.1", ..., "train_num_updates": "502"}" with --log-format json
_LINE = re.compile(r"\| INFO \| (train_inner|train|valid) \| (?=epoch \d|\{)(.*)")
_VALUE = {"train_inner": r"(\w+)=([^\s,]+)", "train": r"\| (\w+) (\S+)", "valid": r"\| (\w+) (\S+)"}


def _fairseq_records(line: str) -> Iterator[Record]:
    for part in line.split("\r"):  # progress bars
        match = _LINE.search(part)
        if match is None:
            continue
        source, said = match.groups()
        if said.startswith("{"):
            found = {re.sub(f"^{source}_", "", key): value for key, value in json.loads(said).items()}
        else:
            found = dict(re.findall(_VALUE[source], said))
        step, loss = int(found["num_updates"]), float(found["loss"])
        others = {f"{source}_{name}": float(found[name]) for name in OTHERS if name in found}
        yield source, step, {f"{source}_loss": loss, **others}


def _add(curves: Dict[str, Points], source: str, step: int, values: Dict[str, float]) -> None:
    """Append ``values`` at ``step``. A run that was resumed repeats steps: what it goes back over is taken out."""
    last = max((curves[name][-1][0] for name in values if curves.get(name)), default=-1)
    if step < last:
        for name, points in curves.items():
            curves[name] = [point for point in points if point[0] < step]
    for name, value in values.items():
        points = curves.setdefault(name, [])
        if points and points[-1][0] == step:
            points.pop()
        points.append((step, value))


def _seed(path: Path) -> Tuple[int, str]:
    digits = re.sub(r"\D", "", path.parent.name)
    return int(digits or 0), path.parent.name


def shown(logs: Iterable[Log]) -> Dict[str, str]:
    """The curves to draw of logs of one kind, with their axes' labels; a panel of which no log has a curve is left out.

    Of a panel's curves the first that every log has, else the first that one has: epochs' means do not stand beside
    means over a few updates.
    """
    logs = list(logs)
    found = {}
    for panel in logs[0].kind.panels:
        for enough in (all, any):
            names = [name for name in panel if enough(log.curves.get(name) for log in logs)]
            if names:
                found[names[0]] = panel[names[0]]
                break
    return found


def mean(seeds: Iterable[Points]) -> Points:
    """The mean of several curves, at the steps that all of them have."""
    values = [dict(points) for points in seeds]
    common = sorted(set.intersection(*map(set, values)))
    return [(step, sum(each[step] for each in values) / len(values)) for step in common]


def rows(runs: Dict[str, List[Log]]) -> List[Dict[str, Any]]:
    """One row a point of every curve of every log, for a CSV."""
    return [
        {"run": label, "log": str(log.path), "kind": log.kind.writer, "curve": name, "step": step, "value": value}
        for label, logs in runs.items()
        for log in logs
        for name, points in log.curves.items()
        for step, value in points
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help="LABEL is the folder's name if not said")
    parser.add_argument("--output", required=True, type=Path, help="the figure's path without its ending")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out what is before iteration N")


def run(options: argparse.Namespace) -> None:
    stem = check_stem(options.output)
    runs = read(options.runs, options.first)
    write_csv(stem.with_name(f"{stem.name}.csv"), rows(runs))
    save(draw(runs), stem)
    print(table(runs))
    print(f"{stem}.png, .pdf and .csv: {len(runs)} run{'s' if len(runs) > 1 else ''}")


def read(arguments: List[str], first: int) -> Dict[str, List[Log]]:
    """The logs of every run from step ``first`` on, by label; what has logged nothing is left out with a warning.

    Raises ``UserError``.
    """
    runs: Dict[str, List[Log]] = {}
    given: Dict[str, bool] = {}  # label -> whether it was said
    for argument in arguments:
        label, path = split(argument)
        said = path != argument
        if label in given and not (said and given[label]):
            raise UserError(f"two runs are called {label}: say LABEL={path}; runs of one LABEL are its seeds")
        given[label] = said
        for log in read_run(Path(path)):
            same = [other for logs in runs.values() for other in logs if other.kind is not log.kind]
            if same:
                raise UserError(
                    f"{same[0].path} is of {same[0].kind.writer}, {log.path} of {log.kind.writer}: "
                    "draw them in two figures, their losses are not comparable"
                )
            if log.curves:
                runs.setdefault(label, []).append(log)
            else:
                print_line(f"warning: {log.path} holds no {log.kind.step} yet and is left out", "stderr")
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


def draw(runs: Dict[str, List[Log]]) -> Any:
    """One panel a quantity, one colour a run: its mean where it has several seeds, and they as thin lines."""
    logs = [log for seeds in runs.values() for log in seeds]
    panels = shown(logs)
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


def _draw_run(axis: Any, seeds: List[Points], look: Dict[str, Any], label: str) -> None:
    line = mean(seeds) if seeds else []
    steps, values = zip(*line) if line else ((), ())
    axis.plot(steps, values, **look, markevery=max(1, len(steps) // MARKERS), label=label)
    for points in seeds if len(seeds) > 1 else ():
        axis.plot(*zip(*points), **{**look, **THIN})


def table(runs: Dict[str, List[Log]]) -> str:
    """The last value of every curve that is drawn, one line a seed."""
    logs = [log for seeds in runs.values() for log in seeds]
    panels = shown(logs)
    lines = [["run", logs[0].kind.step, *panels.values()]]
    for label, seeds in runs.items():
        for log in seeds:
            last = [log.curves[name][-1] if log.curves.get(name) else None for name in panels]
            step = max(point[0] for point in last if point is not None)
            values = ["-" if point is None else f"{point[1]:.4g}" for point in last]
            lines.append([label, str(step), *values])
    return aligned(lines)
