"""experiments/seed_pairs.py on the archived pairs of Multi30k."""

import importlib.util
import json
import math
import re
import runpy
import sys

import numpy
import pandas
import pytest
from conftest import ROOT, unpack

from fairseq_rskip.analysis import figures
from fairseq_rskip.tools.experiments.text_runs import read_runs

SCRIPT = ROOT / "experiments" / "seed_pairs.py"
FIVE = 2.776445  # Student's t, 4 degrees of freedom, 97.5 %; a table's


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    unpack(ROOT / "results" / "gpu" / "multi30k.tar.xz", folder)
    return folder


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["seed_pairs", *map(str, words)])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return exit.value.code


def test_the_archived_pairs_give_the_published_table(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "pair.csv"
    assert not run(monkeypatch, runs, "post-norm", "2rSkip+LN", "--csv", file)
    published = ROOT / "results" / "gpu" / "multi30k_pair.csv"
    assert file.read_text() == published.read_text()

    # the validation losses at the end, read without the project's code
    last = {}
    for path in runs.rglob("run.json"):
        record = json.loads(path.read_text("utf-8"))
        log = (path.parent / "checkpoints" / "train.log").read_text("utf-8")
        losses = re.findall(r'"valid_loss": "([0-9.]+)"', log)
        last[record["settings"]["label"], record["seed"]] = float(losses[-1])
    by_seed = numpy.array(
        [last["2rSkip+LN", seed] - last["post-norm", seed] for seed in range(1, 6)]
    )
    half = FIVE * by_seed.std(ddof=1) / 5**0.5
    row = pandas.read_csv(file).set_index("value").loc["validation loss near update 5,000"]
    numpy.testing.assert_allclose(
        [row["mean"], row["low"], row["high"]],
        [by_seed.mean(), by_seed.mean() - half, by_seed.mean() + half],
        atol=6e-5,  # the table has four digits
    )


def test_a_run_with_two_evaluations_is_refused(tmp_path, monkeypatch, capsys):
    record_of(tmp_path, "post-norm", 0.1, 1, 4.0)
    (path,) = tmp_path.rglob("run.json")
    record = json.loads(path.read_text())
    (scores,) = record["scores"].values()
    path.write_text(json.dumps({**record, "scores": {"beam1": scores, "beam4": scores}}))
    assert run(monkeypatch, tmp_path, "post-norm", "2rSkip+LN") == 1
    assert "has the evaluations beam1, beam4; expected one" in capsys.readouterr().err


def record_of(folder, label, lr, seed, loss, updates=()):
    """A run's record, as results/runs.tar.xz has it, with a log of validations after ``updates``.

    The loss of the k-th validation is k bits.
    """
    path = folder / f"{label}-{lr}" / f"seed{seed}" / "run.json"
    path.parent.mkdir(parents=True)
    names = ("sacreBLEU 13a", "chrF", "chrF++", "tokenised BLEU lower-cased")
    record = {
        "settings": {"label": label, "options": {"lr": lr}},
        "seed": seed,
        "metrics": {"values": {"valid_loss": loss}},
        "scores": {"evaluation": {"values": dict.fromkeys(names, 40.0 - loss)}},
    }
    path.write_text(json.dumps(record))
    if updates:
        log = path.parent / "checkpoints" / "train.log"
        log.parent.mkdir()
        lines = []
        for loss, update in enumerate(updates, 1):
            values = {"epoch": 1, "valid_loss": str(loss), "valid_num_updates": str(update)}
            lines.append(f"2026-11-28 08:00:00 | INFO | valid | {json.dumps(values)}\n")
        log.write_text("".join(lines))


def test_a_row_with_several_rates_is_named_with_one(tmp_path, monkeypatch, capsys):
    for seed in (1, 2):
        record_of(tmp_path, "a", 0.1, seed, 4.0)
        record_of(tmp_path, "a", 0.2, seed, 5.0)
        record_of(tmp_path, "b", 0.1, seed, 4.5 + seed / 10)
    assert run(monkeypatch, tmp_path, "a", "b") == 1
    assert "'a' has runs at the rates 0.1, 0.2; expected a@RATE" in capsys.readouterr().err
    file = tmp_path / "pairs.csv"
    assert not run(monkeypatch, tmp_path, "a@0.2", "b", "--csv", file)
    row = pandas.read_csv(file).set_index("value").loc["best validation loss"]
    assert row["mean"] == pytest.approx(-0.35) and row["seeds"] == 2
    assert [row["seed 1"], row["seed 2"]] == pytest.approx([-0.4, -0.3])
    assert run(monkeypatch, tmp_path, "a@x", "b") == 1
    assert "'a@x': 'x' is no learning rate; expected LABEL@RATE" in capsys.readouterr().err


def test_seeds_of_several_rates_are_no_row(tmp_path, monkeypatch, capsys):
    for seed, rate in ((1, 0.1), (2, 0.1), (3, 0.2)):
        record_of(tmp_path, "a", rate, seed, 4.0)
        record_of(tmp_path, "b", 0.1, seed, 4.5)
    assert run(monkeypatch, tmp_path, "a", "b") == 1
    assert "'a' has runs at the rates 0.1, 0.2; expected a@RATE" in capsys.readouterr().err


def test_a_rate_and_the_recipes_are_two_rates(tmp_path, monkeypatch, capsys):
    for seed, rate in ((1, 0.1), (2, None)):
        record_of(tmp_path, "a", rate, seed, 4.0)
        record_of(tmp_path, "b", 0.1, seed, 4.5)
    assert run(monkeypatch, tmp_path, "a", "b") == 1
    assert "'a' has runs at the rates 0.1, the recipe's; expected a@RATE, or a folder" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("rate", [0.1, None], ids=["a rate", "the recipe's rate"])
def test_two_runs_of_one_seed_are_no_row(tmp_path, monkeypatch, capsys, rate):
    """Of two columns, for example: a rate does not tell them apart."""
    record_of(tmp_path / "one", "a", rate, 1, 4.0)
    record_of(tmp_path / "two", "a", rate, 1, 4.1)
    record_of(tmp_path, "b", 0.1, 1, 4.5)
    assert run(monkeypatch, tmp_path, "a", "b") == 1
    assert "error: 'a' has several runs of one seed, in columns" in capsys.readouterr().err


def test_a_score_that_a_seed_lacks_keeps_the_others(tmp_path, monkeypatch):
    for seed in (1, 2, 3):
        record_of(tmp_path, "a", 0.1, seed, 4.0)
        record_of(tmp_path, "b", 0.1, seed, 4.5 + seed / 10)
    path = tmp_path / "a-0.1" / "seed2" / "run.json"
    record = json.loads(path.read_text())
    del record["scores"]["evaluation"]["values"]["chrF"]
    path.write_text(json.dumps(record))
    file = tmp_path / "pairs.csv"
    assert not run(monkeypatch, tmp_path, "a", "b", "--csv", file)
    table = pandas.read_csv(file).set_index("value")
    assert table["seeds"].to_dict()["chrF"] == 2 and table["seeds"].to_dict()["sacreBLEU 13a"] == 3
    assert table.loc["chrF", "mean"] == pytest.approx(-0.7)


def test_a_resumed_log_counts_once_and_a_run_that_stopped_has_no_later_loss(tmp_path):
    """Resumed after update 300, whose epoch then ended an update earlier."""
    record_of(tmp_path, "a", 0.1, 1, 4.0, updates=[100, 200, 300, 400, 500, 399, 499])
    (losses,) = read_runs(tmp_path, [450, 590, 1000])["losses"]
    assert losses.to_dict() == {100: 1, 200: 2, 300: 3, 399: 6, 499: 7}
    values = read_runs(tmp_path, [430, 540, 590]).iloc[0]
    assert values["validation loss near update 430"] == 6
    assert values["validation loss near update 540"] == 7
    # nearer to the validation at 600 that a run without an end at 500 has
    assert math.isnan(values["validation loss near update 590"])


def test_a_single_validation_is_near_no_later_update(tmp_path):
    record_of(tmp_path, "a", 0.1, 1, 4.0, updates=[300])
    values = read_runs(tmp_path, [100, 300, 5000]).iloc[0]
    assert [values[f"validation loss near update {at}"] for at in (100, 300)] == [1, 1]
    assert math.isnan(values["validation loss near update 5,000"])


def test_a_row_that_is_not_there_is_named(runs, monkeypatch, capsys):
    assert run(monkeypatch, runs, "post-norm", "Keel") == 1
    assert "no finished run of 'Keel'; expected a row's label" in capsys.readouterr().err


spec = importlib.util.spec_from_file_location("seed_pairs", ROOT / "experiments/seed_pairs.py")


seed_pairs = importlib.util.module_from_spec(spec)


spec.loader.exec_module(seed_pairs)


def test_the_figure_shows_the_other_minus_the_baseline(tmp_path, monkeypatch):
    """The baseline has the losses 1, 2, 3 at three updates, the other 3, 4, 5."""
    for seed in (1, 2):
        record_of(tmp_path, "a", 0.1, seed, 4.0, updates=[100, 200, 300])
        record_of(tmp_path, "b", 0.1, seed, 4.5, updates=[100, 200, 300])
        log = tmp_path / "b-0.1" / f"seed{seed}" / "checkpoints" / "train.log"
        text = log.read_text()
        for loss in (3, 2, 1):
            text = text.replace(f'"valid_loss": "{loss}"', f'"valid_loss": "{loss + 2}"')
        log.write_text(text)
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, stem: drawn.append(figure))
    seed_pairs.draw(read_runs(tmp_path, [300]), "a", "b", tmp_path / "f")
    *seeds, mean, _zero = drawn[0].axes[0].get_lines()
    assert [list(line.get_ydata()) for line in (*seeds, mean)] == [[2.0, 2.0, 2.0]] * 3
