"""Parts of reproduce.py that run commands, with shell commands in place of training: errors, locks, states, places."""

import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from reproduce_helpers import error_line, reproduce, wait_until

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked
from fairseq_rskip.tools.reproduce import execution, local, plans, runs
from fairseq_rskip.tools.reproduce.plans import Run
from fairseq_rskip.tools.reproduce.runs import State
from fairseq_rskip.tools.reproduce.tables import Settings


def shell_metrics(_settings, folder):
    path = folder / "value"
    return {"values": {"error": float(path.read_text())}} if path.exists() else None


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A function that makes a run of shell commands; their folder is the working folder of none of them."""
    task = SimpleNamespace(
        commands=lambda settings, seed, folder: [
            ["sh", "-c", x, "sh", str(folder)] for x in settings.identity["lines"]
        ],
        metrics=shell_metrics,
        progress=lambda settings, folder: (0.5, "valid loss 5.5"),
    )
    monkeypatch.setitem(plans.TASKS, "shell", task)
    monkeypatch.setattr(execution, "stopping", threading.Event())

    def make(*lines, seed=1):
        settings = Settings("", {}, {"lines": list(lines)}, "shell run", 1, "line")
        made = Run("shell", settings, seed, tmp_path / "ra ngoài" / "shell run" / f"seed{seed}")
        runs.prepare(made)
        return made

    return make


def test_a_run_of_two_commands_is_done_when_both_are(job):
    made = job('echo one; echo 3 >"$1/part"', 'mv "$1/part" "$1/value"; echo "$RSKIP_TEST"')
    assert runs.state(made) == State(runs.NEW)
    assert execution.execute(made.folder, {"RSKIP_TEST": "from outside"}) == State(runs.DONE, 1.0)
    assert runs.state(made) == State(runs.DONE, 1.0) and runs.metrics(runs.read(made.folder))["values"] == {"error": 3}
    log = (made.folder / "log.txt").read_text("utf-8").splitlines()
    assert [line for line in log if not line.startswith("==")] == ["one", "from outside"] and len(log) == 4
    assert execution.execute(made.folder) == State(runs.DONE, 1.0)
    assert (made.folder / "log.txt").read_text("utf-8").splitlines() == log


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("echo fine; exit 3", "fine"),
        ("exit 3", "it said nothing"),
        ("echo error: too hot; echo later; exit 1", "too hot"),
        ("echo train_cifar.py: error: no such option >&2; exit 2", "train_cifar.py: error: no such option"),
        ("echo Traceback; echo '  in f'; echo 'torch.OutOfMemoryError: CUDA out of memory'; exit 1", "torch.OutOfMem"),
        ("printf '10 %%\\r20 %%\\r30 %%'; exit 1", "30 %"),
        ("printf 'error: bad byte \\377\\n'; exit 1", "bad byte \ufffd"),
        ("kill -KILL $$", "killed by SIGKILL, out of memory perhaps"),
        ("echo epoch 3; kill -SEGV $$", "killed by SIGSEGV"),
        ("true", "the commands ended well, and left no whole result"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(job, line, error):
    made = job(line, 'test ! -e "$1/never"') if line != "true" else job(line)
    state = execution.execute(made.folder)
    assert state.name == runs.BROKEN and state.detail.startswith(error) and "\n" not in state.detail
    assert runs.state(made).name == runs.BROKEN and runs.state(made).detail == state.detail
    assert str(runs.state(made)) == f"failed: {state.detail}"
    assert (made.folder / "log.txt").read_text("utf-8", "replace").count("== 20") == 1  # the second never began


def test_a_command_hears_no_signal_of_a_clusters_user(job):
    made = job('kill -USR1 $$; kill -USR2 $$; echo 1 >"$1/value"')
    assert execution.execute(made.folder).name == runs.DONE


def test_a_failed_run_is_tried_again_and_its_old_error_is_gone(job):
    made = job('test -e "$1/mended" || { echo error: broken; exit 1; }; echo 1 >"$1/value"')
    assert execution.execute(made.folder).detail == "broken"
    (made.folder / "mended").touch()
    assert execution.execute(made.folder).name == runs.DONE
    record = runs.read(made.folder)
    assert "failed" not in record and len(record["attempts"]) == 2


def test_a_command_that_has_ended_is_not_run_twice(job):
    """Stopped in the second command: the first, which a training ended by --patience would resume, is over."""
    made = job("echo first", 'touch "$1/began"; test -e "$1/again" || exec sleep 60; echo 1 >"$1/value"')
    stopper = threading.Thread(target=lambda: wait_until((made.folder / "began").exists) or execution.stop())
    stopper.start()
    assert execution.execute(made.folder).name == runs.STOPPED
    stopper.join()
    execution.stopping.clear()
    (made.folder / "again").touch()
    assert execution.execute(made.folder).name == runs.DONE
    log = (made.folder / "log.txt").read_text("utf-8").splitlines()
    assert [line for line in log if not line.startswith("==")] == ["first"] and len(log) == 4


def test_a_run_that_others_do_is_left_to_them(job):
    made = job('echo 1 >"$1/value"')
    with locked(made.folder, name=runs.LOCK):
        assert runs.state(made) == State(runs.RUNNING, 0.5, "valid loss 5.5")
        assert str(runs.state(made)) == "running 50 %: valid loss 5.5"
        assert execution.execute(made.folder) == State(runs.RUNNING, detail="by another process")
    assert not (made.folder / "log.txt").exists()


def test_a_look_at_the_state_keeps_no_run_from_its_lock(job):
    made = job('echo 1 >"$1/value"')
    (made.folder / runs.LOCK).touch()
    over = threading.Event()

    def look():
        while not over.is_set():
            runs.state(made)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        states = [execution.execute(made.folder).name for _ in range(10)]
    finally:
        over.set()
        for looker in lookers:
            looker.join()
    assert states == [runs.DONE] * 10


def test_what_a_command_leaves_running_keeps_the_lock(job):
    made = job('sleep 1 & echo 1 >"$1/value"')
    assert execution.execute(made.folder).name == runs.DONE
    runs.note(made.folder, metrics=None)
    assert runs.state(made).name == runs.RUNNING
    deadline = time.monotonic() + 20
    while runs.state(made).name == runs.RUNNING and time.monotonic() < deadline:
        time.sleep(0.05)
    assert runs.state(made).name == runs.STOPPED


def test_so_many_run_at_a_time_as_there_are_places(job, monkeypatch, capsys):
    meeting, lock, now, most = threading.Barrier(2, timeout=20), threading.Lock(), [0], [0]
    seen = []

    def execute(folder, place):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
            seen.append(place["name"])
        meeting.wait()  # as one at a time it would wait in vain
        with lock:
            now[0] -= 1
        return State(runs.DONE)

    monkeypatch.setattr(execution, "execute", execute)
    made = [job("true", seed=seed) for seed in range(6)]
    states = local.run_all(made, [{"name": "a"}, {"name": "b"}])
    assert [state.name for state in states] == [runs.DONE] * 6 and most == [2]
    assert sorted(seen) == ["a"] * 3 + ["b"] * 3 and len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.parametrize("terminal", [True, False], ids=["on a terminal", "in a file"])
def test_what_runs_is_shown_with_its_loss_and_the_time_left(job, monkeypatch, terminal):
    made, looks, out = job('until test -e "$1/go"; do sleep 0.02; done; echo 1 >"$1/value"'), [], io.StringIO()

    def progress(settings, folder):
        looks.append(folder)
        if len(looks) > 4:
            (folder / "go").touch()
        return min(len(looks), 4) / 5, "valid loss 5.5"

    monkeypatch.setattr(plans.TASKS["shell"], "progress", progress)
    monkeypatch.setattr(local, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(local, "SPEAK_EVERY", 0)
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    assert [state.name for state in local.run_all([made], [{}])] == [runs.DONE]
    shown = [line.strip() for line in re.split(r"[\r\n]", out.getvalue()) if "80 %" in line]
    start = "" if terminal else "running "
    assert shown and re.fullmatch(rf"{start} *80 % \[\d\d:\d\d<\d\d:\d\d, valid loss 5.5\] shell run/seed1", shown[-1])


def test_a_damaged_folder_stops_no_other_run(job, capsys):
    good, bad = job('echo 1 >"$1/value"', seed=1), job('echo 1 >"$1/value"', seed=2)
    (bad.folder / runs.LOG).mkdir()
    states = local.run_all([bad, good], [{}])
    assert [state.name for state in states] == [runs.BROKEN, runs.DONE]
    assert "Is a directory" in states[0].detail and "\nfailed shell run/seed2: " in capsys.readouterr().out


def test_places_are_gpus_or_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr(local, "visible_gpus", lambda: [])
    assert local.environments(None) == local.environments(1) == [{}]
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(8))
    assert local.environments(2) == [{"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}] * 2
    assert local.environments(16)[0]["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(local, "visible_gpus", lambda: ["3", "GPU-5"])
    assert local.environments(None) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-5"}]
    assert local.environments(1) == [{}]
    with pytest.raises(UserError, match="--jobs 3: expected at most 2"):
        local.environments(3)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[1]", "{}", '{"task": "speech", "settings": {}, "seed": 1}'],
    ids=["none", "empty", "half", "list", "nothing", "no task"],
)
def test_what_is_no_runs_folder_is_named(tmp_path, capfd, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    status, _, error = reproduce(capfd, "execute", tmp_path)
    assert status == 1 and error_line(error) == f"{tmp_path} is not the folder of a run: it has no whole run.json"
