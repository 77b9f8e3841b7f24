"""Runs from the command line: done once, failing alone, killed and resumed."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from experiment_runs import IMAGES, TRANSLATION, finish, reproduce, tables, write
from fairseq import models

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools import process
from fairseq_rskip.tools import reproduce as reproduce_module
from fairseq_rskip.tools.experiments import execution, results
from fairseq_rskip.tools.experiments.run_folder import LOCK, read_record
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.experiments.text_tasks import planned
from fairseq_rskip.tools.train.main import read
from fairseq_rskip.tools.train.plan import make_plan


def test_a_dry_run_prints_the_commands_and_writes_nothing(tmp_path, capfd):
    out = tmp_path / "out"
    status, printed, _ = reproduce(
        capfd, "run", write(tmp_path, IMAGES), "--output", out, "--dry-run"
    )
    assert status == 0 and printed.count("train-cifar") == 4 and "0 of 4 runs are done" in printed
    assert not out.exists()


def test_a_dry_run_does_not_repeat_the_training_of_a_run_that_lacks_an_evaluation(tmp_path, capfd):
    path = write(tmp_path, TRANSLATION, seeds=[1], rows=TRANSLATION["rows"][:1])
    finish(tables(path)[0], tmp_path / "out", {"xSkip": {1: 4.1}}, metric="valid_loss")
    (run,) = results.ready(tables(path)[0], tmp_path / "out")
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "checkpoint_best.pt").touch()
    _, printed, _ = reproduce(capfd, "run", path, "--output", tmp_path / "out", "--dry-run")
    commands = [line for line in printed.splitlines() if line.endswith("trained, not evaluated")]
    assert len(commands) == 1 and " evaluate " in commands[0]


def test_a_run_that_died_is_no_success(tmp_path, capfd, monkeypatch):
    """Killed before it could note that it failed, its state is what it was before."""
    monkeypatch.setattr(
        execution, "run_all", lambda runs, places: [results.state(run) for run in runs]
    )
    words = [write(tmp_path, IMAGES), "--output", tmp_path / "out", "--no-figures"]
    status, _, error = reproduce(capfd, "run", *words)
    assert status == 1
    assert "4 of 4 runs are not done, the first: not run; the same command tries again" in error


def test_more_jobs_than_gpus_share_them(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def gpus(jobs):
        return [each.get("CUDA_VISIBLE_DEVICES") for each in execution.environments(jobs)]

    assert gpus(None) == gpus(2) == ["0", "1"] and gpus(1) == [None]
    assert gpus(5) == ["0", "1", "0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert gpus(3) == ["6", "7", "6"]


def test_rows_that_differ_in_their_evaluation_are_all_evaluated(tmp_path, monkeypatch):
    """They share a training, whose record one process at a time may write."""
    rows = []
    for beam in (1, 4):
        rows.append({**TRANSLATION["rows"][0], "label": f"{beam}", "evaluate": {"beam": beam}})
    paths = [
        write(tmp_path, TRANSLATION, rows=rows, seeds=[1]),
        write(tmp_path, TRANSLATION, "losses", seeds=[1], metric="valid_loss"),
    ]
    started = []

    def run_all(runs, environments):
        started.append([run.evaluation if run.scored else run.label for run in runs])
        assert len({run.folder for run in runs}) == len(runs)
        for run in runs:
            scores = {**read_record(run.folder).get("scores", {}), run.evaluation: SCORES}
            run.folder.mkdir(parents=True, exist_ok=True)
            write_json(run.folder / "run.json", {"metrics": {"values": {}}, "scores": scores})
        return [results.state(run) for run in runs]

    SCORES = {"values": {"sacreBLEU 13a": 1.0}}
    monkeypatch.setattr(execution, "run_all", run_all)
    for name in ("prepare_data", "_check_inputs", "report"):
        monkeypatch.setattr(reproduce_module, name, lambda *arguments: False)
    names = [*map(str, paths), "--output", str(tmp_path / "out")]
    assert reproduce_module.main(names, "run") == 0
    assert [len(each) for each in started] == [2, 1]
    assert {*started[0], *started[1]} == {"evaluation-beam1", "evaluation-beam4", "rSkip"}


def test_help_needs_no_torch():
    code = "import sys; from fairseq_rskip.tools.reproduce import main; main(['run', '-h'])"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_translation_is_trained_and_evaluated_and_a_loss_is_only_trained(tmp_path):
    path = write(tmp_path, TRANSLATION, evaluate={"average": 3, "beam": 2})
    run = results.ready(tables(path)[0], tmp_path)[0]
    train, evaluate = TASKS["translation"].commands(run)
    assert make_plan(*read([*train[4:], "--dry-run"])).save == run.folder / "checkpoints"
    assert (
        train[train.index("--keep-last-epochs") + 1] == "10"
        and evaluate[3] == "evaluate"
        and "--beam" in evaluate
    )
    path = write(tmp_path, TRANSLATION, metric="valid_loss")
    assert len(TASKS["translation"].commands(results.ready(tables(path)[0], tmp_path)[0])) == 1


def test_rows_that_share_a_training_keep_the_checkpoints_of_the_one_that_averages_most(tmp_path):
    path = write(
        tmp_path,
        TRANSLATION,
        rows=[
            {"label": "5", "arch": "transformer_postln_tiny", "evaluate": {"average": 5}},
            {"label": "20", "arch": "transformer_postln_tiny", "evaluate": {"average": 20}},
        ],
    )
    (experiment,) = tables(path)
    trainings = []
    for cell in experiment.cells:
        train, _ = TASKS["translation"].commands(cell.trials[0].run)
        trainings.append(train)
    assert trainings[0] == trainings[1]
    assert trainings[0][trainings[0].index("--keep-last-epochs") + 1] == "20"
    (chosen,) = tables(path, rows=["5"])
    assert TASKS["translation"].commands(chosen.cells[0].trials[0].run)[0] == trainings[0]


def test_a_wrong_number_of_averaged_checkpoints_is_one_line(tmp_path):
    row = {"arch": "transformer_postln_tiny"}
    rows = [{"label": "one", **row}, {"label": "two", **row, "evaluate": {"average": "abc"}}]
    with pytest.raises(UserError, match="average") as refused:
        tables(write(tmp_path, TRANSLATION, rows=rows))
    assert "\n" not in str(refused.value)


def test_a_table_builds_one_small_model_for_each_network(tmp_path, monkeypatch):
    """Seeds share the check of ``rskip run``, and the commands of the runs do not repeat it."""
    planned.cache_clear()
    built = []
    monkeypatch.setattr(models, "build_model", lambda args, task: built.append(args._name))
    runs = results.ready(tables(write(tmp_path, TRANSLATION))[0], tmp_path)
    assert len(runs) == 6 and built == ["transformer_xskip_ln_tiny", "transformer_rskip_ln_tiny"]
    for run in runs:
        train, _ = TASKS["translation"].commands(run)
        make_plan(*read([*train[4:], "--dry-run"]))
    assert len(built) == 2


def test_a_run_sets_the_time_to_save_a_state_to_a_minute(tmp_path, monkeypatch):
    for name in ("end_with_parent", "stop_on_signals"):
        monkeypatch.setattr(process, name, lambda *_: None)
    monkeypatch.setattr(process, "GRACE", process.GRACE)
    monkeypatch.setattr(execution, "execute", lambda folder: True)
    assert execution.main([str(tmp_path)]) == 0 and process.GRACE == 60


def test_a_training_counted_in_epochs_has_ended_with_its_last_one(tmp_path):
    """fairseq logs a line "train" when an epoch is over, others while it lasts."""
    path = write(tmp_path, TRANSLATION, options={"max-epoch": 2}, seeds=[1])
    run = results.ready(tables(path)[0], tmp_path)[0]
    (run.folder / "checkpoints").mkdir(parents=True)
    log = run.folder / "checkpoints" / "train.log"
    line = '2026-01-01 00:00:00 | INFO | {0} | {{"epoch": {1}, "{0}_num_updates": "{2}"}}\n'
    for source, epoch, expected in (("valid", 1, 0), ("train", 1, 0.5), ("train", 2, 1.0)):
        with open(log, "a", encoding="utf-8") as file:
            file.write(line.format(source, epoch, 10 * epoch))
        assert TASKS["translation"].progress(run)[0] == expected
    (run.folder / "run.lock").touch()
    (run.folder / "log.txt").touch()
    assert results.state(run).kind == "trained, not evaluated"


def test_a_training_whose_checkpoints_were_removed_begins_again(tmp_path):
    """An evaluation of them may be left."""
    run = results.ready(tables(write(tmp_path, TRANSLATION, seeds=[1]))[0], tmp_path)[0]
    (run.folder / run.evaluation).mkdir(parents=True)
    assert TASKS["translation"].progress(run)[0] == 0
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "checkpoint_last.pt").touch()
    assert TASKS["translation"].progress(run) == (1.0, "evaluating")


def test_parallel_runs_share_the_cores(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(execution, "all_cores", lambda: 9)
    assert [each["OMP_NUM_THREADS"] for each in execution.environments(4)] == ["2"] * 4
    assert execution.environments(1) == [{}]


def test_a_checkpoint_to_start_from_that_is_no_file_is_refused_before_the_first_run(
    tmp_path, capfd
):
    row = {"label": "fine-tuned", "options": {"finetune-from": str(tmp_path)}}
    path = write(tmp_path, IMAGES, rows=[*IMAGES["rows"], row], baseline="plain")
    status, _, error = reproduce(capfd, "run", path, "--output", tmp_path / "out")
    assert status == 1 and f"finetune-from: {tmp_path} is a folder; expected a check" in error
    assert not list((tmp_path / "out").rglob("log.txt"))


def test_the_checksum_of_a_corpus_is_of_its_words_not_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = TASKS["translation"]
    assert text.data_checksum("mine") == ""
    folder, actual = tmp_path / "data" / "mine" / "data-bin", []
    folder.mkdir(parents=True)
    for words in ("a 3\n", "a 4\n", "a 3\n"):
        (folder / "dict.en.txt").write_text(words)
        actual.append(text.data_checksum("mine"))
    assert actual[0] == actual[2] != actual[1]


def test_runs_of_another_process_are_named_and_the_command_does_not_succeed(tmp_path, capfd):
    path = write(tmp_path, IMAGES, seeds=[1], rows=IMAGES["rows"][:1])
    (run,) = results.ready(tables(path)[0], tmp_path / "out")
    execution.prepare(run)
    with locked(run.folder, LOCK):
        status, _, error = reproduce(capfd, "run", path, "--output", tmp_path / "out")
    assert status == 1 and f"another process executes 1 of these runs, the first: {run};" in error


def start(*words, home):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), *map(str, words)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(holds, process=None):
    deadline = time.monotonic() + 300
    while not holds():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_table_that_is_killed_stops_all_and_the_same_command_resumes(tmp_path):
    options = {**IMAGES["options"], "iterations": 150, "save-interval": 10, "device": "cpu"}
    path, out = (
        write(tmp_path, IMAGES, options=options, seeds=[1], rows=IMAGES["rows"][:1]),
        tmp_path / "out",
    )
    words = ["run", path, "--output", out]
    (first,) = results.ready(tables(path)[0], out)
    killed = start(*words, home=tmp_path)
    wait_for((first.folder / "checkpoint.pt").exists, killed)
    killed.kill()
    killed.communicate()
    wait_for(lambda: results.state(first).kind == "stopped")  # nothing holds its lock any more
    resumed = start(*words, home=tmp_path)
    printed, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, printed
    assert results.state(first).kind == "done"
    assert "resum" in (first.folder / "log.txt").read_text().lower()
    assert json.loads((first.folder / "run.json").read_text())["metrics"]["parameters"] > 0
    assert (out / "report" / "report.html").exists()


def test_runs_that_wait_for_a_sweep_are_said_where_the_others_start(tmp_path, monkeypatch, capfd):
    options = {**IMAGES["options"], "valid-images": 100}
    path = write(tmp_path, IMAGES, sweep={"lr": [0.1, 0.2]}, options=options)
    for name in ("prepare_data", "_check_inputs", "report"):
        monkeypatch.setattr(reproduce_module, name, lambda *_: False)
    monkeypatch.setattr(execution, "run_all", lambda runs, environments: [])
    _, printed, _ = reproduce(capfd, "run", path, "--output", tmp_path / "out")
    assert printed == "4 runs to start; more follow where sweeps end, in 2 rows\n"


def test_a_training_that_diverged_is_not_repeated(tmp_path, monkeypatch, capfd):
    """A value of a sweep that diverges is a result; a sweep without another value is a failure."""
    options = {**IMAGES["options"], "valid-images": 100}
    rows = IMAGES["rows"][:1]
    path = write(tmp_path, IMAGES, rows=rows, seeds=[1], sweep={"lr": [0.1, 9]}, options=options)
    folders = [
        trial.run.folder_in(tmp_path / "out", 1) for trial in tables(path)[0].cells[0].trials
    ]
    started = []
    for name in ("prepare_data", "_check_inputs", "report"):
        monkeypatch.setattr(reproduce_module, name, lambda *_: False)

    def run_all(runs, environments):
        started.extend(run.folder for run in runs)
        return []

    monkeypatch.setattr(execution, "run_all", run_all)

    def run(*records):
        started.clear()
        for folder, record in zip(folders, records, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps(record))
        status, _, error = reproduce(capfd, "run", path, "--output", tmp_path / "out")
        return status, error

    good = {"metrics": {"values": {"valid_error": 10.0, "error": 10.0}}}
    diverged = {"failed": {"error": "stopped at iteration 50, the loss is not finite"}}
    killed = {"failed": {"error": "killed by SIGKILL, perhaps out of memory"}}
    assert run(good, diverged) == (0, "") and not started
    _, printed, _ = reproduce(capfd, "run", path, "--output", tmp_path / "out", "--dry-run")
    assert printed == "# 1 of 2 runs are done, 1 diverged\n"
    status, error = run(diverged, diverged)
    assert status == 1 and "diverged: plain, every value of its sweep;" in error and not started
    run(good, killed)
    assert started == [folders[1]]


def test_each_parallel_run_has_its_own_gpu(tmp_path, monkeypatch):
    started = []

    def start(command, env, **options):
        started.append((command[-1], env["CUDA_VISIBLE_DEVICES"]))
        return SimpleNamespace(poll=lambda: 0, terminate=lambda: None, wait=lambda: 0)

    monkeypatch.setattr(execution, "POLL_INTERVAL", 0)
    monkeypatch.setattr(execution.subprocess, "Popen", start)
    runs = results.ready(tables(write(tmp_path, IMAGES))[0], tmp_path)[:2]
    execution.run_all(runs, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}])
    assert started == [(str(runs[0].folder), "0"), (str(runs[1].folder), "1")]
