"""The commands of one run: resumed where they failed, kept where they are done, refused where what
they depend on has changed.
"""

import hashlib
import os
import shutil
import signal
import sys
import time
from dataclasses import replace

import pytest
from experiment_runs import IMAGES, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked
from fairseq_rskip.tools.experiments import execution, results
from fairseq_rskip.tools.experiments.run_folder import LOCK, read_record
from fairseq_rskip.tools.experiments.tasks import TASKS


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepare a run of two commands that write lines, the first one a checkpoint, too.

    The second one fails until the file ``good`` is there.
    """
    run = results.ready(tables(write(tmp_path, IMAGES))[0], tmp_path)[0]
    script = "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1]); print(sys.argv[2])\n"
    script += (
        "if sys.argv[2] == 'two' and not (folder / 'good').exists(): "
        "sys.exit('error: a full disk')\n"
    )
    script += "(folder / 'result.json').write_text(json.dumps({'error': 5.0}))\n"
    script += "(folder / 'checkpoints').mkdir(exist_ok=True)\n"
    script += "(folder / 'checkpoints' / 'checkpoint_best.pt').touch()\n"
    commands = [[sys.executable, "-c", script, str(run.folder), word] for word in ("one", "two")]
    monkeypatch.setattr(type(TASKS["images"]), "commands", lambda self, run: commands)
    execution.prepare(run)
    return run


def add_checkpoint(run):
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "checkpoint_best.pt").touch()


def test_a_failed_run_says_why_and_resumes_at_the_failed_command(prepared):
    assert execution.execute(prepared.folder)
    assert str(results.state(prepared)) == "failed: a full disk"
    label = read_record(prepared.folder)["settings"]["label"]  # rskip compare shows it
    assert label == IMAGES["rows"][0]["label"]
    seconds = read_record(prepared.folder)["seconds"]
    (prepared.folder / "good").touch()
    assert execution.execute(prepared.folder)
    # of the first command, which trains
    assert read_record(prepared.folder)["metrics"]["seconds"] == seconds
    assert results.state(prepared).kind == "done" and read_record(prepared.folder)["metrics"][
        "values"
    ] == {"error": 5.0}
    log = (prepared.folder / "log.txt").read_text()
    assert [line for line in log.splitlines() if line in ("one", "two")] == ["one", "two", "two"]
    assert execution.execute(prepared.folder) and (prepared.folder / "log.txt").read_text() == log


def test_only_commands_that_are_as_they_were_are_not_repeated(prepared):
    done = {"complete": 1, "commands": [["a"], ["b"]]}
    add_checkpoint(prepared)
    assert execution.count_complete(prepared, done, [["a"], ["c"]]) == 1
    assert execution.count_complete(prepared, done, [["c"], ["b"]]) == 0


def test_what_is_to_be_evaluated_is_trained_again_where_its_checkpoints_were_removed(prepared):
    assert execution.execute(prepared.folder)
    assert str(results.state(prepared)) == "failed: a full disk"
    shutil.rmtree(prepared.folder / "checkpoints")
    (prepared.folder / "good").touch()
    assert execution.execute(prepared.folder) and results.state(prepared).kind == "done"
    log = (prepared.folder / "log.txt").read_text()
    lines = [line for line in log.splitlines() if line in ("one", "two")]
    assert lines == ["one", "two", "one", "two"]


def test_what_was_complete_of_other_commands_does_not_count(prepared, monkeypatch):
    """Even where the attempt with the new commands is killed before one of them has ended."""
    execution.execute(prepared.folder)
    assert read_record(prepared.folder)["complete"] == 1
    monkeypatch.setattr(type(TASKS["images"]), "commands", lambda self, run: [["true"], ["x"]])
    monkeypatch.setattr(execution, "_data_have_changed", lambda run: sys.exit("killed"))
    with pytest.raises(SystemExit):
        execution.execute(prepared.folder)
    record = read_record(prepared.folder)
    assert execution.count_complete(prepared, record, [["true"], ["x"]]) == 0


def test_what_is_trained_is_not_trained_again_while_its_checkpoints_are_there(prepared):
    """Whatever the commands are now: fairseq would train further than --patience did."""
    done = {"metrics": {"values": {"error": 9.0}}, "commands": [["a"], ["b"]], "complete": 2}
    assert execution.count_complete(prepared, done, [["c"], ["d"]]) == 0
    add_checkpoint(prepared)
    assert execution.count_complete(prepared, done, [["c"], ["d"]]) == 1


@pytest.mark.parametrize("scores", [{"values": {"error": 1.0}}, None], ids=["scored", "no scores"])
def test_another_evaluation_keeps_the_scores_of_the_first(prepared, monkeypatch, scores):
    """The checkpoints of the earlier training are gone, so its figures are measured again."""
    monkeypatch.setattr(type(TASKS["images"]), "scores", lambda self, run: scores)
    run = replace(prepared, scored=True, evaluate={"beam": 4})
    execution.prepare(run)
    first = {"evaluation": {"values": {"error": 2.0}}}
    earlier = {"values": {"error": 9.0}, "time": "2026-01-01T00:00:00+0000"}
    execution.note(run.folder, scores=first, metrics=earlier)
    (run.folder / "good").touch()
    assert execution.execute(run.folder)
    record = read_record(run.folder)
    assert record["metrics"]["values"] == {"error": 5.0}
    if scores:
        assert record["scores"] == {**first, "evaluation-beam4": scores}
    else:
        assert record["scores"] == first and results.state(run).kind == "failed"
        assert "left no complete result" in str(results.state(run))


def test_a_command_that_is_still_running_keeps_its_runs_lock(prepared):
    """Nothing else may write there, even if the process that started it was killed."""
    script = f"sleep 100 >/dev/null 2>&1 & echo $! > {prepared.folder}/pid"
    with locked(prepared.folder, LOCK) as lock:
        assert execution._follow(["sh", "-c", script], prepared.folder, lock.fileno()) == ""
    with locked(prepared.folder, LOCK) as lock:
        assert lock is None
    os.kill(int((prepared.folder / "pid").read_text()), signal.SIGKILL)


def test_the_time_left_is_that_of_the_part_trained_since_the_start(prepared, monkeypatch):
    """Resumed at a half, at three quarters after ten minutes."""
    monkeypatch.setattr(type(TASKS["images"]), "progress", lambda self, run: (0.75, "loss 2"))
    job = execution.Job.__new__(execution.Job)
    job.run, job.done_before, job.started = prepared, 0.5, time.monotonic() - 600
    assert job.progress().endswith(": 75%, 10 min, 10 min left; loss 2")


def test_a_rule_that_has_changed_since_it_was_planned_is_not_trained(
    prepared, tmp_path, monkeypatch
):
    rule = tmp_path / "my_rule.py"
    rule.write_text("# as planned\n")
    monkeypatch.setenv("RSKIP_RULES", str(rule))
    checksum = hashlib.sha256(rule.read_bytes()).hexdigest()
    execution.prepare(replace(prepared, identity={**prepared.identity, "rule": checksum}))
    rule.write_text("# another\n")
    assert execution.execute(prepared.folder)
    assert "the file of its rule (RSKIP_RULES) has changed" in str(results.state(prepared))
    assert not (prepared.folder / "log.txt").exists()

    rule.write_text("# as planned\n")
    (prepared.folder / "good").touch()
    assert execution.execute(prepared.folder)
    assert results.state(prepared).kind == "done"


def test_a_corpus_that_was_corrected_before_anything_trained_is_the_rows(prepared, monkeypatch):
    content = iter(["wrong", "right"])
    monkeypatch.setattr(type(TASKS["images"]), "data_checksum", lambda self, data: next(content))
    assert execution.execute(prepared.folder) and results.state(prepared).kind == "failed"
    shutil.rmtree(prepared.folder / "checkpoints")
    (prepared.folder / "good").touch()
    assert execution.execute(prepared.folder) and results.state(prepared).kind == "done"
    assert read_record(prepared.folder)["data_checksum"] == "right"


def test_seeds_of_a_corpus_that_was_prepared_again_are_not_one_row(prepared, monkeypatch):
    """The run's identity, and so its folder, has the corpus's name only."""
    content = iter(["first", "first", "second"])
    task = type(TASKS["images"])
    monkeypatch.setattr(task, "data_checksum", lambda self, data: next(content))
    (prepared.folder / "good").touch()
    assert execution.execute(prepared.folder)
    commands = TASKS["images"].commands(prepared)

    def into_its_folder(self, run):
        return [[*words[:3], str(run.folder), words[-1]] for words in commands]

    monkeypatch.setattr(task, "commands", into_its_folder)
    assert read_record(prepared.folder)["data_checksum"] == "first"
    for seed, state in ((2, "done"), (3, "failed")):
        run = replace(prepared, seed=seed, folder=prepared.folder.with_name(f"seed{seed}"))
        execution.prepare(run)
        (run.folder / "good").touch()
        assert execution.execute(run.folder) and results.state(run).kind == state
    assert "was prepared again, and " in str(results.state(run))


def test_a_run_whose_parent_is_another_now_is_named(prepared, tmp_path):
    """A fine-tuned row would else stay as it was beside rows of the new checkpoint."""
    parent = tmp_path / "parent.pt"
    parent.write_bytes(b"first")
    run = replace(prepared, options={**prepared.options, "finetune-from": str(parent)})
    execution.prepare(run)
    (run.folder / "good").touch()
    assert execution.execute(run.folder) and results.state(run).kind == "done"
    parent.write_bytes(b"second")
    with pytest.raises(UserError, match=f"{run.folder} began with another {parent} than there is"):
        results.state(run)
    parent.unlink()  # what is not there any more is not compared
    assert results.state(run).kind == "done"


def test_a_run_that_another_process_does_is_left_alone(prepared):
    with locked(prepared.folder, LOCK):
        assert not execution.execute(prepared.folder)
        assert results.state(prepared).kind == "running"
    assert not (prepared.folder / "log.txt").exists()
