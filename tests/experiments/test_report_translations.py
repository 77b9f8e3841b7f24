"""A report of translations: scores, the tests by sentence, outputs that are degenerate."""

import json
import random
import re
import statistics

import pytest
from experiment_runs import BAD, GOOD, TRANSLATION, finish, report, tables, write

from fairseq_rskip.tools.experiments import results, text_tasks
from fairseq_rskip.tools.report.tables import warnings


def translate(table, out, label, seed, hypotheses, reference, score):
    (cell,) = (cell for cell in table.cells if cell.row.label == label)
    folder = cell.trials[0].run.folder_in(out, seed)
    (folder / "evaluation").mkdir(parents=True)
    (folder / "evaluation" / "hyp.txt").write_text("\n".join(hypotheses) + "\n")
    scores = {
        "values": {"sacreBLEU 13a": score},
        "folder": "evaluation",
        "signatures": {"sacreBLEU 13a": "nrefs:1|tok:13a"},
    }
    scores |= {"references": [str(reference)], "length_ratio": 0.987}
    scores["examples"] = [{"source": "s", "reference": "r", "translation": f"{label} <b>"}]
    metrics = {"values": {"valid_loss": 7.5}, "seconds": 61.0}
    record = {"metrics": metrics, "scores": {"evaluation": scores}}
    (folder / "run.json").write_text(json.dumps(record))


def noisy(lines, share, rng):
    """``lines`` with a ``share`` of the words replaced."""
    return [
        " ".join(rng.choice("abcdefgh") if rng.random() < share else w for w in line.split())
        for line in lines
    ]


@pytest.mark.parametrize(
    ("scores", "second", "significant", "is_bold"),
    [
        ([(10, 60), (11, 62)], 0.1, True, True),
        ([(10, 60), (10, 60)], 0.1, True, False),  # the seeds have no variance to compare
        ([(10, 60), (40, 41)], 0.1, True, False),
        ([(10, 60), (11, 62)], 0.6, False, False),
    ],
    ids=["both", "no variance", "not over seeds", "one seed of two"],
)
def test_translations_are_tested_for_each_seed_and_bold_needs_all_and_the_seeds(
    tmp_path, capfd, scores, second, significant, is_bold
):
    rng = random.Random(1)
    lines = [" ".join(rng.choices("abcdefgh", k=9)) for _ in range(60)]
    reference, out = tmp_path / "test.de", tmp_path / "out"
    reference.write_text("\n".join(lines) + "\n")
    path = write(tmp_path, TRANSLATION, seeds=[1, 2])
    (table,) = tables(path)
    for seed, share, (base, ours) in zip((1, 2), (0.1, second), scores):
        translate(table, out, "xSkip", seed, noisy(lines, 0.6, rng), reference, base)
        translate(table, out, "rSkip", seed, noisy(lines, share, rng), reference, ours)
    rows, page = report(capfd, path, out, "--no-figures")
    p = dict(word.split(":") for word in rows["rSkip"]["p"].split())
    assert set(p) == {"1", "2"} and float(p["1"]) < 0.01
    assert (float(p["2"]) < 0.01) is significant and (float(p["2"]) > 0.05) is not significant
    bold = re.findall("<strong>(.*?)</strong>", page)
    assert bold == (["61.00 ± 1.41"] if is_bold else [])
    assert "nrefs:1|tok:13a" in page and "0.987" in page and "rSkip &lt;b&gt;" in page


def test_translations_of_two_test_sets_are_not_compared(tmp_path, capfd):
    path, out = write(tmp_path, TRANSLATION, seeds=[1, 2]), tmp_path / "out"
    (table,) = tables(path)
    for label, score in (("xSkip", 10.0), ("rSkip", 60.0)):
        reference = tmp_path / f"{label}.de"
        reference.write_text(f"{label} a b c\n" * 12)
        for seed in (1, 2):
            translate(table, out, label, seed, [f"{label} a"] * 12, reference, score)
    rows, _ = report(capfd, path, out, "--no-figures")
    assert rows["rSkip"]["p"] == ""
    assert rows["rSkip"]["untested"] == "seed 1: other test set; seed 2: other test set"


def test_rows_that_differ_in_evaluate_alone_are_compared(tmp_path, capfd):
    """They share the trainings' folders. Translations by two beams, and another rule's."""
    rule = {"arch": "transformer_preln_tiny"}
    rows = [
        {"label": "greedy", **rule, "evaluate": {"beam": 1}},
        {"label": "beam 5", **rule, "evaluate": {"beam": 5}},
        {"label": "other", "arch": "transformer_keel_tiny", "evaluate": {"beam": 5}},
        {"label": "again", **rule, "evaluate": {"beam": 1}},
    ]
    path, out = write(tmp_path, TRANSLATION, rows=rows, test="seeds"), tmp_path / "out"
    (table,) = tables(path)
    scores = {
        "greedy": [30.0, 30.5, 31.0],
        "beam 5": [33.0, 33.6, 34.0],
        "other": [36.0, 36.1, 37.3],
    }
    for cell in table.cells:
        run = cell.trials[0].run
        for seed, value in enumerate(scores.get(cell.row.label, []), start=1):
            file = run.folder_in(out, seed) / "run.json"
            record = {"metrics": {"values": {"valid_loss": 7.5}}, "scores": {}}
            if file.exists():
                record = json.loads(file.read_text())
            file.parent.mkdir(parents=True, exist_ok=True)
            record["scores"][run.evaluation] = {"values": {"sacreBLEU 13a": value}}
            file.write_text(json.dumps(record))
    actual, _ = report(capfd, path, out, "--no-figures")
    for label in ("beam 5", "other"):
        expected = statistics.fmean(scores[label]) - statistics.fmean(scores["greedy"])
        assert float(actual[label]["ours_minus_baseline"]) == pytest.approx(expected)
    assert actual["again"]["untested"] == "same runs"
    assert actual["beam 5"]["tests"] == actual["other"]["tests"] == "2"


def test_the_length_ratio_is_that_of_sacrebleu(monkeypatch):
    """Compound-split BLEU, a later row, counts other tokens."""
    monkeypatch.setattr(text_tasks, "_examples", lambda run, reference: [])
    rows = [
        {"name": "sacreBLEU 13a", "score": 30.0, "signature": "", "length_ratio": 0.77},
        {"name": "chrF", "score": 50.0, "signature": ""},
        {"name": "compound-split BLEU", "score": 20.0, "signature": "", "length_ratio": 1.54},
    ]
    scores = text_tasks.Translation().read_scores(None, {"scores": rows, "ref": ["test.de"]})
    assert scores["length_ratio"] == 0.77


def test_degenerate_output_is_warned_of_above_the_table(tmp_path, capfd):
    path, out = write(tmp_path, TRANSLATION, seeds=[1]), tmp_path / "out"
    (table,) = tables(path)
    reference = tmp_path / "test.de"
    reference.write_text("a b c d\n" * 12)
    translate(table, out, "xSkip", 1, ["."] * 12, reference, 0.0)
    record_of = table.cells[0].trials[0].run.folder_in(out, 1) / "run.json"
    record = json.loads(record_of.read_text())
    record["scores"]["evaluation"]["degenerate"] = "its length ratio is 0.25"
    record_of.write_text(json.dumps(record))
    _, page = report(capfd, path, out, "--no-figures")
    assert "xSkip, seed 1: the output is degenerate: its length ratio is 0.25" in page
    assert "With metric: valid_loss in the file their losses are compared" in page


def test_one_degenerate_output_of_three_does_not_spoil_the_others(tmp_path, capfd):
    path, out = write(tmp_path, TRANSLATION), tmp_path / "out"
    (table,) = tables(path)
    reference = tmp_path / "test.de"
    reference.write_text("a b c d\n" * 12)
    for seed in (1, 2, 3):
        translate(table, out, "xSkip", seed, ["a b c d"] * 12, reference, 50.0)
    (line, _) = [results.collect(table, cell, out) for cell in table.cells]
    line.records[2]["degenerate"] = "its length ratio is 0.25"
    assert warnings([line]) == [
        "xSkip, seed 2: the output is degenerate: its length ratio is 0.25."
    ]


@pytest.mark.parametrize(
    ("arch", "smoothed"), [("transformer_preln_tiny", True), ("transformer_lm_preln_tiny", False)]
)
def test_only_the_loss_of_a_translation_is_called_label_smoothed(tmp_path, capfd, arch, smoothed):
    data = "multi30k-en-de" if smoothed else "captions"
    file = {"data": data, "metric": "valid_loss", "rows": [{"label": "pre-norm", "arch": arch}]}
    path, out = write(tmp_path, file), tmp_path / "out"
    finish(tables(path)[0], out, {"pre-norm": {1: 7.5}}, metric="valid_loss")
    _, page = report(capfd, path, out, "--no-figures")
    assert "bits per" in page and ("label smoothing included" in page) is smoothed


def score(table, out, scores):
    """Write the records of finished translations: ``scores`` are label -> seed -> BLEU."""
    for cell in table.cells:
        run = cell.trials[0].run
        for seed, value in scores[cell.row.label].items():
            folder = run.folder_in(out, seed)
            folder.mkdir(parents=True)
            of_evaluation = {run.evaluation: {"values": {"sacreBLEU 13a": value}}}
            record = {"metrics": {"values": {"valid_loss": 7.5}}, "scores": of_evaluation}
            (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("xskip", "rskip"), [(GOOD, BAD), (BAD, GOOD)], ids=["row", "baseline"])
def test_of_translations_the_higher_score_is_bold(tmp_path, capfd, xskip, rskip):
    path = write(tmp_path, TRANSLATION, test="seeds")
    score(tables(path)[0], tmp_path / "out", {"xSkip": xskip, "rSkip": rskip})
    _, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert re.findall("<strong>(.*?)</strong>", page) == ["14.13 ± 0.15"]
