"""Processes that tests start and stop."""

import time
from pathlib import Path


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
