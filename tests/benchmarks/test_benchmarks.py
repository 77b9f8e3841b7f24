"""The benchmarks in small runs, and how they compare."""

import csv
from types import SimpleNamespace

import pytest
import torch

from benchmarks import harness, operator, resnet, transformer


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_contenders_take_turns_and_the_first_round_does_not_count(monkeypatch):
    clock, calls = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(harness.time, "process_time", lambda: clock.now)
    seconds = {"slow": {-1: 1e9, 0: 6.0, 1: 12.0, 2: 4.0}, "fast": {-1: 1e9, 0: 3.0, 1: 3.0, 2: 4.0}}

    def contender(name):
        def run(turn):
            calls.append((name, turn))
            clock.now += seconds[name][turn]
            return 12.0

        return run

    args = SimpleNamespace(rounds=3, threads=1, device="cpu")
    rates = harness.measure({name: contender(name) for name in seconds}, args, lambda turn: turn)
    assert rates == {"slow": [2.0, 1.0, 3.0], "fast": [4.0, 4.0, 3.0]}
    assert [sorted(calls[k : k + 2]) for k in range(0, 8, 2)] == [[("fast", t), ("slow", t)] for t in (-1, 0, 1, 2)]
    assert len({calls[k][0] for k in range(0, 8, 2)}) == 2  # not always the same one first
    assert harness.ratio(rates["fast"], rates["slow"]) == 2.0  # of 2, 4 and 1


@pytest.fixture
def own_threads():
    """Benchmarks set torch's threads for their process, and the bits of later tests depend on them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("benchmark", [operator, resnet, transformer], ids=["operator", "resnet", "transformer"])
def test_each_benchmark_writes_speeds_and_the_machine(benchmark, built_operator, tmp_path, own_threads):
    path, options = tmp_path / "speed.csv", []
    if benchmark is operator:
        options = ["--builds", "one"]
    if benchmark is transformer:
        options = ["--contenders", "stock", "rskip_ln:2", "askip_ln:halting"]
    assert benchmark.main(["--quick", "--rounds", "1", *options, "--csv", str(path)]) == 0
    rows = read(path)
    assert all(row["threads"] == "1" and row["clock"] == "processor time" and row["capability"] for row in rows)
    over = next(name for name in rows[0] if "over_" in name)
    assert len(rows) >= 2 and all(float(row[over]) > 0 for row in rows)


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "none" / "speed.csv"
    assert resnet.main(["--dtype", "fp16", "--csv", str(path)]) == 1
    assert "--dtype fp16" in capsys.readouterr().err and not path.parent.exists()
