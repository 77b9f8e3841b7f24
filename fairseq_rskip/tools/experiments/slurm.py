"""Start runs as SLURM jobs through submitit: one array, a job for each run; a job that meets its limit requeues."""

import re
from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError

from .execution import execute, prepare
from .records import Run

DEFAULTS = {"time": 1440, "gpus_per_node": 1, "cpus_per_task": 8, "array_parallelism": 64}


class Job:
    """The execution of one run; submitit calls ``checkpoint`` shortly before the time limit."""

    def __call__(self, folder: str) -> None:
        from fairseq_rskip.tools.process import stop_on_signals

        stop_on_signals()
        execute(Path(folder))

    def checkpoint(self, folder: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


def parse(words: list[str]) -> dict[str, Any]:
    """``--slurm`` KEY=VALUE as sbatch has them. Raises ``UserError``."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.lstrip("-").partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z_-]+", key):
            raise UserError(f"--slurm {word}: expected KEY=VALUE, an option of sbatch, such as partition=gpu")
        found[key.replace("-", "_")] = int(value) if value.isdigit() else value
    return found


def submit(runs: list[Run], words: list[str], out: Path) -> None:
    """Submit ``runs`` and return; the same command, given later, submits what is left. Raises ``UserError``."""
    from submitit import SlurmExecutor

    options = {**DEFAULTS, **parse(words)}
    known = SlurmExecutor._valid_parameters()
    more = {key: options.pop(key) for key in list(options) if key not in known}
    executor = SlurmExecutor(out / "slurm")
    executor.update_parameters(job_name="rskip", additional_parameters=more, **options)
    for run in runs:
        prepare(run)
    try:
        jobs = executor.map_array(Job(), [str(run.folder) for run in runs])
    except (OSError, RuntimeError) as error:
        raise UserError(f"sbatch did not take the jobs: {str(error).strip().splitlines()[-1]}") from None
    for run, job in zip(runs, jobs):
        print_line(f"{run}: SLURM job {job.job_id}")
