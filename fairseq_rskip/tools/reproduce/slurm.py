"""Runs as jobs of SLURM, through submitit: one array, a run each, queued again when the time is up."""

import argparse
import contextlib
import importlib.util
import io
import re
import shutil
from pathlib import Path
from typing import Any, List

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked
from fairseq_rskip.tools.console import print_line

from . import runs, squeue
from .plans import Run
from .slurm_job import Attempt

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


def submit(waiting: List[Run], options: argparse.Namespace) -> None:
    """Submit those of the ``waiting`` runs that no living job has yet, and say which job has which.

    Raises ``UserError`` with sbatch's own words if it refuses: nothing is queued then.
    """
    folder = options.output / FOLDER
    with locked(folder, wait=True):  # another reproduce.py may be submitting the same runs
        chosen = choose(waiting)
        if not chosen:
            print_line("nothing to submit")
            return
        handles = queue(make_executor(folder, options), chosen)
    for run, handle in zip(chosen, handles):
        print_line(f"queued {run}: SLURM job {handle.job_id}")
    first = handles[0].job_id.split("_")[0]
    status = f"reproduce.py status --output {options.output}"
    print_line(f"{len(chosen)} runs submitted; {status} follows them, scancel {first} ends them, logs: {folder}")


def choose(waiting: List[Run]) -> List[Run]:
    """Those of ``waiting`` that are to be submitted now; says why the others are not."""
    squeue.ask.cache_clear()
    chosen = []
    for run in waiting:
        state = runs.state(run)
        if state.name in (runs.WAITING, runs.RUNNING, runs.DONE):
            print_line(f"{state} already {run}")
        else:
            chosen.append(run)
    if len(chosen) < len(waiting) and squeue.ask().problem:
        print_line(f"cannot ask SLURM which jobs are alive ({squeue.ask().problem}): what is queued is left as it is")
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


def queue(executor: Any, chosen: List[Run]) -> List[Any]:
    """Submit ``chosen`` by submitit's ``executor``, and record for each run which job has it; returns the handles.

    Raises ``UserError``, and leaves nothing behind, if they are refused.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    before = set(executor.folder.glob("*")) if executor.folder.exists() else set()
    for run in chosen:  # before it can start
        runs.prepare(run, queued={"job": None})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
            handles = executor.submit_array([Attempt(str(run.folder)) for run in chosen])
    except BaseException as error:
        for run in chosen:
            runs.prepare(run, queued=None)
        for path in set(executor.folder.glob("*")) - before:
            path.unlink()
        if isinstance(error, (FailedJobError, FailedSubmissionError)):
            raise UserError(f"SLURM refused: {_words(str(error))}") from None
        raise
    for run, handle in zip(chosen, handles):
        note_job(run.folder, handle.job_id)
    return handles


def note_job(folder: Path, number: str) -> None:
    """Record which job has the run, unless it has started already."""
    with runs.holding(folder) as lock:
        if lock is not None and "queued" in runs.read(folder):
            runs.note(folder, queued={"job": number})


def _words(text: str) -> str:
    """sbatch's complaint as one line."""
    lines = [re.sub("^sbatch: (error: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(filter(None, lines))[:500]
