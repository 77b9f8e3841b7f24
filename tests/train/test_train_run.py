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
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_command
from fairseq.logging.progress_bar import SummaryWriter
from training_corpus import STARTING, lengthen, planner, prepare

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import process
from fairseq_rskip.tools.__main__ import main
from fairseq_rskip.tools.train.main import read
from fairseq_rskip.tools.train.plan import make_plan
from fairseq_rskip.tools.train.run import Progress
from fairseq_rskip.tools.train.saved import SavedTraining
from fairseq_rskip.tools.training_files import LAST

SCRIPT = ROOT / "scripts" / "train.sh"
TINY = "transformer_rskip_ln_tiny"
LITTLE = "--max-tokens 600 --lr 0.005 --warmup-updates 10 --encoder-embed-dim 32".split()

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


def test_a_signal_while_the_command_starts_ends_it(tmp_path, monkeypatch):
    """It comes between the start of the process and the first line that could end it.

    There is a second thread, as in a training: blocked in one, a signal goes to the other.
    """
    start = subprocess.Popen

    def start_and_signal(*args, **options):
        started = start(*args, **options)
        wait_for(lambda: child_of(tmp_path), started)
        os.kill(os.getpid(), signal.SIGTERM)
        return started

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    before = {number: signal.getsignal(number) for number in process._STOPPING}
    process.stop_on_signals()
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    try:
        with pytest.raises(process.Stopped):
            process.follow(["sh", "-c", f"sleep 100 & echo $! > {tmp_path}/pid; wait"])
    finally:
        done.set()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not is_alive(child_of(tmp_path))


FAULTS = """
import resource, torch

def faults_of_a_use(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# 64 MB, 16,384 pages of 4 KiB; each use 64 KB smaller than the last, since glibc asks for more
# than an aligned tensor's size: one of the same size need not fit where the last was
print(min(faults_of_a_use(2**24 - 2**14 * use) for use in range(6)))
"""


def test_a_command_with_cpu_keeps_freed_memory_whatever_its_model():
    """Memory that was freed is used again without a page fault."""
    faults = {}
    for words in (["--cpu"], []):
        printed = []
        command = [sys.executable, "-c", FAULTS, *words]
        assert process.follow(command, on_line=printed.append) == ""
        faults[bool(words)] = int(printed[-1])
    assert faults[False] > 1000 and faults[True] < faults[False] / 10


def test_a_command_with_cpu_keeps_the_memory_settings_of_the_environment(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "7")
    printed = []
    command = ["sh", "-c", "echo $MALLOC_TOP_PAD_ $MALLOC_MMAP_MAX_", "sh", "--cpu"]
    assert process.follow(command, on_line=printed.append) == ""
    assert printed == [b"7 0\n"]


@pytest.fixture
def signals():
    """Puts the handlers back that a test changes."""
    before = {number: signal.getsignal(number) for number in process._STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_nohup_ignores_is_still_ignored(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process.stop_on_signals()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_second_signal_does_not_end_what_the_first_one_cleans_up(signals):
    process.stop_on_signals()
    statuses = []
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except process.Stopped as stopped:
            statuses.append(stopped.status)
    assert statuses == [143]


def test_a_command_that_ignores_the_signal_is_killed(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)

    def interrupt(line):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.follow(["sh", "-c", "trap '' TERM; echo; sleep 60"], on_line=interrupt)
    assert time.monotonic() - start < 30


def test_a_full_disk_for_the_log_does_not_end_the_command():
    lines = []
    with open("/dev/full", "wb", buffering=0) as log:
        assert process.follow(["sh", "-c", "echo a; echo b"], lines.append, log) == ""
    assert lines == [b"a\n", b"b\n"]


def test_a_commit_says_whether_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "PLUGIN", tmp_path / "fairseq_rskip")
    assert process.git_commit() is None
    (tmp_path / "file").write_text("as committed\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    commit = process.git_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "file").write_text("changed\n")
    assert process.git_commit() == f"{commit}+changes"


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


def child_of(folder):
    """The process that a stand-in has named in ``folder``; 0 if it has not yet."""
    text = (folder / "pid").read_text() if (folder / "pid").exists() else ""
    return int(text) if text.endswith("\n") else 0


def is_alive(pid):
    """Whether a process is at work still; one that nobody has waited for yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, process):
    deadline = time.time() + 180
    while not condition() and process.poll() is None and time.time() < deadline:
        time.sleep(0.02)
    assert process.poll() is None and condition(), (
        "it ended before it could be stopped, or took too long"
    )


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


@pytest.mark.slow
def test_training_is_killed_resumes_and_ends(tiny_corpus, tmp_path, capsys):
    data, save = prepare(tiny_corpus, tmp_path), tmp_path / "gespeichert in ö"
    argv = [data, TINY, *LITTLE, "--save-dir", save]
    command = planner(capsys)(*argv, "--max-epoch", "500", "--dry-run").words
    command = [
        sys.executable,
        "-m",
        "fairseq_rskip.tools.train.run",
        str(save),
        "about",
        "fairseq-train",
        *command,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as process:
        wait_for((save / "checkpoint2.pt").exists, process)
        process.kill()  # fairseq-train ends with it, and gives the folder free
    (save / "checkpoint_last.pt.part").touch()
    lengthen(data / "data-bin" / "valid.src-tgt.src", 10, 3001)  # which ends nothing either
    done = run_command([SCRIPT, *argv, "--max-update", 60])
    assert done.returncode == 0, done.stderr
    assert (
        "Loaded checkpoint" in done.stdout
        and f"--arch {TINY}" in done.stdout
        and "| INFO |" not in done.stdout
    )
    first, slow = done.stderr.splitlines()
    assert first == STARTING and "slow" in slow
    assert (
        "warning: 1 sentence is longer than --max-tokens or the model's positions and left out\n"
        in done.stdout
    )
    log = (save / "train.log").read_text("utf-8")
    assert log.startswith("about\n") and log.count("tokens per step: ") == 1 and "| INFO |" in log
    for name in ("dict.src.txt", "dict.tgt.txt", "preparation.json"):
        assert (save / name).read_bytes() == (data / "data-bin" / name).read_bytes()
    assert 5 <= len([path for path in save.iterdir() if path.stem[10:].isdigit()]) <= 10
    assert (save / "tensorboard").is_dir() == bool(SummaryWriter) and not list(save.glob("*.part"))
    plan = make_plan(*read([*map(str, argv), "--max-update", "70", "--lr", "0.5"]))
    (warning,) = plan.changes()
    assert re.search(r" had lr \[?[\d.]+\]?, now \[0.5\]; another --save-dir", warning), warning
    same = make_plan(*read([*map(str, argv), "--max-update", "70"]))
    assert same.changes() == []
    (warning,) = same._replace(warm_up=14, settings={}).changes()  # the recipe's, as it is longer
    assert " had warmup-updates 10, now 14; another" in warning
    assert warning.endswith(", --warmup-updates 10 keeps its schedule")
    assert (
        main(["train", *map(str, argv), "--max-update", "60"]) == 0
        and "all 60 updates" in capsys.readouterr().err
    )
    for other, said in {
        "--skip-lambda 3": "skip-lambda 2, not 3",
        "--seed 7": "seed 1, not 7",
        "--optimizer sgd": "optimizer adam, not sgd",
        "--lr-scheduler fixed": "lr-scheduler inverse_sqrt, not fixed",
        "--criterion cross_entropy": "criterion label_smoothed_cross_entropy, not cross_entropy",
        "--max-tokens 500": "max-tokens 600, not 500",
        "--truncate-source": "truncate-source False, not True",
    }.items():
        words = [*map(str, argv), "--max-update", "60", *other.split()]
        assert main(["train", *words]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {save} has a finished training with {said}; ")


@pytest.mark.parametrize(("given", "refused"), [(2.0, True), (1.0, False), (None, True)])
def test_a_training_keeps_the_initial_values_that_it_began_with(tmp_path, given, refused):
    """Otherwise a checkpoint would say later that it began with the new ones; None is the default.

    What matters in training only may change.
    """
    model = {"_name": "transformer_mhc", "skip_kind": "mhc", "skip_read_bias": 1.0}
    torch.save(
        {"cfg": {"model": {**model, "skip_norm": "layer", "skip_drop_path": 0.0}}}, tmp_path / LAST
    )
    asked = {"skip-kind": "mhc", "skip-read-bias": given, "skip-drop-path": 0.1}
    saved = SavedTraining(tmp_path)
    assert ("skip-drop-path", 0.0, 0.1) in saved.differences(asked)
    if not refused:
        saved.check_start(asked)
        return
    with pytest.raises(UserError, match=r"^--skip-read-bias [24].0: the training in .* with 1.0,"):
        saved.check_start(asked)
    saved.check_start({**asked, "skip-norm": "rms"})  # the checkpoint refuses that itself


def test_a_training_keeps_its_equation(tmp_path):
    model = {"_name": "transformer_rskip_ln", "skip_kind": "rskip", "skip_lambda": 2.0}
    torch.save({"cfg": {"model": {**model, "skip_norm": "layer"}}}, tmp_path / LAST)
    saved = SavedTraining(tmp_path)
    saved.check_start({"skip-kind": "rskip", "skip-lambda": 2})
    with pytest.raises(UserError, match=r"^--skip-lambda 3: the training in .* has 2.0; "):
        saved.check_start({"skip-kind": "rskip", "skip-lambda": 3})


def test_a_training_keeps_the_model_that_it_began_with(tmp_path):
    parent = tmp_path / "parent.pt"
    asked = {"finetune-from-model": str(parent)}
    torch.save({"cfg": {"checkpoint": {"finetune_from_model": None}}}, tmp_path / LAST)
    with pytest.raises(UserError, match="the training in .* began without it; another --save-dir"):
        SavedTraining(tmp_path).check_start(asked)
    with pytest.raises(UserError, match="has a finished training without finetune-from-model, not"):
        SavedTraining(tmp_path).check_settings(asked)
    torch.save({"cfg": {"checkpoint": {"finetune_from_model": str(parent)}}}, tmp_path / LAST)
    SavedTraining(tmp_path).check_start(asked)
    with pytest.raises(UserError, match="--finetune-from-model other.pt: .* began with /"):
        SavedTraining(tmp_path).check_start({"finetune-from-model": "other.pt"})


def test_a_resumed_training_has_ended_by_the_updates_of_its_last_part(tmp_path):
    history = [{"num_updates": 50}, {"num_updates": 100}]
    cfg = {"model": {"_name": "transformer"}, "distributed_training": {"distributed_world_size": 1}}
    torch.save({"cfg": cfg, "optimizer_history": history}, tmp_path / LAST)
    saved = SavedTraining(tmp_path)
    assert saved.why_ended(100, "updates", 0).endswith("has all 100 updates: nothing to train")
    assert saved.why_ended(101, "updates", 0) == ""
    processes = ("distributed-world-size", 1, 2)
    assert saved.differences({"distributed-world-size": 2}) == [processes]


def test_settings_of_fairseqs_older_classes_are_compared_too(tmp_path):
    """Theirs are a Namespace where others have a mapping."""
    cfg = {
        "model": Namespace(_name="transformer_tiny", dropout=0.1),
        "task": Namespace(_name="translation_multi_simple_epoch", langs="a,b"),
        "optimizer": {"_name": "adam"},
        "lr_scheduler": None,
    }
    torch.save({"cfg": cfg}, tmp_path / LAST)
    asked = {"arch": "transformer_tiny", "dropout": 0.3, "langs": "a,b", "optimizer": "sgd"}
    assert SavedTraining(tmp_path).differences({**asked, "task": "translation"}) == [
        ("dropout", 0.1, 0.3),
        ("optimizer", "adam", "sgd"),
        ("task", "translation_multi_simple_epoch", "translation"),
    ]


def test_a_stop_names_the_updates_of_the_checkpoint(capsys):
    """Not those of the last line: what came after the checkpoint is trained again."""
    progress = Progress()
    for line in (
        "Loaded checkpoint c/checkpoint_last.pt (epoch 2 @ 8 updates)",
        "Saved checkpoint c/checkpoint_last.pt (epoch 3 @ 16 updates, score 8.1)",
    ):
        progress.read(f"2026-01-01 00:00:00 | INFO | fairseq.trainer | {line}\n".encode())
    assert progress.saved == "16"
    assert capsys.readouterr().out.splitlines() == [
        "Loaded checkpoint c/checkpoint_last.pt (epoch 2 @ 8 updates)"
    ]


def test_a_saved_default_equals_the_same_value_that_is_asked_for(tmp_path):
    model = {"_name": "transformer_mhc", "skip_kind": "mhc", "skip_read_bias": None}
    torch.save({"cfg": {"model": model}}, tmp_path / LAST)
    asked = {"skip-kind": "mhc", "skip-read-bias": 4.0}  # 4 is mhc's default
    assert SavedTraining(tmp_path).differences(asked) == []
