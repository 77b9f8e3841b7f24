"""What the benchmarks share, and bench_op.py and bench_cifar.py in small runs."""

import csv
import os
from types import SimpleNamespace

import pytest
from vision_helpers import error_line

from fairseq_rskip import ops
from fairseq_rskip.tools import bench_operator, bench_resnet, benchmark


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Contender:
    """Takes ``seconds`` of the clock, half of them of the processor, for any work; ``calls`` says what happened."""

    def __init__(self, name, seconds, clock, calls):
        self.name, self.seconds, self.clock, self.calls = name, seconds, clock, calls

    def prepare(self):
        self.clock.now += 100.0  # outside the clock

    def __call__(self, work):
        self.calls.append((self.name, work))
        self.clock.now += self.seconds[work]
        self.clock.cpu += self.seconds[work] / 2
        return 12.0


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch, capsys):
    clock, calls = SimpleNamespace(now=0.0, cpu=0.0), []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(benchmark.time, "process_time", lambda: clock.cpu)
    slow = Contender("slow", {-1: 1e9, 0: 6.0, 1: 12.0, 2: 4.0}, clock, calls)
    fast = Contender("fast", {-1: 1e9, 0: 3.0, 1: 3.0, 2: 4.0}, clock, calls)
    rates = benchmark.measure({"slow": slow, "fast": fast}, 3, work=lambda turn: turn)
    assert rates["slow"] == ([2.0, 1.0, 3.0], [4.0, 2.0, 6.0]) and rates["fast"].clock == [4.0, 4.0, 3.0]
    assert [sorted(calls[k : k + 2]) for k in range(0, 8, 2)] == [[("fast", t), ("slow", t)] for t in (-1, 0, 1, 2)]
    assert len({calls[k][0] for k in range(0, 8, 2)}) == 2  # not always the same one first
    assert benchmark.ratio(rates["fast"].clock, rates["slow"].clock) == 2.0  # of 2, 4 and 1
    assert "round 3 of 3 done" in capsys.readouterr().err


def test_a_table_names_machine_and_versions(tmp_path, capsys):
    settings = benchmark.machine()
    assert settings["cores"] == os.cpu_count() and {"device", "threads", "python", "torch"} <= settings.keys()
    benchmark.report([{"model": "a", "ratio": 0.5}], settings, tmp_path / "x.csv")
    (row,) = read(tmp_path / "x.csv")
    assert row == {"model": "a", "ratio": "0.5", **{key: str(value) for key, value in settings.items()}}
    assert capsys.readouterr().out == f"model=a  ratio=0.5\nwritten to {tmp_path}/x.csv\n"


def test_bench_op_compares_every_number_of_steps(tmp_path, capfd, monkeypatch):
    if ops.in_use().name != "cpu":
        pytest.skip("no CPU operator here")
    monkeypatch.setattr(bench_operator, "SHAPES", ((3, 16),))
    monkeypatch.setattr(bench_operator, "ELEMENTS", 1)
    output = tmp_path / "speed.csv"
    assert bench_operator.main(["--rounds", "1", "--no-compile", "--output", str(output)]) == 0
    rows = read(output)
    assert [row["lambda"] for row in rows] == ["1", "2", "3"] and rows[0]["operator_over_lambda1"] == "1.0"
    for row in rows:
        times = float(row["eager_ms"]) / float(row["operator_ms"])
        assert float(row["eager_over_operator"]) == pytest.approx(times, 0.1)
    capfd.readouterr()
    monkeypatch.setattr(bench_operator, "in_use", lambda: ops.dispatch.Backend("reference", "no compiler"))
    assert bench_operator.main(["--output", str(output)]) == 1
    assert error_line(capfd.readouterr().err) == "the CPU operator is not in use: no compiler"


@pytest.mark.slow
def test_bench_cifar_compares_every_skip_and_every_loop_and_keeps_the_part_it_leaves_out(tmp_path, capfd, monkeypatch):
    output = tmp_path / "speed.csv"
    argv = "--depth 8 --batch-size 4 --images 16 --rounds 1 --steps 1 --workers 1 --device cpu --output".split()
    assert bench_resnet.main([*argv, str(output)]) == 0
    rows = read(output)
    steps = {(r["model"], r["memory_format"]) for r in rows if r["measured"] == "step"}
    assert {("plain", "channels_last"), ("rskip_ln_lambda3", "contiguous")} <= steps and len(steps) == 12
    loops = [r["model"].split(": ")[1] for r in rows if r["measured"] == "loop"]
    assert loops == ["bare step", "whole loop", "PIL and DataLoader"]
    assert all(float(r["images_per_s"]) > 0 and float(r["ratio"]) > 0 for r in rows)

    names = ("measured", "model", "memory_format", "images_per_s", "ratio", "ratio_to")
    new = {**{name: rows[-1][name] for name in names}, "images_per_s": "7"}
    monkeypatch.setattr(bench_resnet, "table", lambda *_: [new])
    assert bench_resnet.main([*argv, str(output), "--only", "loop"]) == 0
    assert read(output) == [*rows[:12], {**rows[-1], "images_per_s": "7"}]

    before = output.read_bytes()
    output.write_bytes(before.replace(b"images_per_s", b"pictures_per_s"))
    capfd.readouterr()
    assert bench_resnet.main([*argv, str(output), "--only", "loop"]) == 1
    assert "has other columns than this version writes" in error_line(capfd.readouterr().err)
    output.write_bytes(before.replace(b"CPU", b"H200"))
    assert bench_resnet.main([*argv, str(output), "--only", "loop"]) == 0
    assert len(read(output)) == 1  # another machine's rows are not kept


@pytest.mark.parametrize(
    "options, message",
    [
        (["--amp", "fp16"], "--amp fp16 needs a GPU: expected bf16 or off on a CPU"),
        (["--depth", "21"], "--depth 21: expected 6n+2 with n >= 1, for example 20, 32, 44, 56, 110"),
    ],
    ids=["amp", "depth"],
)
def test_what_bench_cifar_cannot_measure_is_one_line(tmp_path, capfd, options, message):
    argv = ["--device", "cpu", "--output", str(tmp_path / "speed.csv"), *options]
    assert bench_resnet.main(argv) == 1
    assert error_line(capfd.readouterr().err) == message
    assert list(tmp_path.iterdir()) == []
