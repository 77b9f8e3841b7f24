"""The benchmarks in small runs, how they compare, and the parts of benchmarks/gpu.py."""

import csv
import json
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, harness, operator, resnet, rules, transformer
from fairseq_rskip.tools.reproduce import parse


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch):
    clock, calls = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(time, "process_time", lambda: clock.now)
    seconds = {"slow": iter([1e9, 6.0, 12.0, 4.0]), "fast": iter([1e9, 3.0, 3.0, 4.0])}

    def contender(name):
        def run(work):
            calls.append(name)
            clock.now += next(seconds[name])
            return work

        return run

    args = SimpleNamespace(rounds=3, device="cpu")
    rates = harness.measure({name: contender(name) for name in seconds}, args, 12.0)
    assert rates.to_dict("list") == {"slow": [2.0, 1.0, 3.0], "fast": [4.0, 4.0, 3.0]}
    assert [sorted(calls[k : k + 2]) for k in range(0, 8, 2)] == [["fast", "slow"]] * 4
    assert len({calls[k] for k in range(0, 8, 2)}) == 2  # not always the same one first
    expected = {
        "slow": {"speed": 2.0, "gain": 1.0},
        "fast": {"speed": 4.0, "gain": 2.0},
    }  # the latter of 2, 4 and 1
    assert harness.medians(rates, "slow", "speed", "gain") == expected


@pytest.mark.parametrize(
    "benchmark", [operator, resnet, transformer], ids=["operator", "resnet", "transformer"]
)
def test_each_benchmark_writes_speeds_and_the_machine(
    benchmark, built_operator, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: None
    )  # later tests' bits depend on them
    path = tmp_path / "speed.csv"
    options = ["--contenders", "stock", "askip_ln:halting"] if benchmark is transformer else []
    assert benchmark.main(argv=["--quick", "--rounds", "1", *options, "--csv", str(path)]) == 0
    rows = read(path)
    assert all(
        row["device"] and row["clock"] == "processor time" and row["capability"] for row in rows
    )
    over = next(name for name in rows[0] if "over_" in name)
    assert len(rows) >= 2 and all(float(row[over]) > 0 for row in rows)
    if benchmark is operator:
        assert all(float(row["operator_over_triad"]) > 0 for row in rows)
    if benchmark is transformer:
        assert 0.5 < float(rows[0]["saved_MB"]) < float(rows[1]["saved_MB"]) < 1.5
        assert all(float(row["peak_MB"]) > 100 for row in rows)


def test_the_cost_of_rules_is_measured_beside_pre_norm(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "cost.csv"
    words = ["--rules", "preln", "postln", "admin", "hyper", "--quick", "--rounds", "1"]
    assert rules.main(argv=[*words, "--csv", str(path)]) == 0
    rows = {row["rule"]: row for row in read(path)}
    assert list(rows) == ["postln", "hyper"]  # pre-norm is 1, and Admin needs data
    assert all(float(row["step"]) > 0 for row in rows.values())
    assert all(
        row["device"] and row["capability"] and row["dtype"] == "fp32" for row in rows.values()
    )
    # post-norm keeps about what pre-norm does, hyper-connections n streams
    assert 0.9 < float(rows["postln"]["kept"]) <= 1 < 1.1 < float(rows["hyper"]["kept"])

    words = ["--rules", "keel", "--quick", "--rounds", "1", "--csv", str(path)]
    assert rules.main(argv=words) == 0
    after = {row["rule"]: row for row in read(path)}
    assert list(after) == ["postln", "keel", "hyper"] and after["hyper"] == rows["hyper"]


TRAINED = """
import sys
from benchmarks.contender import Contender

Contender("{name}", "quick", "cpu", "fp32").training()
print("fairseq_rskip" in sys.modules)
"""


@pytest.mark.parametrize(("name", "imported"), [("stock", "False"), ("rskip_ln:2", "True")])
def test_only_a_contender_with_a_rule_imports_the_plugin(name, imported):
    command = [sys.executable, "-c", TRAINED.format(name=name)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert output.splitlines()[-1] == imported


def test_a_contender_sets_its_variables_and_its_failure_is_named(capfd, tmp_path):
    words = ["--quick", "--csv", str(tmp_path / "speed.csv")]
    words += ["--contenders", "RSKIP_OPS=fastest rskip_ln:2"]
    assert transformer.main(argv=words) == 1
    printed = capfd.readouterr().err
    assert "RSKIP_OPS=fastest" in printed  # the process had the variable
    assert "the contender 'RSKIP_OPS=fastest rskip_ln:2' ended" in printed.splitlines()[-1]


def test_every_part_is_listed_with_its_command_which_is_accepted(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "run", lambda table, args: None)
    monkeypatch.setattr(harness, "write", lambda path, rows: None)
    assert gpu.main(["--list", "--output", str(tmp_path / "out"), "--cifar10", "my images"]) == 0
    commands = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    speeds = {
        f"{b.__name__.split('.')[1]}-{t}": b
        for b in (operator, transformer, resnet)
        for t in ("fp16", "bf16")
    }
    assert list(commands) == [
        "tests",
        *list(speeds)[:2],
        "operator-fp32",
        *list(speeds)[2:],
        "translation",
        "images",
        "depthbench",
    ]
    for name, benchmark in speeds.items():
        assert benchmark.main(argv=shlex.split(commands[name])[3:]) == 0
    for name in gpu.TRAININGS:
        words = shlex.split(commands[name])
        assert words[2] == "fairseq_rskip.tools" and parse(words[3:], None).tables == [
            f"experiments/gpu-{name}.yaml"
        ]
    assert commands["images"].endswith("--corpus 'my images'")


@pytest.mark.parametrize(
    ("words", "named"),
    [("opperator", "opperator"), ("tests", "--dry-run"), ("tests --dry-run", "status 3")],
)
def test_what_cannot_run_or_fails_is_named(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: named != "--dry-run")
    monkeypatch.setattr(
        gpu, "parts", lambda options: {"tests": [sys.executable, "-c", "raise SystemExit(3)"]}
    )
    assert gpu.main([*words.split(), "--output", str(tmp_path)]) == 1
    assert named in capsys.readouterr().err


def test_every_training_is_a_row_with_its_machine(tmp_path):
    for seed, record in ((1, {"metrics": {"seconds": 9.5, "values": {"error": 7.2}}}), (2, {})):
        folder = tmp_path / "images" / "runs" / "resnet" / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    gpu.collect("images", Namespace(output=tmp_path, dry_run=True))
    rows = read(tmp_path / "images.csv")
    assert [(row["seed"], row["error"]) for row in rows] == [("seed1", "7.2"), ("seed2", "")]
    assert all(row["device"] and row["torch"] == torch.__version__ for row in rows)
