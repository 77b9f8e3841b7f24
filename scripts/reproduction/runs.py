"""The folder of a run: what was to be done there, and what has become of it.

run.json says what is run, by whom and since when; log.txt is everything that the commands said; metrics.json is there
when all has gone well, failed.json when not. run.lock is held, by the process or what it started, while it runs.
"""

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
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.safe_load import UserError
from reproduction.plans import TASKS, Job
from reproduction.tables import ROOT

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
        return Job(about["task"], about["settings"], about["seed"], folder)
    except KeyError:
        raise UserError(f"{folder} is not the folder of a run: it has no whole {RUN}") from None


def state(job: Job) -> State:
    """What has become of the run."""
    folder = job.folder
    if (folder / METRICS).exists():
        return State(DONE, 1.0)
    progress = TASKS[job.task].progress(job.settings, folder)
    if (folder / LOCK).exists():
        with locked(folder, name=LOCK) as free:
            if not free:
                return State(RUNNING, progress)
    failed = read(folder / FAILED)
    if failed:
        return State(BROKEN, progress, failed["error"])
    queued = read(folder / QUEUED)
    if queued:
        return State(WAITING, progress, f"SLURM job {queued.get('job')}")
    return State(STOPPED, progress) if (folder / LOG).exists() else State(NEW)


def metrics(folder: Path) -> Dict[str, Any]:
    return read(folder / METRICS)


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
