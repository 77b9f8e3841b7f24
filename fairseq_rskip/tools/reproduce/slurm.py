"""Runs as jobs of SLURM, through submitit: one array, a run each, queued again when the time is up."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, List

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools.reproduce import runs, slurm_job, squeue
from fairseq_rskip.tools.reproduce.local import name
from fairseq_rskip.tools.reproduce.plans import Job
from fairseq_rskip.tools.reproduce.tables import ROOT

FOLDER = "slurm"  # in OUTPUT: scripts, logs, and what submitit keeps
GPUS, CPUS, MINUTES = 1, 8, 24 * 60  # of a job, unless the options say
SIGNAL = 120  # seconds before the time limit; SLURM may be a minute early
TIMEOUTS = 30  # that a run may have; pre-emptions do not count


def check(options: argparse.Namespace) -> None:
    """Raise ``UserError`` where nothing can be submitted; to be called before anything is written."""
    for tool in ("sbatch", "srun"):
        if shutil.which(tool) is None:
            raise UserError(f"--launcher slurm: there is no {tool} in PATH; --launcher local runs on this machine")
    if importlib.util.find_spec("submitit") is None:
        raise UserError("--launcher slurm needs submitit: pip install submitit")
    if "%" in str(options.output):
        raise UserError(f"--output {options.output}: SLURM takes % in a path for a placeholder; choose another")


def submit(waiting: List[Job], options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Submit the ``waiting`` runs that no living job has yet, and say which job has which; returns the exit status.

    Raises ``UserError`` with sbatch's own words if it refuses: nothing is queued then.
    """
    folder = options.output / FOLDER
    with locked(folder, wait=True):  # another reproduce.py may be submitting the same runs
        chosen = choose(waiting, say)
        if not chosen:
            say("nothing to submit")
            return 0
        handles = queue(make_executor(folder, options), chosen)
    for job, handle in zip(chosen, handles):
        say(f"queued {name(job)}: SLURM job {handle.job_id}")
    first = handles[0].job_id.split("_")[0]
    status = f"reproduce.py status --output {options.output}"
    say(f"{len(chosen)} runs submitted; {status} follows them, scancel {first} ends them, logs: {folder}")
    return 0


def choose(waiting: List[Job], say: Callable[[str], None]) -> List[Job]:
    """Those of ``waiting`` that are to be submitted now; says why the others are not."""
    squeue.ask.cache_clear()
    chosen = []
    for job in waiting:
        state = runs.state(job)
        if state.name in (runs.WAITING, runs.RUNNING, runs.DONE):
            say(f"{state} already {name(job)}")
        else:
            chosen.append(job)
    if len(chosen) < len(waiting) and squeue.ask().problem:
        say(f"cannot ask SLURM which jobs are alive ({squeue.ask().problem}): what is queued is left as it is")
    return chosen


def make_executor(folder: Path, options: argparse.Namespace) -> Any:
    """submitit's executor with the options of the command line in sbatch's terms."""
    from submitit import SlurmExecutor

    cpus = options.cpus or CPUS
    gpus = GPUS if options.gpus is None else options.gpus
    named = {"partition": options.partition, "account": options.account, "qos": options.qos, "mem": options.mem}
    more = {key: value for key, value in named.items() if value is not None}
    executor = SlurmExecutor(folder, max_num_timeout=TIMEOUTS)
    executor.update_parameters(
        job_name="-".join(["rskip", *options.tables]),
        time=options.time or MINUTES,
        cpus_per_task=cpus,
        gpus_per_node=gpus or None,
        signal_delay_s=SIGNAL,
        wckey=None,  # submitit's own, which a cluster with such keys would refuse
        srun_args=["--cpus-per-task", str(cpus)],  # srun takes it no longer from sbatch since SLURM 22.05
        additional_parameters={"requeue": True, **more, **dict(options.slurm or ())},
        **({"array_parallelism": options.array_size} if options.array_size else {}),
    )
    return executor


def queue(executor: Any, jobs: List[Job]) -> List[Any]:
    """Submit ``jobs`` by submitit's ``executor``, and note in each run's folder which job has it; returns the handles.

    Raises ``UserError``, and leaves nothing behind, if they are refused.
    """
    import cloudpickle
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    cloudpickle.register_pickle_by_value(slurm_job)
    before = set(executor.folder.glob("*")) if executor.folder.exists() else set()
    for job in jobs:  # before it can start, and remove it
        write_json(job.folder / runs.QUEUED, {"job": None})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
            handles = executor.submit_array([attempt(job) for job in jobs])
    except BaseException as error:
        for path in [job.folder / runs.QUEUED for job in jobs] + list(set(executor.folder.glob("*")) - before):
            path.unlink()
        if isinstance(error, (FailedJobError, FailedSubmissionError)):
            raise UserError(f"SLURM refused: {_words(str(error))}") from None
        raise
    for job, handle in zip(jobs, handles):
        _note(job, handle.job_id)
    return handles


def attempt(job: Job) -> slurm_job.Attempt:
    command = [sys.executable, str(ROOT / "scripts" / "reproduce.py"), "execute", str(job.folder)]
    return slurm_job.Attempt(command, str(job.folder), os.getcwd())


def _note(job: Job, number: str) -> None:
    """Write the job's number into queued.json, unless the job has started already."""
    path = job.folder / runs.QUEUED
    for _ in range(5):  # `status` takes the lock for a moment
        with locked(job.folder, name=runs.LOCK) as free:
            if free and path.exists():
                write_json(path, {"job": number})
        if free or not path.exists():
            return
        time.sleep(0.1)


def _words(text: str) -> str:
    """sbatch's complaint as one line."""
    lines = [re.sub("^sbatch: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(filter(None, lines))[:500]
