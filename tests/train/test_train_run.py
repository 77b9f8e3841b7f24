"""scripts/train.sh at work: its log, what it says meanwhile, signals and resuming.

What does not depend on fairseq is tried with a stand-in for fairseq-train that takes no time.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, run_command
from processes import child_of, is_alive, wait_for

from fairseq_rskip.tools.train.run import Progress

# What fairseq-train logs with --log-format json, and what is not JSON
TRAINING = """
say() { printf '2026-01-01 00:00:00 | %s\\n' "$1"; }
say 'INFO | fairseq_cli.train | SkipTransformerEncoder('
say 'INFO | fairseq.trainer | Loaded checkpoint save/checkpoint_last.pt (epoch 1 @ 5 updates)'
say 'WARNING | fairseq_rskip.models.skip_transformer | a skip scaled by 3 grows'
say 'INFO | train_inner | {"epoch": 1, "update": 0.5, "loss": "9.5", \
"wps": "1234.5", "num_updates": "10"}'
say 'INFO | valid | {"epoch": 1, "valid_loss": "8.25", \
"valid_num_updates": "20", "valid_best_loss": "8.25"}'
say 'INFO | train | {"epoch": 1, "train_loss": "9", "train_wps": "0", "train_num_updates": "20"}'
"""
LINES = [
    "Loaded checkpoint save/checkpoint_last.pt (epoch 1 @ 5 updates)",
    "warning: a skip scaled by 3 grows",
    "epoch 1, 20 updates, train loss 9.500 at update 10, valid loss 8.250, 1,234 words/s",
]


def running(save, program, *words, lines_every=30):
    """The command that runs a shell's ``program`` in place of fairseq-train."""
    code = (
        "import sys; from pathlib import Path; from fairseq_rskip.errors import exit_status; "
        f"from fairseq_rskip.tools.train import run; run.LINES_EVERY = {lines_every}; "
        "run.stop_on_signals(); "
        "sys.exit(exit_status(lambda: run.run(Path(sys.argv[1]), 'recipe: x', sys.argv[2:])))"
    )
    return [sys.executable, "-c", code, str(save), "sh", "-c", program, *words]


def test_the_log_has_everything_and_the_screen_a_line_for_each_validation(tmp_path):
    done = run_command(running(tmp_path / "save", TRAINING))
    assert done.returncode == 0, done.stderr
    about, log_line, *lines, last = done.stdout.splitlines()
    assert (about, log_line, lines) == (
        "recipe: x",
        f"the whole log: {tmp_path}/save/train.log",
        LINES,
    )
    assert re.fullmatch(
        r"trained in 0\.\d minutes: epoch 1, 20 updates, train loss 9.500 at update 10, valid.*",
        last,
    )
    log = (tmp_path / "save" / "train.log").read_text("utf-8")
    assert log.startswith("recipe: x\n2026") and log.count("\n") == 1 + TRAINING.count("say '")
    assert not done.stderr


def test_a_reader_that_goes_away_costs_neither_log_nor_success(tmp_path):
    reader, writer = os.pipe()
    with subprocess.Popen(
        running(tmp_path, TRAINING), stdout=writer, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        os.close(writer)
        os.close(reader)
        error = process.stderr.read().decode()
    assert process.returncode == 0 and not error
    assert (tmp_path / "train.log").read_text("utf-8").endswith('"train_num_updates": "20"}\n')


STATUS = {"INT": (signal.SIGINT, 130), "TERM": (signal.SIGTERM, 143), "HUP": (signal.SIGHUP, 129)}


@pytest.mark.parametrize(("number", "status"), STATUS.values(), ids=STATUS)
def test_a_signal_ends_every_process(tmp_path, number, status):
    """The stand-in is as obstinate as a shell that waits for a child of its own.

    It prints now and then, as a training does: Python acts on a signal that came just before it
    began to read once there is something to read.
    """
    (tmp_path / "checkpoint_last.pt").touch()
    command = running(tmp_path, f"while sleep 1; do echo; done & echo $! > {tmp_path}/pid; wait")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    # ignored where pytest ignores it, as under nohup
    before = {"preexec_fn": lambda: signal.signal(number, signal.SIG_DFL), "cwd": ROOT}
    with subprocess.Popen(command, **streams, **before) as process:
        wait_for(lambda: child_of(tmp_path), process)
        with open(tmp_path / "train.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.send_signal(number)
        error = process.stderr.read()
    assert process.returncode == status
    resume = f"the same command resumes from {tmp_path}/checkpoint_last.pt"
    assert error == f"stopped: no update logged yet; {resume}\n"
    assert not is_alive(child_of(tmp_path))


def test_a_resumed_training_says_what_it_resumes_from_until_something_is_logged():
    progress = Progress()
    assert progress.summary == "no update logged yet"
    progress.read(b"INFO | fairseq | Loaded checkpoint a/b.pt (epoch 1 @ 60 updates)\n")
    assert progress.summary == "no update logged yet after the 60 of the checkpoint"


def test_lines_of_progress_end_with_the_training(monkeypatch, capsys):
    """A thread that went on would print into whatever the process does next."""
    monkeypatch.setattr("fairseq_rskip.tools.train.run.LINES_EVERY", 0.01)
    before = set(threading.enumerate())
    with Progress():
        (thread,) = set(threading.enumerate()) - before
        while not capsys.readouterr().out:
            time.sleep(0.01)
    thread.join(60)
    assert not thread.is_alive()


def test_what_a_training_left_running_keeps_its_folder(tmp_path):
    """A worker may write there still, though the process that started it has ended."""
    left = running(tmp_path, f"sleep 100 >/dev/null 2>&1 & echo $! > {tmp_path}/pid")
    assert run_command(left).returncode == 0
    second = run_command(running(tmp_path, "true"))
    os.kill(child_of(tmp_path), signal.SIGKILL)
    assert second.returncode == 1 and f"another training writes to {tmp_path}" in second.stderr


def test_what_a_killed_training_left_unfinished_is_removed(tmp_path):
    for name in ("checkpoint_last.pt.tmp", "checkpoint_last.pt.part", "checkpoint_last.pt"):
        (tmp_path / name).touch()
    assert run_command(running(tmp_path, "true")).returncode == 0
    assert [path.name for path in tmp_path.glob("*.pt*")] == ["checkpoint_last.pt"]


def test_a_killed_parent_ends_the_training(tmp_path):
    with subprocess.Popen(
        running(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 100"), cwd=ROOT
    ) as process:
        wait_for(lambda: child_of(tmp_path), process)
        second = run_command(running(tmp_path, "true"))
        assert second.returncode == 1 and f"(process {process.pid})" in second.stderr
        process.kill()
    deadline = time.time() + 20
    while is_alive(child_of(tmp_path)) and time.time() < deadline:
        time.sleep(0.02)
    assert not is_alive(child_of(tmp_path))
    assert run_command(running(tmp_path, "true")).returncode == 0


def test_a_pipe_gets_a_line_regularly_from_a_silent_training(tmp_path):
    done = run_command(running(tmp_path, "sleep 2", lines_every=0.5))
    assert len(re.findall(r"^0\.0 minutes: no update logged yet$", done.stdout, re.MULTILINE)) >= 2


def test_a_failure_is_one_line_with_its_reason(tmp_path):
    (tmp_path / "train.log").write_text("KeyError: of the run before\n")
    done = run_command(running(tmp_path, "echo 'KeyError: early'; echo 'ValueError: late'; exit 3"))
    reason = "fairseq-train failed: ValueError: late"
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {reason}; its output is in {tmp_path}/train.log\n",
    )


@pytest.mark.parametrize(
    "reason",
    ["FloatingPointError: gradients are Nan/Inf", "ValueError: the loss is nan"],
    ids=["fairseq's own", "any other"],
)
def test_a_loss_of_nan_advises_a_lower_rate(tmp_path, reason):
    done = run_command(running(tmp_path, f"echo '{reason}'; exit 1"))
    assert done.returncode == 1
    assert f"{reason}; try a lower --lr; its output is in" in done.stderr


def test_the_train_loss_is_one_average_to_the_last_line(tmp_path):
    """fairseq logs the mean over an epoch between means over intervals.

    Only the latter are shown.
    """
    figures = '"num_updates": "%d", "wps": "5"}\''
    say = 'echo \'| INFO | %s | {"epoch": 1, '
    program = "\n".join(
        [
            say % "train_inner" + '"loss": "7.5", ' + figures % 100,
            say % "train" + '"train_loss": "8.5", "train_num_updates": "120"}\'',
            say % "valid" + '"valid_loss": "8", "valid_num_updates": "120"}\'',
            say % "train_inner" + '"loss": "6.5", ' + figures % 200,
        ]
    )
    done = run_command(running(tmp_path, program))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"train loss ([\d.]+)", done.stdout) == ["7.500", "6.500"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = run_command(running(tmp_path / "file" / "save", "true"))
    reason = f"cannot write into {tmp_path}/file/save: Not a directory"
    assert (done.returncode, done.stderr) == (1, f"error: {reason}\n")
