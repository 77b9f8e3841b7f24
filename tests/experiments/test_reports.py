"""The report: numbers, tests, what is bold, and what stands in the page."""

import json
import re
import statistics

import pytest
from experiment_runs import BAD, GOOD, IMAGES, TRANSLATION, finish, report, reproduce, tables, write
from scipy import stats

from fairseq_rskip.tools.experiments import results, text_tasks
from fairseq_rskip.tools.report.tables import _p_values, facts, short_commit


@pytest.fixture
def images(tmp_path):
    """A table of two rows and three seeds: path, table, output folder."""
    path = write(tmp_path, IMAGES, seeds=[1, 2, 3])
    return path, tables(path)[0], tmp_path / "out"


def test_means_differences_and_p_values_are_those_of_scipy(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": BAD, "recursive": GOOD})
    rows, page = report(capfd, path, out, "--no-figures")
    row = rows["recursive"]
    assert float(row["mean"]) == pytest.approx(sum(GOOD.values()) / 3)
    assert float(row["ours_minus_baseline"]) == pytest.approx(-4.1)
    test = stats.ttest_rel([*GOOD.values()], [*BAD.values()])
    assert float(row["p"]) == float(row["p_holm"]) == pytest.approx(test.pvalue, rel=1e-9)
    interval = test.confidence_interval()
    assert (float(row["low"]), float(row["high"])) == pytest.approx(interval, rel=1e-9)
    assert "3 seeds, 1 test" in page and "sample standard deviation" in page
    assert re.findall("<strong>(.*?)</strong>", page) == ["10.03 ± 0.15"]
    assert "Power" in page
    columns = re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page.partition("<summary>Settings")[0])
    meaning = dict(columns)
    assert "value minus that of plain" in meaning["\u2212 plain"]
    assert "* marks what is below 0.05" in meaning["p, Holm"]


def test_a_further_metric_is_its_mean_where_every_seed_has_it(tmp_path, capfd):
    path = write(tmp_path, IMAGES, also=["test_loss"], seeds=[1, 2])
    (table,) = tables(path)
    finish(table, tmp_path / "out", {"plain": {1: 10.0, 2: 12.0}, "recursive": {1: 9.0, 2: 9.5}})
    losses = {"plain": [0.25, 0.75], "recursive": [0.5]}
    for cell in table.cells:
        for seed, loss in enumerate(losses[cell.row.label], start=1):
            file = cell.trials[0].run.folder_in(tmp_path / "out", seed) / "run.json"
            record = json.loads(file.read_text())
            record["metrics"]["values"]["test_loss"] = loss
            file.write_text(json.dumps(record))
    rows, _ = report(capfd, path, tmp_path / "out", "--no-figures")
    assert float(rows["plain"]["test_loss"]) == 0.5 and rows["recursive"]["test_loss"] == ""


def test_each_column_has_its_own_length_and_power(tmp_path, capfd):
    columns, out = {"a": {}, "b": {"options": {"iterations": 24}}}, tmp_path / "out"
    path = write(tmp_path, IMAGES, columns=columns, seeds=[1, 2, 3])
    for column, values in (("a", BAD), ("b", {1: 10.0, 2: 12.0, 3: 9.0})):
        finish(tables(path, columns=[column])[0], out, {"plain": GOOD, "recursive": values})
    rows, page = report(capfd, path, out, "--no-figures")
    assert rows["plain"]["length"] == "24 iterations"  # column b, the last one
    deviations = {"a": 0.0707, "b": 0.972}  # of the differences, over the root of two
    for column, deviation in re.findall(r"Power of (\w+): 3 seeds.*?deviation ([\d.]+)", page):
        assert float(deviation) == pytest.approx(deviations.pop(column), rel=1e-2)
    assert not deviations


def test_nothing_is_bold_that_is_not_better_than_chance(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": GOOD, "recursive": {1: 10.1, 2: 9.8, 3: 10.3}})
    assert "<strong>" not in report(capfd, path, out, "--no-figures")[1]


def test_a_baseline_that_is_not_run_is_shown_with_its_reason(images, capfd):
    path, table, out = images
    finish(table, out, {"recursive": GOOD})
    rows, page = report(capfd, path, out, "--no-figures")
    assert rows["plain"]["state"] == "not run" and rows["recursive"]["untested"] == "plain: not run"
    assert "\u2212 plain" in page


def test_rows_of_equal_settings_are_said_to_be_the_same(tmp_path, capfd):
    same = {**IMAGES["rows"][1], "label": "same"}
    path = write(tmp_path, IMAGES, rows=[*IMAGES["rows"], same], seeds=[1, 2, 3])
    finish(tables(path)[0], tmp_path / "out", {"plain": BAD, "recursive": GOOD})
    rows, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert "same has the settings, and the runs, of recursive." in page
    test = stats.ttest_rel([*GOOD.values()], [*BAD.values()])
    assert float(rows["recursive"]["p"]) == pytest.approx(test.pvalue, rel=1e-9)
    assert "2 degrees of freedom" in page


def test_finished_runs_that_a_changed_file_leaves_out_are_named(images, capfd, tmp_path):
    path, table, out = images
    finish(table, out, {"plain": BAD, "recursive": GOOD})
    for change in ([write(tmp_path, IMAGES, options={"depth": 14})], [path, "--seeds", 7]):
        status, _, error = reproduce(capfd, "report", *change, "--output", out, "--no-figures")
        assert status == 0 and "none of these runs is done, but 6 others below" in error
    report(capfd, path, out, "--no-figures")
    page = (out / "report" / "report.html").read_bytes()
    status, _, error = reproduce(capfd, "report", *change, "--output", out, "--no-figures")
    assert status == 0 and f"the report in {out / 'report'} is kept" in error
    assert (out / "report" / "report.html").read_bytes() == page


def test_runs_that_another_evaluation_has_scored_are_said_to_be_trained(tmp_path, capfd):
    """The page that is there is kept until they are evaluated."""
    path, out = write(tmp_path, TRANSLATION), tmp_path / "out"
    finish(tables(path)[0], out, {"xSkip": {1: 4.1, 2: 4.2}}, metric="valid_loss")
    status, _, error = reproduce(capfd, "report", path, "--output", out, "--no-figures")
    assert status == 0 and "warning: 2 of these runs are trained, and not evaluated as" in error


def test_the_power_is_that_of_the_row_with_the_fewest_seeds_that_has_two(tmp_path, capfd):
    rows = [*IMAGES["rows"], {**IMAGES["rows"][1], "options": {"skip-kind": "rezero"}}]
    rows[2]["label"] = "third"
    path = write(tmp_path, IMAGES, rows=rows, seeds=[1, 2, 3])
    values = {"plain": BAD, "recursive": {1: 10.0, 2: 10.4}, "third": {1: 12.0}}
    finish(tables(path)[0], tmp_path / "out", values)
    _, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert "Power: 2 seeds per row" in page


def test_of_two_best_rows_of_one_value_both_are_bold(tmp_path, capfd):
    """Though one of them is the baseline from which another row differs."""
    third = {**IMAGES["rows"][1], "label": "third", "options": {"skip-kind": "rezero"}}
    path = write(tmp_path, IMAGES, rows=[*IMAGES["rows"], third], seeds=[1, 2, 3])
    good, worse = {1: 5.0, 2: 5.1, 3: 5.2}, {1: 9.0, 2: 9.3, 3: 9.0}
    values = {"plain": good, "recursive": dict(good), "third": worse}
    finish(tables(path)[0], tmp_path / "out", values)
    report(capfd, path, tmp_path / "out", "--no-figures")
    page = (tmp_path / "out" / "report" / "report.md").read_text("utf-8")
    assert page.count("| **5.10") == 2 and "**9.10" not in page


def test_a_page_names_checkpoints_without_their_folders(images, capfd):
    """It is made to be shared."""
    path, table, out = images
    weights = "checkpoint /home/me/runs/a/checkpoints/checkpoint_best.pt"
    finish(table, out, {"plain": BAD, "recursive": GOOD}, weights=weights)
    page = report(capfd, path, out)[1]
    assert "checkpoint checkpoint_best.pt" in page and "/home/me" not in page


def test_seconds_are_the_mean_of_the_seeds(images, capfd):
    path, table, out = images
    for seed, seconds in ((1, 60.0), (2, 120.0), (3, 300.0)):
        finish(table, out, {"plain": {seed: BAD[seed]}}, seconds=seconds)
    assert re.search(r"<td[^>]*>160</td>", report(capfd, path, out, "--no-figures")[1])


def test_a_commit_is_short_and_says_whether_files_differed_from_it():
    assert short_commit(f"{'ab' * 20}+changes") == "ababababab+changes"


def test_p_values_are_as_a_reader_expects_them():
    assert _p_values({"": 0.0049}, mark=False) == "0.005"
    assert _p_values({"": 0.0009}, mark=True) == "< 0.001 *"
    assert _p_values({"1": 0.3, "2": 0.049}, mark=True) == "seed 1: 0.300, seed 2: 0.049 *"


def test_one_seed_has_no_p_value_and_says_so(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": {1: 14.0}, "recursive": {1: 10.0}})
    rows, page = report(capfd, path, out, "--no-figures", "--seeds", 1)
    assert rows["recursive"]["p"] == "" and "one seed" in page and "<strong>" not in page


def test_a_difference_is_of_the_seeds_of_both(images, capfd):
    """One seed in common: 16 - 17, not 16 less the baseline's mean, 13."""
    path, table, out = images
    finish(table, out, {"plain": {1: 10.0, 2: 12.0, 3: 17.0}, "recursive": {3: 16.0}})
    rows, _ = report(capfd, path, out, "--no-figures")
    assert float(rows["recursive"]["ours_minus_baseline"]) == -1.0


def test_missing_seeds_failures_and_values_that_are_not_finite_are_named(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": {1: 14.0, 2: 14.2}, "recursive": {1: float("nan")}})
    folder = table.cells[1].trials[0].run.folder_in(out, 2)
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()
    (folder / "run.json").write_text(json.dumps({"failed": {"error": "the <disk> is full"}}))
    rows, page = report(capfd, path, out, "--no-figures")
    assert rows["plain"]["seeds_done"] == "2" and "3 not run" in rows["plain"]["state"]
    for word in ("not finite", "the <disk> is full", "3 not run"):
        assert word in rows["recursive"]["state"]
    assert "the &lt;disk&gt; is full" in page and "<disk>" not in page
    first = re.search('<p class="warning">(.*?)</p>', page)[1]
    assert first.startswith("2 models have no value: recursive,")
    assert "seed 1: done, with error not finite" in first and "seed 2: failed: the" in first


def test_published_values_are_compared_only_with_the_whole_experiment(tmp_path, capfd):
    rows = [{**row, "reported": 9.5} for row in IMAGES["rows"]]
    path, out = write(tmp_path, IMAGES, rows=rows, source="A paper"), tmp_path / "out"
    finish(tables(path)[0], out, {"plain": {1: 10.0, 2: 10.5}})
    actual, page = report(capfd, path, out, "--no-figures")
    assert float(actual["plain"]["ours_minus_paper"]) == 0.75 and "Not the published" not in page
    short = ["iterations=6", "batch-size=4"]
    finish(tables(path, changes=short)[0], out, {"plain": {1: 20.0, 2: 20.5}})
    actual, page = report(capfd, path, out, "--no-figures", "--set", *short)
    assert actual["plain"]["ours_minus_paper"] == "" and "Not the published experiment" in page
    assert (actual["plain"]["scale"], actual["plain"]["changed"]) == ("0.5", "batch-size 4")


def test_a_length_is_not_compared_with_that_of_a_file_whose_own_options_are_refused(
    tmp_path, capfd
):
    """The whole table was trained with what --set gives: its report must not end in an error."""
    path, out = write(tmp_path, IMAGES, metric="valid_error"), tmp_path / "out"
    words = ["valid-images=100", "iterations=6"]
    (table,) = tables(path, changes=words)
    finish(table, out, {"plain": {1: 20.0, 2: 20.5}}, metric="valid_error")
    actual, _ = report(capfd, path, out, "--no-figures", "--set", *words)
    assert (actual["plain"]["scale"], float(actual["plain"]["mean"])) == ("1.0", 20.25)
    assert "iterations 6" in actual["plain"]["changed"]


def test_a_table_without_a_row_to_show_does_not_stop_the_others(images, capfd, tmp_path):
    path, table, out = images
    finish(table, out, {"plain": {1: 10.0, 2: 10.5}})
    rows = [{**row, "run": False} for row in IMAGES["rows"]]
    idle = write(tmp_path, IMAGES, name="idle", rows=rows)
    words = ["--output", out, "--no-figures"]
    status, printed, error = reproduce(capfd, "report", path, idle, *words)
    assert status == 0 and "plain" in printed
    assert error == f"warning: {idle}: no row of these is run or has a published value\n"
    status, _, error = reproduce(capfd, "report", idle, *words)
    assert status == 1 and error.startswith(f"error: {idle}: no row of these")


def test_the_page_holds_curves_and_needs_nothing_else(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": BAD, "recursive": GOOD}, parameters=1234567, seconds=90)
    _, page = report(capfd, path, out)
    assert page.count("data:image/png;base64,") == 1 and "1,234,567" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    text = (out / "report" / "report.md").read_text("utf-8")
    assert text.startswith("# mine\n") and "<h1>mine</h1>" in page  # its file's name is its title
    assert "| recursive" in text and "](figures/mine-curves.png)" in text
    assert (out / "report" / "figures" / "mine-curves.png").exists()


def test_a_row_has_its_own_seeds_and_published_parameters(tmp_path, capfd):
    rows = [{**IMAGES["rows"][0], "seeds": [1, 2, 3], "parameters": "65M"}, IMAGES["rows"][1]]
    path, out = write(tmp_path, IMAGES, rows=rows), tmp_path / "out"
    finish(tables(path)[0], out, {"plain": BAD, "recursive": {1: 10.0, 2: 10.2}})
    actual, page = report(capfd, path, out, "--no-figures")
    planned = [actual[row]["seeds_planned"] for row in ("plain", "recursive")]
    assert planned == ["3", "2"] and "65M" in page
    assert "2 seeds, 1 test" in page


def test_a_report_names_the_architecture_that_a_row_has_in_each_column(tmp_path):
    """A label such as "data" does not hide what the report says of the data."""
    arch = {"de": "transformer_postln_tiny", "fr": "transformer_preln_tiny"}
    rows = [{"label": "data", "arch": arch}, {"label": "one", "arch": "transformer_postln_tiny"}]
    columns = {"de": {"data": "multi30k-en-de"}, "fr": {"data": "multi30k-en-fr"}}
    (table,) = tables(write(tmp_path, TRANSLATION, rows=rows, columns=columns))
    lines = [results.collect(table, cell, tmp_path) for cell in table.cells]
    about = facts(table, lines)
    assert about["row data"] == "de: transformer_postln_tiny, fr: transformer_preln_tiny"
    assert about["row one"] == "transformer_postln_tiny"
    assert about["data"] == "multi30k-en-de / multi30k-en-fr"


def test_seeds_of_several_precisions_are_warned_of(images, capfd):
    path, table, out = images
    finish(table, out, {"plain": BAD, "recursive": GOOD}, computed="fp32 on a CPU")
    finish(table, out, {"recursive": {2: 10.2}}, computed="fp16 on CUDA")
    _, page = report(capfd, path, out, "--no-figures")
    assert "recursive: its seeds were computed in fp32 on a CPU / fp16 on CUDA." in page
    assert "plain: its seeds" not in page


@pytest.mark.parametrize(
    ("options", "computed"),
    [
        ("--cpu --lr 1", "fp32 on a CPU"),
        ("--bf16 --cpu", "bf16 on a CPU"),
        ("--memory-efficient-fp16 --lr 1", "fp16 on CUDA"),
        ("--lr 1", "fp32 on CUDA"),
    ],
)
def test_precision_and_device_are_read_from_the_command(options, computed):
    log = (
        f"recipe: sotu\n/usr/bin/fairseq-train data {options}\n"
        "NOTE: your device may support faster training with --fp16 or --amp\n"
    )
    assert text_tasks._how_computed(log) == computed
    assert text_tasks._how_computed(log + log) == computed
    resumed = text_tasks._how_computed(log + "/usr/bin/fairseq-train data --amp\n")
    assert resumed == f"{computed} / amp on CUDA"


@pytest.mark.parametrize(
    ("plain", "recursive"), [(BAD, GOOD), (GOOD, BAD)], ids=["row", "baseline"]
)
def test_of_images_the_lower_error_is_bold(tmp_path, capfd, plain, recursive):
    path = write(tmp_path, IMAGES, seeds=[1, 2, 3])
    finish(tables(path)[0], tmp_path / "out", {"plain": plain, "recursive": recursive})
    _, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert re.findall("<strong>(.*?)</strong>", page) == ["10.03 ± 0.15"]


def test_the_csv_has_the_sample_standard_deviation(tmp_path, capfd):
    path = write(tmp_path, IMAGES, seeds=[1, 2, 3])
    finish(tables(path)[0], tmp_path / "out", {"plain": BAD})
    rows, _ = report(capfd, path, tmp_path / "out", "--no-figures")
    expected = statistics.stdev(BAD.values())
    assert float(rows["plain"]["standard_deviation"]) == pytest.approx(expected)


def test_p_is_corrected_for_the_rows_of_the_column(tmp_path, capfd):
    """Of two tests: the smaller p is doubled, the larger one is at least that (Holm 1979)."""
    third = {"label": "third", "options": {"skip-kind": "rezero"}}
    path = write(tmp_path, IMAGES, rows=[*IMAGES["rows"], third], seeds=[1, 2, 3])
    values = {"plain": BAD, "recursive": GOOD, "third": {1: 13.8, 3: 14.0}}
    finish(tables(path)[0], tmp_path / "out", values)
    rows, _ = report(capfd, path, tmp_path / "out", "--no-figures")
    smaller, larger = (float(rows[row]["p"]) for row in ("recursive", "third"))
    assert smaller < larger
    assert float(rows["recursive"]["p_holm"]) == pytest.approx(2 * smaller)
    assert float(rows["third"]["p_holm"]) == pytest.approx(max(2 * smaller, larger))


def test_the_shared_seeds_are_those_of_both_rows(tmp_path, capfd):
    path = write(tmp_path, IMAGES, seeds=[1, 2, 3])
    finish(tables(path)[0], tmp_path / "out", {"plain": {1: 14.0, 3: 14.1}, "recursive": GOOD})
    rows, page = report(capfd, path, tmp_path / "out", "--no-figures")
    assert rows["recursive"]["shared_seeds"] == "2" and "2 seeds, 1 test" in page
