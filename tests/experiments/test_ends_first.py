"""experiments/ends_first.py on the archived trainings of Multi30k."""

import itertools
import json
import re
import runpy
import sys

import pandas
import pytest
from conftest import ROOT, unpack

FOLDER = ROOT / "experiments"
ROWS = ["post-norm@0.0025", "2rSkip+LN", "3rSkip+LN", "2xSkip+LN", "pre-norm", "DeepNorm", "Keel"]
ROWS += ["fixed angle"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name in ("multi30k", "multi30k_rows"):
        unpack(ROOT / "results" / "gpu" / f"{name}.tar.xz", folder)
    return folder


def run(monkeypatch, *words, script="ends_first"):
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    return exit.value.code


def test_the_archived_runs_give_the_published_table(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.csv"
    tests = tmp_path / "tests.csv"
    files = ["--csv", file, "--tests", tests, "--figure", tmp_path / "rows"]
    assert not run(monkeypatch, runs, *ROWS, "--seeds", 1, 2, 3, *files)
    assert file.read_text() == (ROOT / "results/gpu/multi30k_rows.csv").read_text()
    assert tests.read_text() == (ROOT / "results/gpu/multi30k_tests.csv").read_text()
    assert (tmp_path / "rows.png").stat().st_size > 10_000

    # ρ and its exact p, computed from all orders of eight rows
    table = pandas.read_csv(file)
    starts, ends = (
        table[name].rank() for name in ("validation loss near update 1,000", "best validation loss")
    )
    rho = starts.corr(ends)
    mean = starts.mean() * ends.mean()
    scale = starts.std(ddof=0) * ends.std(ddof=0)
    values = [
        (sum(a * b for a, b in zip(order, ends)) / len(ends) - mean) / scale
        for order in itertools.permutations(starts)
    ]
    upper = sum(value >= rho - 1e-9 for value in values) / len(values)
    expected = f"Spearman's ρ = {rho:.2f}, p = {min(1, 2 * upper):.3f}"
    assert f"near update 1,000 and best validation loss: {expected}" in capsys.readouterr().out


def test_the_pairs_at_their_own_rates_give_the_published_table(runs, tmp_path, monkeypatch):
    file = tmp_path / "pairs.csv"
    words = [runs, "post-norm@0.0025", "2rSkip+LN", "--csv", file]
    assert not run(monkeypatch, *words, script="seed_pairs")
    assert file.read_text() == (ROOT / "results/gpu/multi30k_own_rates.csv").read_text()


def test_the_rates_of_the_page_are_those_of_the_records(runs):
    page = (ROOT / "docs/studies/multi30k.md").read_text("utf-8")
    table = page.split("## The rates tried")[1].split("\n\n")[2].splitlines()
    shown = {}
    for line in table[2:]:
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if label.endswith("on a CPU"):
            continue
        for rate, cell in zip((0.0025, 0.005, 0.01), cells):
            if cell:
                shown[label, rate] = float(re.search(r"\d\.\d+", cell)[0])
    recorded = {}
    for path in runs.rglob("run.json"):
        record = json.loads(path.read_text("utf-8"))
        settings = record["settings"]
        if record["seed"] == 1 and settings["label"] not in ("post-norm", "2rSkip+LN", "1.2/N"):
            key = settings["label"], settings["options"]["lr"]
            recorded[key] = record["metrics"]["values"]["valid_loss"]
    assert shown == recorded


@pytest.mark.parametrize("number", [4, 11])
def test_too_few_or_too_many_rows_are_refused(number, tmp_path, monkeypatch, capsys):
    rows = [f"row {k}" for k in range(number)]
    assert run(monkeypatch, tmp_path, *rows) == 1
    assert f"error: {number} rows; expected 5 to 10" in capsys.readouterr().err


def test_one_shared_seed_is_no_test(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "tests.csv"
    assert run(monkeypatch, runs, *ROWS, "--seeds", 1, "--tests", file) == 1
    assert "share 1 seeds: expected 2 or more" in capsys.readouterr().err
