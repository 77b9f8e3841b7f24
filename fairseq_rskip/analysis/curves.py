"""Learning curves from the logs of runs: of train_cifar.py (log.jsonl) and of fairseq-train (train.log).

A run's folder holds a log, or folders ``seed*`` that do. Of fairseq's log lines those of ``train_inner`` (every
``--log-interval`` updates), ``train`` (every epoch) and ``valid`` are read, in its formats ``simple`` and ``json``.
fairseq logs loss and nll_loss in bits a token (base 2), and ``ppl = 2^nll_loss``; train_cifar.py logs its loss in nats.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

from ..errors import UserError

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
        values = {"train_loss": float(record["train_loss"])}
        if "test_error" in record:
            values["test_error"] = float(record["test_error"])
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
