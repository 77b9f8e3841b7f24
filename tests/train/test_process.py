"""A command that a training runs: its signals, its log, the memory that it keeps."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from processes import child_of, is_alive, wait_for

from fairseq_rskip.tools import process


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
