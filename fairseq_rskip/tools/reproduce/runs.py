"""The folder of a run: what was to be done there, and what has become of it.

run.json says what is run, by whom and since when; log.txt is everything that the commands said; metrics.json is there
when all has gone well, failed.json when not. run.lock is held, by the process or what it started, while it runs.
"""

import fcntl
import json
import platform
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

import torch

from fairseq_rskip import __version__
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.reproduce import squeue
from fairseq_rskip.tools.reproduce.plans import TASKS, Job
from fairseq_rskip.tools.reproduce.tables import ROOT

RUN, LOG, METRICS, FAILED, QUEUED, LOCK = (
    "run.json",
    "log.txt",
    "metrics.json",
    "failed.json",
    "queued.json",
    "run.lock",
)

DONE, RUNNING, WAITING, BROKEN, STOPPED, NEW = "done", "running", "queued", "failed", "stopped", "not run"


@dataclass(frozen=True)
class State:
    """``name`` is one of the above; ``progress`` from 0 to 1; ``detail`` the last error's line, or the SLURM job."""

    name: str
    progress: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        percent = f" {100 * self.progress:.0f} %" if self.name in (RUNNING, STOPPED) else ""
        return f"{self.name}{percent}" + (f": {self.detail}" if self.detail else "")


def read(path: Path) -> Dict[str, Any]:
    """A JSON object, or {} if it is not there or not whole."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def prepare(job: Job) -> None:
    """Make the run's folder and its run.json, with what ``execute`` needs. Raises ``UserError``."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {job.folder}: {error.strerror}") from None
    about = {
        **read(job.folder / RUN),
        "task": job.task,
        "settings": job.settings,
        "seed": job.seed,
        "commands": job.commands(),
        "versions": versions(),
        "git": git_commit(),
    }
    write_json(job.folder / RUN, about)


def load(folder: Path) -> Job:
    """The run that ``prepare`` wrote. Raises ``UserError``."""
    about = read(folder / RUN)
    try:
        job = Job(about["task"], about["settings"], about["seed"], folder)
        job.commands()
        return job
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is not the folder of a run: it has no whole {RUN}") from None


def state(job: Job) -> State:
    """What has become of the run."""
    folder = job.folder
    if metrics(folder):
        return State(DONE, 1.0)
    progress = TASKS[job.task].progress(job.settings, folder)
    if _held(folder / LOCK):
        return State(RUNNING, progress)
    queued = read(folder / QUEUED)  # after a failure, if there was one: `execute` removes it
    if queued and squeue.alive(queued.get("job")):
        return State(WAITING, progress, f"SLURM job {queued.get('job')}")
    failed = read(folder / FAILED)
    if failed:
        return State(BROKEN, progress, str(failed.get("error")))
    return State(STOPPED, progress) if (folder / LOG).exists() else State(NEW)


def _held(lock: Path) -> bool:
    """Whether a run holds ``lock``: looked at for a moment, shared with others who look, and without writing."""
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # none yet, or one that this user may not read
        return False


def metrics(folder: Path) -> Dict[str, Any]:
    """What a finished run wrote; {} if there is none, or no whole one: `run` then makes it from what the run left."""
    content = read(folder / METRICS)
    return content if isinstance(content.get("values"), dict) else {}


def versions() -> Dict[str, str]:
    return {"fairseq_rskip": __version__, "python": platform.python_version(), "torch": torch.__version__}


def git_commit() -> Optional[str]:
    """The project's commit, with "+changes" where files differ from it; None outside of git."""
    try:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True, "timeout": 30}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def stamp() -> Dict[str, Any]:
    """When and where."""
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname()}
