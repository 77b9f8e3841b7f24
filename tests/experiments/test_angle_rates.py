"""The answers about the fixed angle at its own rate, on a table whose answers are known."""

import runpy
import sys
from pathlib import Path

import pandas
import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "angle_rates.py"
DEPTHS = ("6 layers", "12 layers", "72 layers")


def report(path, **rules):
    """``rules``: rule -> the means at the depths and the rates that were chosen."""
    lines = []
    for rule, (means, rates) in rules.items():
        for depth, mean, rate in zip(DEPTHS, means, rates):
            noise = {seed: 0.002 * (-1) ** (seed + len(rule)) for seed in (1, 2, 3)}
            pairs = [f"{seed}:{mean + 0.1 * seed + noise[seed]:.4f}" for seed in noise]
            line = {"row": rule.replace("_", " ").replace("pre norm", "pre-norm"), "column": depth}
            lines.append({**line, "values_by_seed": " ".join(pairs), "chosen": f"lr {rate}"})
    pandas.DataFrame(lines).to_csv(path, index=False)


def test_the_answers_are_the_registered_ones(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.csv"
    report(
        path,
        pre_norm=([5.0, 5.0, 5.0], [0.006, 0.012, 0.006]),
        fixed_angle=([4.9, 5.0, 5.1], [0.012, 0.006, 0.003]),
    )
    monkeypatch.setattr(sys, "argv", ["angle_rates", str(path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    *table, first, second, third, fourth = capsys.readouterr().out.splitlines()
    answers = [line.split("|")[-2].strip() for line in table[2:]]
    assert answers == ["better", "open", "not better"]
    assert first == "pre-norm: rates 0.006, 0.012, 0.006: one rate for all depths"
    assert second.startswith("pre-norm: 72 layers minus 6 layers +0.000, +0.000, +0.000: does not")
    assert third == "fixed angle: rates 0.012, 0.006, 0.003: no one rate for all depths"
    assert fourth.endswith("does not gain from depth")
