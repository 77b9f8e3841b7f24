"""bench_cifar.py and demo_cifar.sh, as a person runs them."""

import csv
import importlib.util
import os
import re
import sys

import pytest
from conftest import ROOT, run_command

from fairseq_rskip.errors import UserError

SCRIPTS = ROOT / "scripts"


def module(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.slow
def test_the_bench_compares_every_skip_and_every_loop(tmp_path):
    output = tmp_path / "speed.csv"
    command = [sys.executable, SCRIPTS / "bench_cifar.py", "--depth", "8", "--batch-size", "16", "--rounds", "2"]
    done = run_command([*command, "--steps", "1", "--workers", "1", "--device", "cpu", "--output", output])
    assert done.returncode == 0, done.stderr
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {(r["model"], r["memory_format"]) for r in rows if r["measured"] == "step"}
    assert {("plain", "channels_last"), ("rskip_ln_lambda3", "contiguous")} <= steps and len(steps) == 12
    assert [r["model"].split(": ")[1] for r in rows if r["measured"] == "loop"] == [
        "bare step",
        "whole loop",
        "PIL and DataLoader",
    ]
    assert all(float(r["images_per_s"]) > 0 and float(r["ratio"]) > 0 for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        (["--amp", "fp16"], "error: --amp fp16 needs a GPU: expected bf16 or off on a CPU\n"),
        (["--depth", "21"], "error: --depth 21: expected 6n+2 with n >= 1, for example 20, 32, 44, 56, 110\n"),
    ],
)
def test_what_the_bench_cannot_measure_is_one_line(tmp_path, options, message):
    command = [sys.executable, SCRIPTS / "bench_cifar.py", "--device", "cpu", "--output", tmp_path / "speed.csv"]
    done = run_command([*command, *options])
    assert (done.returncode, done.stderr) == (1, message)
    assert list(tmp_path.iterdir()) == []


def test_the_bench_keeps_the_other_part_of_the_same_device(tmp_path, monkeypatch):
    bench, path = module("bench_cifar"), tmp_path / "speed.csv"

    def row(measured, device, rate):
        return {"measured": measured, "device": device, "images_per_s": rate}

    def kept():
        with open(path, newline="") as file:
            return [tuple(row.values()) for row in csv.DictReader(file)]

    bench.write_table(path, [row("step", "CPU", 1), row("loop", "CPU", 2)], None)
    bench.write_table(path, [row("loop", "CPU", 3)], "loop")
    assert kept() == [("step", "CPU", "1"), ("loop", "CPU", "3")]
    bench.write_table(path, [row("step", "CPU", 4)], "step")
    assert kept() == [("step", "CPU", "4"), ("loop", "CPU", "3")]
    before = path.read_bytes()
    path.write_bytes(before.replace(b"images_per_s", b"pictures_per_s"))
    with pytest.raises(UserError, match="has other columns than this version writes"):
        bench.write_table(path, [row("step", "CPU", 5)], "step")
    path.write_bytes(before)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="cannot write .*speed.csv: No space left on device"):
        bench.write_table(path, [row("step", "CPU", 6)], None)
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    bench.write_table(path, [row("loop", "H200", 9)], "loop")
    assert kept() == [("loop", "H200", "9")]


DEMO = SCRIPTS / "demo_cifar.sh"


@pytest.mark.slow
def test_the_demo_trains_draws_and_says_when_it_has_not_learned(tmp_path):
    theirs = tmp_path / "chỗ để" / "cifar" / "thesis.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("years of work")
    environment = {"DEMO_DIR": "chỗ để", "DEMO_ITERATIONS": "10", "DEMO_MOST_ERROR": "100"}
    done = run_command([DEMO], env=environment, cwd=tmp_path)  # a relative folder is the caller's
    assert done.returncode == 0 and "The demo is done" in done.stdout, done.stderr
    (folder,) = (tmp_path / "chỗ để").glob("cifar-*")
    assert re.fullmatch("cifar-[0-9a-f]{12}", folder.name) and (folder / "curve.png").is_file()
    again = run_command([DEMO], env={**environment, "DEMO_MOST_ERROR": "1"}, cwd=tmp_path)
    assert "epoch 1 " not in again.stdout  # not trained again
    assert again.returncode == 1
    assert again.stderr.startswith("error: the test error is ") and "the demo wants at most 1 %" in again.stderr
    assert theirs.read_text() == "years of work"


@pytest.mark.parametrize(
    "name, values, expected",
    [
        ("DEMO_ITERATIONS", ("abc", "0", "-1", "1.5", "08"), "an integer >= 1"),
        ("DEMO_MOST_ERROR", ("abc", "-1", "5%", "nan"), "a number >= 0, in %"),
    ],
)
def test_the_demo_refuses_what_is_no_number(tmp_path, name, values, expected):
    for value in values:
        done = run_command([DEMO], env={"DEMO_DIR": str(tmp_path), name: value})
        assert (done.returncode, done.stderr) == (1, f"error: {name}={value}: expected {expected}\n")
    assert list(tmp_path.iterdir()) == []
