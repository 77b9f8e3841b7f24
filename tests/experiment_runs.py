"""Small YAML tables and folders of runs, for tests of experiments.

The folders are as finished commands leave them.
"""

import csv
import json
import signal

import pytest
import yaml

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.experiments import plan
from fairseq_rskip.tools.reproduce import main

PLAIN = {"skip-kind": "xskip", "skip-lambda": 1, "skip-norm": "none"}
RECURSIVE = {"skip-kind": "rskip", "skip-lambda": 2, "skip-norm": "layer"}
IMAGES = {
    "data": "digits",
    "seeds": [1, 2],
    "options": {"depth": 8, "iterations": 12, "batch-size": 8, "warmup-iterations": 1},
    "rows": [{"label": "plain", "options": PLAIN}, {"label": "recursive", "options": RECURSIVE}],
}
TRANSLATION = {
    "data": "multi30k-en-de",
    "seeds": [1, 2, 3],
    "rows": [
        {"label": "xSkip", "arch": "transformer_xskip_ln_tiny"},
        {"label": "rSkip", "arch": "transformer_rskip_ln_tiny", "options": {"skip-lambda": 2}},
    ],
}

# errors of three seeds each, further apart than any scatter
GOOD, BAD = {1: 10.0, 2: 10.2, 3: 9.9}, {1: 14.0, 2: 14.3, 3: 14.1}


def write(folder, table, name="mine", **changes):
    """``table`` with ``changes`` as a YAML file; returns its path."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**table, **changes}, allow_unicode=True), encoding="utf-8")
    return path


def tables(*names, **selection):
    """The tables of these names or files, as ``rskip run`` reads them."""
    return plan.make_tables([*map(str, names)], plan.Selection(**selection))


def refused(path, **selection):
    """The sentences in which the tables of ``path`` are refused, a line each."""
    with pytest.raises(UserError) as raised:
        tables(path, **selection)
    return str(raised.value)


def finish(table, out, values, metric="error", **more):
    """Write run.json of finished runs: ``values`` are label -> seed -> value."""
    for cell in table.cells:
        for seed, value in values.get(cell.row.label, {}).items():
            folder = cell.trials[0].run.folder_in(out, seed)
            folder.mkdir(parents=True, exist_ok=True)
            record = {"metrics": {"values": {metric: value}, **more}, "versions": {"torch": "2.14"}}
            (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
            lines = [
                {"iteration": n, "train_loss": 2.0 / n, "test_error": 50.0 / n} for n in (1, 2, 3)
            ]
            (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def reproduce(capfd, *argv):
    """scripts/reproduce.py in this process: status, standard output, standard error."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    capfd.readouterr()
    try:
        status = main([str(word) for word in argv])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (status, *capfd.readouterr())


def report(capfd, path, out, *words):
    """Write the report; returns its CSV by row, and the page."""
    status, _, error = reproduce(capfd, "report", path, "--output", out, *words)
    assert status == 0, error
    with open(out / "report" / "report.csv", encoding="utf-8", newline="") as file:
        rows = {record["row"]: record for record in csv.DictReader(file)}
    return rows, (out / "report" / "report.html").read_text("utf-8")
