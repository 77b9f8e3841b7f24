"""Runs by reproduce.py as real processes: once each, killed, interrupted, failing, several at a time."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_checked
from reproduce_helpers import (
    SCRIPT,
    TABLE,
    alive,
    children,
    descendants,
    error_line,
    read,
    reproduce,
    start,
    wait_until,
    write_table,
)
from vision_helpers import history, write_folder

from fairseq_rskip.tools.reproduce import images, runs

pytestmark = pytest.mark.slow
SWEPT = {**TABLE["rows"][0], "sweep": {"lr": [0.2, 0.001, 1e30]}}


class Place:
    """A home, a folder of experiments whose table runs on a few images, and an output, all with spaces and accents."""

    def __init__(self, folder):
        self.home = folder / "nhà"
        data = f"imagefolder:{write_folder(folder / 'ảnh nhỏ')}"
        options = {**TABLE["options"], "valid-images": 3}
        self.tables = write_table(folder / "bảng của tôi", data=data, rows=[SWEPT], options=options)
        self.output = folder / "đầu ra"

    def words(self, *more, output=None):
        return ("run", "small", "--experiments", self.tables, "--output", output or self.output, *more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("reproduce"))


@pytest.fixture(scope="module")
def first(place):
    """The whole table, two runs at a time, for a reader who soon goes away; one value is bound to fail."""
    environment = {"HOME": str(place.home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    environment["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]  # where the operator is built already
    line = 'set -o pipefail; "$@" | head -n 1'
    command = ["bash", "-c", line, "bash", sys.executable, str(SCRIPT), *map(str, place.words("--jobs", 2))]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=600, check=False)


def by_value(output):
    """(learning rate, seed) -> the folder of its run."""
    found = {path.parent: read(path) for path in output.glob("runs/*/seed*/run.json")}
    return {(record["settings"]["options"]["lr"], record["seed"]): folder for folder, record in found.items()}


def test_a_sweep_chooses_on_the_held_out_images_and_trains_the_other_seed(place, first, capfd):
    """A value that fails stops no other, and is shown with its error."""
    assert first.returncode == 1
    failed, _, again = error_line(first.stderr).rpartition("; ")
    assert failed.startswith("1 of 4 runs failed: the loss is not finite") and again == "the same command tries again"
    assert len(first.stdout.splitlines()) == 1  # its reader went, the runs stayed
    found = by_value(place.output)
    errors = {lr: read(found[lr, 1] / "run.json")["metrics"]["values"]["valid_error"] for lr in (0.2, 0.001)}
    best = min(errors, key=errors.get)
    assert set(found) == {(0.2, 1), (0.001, 1), (1e30, 1), (best, 2)}
    status, out, _ = reproduce(capfd, "status", "small", "--output", place.output)
    assert status == 0 and re.search(rf"plain, lr {best}: valid_error [\d.]+  chosen", out)
    assert "plain, lr 1e+30: failed: the loss is not finite at iteration" in out
    assert "plain, seed 2: done  error" in out
    failed = read(found[1e30, 1] / "run.json")["failed"]
    assert failed["error"] in (found[1e30, 1] / "log.txt").read_text("utf-8") and failed["status"] == "status 1"
    assert "metrics" not in read(found[1e30, 1] / "run.json")


def test_a_runs_folder_tells_all_about_it(place, first):
    folder = by_value(place.output)[0.2, 1]
    about, log = read(folder / "run.json"), (folder / "log.txt").read_text("utf-8")
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?|None", str(about.get("git")))
    assert about["versions"]["torch"] == torch.__version__ and about["seed"] == 1
    assert [a["environment"]["OMP_WAIT_POLICY"] for a in about["attempts"]] == ["passive"]  # two at a time
    assert log.startswith("== 20") and "train_cifar.py" in log.splitlines()[0] and "epoch 1" in log
    values = about["metrics"]["values"]
    assert values["error"] == read(folder / "result.json")["error"]
    part, told = images.progress(runs.load(folder).settings, folder)
    assert part == 1 and re.match(r"train loss \d+\.\d{3}, valid error ", told)
    assert told.endswith(f"valid error {values['valid_error']:.2f} %, test error {values['error']:.2f} %")


def test_a_damaged_record_is_made_again_without_training_and_nothing_else_is(place, first, capfd, monkeypatch):
    monkeypatch.setenv("HOME", str(place.home))
    found = by_value(place.output)
    folder, done = found[0.2, 1], [path for (lr, _), path in found.items() if lr != 1e30]
    before = {path: path.stat().st_mtime_ns for each in done for path in each.iterdir() if each != folder}
    trained = (folder / "checkpoint.pt").stat().st_mtime_ns
    (folder / "run.json").write_bytes((folder / "run.json").read_bytes()[:-100])
    _, out, _ = reproduce(capfd, "status", "--output", place.output)
    assert "plain, lr 0.2: stopped 100 %" in out
    status, out, _ = reproduce(capfd, *place.words())
    assert status == 1 and out.count("done already") == 2  # the value that fails is tried again
    assert read(folder / "run.json")["metrics"]["values"]["error"] == read(folder / "result.json")["error"]
    assert read(folder / "run.json")["seed"] == 1 and (folder / "checkpoint.pt").stat().st_mtime_ns == trained
    assert {path: path.stat().st_mtime_ns for path in before} == before


LONG = ("--set", "iterations=120", "lr=0.2", "--seeds", 1)


def test_a_run_that_is_killed_and_interrupted_ends_as_an_uninterrupted_one(place, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HOME", str(place.home))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = place.words(*LONG, output=tmp_path / "out")
    process = start(*words, home=place.home)
    wait_until(lambda: list(tmp_path.glob("out/runs/*/seed1/checkpoint.pt")), process)
    (folder,) = tmp_path.glob("out/runs/*/seed1")
    (child,) = children(process.pid)
    os.killpg(child, signal.SIGSTOP)  # it shall be there still when we look
    process.kill()
    process.communicate()
    status, out, _ = reproduce(capfd, *words)  # what it started lives: it is left to it
    assert status == 0 and re.search(r"running already .*/seed1: train loss \d", out)
    os.killpg(child, signal.SIGKILL)
    wait_until(lambda: not alive(child))
    part = history(folder)
    assert 0 < part[-1]["iteration"] < 120
    _, out, _ = reproduce(capfd, "status", "--output", tmp_path / "out")
    assert re.search(r"plain, seed 1: stopped \d+ %", out)
    for number, command in ((signal.SIGINT, words), (signal.SIGTERM, ("execute", folder))):
        interrupt(command, number, folder, place.home)
    assert reproduce(capfd, *words)[0] == 0
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
