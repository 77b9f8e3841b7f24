"""What a report says of values that were chosen by a sweep."""

import json

from experiment_runs import IMAGES, report, tables, write


def test_a_sweep_of_two_options_names_the_ends_that_were_chosen(tmp_path, capfd):
    """The lowest rate with the larger lambda is neither the first combination nor the last."""
    options = {**IMAGES["options"], "valid-images": 100}
    rows = [{"label": "recursive", "options": {"skip-kind": "rskip", "skip-norm": "layer"}}]
    sweep = {"lr": [0.1, 0.2, 0.4], "skip-lambda": [2, 3, 4]}
    path = write(tmp_path, IMAGES, rows=rows, sweep=sweep, options=options, seeds=[1])
    (table,) = tables(path)
    for lowest, at_an_end in (
        ((0.1, 4), ", the end of the sweep of lr and skip-lambda: a value beyond"),
        ((0.1, 3), ", the end of the sweep of lr: a value beyond"),
        ((0.2, 3), "."),
    ):
        for point in table.cells[0].trials:
            error = 10.0 if tuple(point.values.values()) == lowest else 20.0
            folder = point.run.folder_in(tmp_path / "out", 1)
            folder.mkdir(parents=True, exist_ok=True)
            record = {"metrics": {"values": {"valid_error": error, "error": error}}}
            (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
        _, page = report(capfd, path, tmp_path / "out", "--no-figures")
        rate, scale = lowest
        assert f"chosen lr {rate}, skip-lambda {scale}{at_an_end}" in page


def test_a_value_of_a_sweep_that_diverged_is_a_result(tmp_path, capfd):
    """It is not told as a row without a value, nor with the folder where its log is."""
    options = {**IMAGES["options"], "valid-images": 100}
    rows = IMAGES["rows"][:1]
    path = write(tmp_path, IMAGES, rows=rows, seeds=[1], sweep={"lr": [0.1, 9]}, options=options)
    diverged = {"error": "fairseq-train failed: FloatingPointError; its output is in /data/log"}
    metrics = {"values": {"valid_error": 10.0, "error": 10.0}}
    good, bad = tables(path)[0].cells[0].trials
    for trial, record in ((good, {"metrics": metrics}), (bad, {"failed": diverged})):
        folder = trial.run.folder_in(tmp_path / "out", 1)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    rows, page = report(capfd, path, tmp_path / "out", "--no-figures")
    why = "because training failed or diverged: plain, lr 9: diverged."
    assert f"1 value of sweeps was not chosen, {why}" in page
    assert "lr 0.1: 10.000, lr 9: diverged; chosen lr 0.1" in page
    assert "/data/log" not in page + rows["plain"]["swept"] and "has no value" not in page


def test_a_choice_without_a_value_that_failed_is_one_for_now(tmp_path, capfd):
    options = {**IMAGES["options"], "valid-images": 100}
    rows = IMAGES["rows"][:1]
    path = write(tmp_path, IMAGES, rows=rows, seeds=[1], sweep={"lr": [0.1, 9]}, options=options)
    metrics = {"values": {"valid_error": 10.0, "error": 10.0}}
    good, bad = tables(path)[0].cells[0].trials
    for trial, record in ((good, {"metrics": metrics}), (bad, {"failed": {"error": "disk"}})):
        folder = trial.run.folder_in(tmp_path / "out", 1)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    _, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert "chosen lr 0.1, for now: what failed is tried again and may be better" in page


def test_a_sweep_without_a_value_is_over(tmp_path, capfd):
    options = {**IMAGES["options"], "valid-images": 100}
    path = write(tmp_path, IMAGES, rows=IMAGES["rows"][:1], sweep={"lr": [1, 2]}, options=options)
    tried = [point.run.folder_in(tmp_path / "out", 1) for point in tables(path)[0].cells[0].trials]
    for folder, sentence in zip(tried, ("not decided yet", "none chosen"), strict=True):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"failed": {"error": "loss: nan"}}))
        _, page = report(capfd, path, tmp_path / "out", "--no-figures")
        assert f"; {sentence}" in page
