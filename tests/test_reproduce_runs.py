"""Runs by reproduce.py as real processes: once each, killed, interrupted, failing, several at a time."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_checked
from reproduce_helpers import (
    PLAIN,
    SCRIPT,
    TABLE,
    alive,
    children,
    descendants,
    error_line,
    read,
    reproduce,
    reproduce_process,
    start,
    wait_until,
    write_table,
)
from vision_helpers import history, write_folder

from fairseq_rskip.tools.reproduce import runs

pytestmark = pytest.mark.slow
BROKEN = {"label": "broken", "options": {**PLAIN, "lr": 1e30, "warmup-lr": 1e30}}
LONG = ("--set", "iterations=120", "--rows", "plain", "--seeds", 1)
SWEPT = {**TABLE["rows"][0], "sweep": {"lr": [0.2, 0.001, 1e30]}}


class Place:
    """A home, a folder of experiments whose tables run on a few images, and an output, all with spaces and accents."""

    def __init__(self, folder):
        self.home = folder / "nhà"
        data = f"imagefolder:{write_folder(folder / 'ảnh nhỏ')}"
        rows = [TABLE["rows"][0], BROKEN, TABLE["rows"][1]]
        self.tables = write_table(folder / "bảng của tôi", data=data, seeds=[1], rows=rows)
        options = {**TABLE["options"], "valid-images": 3}
        write_table(self.tables, "swept", data=data, seeds=[1, 2], rows=[SWEPT], options=options)
        self.output = folder / "đầu ra"

    def words(self, *more, output=None, tables=("small",)):
        return ("run", *tables, "--experiments", self.tables, "--output", output or self.output, *more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("reproduce"))


@pytest.fixture(scope="module")
def first(place):
    """The whole of both tables, two runs at a time, for a reader who soon goes away; some are bound to fail."""
    words = place.words("--jobs", 2, tables=("small", "swept"))
    environment = {"HOME": str(place.home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]  # where the operator is built already
    line = 'set -o pipefail; "$@" | head -n 1'
    command = ["bash", "-c", line, "bash", sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=600, check=False)


def by_row(place):
    """seed1 of each row; the broken row is a plain skip, too."""
    result = {}
    for path in place.output.glob("runs/*/seed1"):
        options = read(path / "run.json")["settings"]["options"]
        if "valid-images" not in options:
            result["broken" if "lr" in options else options["skip-kind"]] = path
    return result


def test_a_failing_row_stops_no_other_and_is_shown_with_its_error(place, first, capfd):
    assert first.returncode == 1
    assert error_line(first.stderr) == "2 of 7 runs failed; reproduce.py status shows why"
    assert len(first.stdout.splitlines()) == 1  # its reader went, the runs stayed
    status, out, _ = reproduce(capfd, "status", "small", "--output", place.output)
    lines = {line.split(",")[0].strip(): line for line in out.splitlines()[1:]}
    assert "done  error " in lines["plain"] and "done  error " in lines["recursive"]
    assert "failed: the loss is not finite at iteration" in lines["broken"]
    folders = by_row(place)
    failed = read(folders["broken"] / "run.json")["failed"]
    assert failed["error"] in (folders["broken"] / "log.txt").read_text("utf-8") and failed["status"] == "status 1"
    assert "metrics" not in read(folders["broken"] / "run.json")


def test_a_runs_folder_tells_all_about_it(place, first, capfd, tmp_path):
    folder = by_row(place)["rskip"]
    about, log = read(folder / "run.json"), (folder / "log.txt").read_text("utf-8")
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|None", str(about["git"]))
    assert about["versions"]["torch"] == torch.__version__ and about["seed"] == 1
    assert [a["environment"]["OMP_WAIT_POLICY"] for a in about["attempts"]] == ["passive"]  # two at a time
    (command,) = about["commands"]
    assert log.startswith("== 20") and "train_cifar.py" in log.splitlines()[0] and "epoch 1" in log
    # the command by itself gives the same result
    options = command[2 : command.index("--output")]
    environment = {**about["attempts"][0]["environment"], "HOME": str(place.home)}
    run_checked([*command[:2], *options, "--output", tmp_path / "own"], env=environment)
    result = read(tmp_path / "own" / "seed1" / "result.json")
    assert read(folder / "run.json")["metrics"]["values"]["error"] == result["error"]
    assert history(folder) == history(tmp_path / "own" / "seed1")


def test_what_is_done_is_not_done_again(place, first, capfd):
    done = [path for row, path in by_row(place).items() if row != "broken"]
    before = {path: path.stat().st_mtime_ns for folder in done for path in folder.iterdir()}
    status, out, _ = reproduce(capfd, *place.words("--rows", "plain", "recursive"))
    assert status == 0 and out.count("done already") == 2
    assert {path: path.stat().st_mtime_ns for folder in done for path in folder.iterdir()} == before


def test_a_truncated_result_is_made_again_without_training(place, first, tmp_path, capfd):
    shutil.copytree(place.output, tmp_path / "out")
    (folder,) = (path for path in tmp_path.glob("out/runs/*rskip*/seed1"))
    trained = (folder / "checkpoint.pt").stat().st_mtime_ns
    (folder / "run.json").write_bytes((folder / "run.json").read_bytes()[:-100])
    words = place.words("--rows", "recursive", output=tmp_path / "out")
    status, out, _ = reproduce(capfd, "status", "--experiments", place.tables, "--output", tmp_path / "out")
    assert status == 0 and "recursive, seed 1: stopped 100 %" in out
    assert reproduce_process(*words, home=place.home).returncode == 0
    assert read(folder / "run.json")["metrics"]["values"]["error"] == read(folder / "result.json")["error"]
    assert read(folder / "run.json")["seed"] == 1 and (folder / "checkpoint.pt").stat().st_mtime_ns == trained


def test_a_sweep_chooses_on_the_held_out_images_and_trains_the_other_seeds(place, first, capfd):
    found = {}
    for path in place.output.glob("runs/*/seed*/run.json"):
        record = read(path)
        if "valid-images" in record["settings"]["options"]:
            found[record["settings"]["options"]["lr"], record["seed"]] = record
    assert set(found) == {(0.2, 1), (0.001, 1), (1e30, 1), *((lr, 2) for lr, seed in found if seed == 2)}
    errors = {lr: found[lr, 1]["metrics"]["values"]["valid_error"] for lr in (0.2, 0.001)}
    assert "failed" in found[1e30, 1] and len(found) == 4
    best = min(errors, key=errors.get)
    assert (best, 2) in found
    _, out, _ = reproduce(capfd, "status", "swept", "--output", place.output)
    assert (
        re.search(rf"plain, lr {best}: valid_error [\d.]+  chosen", out)
        and "plain, lr 1e+30: failed: the loss is" in out
    )
    assert "plain, seed 2: done  error" in out


def test_a_run_that_is_killed_and_interrupted_ends_as_an_uninterrupted_one(place, tmp_path, capfd):
    words = place.words(*LONG, output=tmp_path / "out")
    process = start(*words, home=place.home)
    wait_until(lambda: list(tmp_path.glob("out/runs/*/seed1/checkpoint.pt")), process)
    (folder,) = tmp_path.glob("out/runs/*/seed1")
    (child,) = children(process.pid)
    os.killpg(child, signal.SIGSTOP)  # it shall be there still when we look
    process.kill()
    process.communicate()
    status, out, _ = reproduce(capfd, *words)  # what it started lives: it is left to it
    assert status == 0 and re.search(r"running \d+ % already .*/seed1", out)
    os.killpg(child, signal.SIGKILL)
    wait_until(lambda: not alive(child))
    part = history(folder)
    assert 0 < part[-1]["iteration"] < 120
    _, out, _ = reproduce(capfd, "status", "--output", tmp_path / "out")
    assert re.search(r"plain, seed 1: stopped \d+ %", out)
    for number, command in ((signal.SIGINT, words), (signal.SIGTERM, ("execute", folder))):
        interrupt(command, number, folder, place.home)
    assert reproduce_process(*words, home=place.home).returncode == 0
    assert len(read(folder / "run.json")["attempts"]) == 4
    command = read(folder / "run.json")["commands"][0]
    options = command[2 : command.index("--output")]
    run_checked([*command[:2], *options, "--output", tmp_path / "whole"], env={"HOME": str(place.home)})
    truth = tmp_path / "whole" / "seed1"
    assert history(folder) == history(truth) and history(folder)[: len(part)] == part
    ours, theirs = (torch.load(path / "checkpoint.pt", weights_only=True)["model"] for path in (folder, truth))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read(folder / "run.json")["metrics"]["values"]["error"] == read(truth / "result.json")["error"]


def interrupt(command, number, folder, home):
    """Start ``command``, and send it the signal when it has resumed the run; it ends what it has started."""
    log = folder / "log.txt"
    before = log.read_text("utf-8").count("resuming from")
    process = start(*command, home=home)
    wait_until(lambda: log.read_text("utf-8").count("resuming from") > before, process)
    started = descendants(process.pid)
    assert started
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130 and error_line(error) == "interrupted; the same command resumes from here"
    assert not any(alive(pid) for pid in started)
    assert "stopped at iteration" in log.read_text("utf-8").splitlines()[-1]
    assert runs.state(runs.load(folder)).name == runs.STOPPED and "failed" not in read(folder / "run.json")
