"""The finished runs below a folder, from records that are written down here."""

import json

from fairseq_rskip.analysis.skip_log import SkipLines
from fairseq_rskip.tools.experiments.finished import finished_runs

SETTINGS = {"arch": "transformer_angle", "options": {"lr": 0.1}, "label": "fixed angle"}
METRICS = {"values": {"valid_loss": 4.0}}


def write(folder, **record):
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"settings": SETTINGS, "seed": 2, **record}))


def test_only_finished_runs_are_read_by_their_paths(tmp_path):
    write(tmp_path / "b" / "seed2", metrics=METRICS, scores={"beam4": {"values": {"chrF": 50.0}}})
    write(tmp_path / "a" / "seed1", metrics=METRICS)
    write(tmp_path / "failed" / "seed1", failed={"error": "diverged"})
    write(tmp_path / "begun" / "seed1")
    (tmp_path / "c" / "seed1").mkdir(parents=True)
    (tmp_path / "c" / "seed1" / "run.json").write_text("cut o")
    logs = tmp_path / "b" / "seed2" / "checkpoints" / "tensorboard" / "skip"
    logs.mkdir(parents=True)
    SkipLines(logs, first=1).write(1, {})

    first, second = finished_runs(tmp_path)
    assert (first.folder, first.scores, first.skip_log) == (tmp_path / "a" / "seed1", {}, None)
    assert (second.label, second.arch, second.seed) == ("fixed angle", "transformer_angle", 2)
    assert second.options == {"lr": 0.1} and second.values == {"valid_loss": 4.0}
    assert second.scores == {"beam4": {"chrF": 50.0}}
    assert second.skip_log == logs / "skips.jsonl"
    assert not list(finished_runs(tmp_path / "nothing"))


def test_a_record_without_a_label_is_read(tmp_path):
    settings = {key: value for key, value in SETTINGS.items() if key != "label"}
    write(tmp_path / "seed1", settings=settings, metrics=METRICS)
    (run,) = finished_runs(tmp_path)
    assert run.label == ""
