"""Runs as jobs of SLURM, through submitit: one array, a run each, queued again when the time is up."""

import argparse
import contextlib
import io
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked

from . import execution, runs
from .plans import Run
from .runs import BROKEN, DONE, STOPPED, State

FOLDER = "slurm"  # in OUTPUT: scripts, logs, and what submitit keeps
SIGNAL = 120  # seconds before the time limit; SLURM may be a minute early
TIMEOUTS = 30  # that a run may have; pre-emptions do not count
IS_KILLED = 600.0  # seconds in which SLURM kills a job that it has told to end


class Attempt:
    """A job: does the run of ``folder``, which saves before SLURM ends the job. Pickled by its name.

    USR2, before the time limit: submitit asks ``checkpoint``, and requeues the job. TERM, of a pre-emption or scancel:
    the run saves, then the job waits to be killed; ending by itself would make it a finished job, which SLURM does not
    queue again. The run has a thread of its own: a handler that interrupts ``Popen.wait`` would find its lock taken.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.state: State | None = None

    def __call__(self) -> None:
        """Raises ``RuntimeError`` if the run failed: that makes it a failed job."""
        signal.signal(signal.SIGTERM, lambda *_: execution.stop())  # submitit's own handler ignores it
        threading.Thread(target=self._execute).start()
        try:
            self._wait()
            if self.state.name == STOPPED:
                time.sleep(IS_KILLED)
        except BaseException:
            execution.stop()
            self._wait()
            raise
        if self.state.name in (BROKEN, STOPPED):
            raise RuntimeError(f"{self.state}; {self.folder}/{runs.LOG} says more")

    def checkpoint(self) -> Any:
        """submitit's question, inside the handler of USR2, what to do when the job runs again; None for nothing."""
        from submitit.helpers import DelayedSubmission

        execution.stop()
        self._wait()
        if self.state.name == DONE:  # it was just done
            raise SystemExit(0)
        return None if self.state.name == BROKEN else DelayedSubmission(Attempt(self.folder))

    def _execute(self) -> None:
        from submitit import JobEnvironment

        try:
            self.state = execution.execute(Path(self.folder), job=JobEnvironment().job_id)
        except BaseException as error:
            self.state = State(BROKEN, detail=str(error))
            raise

    def _wait(self) -> None:
        while self.state is None:
            time.sleep(0.1)


def check(options: argparse.Namespace) -> None:
    """Raise ``UserError`` where nothing can be submitted; to be called before anything is written."""
    import submitit  # noqa: F401 (a package that is missing is said to be)

    for tool in ("sbatch", "srun"):
        if shutil.which(tool) is None:
            raise UserError(f"--launcher slurm: there is no {tool} in PATH; --launcher local runs on this machine")
    if "%" in str(options.output):
        raise UserError(f"--output {options.output}: SLURM takes % in a path for a placeholder; choose another")


def submit(waiting: list[Run], options: argparse.Namespace) -> None:
    """Submit those of the ``waiting`` runs that no living job has yet, and say which job has which.

    Raises ``UserError`` with sbatch's own words if it refuses: nothing is queued then.
    """
    folder = options.output / FOLDER
    with locked(folder, wait=True):  # another process may be submitting the same runs
        runs.queued_jobs.cache_clear()
        chosen = runs.still_to_do(waiting, runs.WAITING)
        problem = runs.queued_jobs()[1]
        if problem and len(chosen) < len(waiting):
            print_line(f"cannot ask SLURM which jobs are alive ({problem}): what is queued is left as it is")
        if not chosen:
            return print_line("nothing to submit")
        for run in chosen:
            runs.prepare(run, queued=None)
        jobs = [job.job_id for job in _submit(make_executor(folder, options), chosen)]
        for run, job in zip(chosen, jobs):
            runs.prepare(run, queued={"job": job})
            print_line(f"queued {run}: SLURM job {job}")
    status = f"rskip reproduce status --output {shlex.quote(str(options.output))}"
    first = jobs[0].partition("_")[0]
    print_line(f"{len(chosen)} runs submitted; {status} follows them, scancel {first} ends them, logs: {folder}")


def make_executor(folder: Path, options: argparse.Namespace) -> Any:
    """submitit's executor with the options of the command line in sbatch's terms."""
    from submitit import SlurmExecutor

    named = {name: getattr(options, name) for name in ("partition", "account", "qos", "mem")}
    more = {key: value for key, value in named.items() if value is not None}
    executor = SlurmExecutor(folder, max_num_timeout=TIMEOUTS)
    executor.update_parameters(
        job_name="-".join(["rskip", *(Path(name).stem for name in options.tables)]),
        time=options.time or 24 * 60,
        cpus_per_task=options.cpus or 8,
        gpus_per_node=1 if options.gpus is None else options.gpus or None,
        signal_delay_s=SIGNAL,
        wckey=None,  # submitit's own, which a cluster with such keys would refuse
        srun_args=["--cpus-per-task", str(options.cpus or 8)],  # not taken from sbatch since SLURM 22.05
        array_parallelism=options.array_size or 256,
        additional_parameters={"requeue": True, **more, **dict(options.slurm or ())},
    )
    return executor


def _submit(executor: Any, chosen: list[Run]) -> list[Any]:
    """The jobs of ``chosen``. Raises ``UserError`` if they are refused."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
            return executor.submit_array([Attempt(str(run.folder)) for run in chosen])
    except (FailedJobError, FailedSubmissionError) as error:
        lines = [re.sub("^sbatch: (error: )?", "", line.strip()) for line in str(error).splitlines()]
        raise UserError(f"SLURM refused: {'; '.join(filter(None, lines))[:500]}") from None
