"""For the tests of scripts/reproduce.py: small tables, the command in this process or in one of its own, processes."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from fairseq_rskip.tools.reproduce import loading, plans
from fairseq_rskip.tools.reproduce.main import main, make_plan
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.vision.config import parse as read_command

SCRIPT = ROOT / "scripts" / "reproduce.py"
PLAIN = {"skip-kind": "xskip", "skip-lambda": 1, "skip-norm": "none"}
RECURSIVE = {"skip-kind": "rskip", "skip-lambda": 2, "skip-norm": "layer"}
TABLE = {
    "title": "A table",
    "source": "nowhere",
    "task": "images",
    "metric": "error",
    "data": "digits",
    "seeds": [1, 2],
    "baseline": "plain",
    "options": {"depth": 8, "iterations": 12, "batch-size": 8, "warmup-iterations": 1},
    "rows": [
        {"label": "plain", "equation": "x + F", "options": PLAIN, "reported": 6.31},
        {"label": "recursive", "equation": "LN(x + LN(x + F))", "options": RECURSIVE},
    ],
}


def write_table(folder, name="small", **changes):
    """``TABLE`` with ``changes`` as folder/NAME.yaml; returns ``folder``, for --experiments."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({**TABLE, **changes}, allow_unicode=True)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


@functools.cache
def shipped():
    """Name -> table, for every file of experiments/."""
    return loading.load_all(loading.FOLDER, pytest.fail)


def plan(name, *words, tables=None):
    """What `run NAME WORDS` plans; of the shipped tables, where no others are given."""
    return make_plan((tables or shipped())[name], parse(["run", name, *map(str, words)]))


def folders(made, out):
    """(row, column, seed) -> the folder of its run."""
    return {
        (cell.row, cell.column, seed): plans.make_run(made, cell.variants[0], seed, out).folder
        for seed in made.seeds
        for cell in made.cells
    }


def only(made):
    """The settings of the only run."""
    first, *twins = [cell.variants[0].settings for cell in made.cells]
    assert all(twin == first for twin in twins)
    return first


def config(made, seed=1, out=loading.FOLDER):
    """train_cifar.py's own reading of the only command."""
    run = plans.make_run(made, made.cells[0].variants[0], seed, out)
    (command,) = run.commands()
    read = read_command(command[2:], "")
    assert (read.seeds, read.resume, read.folder()) == ((seed,), True, run.folder.parent)
    return read


def reproduce(capfd, *argv):
    """reproduce.py in this process: (exit status, stdout, stderr)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    capfd.readouterr()
    try:
        status = main([str(word) for word in argv])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (status, *capfd.readouterr())


def start(*argv, home, program=(str(SCRIPT),)):
    """reproduce.py in the background, one thread; ``home`` is the user's, where decoded images are kept."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HOME": str(home)}
    command = [sys.executable, *program, *map(str, argv)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def wait_until(holds, process=None, timeout=600):
    """Wait for ``holds()``, while ``process`` lives; where it does not come to that, the process is ended."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            for pid in [*descendants(process.pid), process.pid] if process else ():
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("waited in vain")
        time.sleep(0.05)


def children(pid):
    """The processes that process ``pid`` has started, those of its threads too."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(word) for text in lists for word in text.split()]


def descendants(pid):
    """``children`` and theirs."""
    found = children(pid)
    return [*found, *(deeper for child in found for deeper in descendants(child))]


def alive(pid):
    """Whether the process runs; one that has ended, and that nobody has waited for, does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def read(path):
    return json.loads(path.read_text("utf-8"))


def error_line(error):
    """The only line on stderr."""
    (line,) = error.splitlines()
    assert line.startswith("error: "), line
    return line[len("error: ") :]
