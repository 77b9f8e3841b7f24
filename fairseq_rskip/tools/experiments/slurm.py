"""Submit runs to a cluster that has Slurm, each as a job of one array."""

from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError

from . import execution
from .records import Run

DEFAULTS = {"time": 1440, "gpus_per_node": 1, "cpus_per_task": 8, "array_parallelism": 64}
# OpenMP would take all cores of a node; srun has no --cpus-per-task of sbatch from Slurm 22.05 on
SETUP = [
    'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"',
]


def submit(runs: list[Run], words: list[str], out: Path) -> None:
    """Submit ``runs`` as one array, with sbatch's options KEY=VALUE, and return.

    Raises ``UserError``.
    """
    from submitit import SlurmExecutor

    known = SlurmExecutor._valid_parameters()
    options: dict[str, Any] = {}
    of_sbatch: dict[str, Any] = {}  # those that submitit has no name for
    for name, value in {**DEFAULTS, **_sbatch_options(words)}.items():
        if name in known:
            options[name] = value
        else:
            of_sbatch[name] = value

    for run in runs:
        execution.prepare(run)
    try:
        executor = SlurmExecutor(out / "slurm")
        executor.update_parameters(
            job_name="rskip", setup=SETUP, additional_parameters=of_sbatch, **options
        )
        jobs = executor.map_array(SlurmJob(), [str(run.folder) for run in runs])
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        if "(gres)" in reason:
            reason += " (gpus-per-node=0 asks for no GPU)"
        raise UserError(f"SLURM did not take the jobs: {reason}") from None
    for run, job in zip(runs, jobs):
        print_line(f"{run.titled}: SLURM job {job.job_id}")


class SlurmJob:
    """What a job of SLURM calls with the folder of its run.

    Because of ``checkpoint`` submitit queues it again when its time is over, up to three times.
    """

    def __call__(self, folder: str) -> int:
        return execution.main([folder])

    def checkpoint(self, folder: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)  # the run's folder has what it resumes from


def _sbatch_options(words: list[str]) -> dict[str, int | str]:
    """The options in KEY=VALUE, numbers as ``int``. Raises ``UserError``."""
    options: dict[str, int | str] = {}
    for word in words:
        key, _, value = word.lstrip("-").partition("=")
        if not (key and value):
            raise UserError(
                f"--slurm {' '.join(words)}: expected KEY=VALUE, options of sbatch, "
                "as partition=gpu"
            )
        options[key.replace("-", "_")] = int(value) if value.isdigit() else value
    return options
