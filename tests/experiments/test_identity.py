"""The folder of a run: what changes it, and that published runs still count as done."""

import csv
import json

import pytest
from conftest import ROOT, unpack
from experiment_runs import IMAGES, TRANSLATION, reproduce, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import process
from fairseq_rskip.tools.experiments import execution, results
from fairseq_rskip.tools.experiments.records import evaluation_name
from fairseq_rskip.tools.experiments.run_folder import measured, read_record
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.report.tables import facts

STUDIES = {
    "skips": ({}, 45),
    "why": ({}, 18),
    "deep": (
        {"columns": ["36 layers"], "seeds": [1], "rows": ["1xSkip+LN", "2xSkip+LN", "2rSkip+LN"]},
        9,
    ),
    "rivals": (
        {"rows": ["1xSkip+LN", "ReZero", "mHC", "askip, halting", "1xSkip+LN, FFN 552"]},
        25,
    ),
    "skips-cifar": ({"corpus": "cifar10-jpg"}, 21),
    "rivals-cifar": (
        {
            "corpus": "cifar10-jpg",
            "changes": ["iterations=300", "warmup-iterations=2", "batch-size=32", "amp=bf16"],
            "rows": [
                "1xSkip",
                "2rSkip+DyT",
                "Admin, formula",
                "askip, gradient",
                "1xSkip, width 17",
            ],
        },
        25,
    ),
}


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Unpack results/runs.tar.xz into a folder.

    Empty image folders of the published names are in it, too.
    """
    folder = tmp_path_factory.mktemp("published")
    unpack(ROOT / "results" / "runs.tar.xz", folder)
    for name in ("cifar10-jpg", "cifar10-png"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("name", STUDIES)
def test_the_published_runs_of_a_study_are_done(published, name):
    options, count = STUDIES[name]
    if "corpus" in options:
        options = {**options, "corpus": str(published / options["corpus"])}
    (table,) = tables(name, **options)
    states = [results.state(run) for run in results.ready(table, published)]
    assert [state.kind for state in states] == ["done"] * count


PUBLISHED = {
    "skips_cifar": "skips-cifar --corpus {}/cifar10-jpg --seeds 1 2 3 4 5",
    "cifar_png": "cifar --corpus {}/cifar10-png",
    "cifar_png_110": "cifar --corpus {}/cifar10-png --rows 1xSkip+LN 2rSkip+LN --seeds 1 --set "
    "depth=110 iterations=5000 warmup-iterations=31 batch-size=64",
    "rivals": "rivals",
    "rivals_cifar": "rivals-cifar --corpus {}/cifar10-jpg --set "
    "iterations=300 warmup-iterations=2 batch-size=32 amp=bf16",
    "lm_rivals": "lm-rivals",
    "lm_starts": "lm-starts",
    "lm_depth": "lm-depth --set lr=0.003",
    "depth_runs": "depth",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_table_is_what_its_published_runs_give(published, capfd, name):
    words = [
        "report",
        *PUBLISHED[name].format(published).split(),
        "--no-figures",
        "--output",
        published,
    ]
    assert reproduce(capfd, *words)[0] == 0
    ours, theirs = (
        list(csv.DictReader(path.open(encoding="utf-8", newline="")))
        for path in (published / "report" / "report.csv", ROOT / "results" / f"{name}.csv")
    )
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    for row, other in zip(ours, theirs):
        for key in row:
            assert same(row[key], other[key]), (row["row"], key)


def same(cell, other):
    """Least squares differ in the last digits between processors."""
    try:
        return float(cell) == pytest.approx(float(other), rel=1e-6, abs=1e-9)
    except ValueError:
        return cell == other


def folders(path, tmp_path, **options):
    (table,) = tables(path, **options)
    return [run.folder for run in results.ready(table, tmp_path)]


def test_the_same_network_in_two_rows_or_tables_is_one_run(tmp_path):
    again = {"label": "again", "options": {**IMAGES["rows"][0]["options"], "skip_lambda": 1.0}}
    rows = [IMAGES["rows"][0], {**IMAGES["rows"][0], **again}]
    one, two = write(tmp_path, IMAGES, "one"), write(tmp_path, IMAGES, "two", rows=rows)
    assert folders(two, tmp_path) == folders(one, tmp_path, rows=["plain"])


def test_folders_of_one_name_do_not_share_runs_but_a_folder_may_be_moved(tmp_path):
    path, old, new = (
        write(tmp_path, IMAGES, rows=IMAGES["rows"][:1]),
        tmp_path / "a" / "mine",
        tmp_path / "b" / "mine",
    )
    for folder in (old, new):
        folder.mkdir(parents=True)
    with pytest.raises(UserError, match="would share their runs"):
        tables(
            write(
                tmp_path, IMAGES, "both", columns={"a": {"data": str(old)}, "b": {"data": str(new)}}
            )
        )
    execution.prepare(results.ready(tables(path, corpus=str(old))[0], tmp_path)[0])
    with pytest.raises(UserError, match="was trained on .*/a/mine, not on imagefolder:.*/b/mine"):
        folders(path, tmp_path, corpus=str(new))
    old.rmdir()
    assert len(folders(path, tmp_path, corpus=str(new))) == 2


@pytest.mark.parametrize(
    ("word", "same"),
    [
        ("device=cpu", True),
        ("save-interval=5", True),
        ("lr=0.1", True),
        ("amp=off", True),  # the default, which YAML reads as false
        ("lr=0.2", False),
        ("batch-size=16", False),
    ],
)
def test_only_what_changes_a_result_changes_the_folder(tmp_path, word, same):
    path = write(tmp_path, IMAGES)
    assert (folders(path, tmp_path) == folders(path, tmp_path, changes=[word])) is same


def test_a_sweep_tries_values_with_one_seed_and_trains_the_best_with_all(tmp_path):
    options = {**IMAGES["options"], "valid-images": 100}
    path = write(
        tmp_path, IMAGES, rows=IMAGES["rows"][:1], sweep={"lr": [0.1, 0.2, 0.4]}, options=options
    )
    (table,) = tables(path)
    first = results.ready(table, tmp_path)
    assert [(run.options["lr"], run.seed) for run in first] == [(0.1, 1), (0.2, 1), (0.4, 1)]
    assert results.rows_that_wait(table, tmp_path) == {"plain"}
    for run, error in zip(first, (30.0, 20.0, float("nan"))):
        run.folder.mkdir(parents=True)
        (run.folder / "run.json").write_text(
            json.dumps({"metrics": {"values": {"valid_error": error, "error": 25.0}}})
        )
    assert [(run.options["lr"], run.seed) for run in results.ready(table, tmp_path)][3:] == [
        (0.2, 2)
    ]
    assert results.rows_that_wait(table, tmp_path) == set()

    for run in first:  # a sweep that is over without a value brings no more runs
        (run.folder / "run.json").write_text(json.dumps({"failed": {"error": "loss: nan"}}))
    assert results.rows_that_wait(table, tmp_path) == set()


def test_an_option_of_a_row_is_not_swept(tmp_path):
    options = {**IMAGES["options"], "valid-images": 100}
    fixed = {"label": "fixed", "options": {"lr": 0.05, "skip-kind": "xskip"}}
    path = write(
        tmp_path,
        IMAGES,
        rows=[*IMAGES["rows"][:1], fixed],
        sweep={"lr": [0.1, 0.2]},
        options=options,
        seeds=[1],
    )
    (table,) = tables(path)
    rates = [[run.options["lr"] for run in cell.runs] for cell in table.cells]
    assert rates == [[0.1, 0.2], [0.05]]


@pytest.mark.parametrize("text", ["0.0001", "1e-4", "1.0e-4", "1E-4"])
def test_a_number_has_one_name_however_it_is_written(tmp_path, text):
    """PyYAML reads 1e-4 as text."""
    path = write(tmp_path, TRANSLATION, options={"lr": 0.0001})
    (expected,) = tables(path)
    path.write_text(path.read_text("utf-8").replace("lr: 0.0001", f"lr: {text}"), "utf-8")
    (actual,) = tables(path)
    (changed,) = tables(path, changes=[f"lr={text}"])
    for table in (actual, changed):
        assert [run.identity for run in table.runs] == [run.identity for run in expected.runs]


def test_a_whole_number_has_one_name_in_a_sweep_a_scale_and_a_change(tmp_path):
    path = write(tmp_path, TRANSLATION, options={"skip-lambda": 2}, rows=TRANSLATION["rows"][:1])
    (expected,) = tables(path)
    swept = write(
        tmp_path,
        TRANSLATION,
        "swept",
        rows=TRANSLATION["rows"][:1],
        sweep={"skip-lambda": [1.0, 4]},
        columns={"a": {}, "b": {"sweep_of": "a", "scale": {"skip-lambda": 2}}},
    )
    (table,) = tables(swept)
    names = [trial.run.name for trial in table.cells[1].trials]
    (changed,) = tables(path, changes=["skip-lambda=2.0"])
    assert changed.runs[0].name == expected.runs[0].name == names[0]


def test_evaluations_that_differ_beyond_a_folders_name_have_two(tmp_path):
    long = "/a/folder/with/a/long/name" * 7
    names = {evaluation_name({"comet": long, "lenpen": value}) for value in (0.6, 1.0)}
    assert len(names) == 2 and all(len(name) < 200 for name in names)
    assert evaluation_name({"beam": 5, "lenpen": 1}) == evaluation_name({"lenpen": 1, "beam": 5})


def test_a_column_takes_the_scaled_choice_of_another_columns_sweep(tmp_path):
    """The rate that is best at depth 20 is halved at depth 32, where nothing is swept."""
    options = {**IMAGES["options"], "valid-images": 100}
    columns = {
        "20": {"options": {"depth": 20}},
        "32": {"options": {"depth": 32}, "sweep_of": "20", "scale": {"lr": 0.5}},
    }
    file = {"rows": IMAGES["rows"][:1], "columns": columns, "options": options}
    path = write(tmp_path, IMAGES, sweep={"lr": [0.1, 0.2]}, seeds=[1], **file)
    for chosen_columns in ([], ["32"]):
        (table,) = tables(path, columns=chosen_columns)
        swept = results.ready(table, tmp_path)
        assert [run.options["depth"] for run in swept] == [20, 20]
        assert [run.options["lr"] for run in swept] == [0.1, 0.2]
    for run, error in zip(swept, (30.0, 20.0)):
        run.folder.mkdir(parents=True)
        record = {"metrics": {"values": {"valid_error": error, "error": 25.0}}}
        (run.folder / "run.json").write_text(json.dumps(record))
    (last,) = results.ready(table, tmp_path)[2:]
    assert (last.options["depth"], last.options["lr"]) == (32, 0.1)
    (result,) = [results.collect(table, cell, tmp_path) for cell in table.cells]
    assert result.chosen == {"lr": 0.1} and result.trials == []
    assert [run.options["depth"] for run in table.cells[0].runs] == [32, 32, 20, 20]
    settings = facts(table, [result])
    assert settings["column 32"] == "depth 32; the choice of 20, lr times 0.5"


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"sweep_of": "21"}, "sweep_of is '21'"),
        ({"sweep_of": "32"}, "sweep_of is '32'; expected one of 20$"),
        ({"scale": {"lr": 0.5}}, "scale needs sweep_of"),
        ({"sweep_of": "20", "scale": {"lrr": 0.5}}, "scale has 'lrr', which is not swept"),
    ],
    ids=["unknown", "itself", "alone", "not-swept"],
)
def test_a_wrong_sweep_of_is_one_line(tmp_path, column, said):
    columns = {"20": {"options": {"depth": 20}}, "32": {"options": {"depth": 32}, **column}}
    options = {**IMAGES["options"], "valid-images": 100}
    path = write(tmp_path, IMAGES, sweep={"lr": [0.1, 0.2]}, columns=columns, options=options)
    with pytest.raises(UserError, match=said):
        tables(path)


def test_a_scaled_option_has_numbers_as_its_values(tmp_path):
    columns = {"20": {}, "32": {"sweep_of": "20", "scale": {"amp": 0.5}}}
    options = {**IMAGES["options"], "valid-images": 100}
    file = {"columns": columns, "options": options}
    path = write(tmp_path, IMAGES, sweep={"amp": ["off", "bf16"]}, **file)
    with pytest.raises(UserError, match="scale has 'amp', whose values are not all numbers"):
        tables(path)


def test_a_row_of_a_fixed_rate_in_a_scaled_column_is_refused(tmp_path):
    """Its rate would stay while those of the other rows fall."""
    columns = {"20": {}, "32": {"sweep_of": "20", "scale": {"lr": 0.5}}}
    rows = [{**IMAGES["rows"][0], "sweep": {}}, IMAGES["rows"][1]]
    options = {**IMAGES["options"], "valid-images": 100}
    file = {"rows": rows, "columns": columns, "options": options}
    path = write(tmp_path, IMAGES, sweep={"lr": [0.1, 0.2]}, **file)
    with pytest.raises(UserError, match="scale has 'lr', which the row 'plain' does not sweep"):
        tables(path)


def first_run(tmp_path, **changes):
    (table,) = tables(write(tmp_path, TRANSLATION, **changes))
    return results.ready(table, tmp_path / "out")[0]


def finish_training(run, **record):
    """What a training of a loss alone leaves."""
    (run.folder / "checkpoints").mkdir(parents=True)
    (run.folder / "checkpoints" / "checkpoint_last.pt").touch()
    metrics = {"values": {"valid_loss": 7.5}, "time": "then"}
    (run.folder / "run.json").write_text(json.dumps({"metrics": metrics, **record}))


def test_another_metric_or_beam_is_the_same_training(tmp_path):
    folder = first_run(tmp_path).folder
    for changes in ({"metric": "valid_loss"}, {"also": ["chrF"]}, {"evaluate": {"beam": 5}}):
        assert first_run(tmp_path, **changes).folder == folder


def test_a_missing_score_is_computed_from_the_kept_checkpoints(tmp_path, monkeypatch):
    run = first_run(tmp_path, metric="valid_loss")
    finish_training(run)
    assert results.state(first_run(tmp_path, metric="valid_loss")).kind == "done"
    scored = first_run(tmp_path, metric="chrF")
    assert str(results.state(scored)) == "trained, not evaluated"

    started = []
    monkeypatch.setattr(process, "follow", lambda command, **how: started.append(command[3]) or "")
    scores = {"values": {"chrF": 40.0}}
    monkeypatch.setattr(type(TASKS["translation"]), "scores", lambda self, run: scores)
    execution.prepare(scored)
    assert execution.execute(scored.folder) and started == ["evaluate"]
    for run in (scored, first_run(tmp_path, metric="valid_loss")):
        assert results.state(run).kind == "done"
    record = measured(scored, read_record(scored.folder))
    assert record["values"] == {"valid_loss": 7.5, "chrF": 40.0} and record["time"] == "then"
    again = first_run(tmp_path, metric="chrF", evaluate={"beam": 5})
    assert str(results.state(again)) == "trained, not evaluated"


def test_without_its_checkpoints_a_run_is_trained_again_to_be_scored(tmp_path, monkeypatch):
    run = first_run(tmp_path, metric="chrF")
    finish_training(run)
    (run.folder / "checkpoints" / "checkpoint_last.pt").unlink()
    started = []
    monkeypatch.setattr(process, "follow", lambda command, **how: started.append(command[3]) or "x")
    execution.prepare(run)
    assert execution.execute(run.folder) and started == ["train"]
